"""The report of a run as a JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_echo._version import __version__

if TYPE_CHECKING:
    from torch_echo.options import Options
    from torch_echo.report.summary import Summary

__all__ = ["FORMAT", "summary_as_json", "write_summary"]

FORMAT = 1
"""Version of the layout of the file."""


def summary_as_json(summary: Summary, options: Options | None) -> dict[str, Any]:
    """`summary`, and the options it was made with (None if the engine was never started), as JSON types."""
    record = asdict(summary)
    record["rebuilt"] = [{"layer": layer, "bytes": size, "values": n} for layer, size, n in summary.rebuilt]
    record["unhandled"] = [{"what": what, "why": why, "where": where} for what, why, where in summary.unhandled]
    return {
        "format": FORMAT,
        "torch_echo": __version__,
        "options": asdict(options) if options is not None else None,
        "summary": record,
    }


def write_summary(path: str | Path, summary: Summary, options: Options | None) -> None:
    """Write the report to `path`: the whole file or, on any error, nothing; a file that is there is replaced."""
    text = json.dumps(summary_as_json(summary, options), indent=2) + "\n"
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
