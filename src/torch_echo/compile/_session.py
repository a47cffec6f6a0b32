"""``torch-echo run --engine compile``: each root module of a script is compiled at its first training call.

A root is a module that is called for training from outside of any other. Its calls go to a compiled function beside it; the module
itself, its class, state and pickle are as ever. Evaluation, and what is compiled already, are left alone. The script's own code
between a root's call and ``backward`` is not compiled.

Where a root's graph is so large that compiling would take minutes (a loop over time, unrolled), the root is handed to the tape
engine: the call in which that turns out is plain PyTorch, those after it are the tape's.

A step may have several graphs, of several roots or between graph breaks. When the second step begins all are known, as is what the
optimizer keeps: they are planned together then, and compiled once more if that is worth it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from torch_echo import compat
from torch_echo.compile._backends import COMPILING, echo, echo_eager, limited, refuse_limit, sharing
from torch_echo.compile._partition import left, plans
from torch_echo.compile._share import Shared
from torch_echo.errors import CaptureError, UnsupportedDevice
from torch_echo.graph import TrainingGraph
from torch_echo.memory import live_bytes
from torch_echo.options import Options, refuse_check
from torch_echo.report.summary import Summary, rebuilt_by_layer
from torch_echo.tape.session import Session

__all__ = ["CompileSession"]


def _root(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


class _Local(threading.local):
    inside = False
    """In a root's call."""


