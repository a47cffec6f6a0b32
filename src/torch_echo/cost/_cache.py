"""A file in which the durations of ops survive the process.

One JSON file per device, version of torch and number of threads, in ``$TORCH_ECHO_CACHE``, else
``$XDG_CACHE_HOME/torch-echo``, else ``~/.cache/torch-echo``. It holds nothing that cannot be measured again: it may be
deleted at any time, and nothing that is wrong with it or with its folder is ever an error. Processes may share it: a
write reads the file again under a lock, adds its own entries, and replaces the file in one step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["CostCache", "cache_folder", "device_key"]

logger = logging.getLogger("torch_echo.cost")

VERSION = 2
"""Of the file's layout and of the way of measuring. Files of another version are replaced."""

MAX_ENTRIES = 50_000
"""More than these, and the oldest go: lengths that vary from step to step would fill the disk in time."""

_LOCK_SECONDS = 2.0

_SECTIONS = ("ops", "rates", "workspaces")


def cache_folder() -> Path | None:
    """Folder of the cache files; None where the user has no home."""
    own = os.environ.get("TORCH_ECHO_CACHE")
    try:
        if own:
            return Path(own).expanduser()
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    except RuntimeError:  # no HOME and no such user, as in many containers
        return None
    return base / "torch-echo"


def device_key(device: torch.device) -> dict[str, str | int]:
    """What durations depend on besides the op: they are not comparable between files whose keys differ."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "threads": 0}
    cores = len(os.sched_getaffinity(0))
    name = f"{_cpu_name()} {cores} cores"
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else os.uname().machine


class CostCache:
    """Two tables of positive numbers, ``ops`` and ``rates``, that :meth:`save` adds to a file.

    Reading happens at construction. Entries set later are kept in memory and written by :meth:`save` only.
    """

    def __init__(self, key: Mapping[str, str | int], folder: Path | None = None) -> None:
        """`key` is of the form that :func:`device_key` returns; `folder` defaults to :func:`cache_folder`."""
        self._key = dict(key)
        folder = folder if folder is not None else cache_folder()
        name = re.sub(r"[^a-z0-9.+]+", "-", "-".join(str(v) for v in self._key.values()).lower()).strip("-")
        self.path: Path | None = None if folder is None else folder / f"{name}.json"
        self._complained = False
        self._tables: dict[str, dict[str, float]] = {section: {} for section in _SECTIONS}
        self._new: dict[str, dict[str, float]] = {section: {} for section in _SECTIONS}
        self._tables.update(self._read())

    def get(self, section: str, key: str) -> float | None:
        """An entry, or None."""
        return self._tables[section].get(key)

    def set(self, section: str, key: str, value: float) -> None:
        """Set an entry, to be written by the next :meth:`save`."""
        self._tables[section][key] = value
        self._new[section][key] = value

    def save(self) -> None:
        """Add the new entries to the file. Where it cannot be written, keep them in memory and say so once."""
        if self.path is None or not any(self._new.values()):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                tables = self._read()
                for section in _SECTIONS:
                    for key, value in self._new[section].items():
                        tables[section].pop(key, None)  # so that what was measured last stands last
                        tables[section][key] = value
                    for key in list(tables[section])[:-MAX_ENTRIES]:
                        del tables[section][key]
                _replace(self.path, json.dumps({"version": VERSION, **self._key, **tables}, indent=0))
        except OSError as error:
            self._complain("op timings are not kept for later runs: cannot write %s (%s)", self.path, error.strerror)
            return
        self._new = {section: {} for section in _SECTIONS}

    def _complain(self, message: str, *args: Any) -> None:
        if not self._complained:
            logger.warning(message, *args)
        self._complained = True

    def _read(self) -> dict[str, dict[str, float]]:
        empty: dict[str, dict[str, float]] = {section: {} for section in _SECTIONS}
        if self.path is None:
            return empty
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or not isinstance(content.get("version"), int):
                raise ValueError("no table with a version")
            if content["version"] != VERSION or any(content.get(name) != value for name, value in self._key.items()):
                return empty
            return {section: _numbers(content.get(section)) for section in _SECTIONS}
        except FileNotFoundError:
            return empty
        except OSError as error:
            self._complain("op timings of earlier runs are not used: cannot read %s (%s)", self.path, error.strerror)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or JSON of another shape
            aside = self.path.with_suffix(".corrupt")
            with contextlib.suppress(OSError):
                os.replace(self.path, aside)
            self._complain("%s is damaged (%s): moved to %s, op timings start anew", self.path, error, aside.name)
        return empty


def _numbers(table: Any) -> dict[str, float]:
    if not isinstance(table, dict):
        raise ValueError("a table is missing")
    return {k: float(v) for k, v in table.items() if type(v) in (int, float) and math.isfinite(v) and v > 0}


def _replace(path: Path, text: str) -> None:
    """Write a file such that a reader sees the old content or the new one, whatever happens in between."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock. After two seconds, or where there are no locks, go on without: entries may get lost."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    break
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
