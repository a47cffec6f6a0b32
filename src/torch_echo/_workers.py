"""Training processes that a watched process starts.

Two ways are served. ``torch.multiprocessing.spawn`` (and ``start_processes``): the function that goes to the children is sent in a
wrapping that, when it is unpickled there, watches the child and leaves the bare function. And launchers such as torchrun, whose
workers are programs of their own: these get what was asked for by the environment (see :mod:`torch_echo._autostart`).

Workers of a DataLoader, and whatever else ``multiprocessing`` starts, are not training processes and stay as they are.
"""

from __future__ import annotations

import functools
import os
import site
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_echo.options import Options

__all__ = ["Job", "is_launcher", "to_workers", "wrap_spawn"]

_LAUNCHERS = {
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli",
}  # fmt: skip
_COMMANDS = {"torchrun", "accelerate"}
_PTH = "torch_echo_autostart.pth"


@dataclass(frozen=True)
class Job:
    """What a process is to be watched with; can be sent to another."""

    options: Options
    session_factory: Any = None
    report_file: str | None = None
    graph_file: str | None = None


class _Watched:
    """A function for spawned processes."""

    def __init__(self, function: Any, job: Job, processes: int) -> None:
        self.function = function
        self.job = job
        self.processes = processes

    def __reduce__(self) -> Any:
        return _watch, (self.function, self.job, self.processes)


def _watch(function: Any, job: Job, processes: int) -> Any:
    from torch_echo import _autostart, options

    options.spawned_together = processes
    _autostart.activate(
        lambda: job.options,
        session_factory=job.session_factory,
        report_file=job.report_file,
        graph_file=job.graph_file,
        always_report=False,
    )
    return function


def wrap_spawn(job: Callable[[], Job | None]) -> Callable[[], None]:
    """Have processes that ``torch.multiprocessing`` spawns watched with the `job` of that moment; returns the undo."""
    package, module = sys.modules.get("torch.multiprocessing"), sys.modules.get("torch.multiprocessing.spawn")
    original = getattr(package, "start_processes", None)
    if package is None or module is None or original is None:
        return lambda: None

    @functools.wraps(original)
    def start_processes(
        fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False, start_method: str = "spawn"
    ) -> Any:
        given = job() if start_method == "spawn" else None
        sent = fn if given is None else _Watched(fn, given, nprocs)
        return original(sent, args, nprocs, join, daemon, start_method)

    def put(function: Any) -> None:
        for each in (package, module):
            vars(each)["start_processes"] = function

    put(start_processes)
    return lambda: put(original)


def is_launcher(name: str, module: bool) -> bool:
    """Is the program one that starts training processes, and does not train itself?"""
    return name in _LAUNCHERS if module else os.path.basename(name) in _COMMANDS


def launches(argv: Sequence[str]) -> bool:
    """Is this the command line of such a program? As in ``sys.orig_argv``."""
    for i, arg in enumerate(argv[1:], 1):
        if arg == "-m":
            return i + 1 < len(argv) and is_launcher(argv[i + 1], True)
        if not arg.startswith("-"):
            return is_launcher(arg, False)
    return False


def to_workers(
    environ: MutableMapping[str, str],
    options: Options,
    engine: str | None,
    report_file: str | None,
    graph_file: str | None,
) -> None:
    """Set the variables that have the programs which this process starts watched. Raises TorchEchoError where they would not see
    them: the line in ``torch_echo_autostart.pth`` comes with an installed torch-echo."""
    from torch_echo.errors import TorchEchoError

    folders = [*site.getsitepackages(), site.getusersitepackages()]
    if not any(os.path.isfile(os.path.join(folder, _PTH)) for folder in folders):
        raise TorchEchoError(
            "a launcher's workers can't be reached, for torch-echo is not installed in this Python: "
            "install it with pip, or have the launcher run it: torchrun ... -m torch_echo run train.py"
        )
    for field in fields(options):
        environ.pop(f"TORCH_ECHO_{field.name.upper()}", None)
    environ.update(options.to_env())
    given = {"": "1", "_ENGINE": engine, "_REPORT": report_file, "_GRAPH": graph_file}
    environ.update({f"TORCH_ECHO{name}": value for name, value in given.items() if value})