class CompileSession:
    """Compiles the roots of a process; the face of :class:`torch_echo.tape.session.Session` that a run needs."""

    def __init__(
        self, options: Options, *, name: str = "session", on_event: Callable[[str], None] | None = None
    ) -> None:
        refuse_check(options)
        refuse_limit(options)
        self.options = options
        self.name = name
        self.on_event = on_event or (lambda _: None)
        self.steps = 0
        """Training calls of the root that was met first: scripts need not have an optimizer of torch's."""
        self.notes: list[tuple[str, str, str]] = []
        self._compiled: weakref.WeakKeyDictionary[torch.nn.Module, Callable[..., Any] | None] = (
            weakref.WeakKeyDictionary()
        )
        self._first: weakref.ref[torch.nn.Module] | None = None
        self._shared = Shared()
        self._since = 0
        """The first of `plans` that is in force."""
        self._large: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Roots that a graph too large to compile was met in, in the call under way."""
        self._tape: Session | None = None
        """Of the roots that were handed to it."""
        self._inner = compat.module_call()
        """What a module's call is beneath ours."""
        self._local = _Local()
        self._undo: list[Callable[[], None]] = []

    @property
    def graph(self) -> TrainingGraph | None:
        """The tape's, if roots were handed to it, or that of the last graph that was compiled."""
        if self._tape is not None and self._tape.graph is not None:
            return self._tape.graph
        return plans[-1].graph if plans else None

    def watch_all(self) -> None:
        """Take in every module that is called for training outside of any other."""
        original = self._inner = compat.module_call()

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(module, *args, **kwargs)
            return self._call(self._inner, module, args, kwargs)

        compat.set_module_call(call)
        self._undo.append(lambda: compat.set_module_call(original))
        self._undo.append(compat.wrap_backward(self._backward))

    def close(self) -> None:
        """Stop; what is compiled is not used any more."""
        while self._undo:
            self._undo.pop()()

    def summary(self) -> Summary:
        """What was done; for the whole step where its graphs were planned together, else the largest graph's peak and the sum of
        all times. If roots were handed to the tape, peaks are those of the step that it planned, times its and the graphs'."""
        s = Summary(steps=self.steps, unhandled=[*self.notes, *(("graph", reason, "") for reason in left)])
        made = plans[self._since :]
        if made:
            largest = max(made, key=lambda e: e.plan.base_peak).plan
            s.eager_peak, s.predicted_peak = largest.base_peak, largest.peak
            s.extra_seconds = sum(e.plan.extra_seconds for e in made)
            s.step_seconds = sum(e.plan.step_seconds for e in made)
            s.compiled_graphs = len(made)
            s.rebuilt = rebuilt_by_layer([(e.graph, e.plan.dropped) for e in made])
        step = self._shared.result
        if step is not None:
            s.planned_together = True
            s.eager_peak, s.predicted_peak = step.base_peak, step.peak
            s.extra_seconds, s.step_seconds = step.extra_seconds, step.step_seconds
            s.plan_notes += [step.note] if step.note else []
        return s if self._tape is None else _merged(s, self._tape.summary())

    def _call(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        local = self._local
        if local.inside or not torch.is_grad_enabled() or not module.training or compat.current_node() is not None:
            return original(module, *args, **kwargs)
        if self._shared.ready and not left and self._first is not None and self._first() is module:
            self._settle(module)
        if module not in self._compiled:
            self._first = self._first or weakref.ref(module)
            self._compiled[module] = self._compile(module)
        compiled = self._compiled[module]
        self.steps += self._first is not None and self._first() is module
        local.inside = True
        try:
            return original(module, *args, **kwargs) if compiled is None else compiled(module, args, kwargs)
        finally:
            local.inside = False
            if module in self._large:
                self._large.discard(module)
                self._hand_over(module)

    def _compile(self, module: torch.nn.Module) -> Callable[..., Any] | None:
        if compat.is_compiled(module):
            self.notes.append((type(module).__name__, "it is compiled already", ""))
            return None
        backend, reason = _backend(module)
        note = (type(module).__name__, reason, "")
        if reason and note not in self.notes:
            self.notes.append(note)
        self.on_event(f"compiling {type(module).__name__}")
        # A code object of its own: how often Dynamo compiles is limited for each.
        code = _root.__code__.replace(co_name=f"{type(module).__name__}_root")
        function = types.FunctionType(code, _root.__globals__)
        if self.options.policy == "echo":
            run = sharing(self.options, self._shared, inductor=backend == "echo")
        else:
            run = partial(echo if backend == "echo" else echo_eager, options=asdict(self.options))
        known = weakref.ref(module)  # the key of a dictionary whose value holds the backend

        def told(nodes: int) -> None:
            self._met_large(
                known(), f"{COMPILING[backend].told(nodes)} (at most {COMPILING[backend].limit:,} are compiled)"
            )

        compiled: Callable[..., Any] = torch.compile(function, backend=limited(run, COMPILING[backend].limit, told))
        return compiled

    def _met_large(self, module: torch.nn.Module | None, reason: str) -> None:
        if module is None or module in self._large:
            return
        if self.options.strict:
            raise CaptureError(f"{type(module).__name__} is {reason}")
        note = (type(module).__name__, f"run by the tape engine: it is {reason}", "")
        if note not in self.notes:
            self.notes.append(note)
        self._large.add(module)

    def _hand_over(self, module: torch.nn.Module) -> None:
        """To the tape, beneath ours: Dynamo, which guards what a module's call is, would compile other roots once more."""
        self._compiled[module] = None
        self._shared.leave()  # what the tape keeps is not known to graphs
        if not any(self._compiled.values()):
            self._since = len(plans)
        if self._tape is None:
            self._tape = Session(self.options, name=self.name, on_event=self.on_event)
            self._undo.append(self._tape.close)
        ours = compat.module_call()
        compat.set_module_call(self._inner)
        try:
            self._tape.watch(module)
        except (CaptureError, UnsupportedDevice) as error:
            if self.options.strict:
                raise
            self.notes.append((type(module).__name__, str(error), ""))
        finally:
            self._inner = compat.module_call()
            compat.set_module_call(ours)

    def _backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._local.inside:  # compiling traces a backward pass too
                self._shared.end()
            return run(*args, **kwargs)

        return backward

    def _settle(self, module: torch.nn.Module) -> None:
        """A second step begins: plan the graphs of the first together."""
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        options = self.options
        budget, least = options.budget_bytes(device), options.on_infeasible == "least"
        if self._shared.settle(live_bytes(device), budget, options.max_overhead, least):
            self._since = len(plans)
            for again in [m for m, compiled in self._compiled.items() if compiled is not None]:
                del self._compiled[again]


def _merged(graphs: Summary, tape: Summary) -> Summary:
    """What was done in compiled graphs, and by the tape in the roots that were handed to it."""
    unhandled = [*graphs.unhandled, *tape.unhandled]
    if tape.predicted_peak is None:
        return replace(graphs, unhandled=unhandled)
    return replace(
        tape,
        steps=graphs.steps,
        unhandled=unhandled,
        extra_seconds=(tape.extra_seconds or 0.0) + (graphs.extra_seconds or 0.0),
        step_seconds=(tape.step_seconds or 0.0) + (graphs.step_seconds or 0.0),
        rebuilt=sorted([*tape.rebuilt, *graphs.rebuilt], key=lambda layer: -layer[1]),
        plan_notes=[*graphs.plan_notes, *tape.plan_notes],
    )


def _backend(module: torch.nn.Module) -> tuple[str, str]:
    """Inductor, where there is what it needs; and if not, why not."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    if device == "cuda":
        needed = "" if importlib.util.find_spec("triton") else "Triton is not installed"
    else:
        needed = "" if shutil.which(os.environ.get("CXX", "g++")) else "there is no C++ compiler (g++)"
    return ("echo", "") if not needed else ("echo_eager", f"run by PyTorch's own kernels instead of Inductor: {needed}")
