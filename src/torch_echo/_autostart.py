"""Activation: watch the training of this process, and say at its end what was done.

Two ways lead here: ``torch-echo run`` (see :mod:`torch_echo.launch`), and ``TORCH_ECHO=1`` in the environment, for
commands that can't be changed. The second starts from a line in ``torch_echo_autostart.pth``, which Python runs at its
own start; where the variable is not set, that line costs one look into ``os.environ``.

torch is never imported from here. The engine is installed at the moment at which the program itself has finished
``import torch``, so that everything a script does before that (thread counts, visible devices, allocator settings in
the environment) still has its effect, and a program that never imports torch never pays for it.

Only the process that was started is watched. Forked children (data loader workers) are told apart by their process id,
and spawned children of ``multiprocessing`` by their command line; those of ``torch.multiprocessing.spawn`` are watched too
(see :mod:`torch_echo._workers`).
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from torch_echo._workers import Job, launches, wrap_spawn

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from torch_echo.graph import TrainingGraph
    from torch_echo.options import Options
    from torch_echo.report.summary import Summary

__all__ = ["Activation", "SessionFactory", "SessionLike", "activate", "current", "install"]

PARENT = "TORCH_ECHO_PARENT"
"""Set for the children of a process that ``TORCH_ECHO=1`` activated: they stay silent unless they train."""


_RANK = "{rank}"
"""Stands for the rank in the name of a file."""


class SessionLike(Protocol):
    """What is needed of :class:`torch_echo.tape.session.Session` here."""

    @property
    def graph(self) -> TrainingGraph | None: ...

    def watch_all(self) -> None: ...

    def summary(self) -> Summary: ...

    def close(self) -> None: ...


class SessionFactory(Protocol):
    """Makes a session; :class:`torch_echo.tape.session.Session` itself is the usual one."""

    def __call__(self, options: Options, *, name: str, on_event: Callable[[str], None] | None) -> SessionLike: ...


class Activation:
    """One session over the life of this process, opened when torch has been imported, reported on at exit."""

    def __init__(
        self,
        options: Callable[[], Options],
        *,
        session_factory: SessionFactory | None = None,
        report_file: str | None = None,
        graph_file: str | None = None,
        always_report: bool = True,
        hook_exceptions: bool = False,
    ) -> None:
        self._options = options
        self._factory = session_factory
        self._report_file = report_file
        self._graph_file = graph_file
        self._always_report = always_report
        self._hook_exceptions = hook_exceptions
        self._pid = os.getpid()
        self._session: SessionLike | None = None
        self._opened_with: Options | None = None
        self._finder: _AfterImport | None = None
        self._undo_spawn: Callable[[], None] = lambda: None
        self._spawned = False

    def start(self) -> None:
        """Open the session as soon as torch is there; report at exit, after the program's own exit handlers."""
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._leave)
        if "torch" in sys.modules:
            self._open()
        else:
            self._finder = _AfterImport("torch", self._open)
            sys.meta_path.insert(0, self._finder)

    def cancel(self) -> None:
        """Undo :meth:`start` without a report."""
        atexit.unregister(self.finish)
        self._leave()

    def _leave(self) -> None:
        if self._finder is not None and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._undo_spawn()
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                session.close()

    def _open(self) -> None:
        if os.getpid() != self._pid:
            return
        if self._hook_exceptions:
            from torch_echo.launch import hook_exceptions

            os.environ[PARENT] = str(self._pid)
            hook_exceptions()
        factory = self._factory or engine()
        self._opened_with = self._options()
        session = factory(self._opened_with, name="run", on_event=_progress if _on_terminal() else None)
        session.watch_all()
        self._session = session
        self._undo_spawn = wrap_spawn(self._job)

    def _job(self) -> Job | None:
        """What processes that this one spawns are to be watched with."""
        if os.getpid() != self._pid or self._opened_with is None:
            return None
        self._spawned = True
        return Job(self._opened_with, self._factory, self._report_file, self._graph_file)

    def finish(self) -> None:
        """Close the session and write the report. Never raises, so that the program's exit status stays its own."""
        if os.getpid() != self._pid:
            return
        try:
            self._finish()
        except BaseException as error:  # an interrupt at this point ends the report, nothing else
            with suppress(BaseException):
                print(f"torch-echo: no report: {type(error).__name__}: {error}", file=_stderr())
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            # Python ends an interrupted program by SIGINT, after the exit handlers, unless one of them has run code
            # from a string, as an import of dataclasses does: that resets its note of the interrupt. This sets it
            # again.
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def _finish(self) -> None:
        from torch_echo.report.files import write_summary
        from torch_echo.report.summary import Summary
        from torch_echo.report.tables import print_summary

        session, self._session = self._session, None
        try:
            summary = session.summary() if session is not None else Summary()
            graph = session.graph if session is not None and self._graph_file is not None else None
        finally:
            if session is not None:
                session.close()
        # Ranks of a distributed run would print one block each: the first one speaks. There is a file for each if its name says so.
        rank = str(summary.rank) if summary.ranks > 1 else os.environ.get("RANK", "0")
        asked = self._always_report or (session is not None and not _launches_others())
        if rank == "0" and (summary.steps or (asked and not self._spawned)):
            print_summary(summary, file=_stderr())
        if self._spawned and not summary.steps:
            return  # files are those of the processes that it has spawned
        if self._report_file is not None and (rank == "0" or _RANK in self._report_file):
            write_summary(self._report_file.replace(_RANK, rank), summary, self._opened_with)
        if graph is not None and self._graph_file is not None and (rank == "0" or _RANK in self._graph_file):
            from torch_echo.graphio import save_graph

            save_graph(graph, self._graph_file.replace(_RANK, rank))


