"""Run a script or a module as ``__main__`` in this process, as ``python script.py`` and ``python -m module`` do.

The program must not be able to tell the difference: ``sys.argv``, ``sys.path[0]``, the globals of ``__main__``, what
``multiprocessing`` sends to its children, exit handlers, exit status and signals are those that Python itself would
give it.

An exception that leaves the program is left to the interpreter too, which alone can do right by all of them
(``SystemExit`` with any argument, ``KeyboardInterrupt`` that ends the process by SIGINT). Only the traceback is
rewritten first, through ``sys.excepthook``, so that it shows no frame of torch-echo.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from torch_echo import _autostart
from torch_echo.errors import TorchEchoError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from torch_echo.options import Options

__all__ = ["ProgramNotFound", "Target", "fail", "hook_exceptions", "launch", "strip_traceback"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH_GLUE = (os.path.join("torch", "_ops.py"), os.path.join("torch", "utils", "_python_dispatch.py"))
_IMPORT_GLUE = (
    runpy.__file__,
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)


class ProgramNotFound(TorchEchoError):
    """There is no such script or module."""


@dataclass(frozen=True)
class Target:
    """The program to run, and its arguments."""

    name: str
    """Path of a script, of a folder or zip file with a ``__main__.py``; or a module's name."""
    args: tuple[str, ...] = ()
    module: bool = False


def launch(
    target: Target,
    options: Options | None,
    *,
    report_file: str | None = None,
    graph_file: str | None = None,
    session_factory: _autostart.SessionFactory | None = None,
) -> None:
    """Run `target` as ``__main__`` under torch-echo; returns when its code has come to its end.

    With `options` None it runs plainly. The report is written at exit. Raises what the program raises, with a hook in
    place that shows it as Python would; a :class:`TorchEchoError` that the program lets through ends in one line and
    status 2.
    """
    if options is None:
        _autostart.deactivate()
    else:
        _autostart.activate(
            lambda: options, session_factory=session_factory, report_file=report_file, graph_file=graph_file
        )
    try:
        _run(target)
    except ProgramNotFound as error:
        _autostart.deactivate()
        fail(error)
    except TorchEchoError as error:
        fail(error)
    except SystemExit:
        raise
    except BaseException as error:
        hook_exceptions(only=error)
        raise


def fail(error: object) -> NoReturn:
    """Say in one line what is wrong and exit with status 2."""
    print(f"torch-echo: error: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(2) from None


def _run(target: Target) -> None:
    sys.argv[:] = ["-m" if target.module else target.name, *target.args]
    if target.module:
        _set_path0(os.getcwd())
        code, spec = _find_module(target.name)
        sys.argv[0] = spec.origin or target.name
        main = _make_main(spec)
    else:
        code, main = _find_script(target.name)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _set_path0(entry: str) -> None:
    """Put the program's folder where Python has put that of torch-echo's own command: first on ``sys.path``."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = entry


def _find_module(name: str) -> tuple[CodeType, ModuleSpec]:
    class NotFound(Exception):
        pass

    try:
        # Also what pdb does: the rules for packages, their __main__ and their parents are in this one place.
        _, spec, code = runpy._get_module_details(name, NotFound)  # type: ignore[attr-defined]
    except NotFound as error:
        raise ProgramNotFound(f"can't run module {name!r}: {error}") from None
    return code, spec


def _find_script(name: str) -> tuple[CodeType, ModuleType]:
    path = os.path.join(os.getcwd(), name)
    if not os.path.exists(path):
        raise ProgramNotFound(f"can't find the script {name!r}: no such file")
    importer: Any = pkgutil.get_importer(path)
    if importer is not None:  # a folder or a zip file
        spec = importer.find_spec("__main__")
        code = spec.loader.get_code("__main__") if spec is not None else None
        if code is None:
            raise ProgramNotFound(f"can't run {name!r}: there is no __main__.py in it")
        _set_path0(path)
        return code, _make_main(spec)
    loader: Any
    try:
        if name.endswith(".pyc"):
            loader = importlib.machinery.SourcelessFileLoader("__main__", path)
            code = loader.get_code("__main__")
        else:
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    except OSError as error:
        raise ProgramNotFound(f"can't read the script {name!r}: {error.strerror}") from None
    _set_path0(os.path.dirname(os.path.realpath(path)))
    return code, _new_main(loader, path)


def _make_main(spec: ModuleSpec) -> ModuleType:
    """``__main__`` for a module found by the import system."""
    main = _new_main(spec.loader, spec.origin)
    main.__package__ = spec.parent
    main.__spec__ = spec
    if sys.version_info < (3, 15):
        main.__cached__ = spec.cached  # type: ignore[attr-defined]
    return main


def _new_main(loader: Any, file: str | None) -> ModuleType:
    """A ``__main__`` with exactly the globals, in the same order, with which this version of Python starts a script."""
    main = ModuleType("__main__")
    main.__loader__ = loader
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    main.__file__ = file
    if sys.version_info < (3, 15):
        main.__cached__ = None  # type: ignore[attr-defined]
    return main


def hook_exceptions(only: BaseException | None = None) -> None:
    """Let ``sys.excepthook``, whoever has set it, see tracebacks without torch-echo's frames.

    A TorchEchoError is shown in one line instead.

    With `only`, for this exception, which is on its way out of the program: the frames through which it passes from
    here on are left out as well.
    """
    before = getattr(sys, "excepthook", sys.__excepthook__)
    inside = strip_traceback(only) if only is not None else None

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        sys.excepthook = before
        if error is only:
            error.__traceback__ = inside
        elif isinstance(error, TorchEchoError):
            fail(error)
        else:
            strip_traceback(error)
        sys.last_traceback = error.__traceback__
        before(kind, error, error.__traceback__)

    sys.excepthook = hook


def strip_traceback(error: BaseException) -> TracebackType | None:
    """Take torch-echo's frames out of the tracebacks of `error` and of the exceptions behind it.

    Goes: every frame before the program's first one; frames of torch-echo in the middle, where it called back into the
    program or into torch. Stays: what torch-echo itself raised, at the end. Returns the traceback of `error`.
    """
    for each in _with_causes(error):
        each.__traceback__ = _strip(each.__traceback__)
    return error.__traceback__


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _strip(traceback: TracebackType | None) -> TracebackType | None:
    frames: list[TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    files = [f.tb_frame.f_code.co_filename for f in frames]
    own = [file.startswith(_HERE) for file in files]

    first = next((i for i, f in enumerate(frames) if f.tb_frame.f_code is launch.__code__), None)
    if first is None:
        first = 0
    else:
        while first < len(files) and (own[first] or files[first] in _IMPORT_GLUE):
            first += 1
    last_foreign = max((i for i in range(first, len(files)) if not own[i]), default=-1)
    kept: list[TracebackType] = []
    after_own = False
    for i in range(first, len(frames)):
        if own[i] and i < last_foreign:
            after_own = True
        elif after_own and files[i].endswith(_TORCH_GLUE):
            continue  # the call from a dispatch mode back into torch
        else:
            after_own = False
            kept.append(frames[i])
    for i, frame in enumerate(kept):
        frame.tb_next = kept[i + 1] if i + 1 < len(kept) else None
    return kept[0] if kept else None