_current: Activation | None = None


@dataclass(frozen=True)
class _Engine:
    """Makes sessions of one engine; can be sent to another process."""

    name: str

    def __call__(self, options: Options, *, name: str, on_event: Callable[[str], None] | None) -> SessionLike:
        if self.name == "compile":
            from torch_echo.compile import CompileSession

            return CompileSession(options, name=name, on_event=on_event)
        from torch_echo.tape.session import Session

        return Session(options, name=name, on_event=on_event)


def engine(chosen: str | None = None) -> SessionFactory:
    """What makes a session of the engine "tape" or "compile"; None: as the environment says, or "tape". Raises OptionError for
    another name. Imports torch when called."""
    chosen = chosen or os.environ.get("TORCH_ECHO_ENGINE", "").strip() or "tape"
    if chosen not in ("tape", "compile"):
        from torch_echo.errors import OptionError

        raise OptionError(f"engine={chosen!r}: must be 'tape' or 'compile'")

    return _Engine(chosen)


def current() -> Activation | None:
    """The activation of this process, if there is one."""
    return _current


def activate(
    options: Callable[[], Options],
    *,
    session_factory: SessionFactory | None = None,
    report_file: str | None = None,
    graph_file: str | None = None,
    always_report: bool = True,
    hook_exceptions: bool = False,
) -> Activation:
    """Start watching this process; an activation that is already there is replaced by the new one.

    `options` is called when torch has been imported. `always_report` False: say nothing where there was nothing to
    watch. `hook_exceptions` cleans tracebacks through ``sys.excepthook``.
    """
    global _current
    deactivate()
    _current = Activation(
        options,
        session_factory=session_factory,
        report_file=report_file,
        graph_file=graph_file,
        always_report=always_report,
        hook_exceptions=hook_exceptions,
    )
    _current.start()
    return _current


def deactivate() -> None:
    """End the activation of this process, if there is one, without a report."""
    global _current
    if _current is not None:
        _current.cancel()
        _current = None


def install(session_factory: SessionFactory | None = None) -> None:
    """What ``TORCH_ECHO=1`` does, called by ``torch_echo_autostart.pth`` when Python starts."""
    if _is_worker(sys.orig_argv) or launches(sys.orig_argv):
        return
    files = {f"{what}_file": _absolute(os.environ.get(f"TORCH_ECHO_{what.upper()}")) for what in ("report", "graph")}
    activate(_options_from_env, session_factory=session_factory, always_report=False, hook_exceptions=True, **files)


def _absolute(path: str | None) -> str | None:
    return os.path.abspath(path) if path else None


def _options_from_env() -> Options:
    from torch_echo.options import Options

    return Options.from_env(os.environ)


def _is_worker(argv: Sequence[str]) -> bool:
    """Whether this command line starts a process of ``multiprocessing``: a worker, a fork server or a tracker."""
    return any(arg == "--multiprocessing-fork" or arg.startswith("from multiprocessing.") for arg in argv)


def _launches_others(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a launcher (torchrun), or a helper that an activated process started."""
    return "torch.distributed.run" in sys.modules or environ.get(PARENT, str(os.getpid())) != str(os.getpid())


def _stderr() -> Any:
    stream = sys.stderr
    return sys.__stderr__ if stream is None or getattr(stream, "closed", False) else stream


def _on_terminal() -> bool:
    try:
        return bool(_stderr().isatty())
    except (AttributeError, ValueError):
        return False


def _progress(event: str) -> None:
    with suppress(OSError, ValueError):
        print(f"torch-echo: {event}", file=_stderr(), flush=True)


class _AfterImport(MetaPathFinder):
    """Calls `callback` once, right after the module `name` has been executed.

    It finds the module by the other finders and replaces ``exec_module`` on that one loader object for the time of the
    import; module, spec and loader are otherwise the ones that the program would have had anyway.
    """

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        loader = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "__dict__"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:  # else: cancelled, or done by another import
                sys.meta_path.remove(self)
                self._callback()

        vars(loader)["exec_module"] = exec_module
        return spec
