"""A session: watches training steps, plans once, applies the plan.

Life of a session, counted in *iterations* (a forward pass, or several, up to and with the backward pass that follows; the
optimizer's step belongs to it):

1. ``WAIT``: the first two iterations (with a memory budget, one) run as plain PyTorch: lazy initialisation and optimizer state
   are over then, and it is known how long a step takes.
2. ``RECORD``: one iteration is watched (see ``_record``), then planned.
3. ``CHECK``: the plan is in force, and the allocator is asked whether the peak is what the replay said. If it is off by more
   than 1%, the session records and plans once more.
4. ``STEADY``: the plan is in force.
"""

from __future__ import annotations

import math
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from torch_echo import compat
from torch_echo.cost import clock, get_cost_model
from torch_echo.errors import BudgetInfeasible, CaptureError, TorchEchoError, UnsupportedDevice
from torch_echo.footprint import replay
from torch_echo.graph import Kind, TrainingGraph
from torch_echo.options import Options
from torch_echo.planning import Plan, plan
from torch_echo.report.explanation import Explanation
from torch_echo.report.summary import Summary, rebuilt_by_layer
from torch_echo.tape import _entry
from torch_echo.tape._build import build
from torch_echo.tape._entry import Entry, entries
from torch_echo.tape._heap import keep_heap
from torch_echo.tape._install import REBUILT_BYTE_SECONDS, RERUN_SECONDS, Installed, engine_seconds, install_plan
from torch_echo.tape._limit import Limit
from torch_echo.tape._mode import OFF, Table, Tape, unpack
from torch_echo.tape._online import OnlineTape
from torch_echo.tape._pause import CollectorPause
from torch_echo.tape._recipe import Passes
from torch_echo.tape._record import PeakMeter, Recorder
from torch_echo.tape._rescue import RescueTape
from torch_echo.tape._stack import alone
from torch_echo.units import format_bytes

__all__ = ["Phase", "Session"]

_PACKAGE = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).resolve().parent)


RootCall = tuple[str, tuple[tuple[int, ...], ...]]

MAX_RECORDS = 12
"""Recordings in the life of a session: each makes one step slow and is followed by planning."""

FAILED_RECORDS = 3
"""Recordings that come to nothing, before a session gives up."""

GROWTH = 1.25
"""Inputs larger by this factor than those of the recorded step make the session record and plan again."""

BUDGET_GROWTH = 1.02
"""The same where a memory budget must hold for the largest step."""

UNLIKE = 3
"""Iterations in a row that make the same calls, but not those of the recorded one, before the session records again."""

CHECK_PATIENCE = 50
"""Iterations in which the check waits for one with the recorded shapes."""

CHECK_TOLERANCE = 0.01
"""A measured peak further than this fraction from the plan's makes the session record and plan again."""


HEADROOM = 0.1
"""Where a plan's peak leaves less than this fraction of the device free, steps are ready to drop what the plan keeps."""


class Phase(Enum):
    """Where a session stands."""

    WAIT = "wait"
    RECORD = "record"
    CHECK = "check"
    STEADY = "steady"
    OFF = "off"


class _Local(threading.local):
    """State of one thread within a session."""

    def __init__(self, reorder: bool) -> None:
        self.tape = Tape(reorder)
        self.depth = 0
        """Nesting of module calls that are taped or recorded."""
        self.lifted = 0
        """Above 0: leave module calls alone (a backward pass, a functorch transform, a root that can't be taped)."""
        self.open = False
        """Between a root's call and the backward pass, the script's own code (the loss) is taped too."""


def _shapes(args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors among a call's arguments, one level of containers deep."""
    found: list[tuple[int, ...]] = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, torch.Tensor):
            found.append(tuple(a.shape))
        elif isinstance(a, (list, tuple)):
            found.extend(tuple(b.shape) for b in a if isinstance(b, torch.Tensor))
        elif isinstance(a, dict):
            found.extend(tuple(b.shape) for b in a.values() if isinstance(b, torch.Tensor))
    return tuple(found)


def _elements(call: RootCall) -> int:
    return sum(math.prod(shape) for shape in call[1])


def _table(entry: Entry) -> Table:
    """What the plan says of this call of a module."""
    tables, call = entry.tables, entry.calls
    if tables is None:
        return OFF
    entry.calls = call + 1
    table: Table = tables[call] if call < len(tables) else entry.beyond
    return table


class Session:
    """One planner and its plan over a set of modules. See the module's docstring."""

    def __init__(
        self, options: Options | None = None, name: str = "session", on_event: Callable[[str], None] | None = None
    ) -> None:
        self.options = options or Options()
        self.name = name
        self.on_event = on_event or (lambda _: None)
        self.phase = Phase.WAIT
        self.iterations = 0
        self.graph: TrainingGraph | None = None
        self.plan: Plan | None = None
        self.installed: Installed | None = None
        self.measured_peak: int | None = None
        self.unhandled: list[tuple[str, str, str]] = []
        self.device: torch.device | None = None
        self._roots: dict[str, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._local = _Local(self.options.reorder)
        self._recorder: Recorder | None = None
        self._thread: threading.Thread | None = None
        """Where the iteration is watched."""
        self._meter: PeakMeter | None = None
        self._backward_seen = False
        self._records = 0
        self._clock: Callable[[], float] = perf_counter
        self._begun = 0.0
        self._plain_seconds: dict[tuple[RootCall, ...], float] = {}
        """Least time that forward and backward took without profiler and plan, by the calls of the iteration."""
        self._remade = False
        self._calls: list[RootCall] = []
        """Calls of root modules in this iteration, with the shapes of their arguments."""
        self._recorded_calls: list[RootCall] = []
        self._unlike: list[str] = []
        """Calls of root modules in the last iteration, and how many before it made the same, but other than the recorded."""
        self._unlikes = 0
        self._checks = 0
        self._late_roots = False
        self._failure: TorchEchoError | None = None
        self._limit: Limit | None = None
        """What the device can hold, where that is of interest."""
        self._ran_out = False
        """Has an allocation failed, so that the script saw it?"""
        self._broken = False
        """Did that happen in this iteration?"""
        self._watch_all = False
        self._codes: dict[int, Any] = {}
        """Code objects by identity, as long as the plan knows places in them by it."""

    # --- what users call ---------------------------------------------------------------------------------------------

    def watch(self, model: torch.nn.Module) -> None:
        """Take in one model: the forward pass of each of its training steps."""
        self._add_root(model)
        _entry.install(self, watch_all=False)

    def watch_all(self) -> None:
        """Take in every module that is called for training outside of any other."""
        self._watch_all = True
        _entry.install(self, watch_all=True)

    def close(self) -> None:
        """Stop. Steps under way finish as they began."""
        self._close_script()
        self._abort_recording()
        self._stop_check()
        self.phase = Phase.OFF
        _entry.uninstall(self)

    def finish(self) -> None:
        """The step under way is complete: plan now what was recorded. Raises what planning raised."""
        self._finish_iteration()
        self._raise_failure()

    def explanation(self) -> Explanation | None:
        """Graph, plan and footprints, for printing; None before the plan is made."""
        if self.graph is None or self.plan is None:
            return None
        return Explanation(self.graph, self.plan, replay(self.graph), replay(self.graph, self.plan.dropped))

    def summary(self) -> Summary:
        """What the session did."""
        s = Summary(steps=self.iterations, unhandled=list(self.unhandled))
        if self.graph is None or self.plan is None:
            return s
        s.measured_peak = self.measured_peak
        s.eager_peak, s.predicted_peak = self.plan.base_peak, self.plan.peak
        s.base_bytes = sum(
            t.nbytes
            for t in self.graph.storages
            if t.alloc < 0 and t.kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE, Kind.BUFFER)
        )
        s.extra_seconds, s.step_seconds = self.plan.extra_seconds, self.plan.step_seconds
        s.rebuilt = rebuilt_by_layer([(self.graph, self.plan.dropped)])
        return s

    # --- modules -----------------------------------------------------------------------------------------------------

    def _add_root(self, model: torch.nn.Module) -> None:
        name = type(model).__name__
        number = 2
        while name in self._roots and self._roots[name]() is not None:
            name = f"{type(model).__name__}#{number}"
            number += 1
        device = next((p.device for p in model.parameters()), None)
        if device is not None:
            if device.type not in ("cpu", "cuda"):
                raise UnsupportedDevice(f"{type(model).__name__} is on {device}; torch-echo handles cpu and cuda")
            if self.device is None:
                self.device = device
                if device.type == "cpu":
                    keep_heap()  # now, so that the steps before the plan, which tell how long a step takes, are like those after it
        self._roots[name] = weakref.ref(model)
        for path, module in model.named_modules():
            known = entries.get(id(module))
            if id(module) not in entries or (known is not None and known.module() is not module):
                entries[id(module)] = Entry(self, module, f"{name}.{path}" if path else name, root=not path)
        if self.phase in (Phase.CHECK, Phase.STEADY) and device is not None and self._records < 3:
            self._late_roots = True

    def meet(self, module: torch.nn.Module) -> Entry | None:
        """A module that no session knows is called for training. See :class:`torch_echo.tape._entry.Owner`."""
        if self._local.depth or compat.current_node() is not None:
            return None
        try:
            self._add_root(module)
        except UnsupportedDevice as error:
            if self.options.strict:
                raise
            self._note("module", str(error), once=True)
            for part in module.modules():
                entries[id(part)] = None
                weakref.finalize(part, entries.pop, id(part), None)
            return None
        return entries[id(module)]

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, entry: Entry, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of a module that this session knows."""
        local = self._local
        original = _entry.original_call
        if local.lifted:
            return original(module, *args, **kwargs)
        if not local.depth:
            if not torch.is_grad_enabled() or not module.training or compat.current_node() is not None:
                return original(module, *args, **kwargs)
            free = self._may_tape(module)
            self._enter_root(entry, args, kwargs, free)
            if self.phase in (Phase.WAIT, Phase.OFF) or not free:
                lean = self.phase is Phase.WAIT and self._lean() and free
                return self._call_unplanned(lean, module, args, kwargs)
        recorder = self._recorder
        if recorder is not None and recorder.active:
            if threading.current_thread() is not self._thread:
                return original(module, *args, **kwargs)
            return self._call_recorded(recorder, entry, module, args, kwargs)
        if local.depth:
            if entry.tables is None:
                return original(module, *args, **kwargs)
            return self._call_taped(entry, module, args, kwargs)
        if self.installed is None:
            return original(module, *args, **kwargs)
        local.tape.prune()
        with CollectorPause():
            try:
                return self._call_taped(entry, module, args, kwargs)
            finally:
                local.tape.prune()

    def _call_unplanned(self, lean: bool, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a root's call as plain PyTorch, or with the rule that needs no plan."""
        local = self._local
        if lean:
            if not isinstance(local.tape, OnlineTape):
                local.tape = self._online_tape()
            local.tape.switch(True, True)
        local.lifted += 1
        try:
            return _entry.original_call(module, *args, **kwargs)
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            local.lifted -= 1
            local.tape.switch(False, False)

    def _call_taped(self, entry: Entry, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a call with the plan in force; mode and hooks as this module needs them."""
        local = self._local
        tape = local.tape
        table = tape.table
        if not local.depth and not local.open and self._watch_all and self.installed is not None:
            script = self.installed.script
            # From here to the backward pass; possible where no context of the script's will be left in between.
            if (script is not OFF or isinstance(tape, RescueTape)) and alone():
                local.open = True
                table = script
        tape.watching = isinstance(tape, RescueTape)
        tape.use(_table(entry))
        local.depth += 1
        try:
            return _entry.original_call(module, *args, **kwargs)
        except BaseException as error:
            if local.depth == 1:
                local.open = False
                table = OFF
                self.failed(error)
            raise
        finally:
            local.depth -= 1
            tape.watching &= local.depth > 0 or local.open
            tape.use(table)

    def _call_recorded(self, recorder: Recorder, entry: Entry, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        local = self._local
        on, hooks = recorder.mode_on, recorder.hooks_on
        if not local.depth and alone():
            # The script's own code up to backward is watched too: it may write over what a recipe would read. What it saves
            # counts only where it will be taped.
            on, hooks = True, self._watch_all
        recorder.enter(entry.path)
        recorder.switch(True, True, True)
        local.depth += 1
        if compat.is_compiled(module):
            self._note(entry.path, "it is compiled by torch.compile and left to it", once=True)
        try:
            return _entry.original_call(module, *args, **kwargs)
        except BaseException as error:
            if local.depth == 1:
                on = hooks = False
                self._abort_recording()
                self.failed(error)
            raise
        finally:
            local.depth -= 1
            # No gate in the script's own code: C++ would put it back when the script's call of backward() ends.
            recorder.switch(on, hooks, on and local.depth > 0)
            recorder.leave()

    def _may_tape(self, module: torch.nn.Module) -> bool:
        """Are this thread's neighbours such that a mode and hooks can be put on?"""
        reason = None
        if not compat.hooks_enabled():
            reason = "saved-tensor hooks are disabled around its call"
        elif compat.functorch_active():
            reason = "it is called inside a functorch transform"
        else:
            top = compat.top_hooks()
            if top is not None and top[1] is not unpack:
                reason = "saved-tensor hooks of another tool are active around its call"
        if reason is None:
            return True
        self._note(type(module).__name__, reason, once=True)
        return False

    def _enter_root(self, entry: Entry, args: Any, kwargs: Any, free: bool) -> None:
        """A training call outside of any other begins; `free`: it can be taped."""
        _entry.watch_compiled()
        if self._elsewhere():
            return
        call = (entry.path, _shapes(args, kwargs))
        if self._backward_seen or self.iterations == 0:
            self._backward_seen = False
            self._close_script()
            self._next_iteration(call, free)
        if not self._calls:
            self._clock = clock(self.device or torch.device("cpu"))
            self._begun = self._clock()
        self._calls.append(call)

    # --- iterations --------------------------------------------------------------------------------------------------

    def _elsewhere(self) -> bool:
        """Is an iteration watched on another thread? Then this one's steps do not count."""
        if (self._recorder is None and self._meter is None) or threading.current_thread() is self._thread:
            return False
        if self._thread is not None and self._thread.is_alive():
            return True
        self._abort_recording()  # that thread has ended in the middle of its iteration
        if self._meter is not None:
            self._meter.stop()
            self._meter = None
        return False

    def _next_iteration(self, first: RootCall, free: bool) -> None:
        """A new iteration begins with the call `first`; it is watched only if that call can be taped."""
        self._finish_iteration()
        self._raise_failure()
        self._count_unlike()
        self.iterations += 1
        self._calls = []
        if self.installed is not None:
            self.installed.reset()
        self._begin_iteration(first, free)
        if self._limit is not None and (self._limit.enforced or self.phase is Phase.CHECK):
            self._limit.settle()

    def _begin_iteration(self, first: RootCall, free: bool) -> None:
        if not free:
            return
        if self.phase is Phase.WAIT:
            if self.iterations > self.warm_up:
                self._start_recording()
        elif self.phase in (Phase.CHECK, Phase.STEADY) and self._outgrown(first):
            self._start_recording()
        elif self.phase is Phase.CHECK:
            self._checks += 1
            if self._checks > CHECK_PATIENCE:
                self.phase = Phase.STEADY
            elif self._recorded_calls[:1] == [first]:
                self._start_check()

    def _outgrown(self, first: RootCall) -> bool:
        """Is the iteration so unlike the recorded one that a new plan is due: new models, other calls, or far larger
        inputs?"""
        if self._records >= MAX_RECORDS:
            return False
        if self._late_roots or self._unlikes >= UNLIKE:
            self._late_roots = False
            self._unlikes = 0
            return True
        known = [_elements(c) for c in self._recorded_calls if c[0] == first[0]]
        growth = BUDGET_GROWTH if self.options.memory_budget is not None else GROWTH
        return bool(known) and _elements(first) > growth * max(known)

    def _count_unlike(self) -> None:
        """Has the recorded iteration turned out an exception? (A step that failed, for one, has a forward pass too many.)"""
        calls = [path for path, _ in self._calls]
        if self.phase not in (Phase.CHECK, Phase.STEADY) or calls == [path for path, _ in self._recorded_calls]:
            self._unlikes = 0
        else:
            self._unlikes = self._unlikes + 1 if calls == self._unlike else 1
        self._unlike = calls

    def _finish_iteration(self) -> None:
        """What was being watched is complete."""
        if self._broken:
            self._broken = False
            self._abort_recording()
            if self._meter is not None:
                self._meter.stop()
                self._meter = None
            if self._records < MAX_RECORDS:
                self.phase = Phase.WAIT
            elif self.installed is not None:
                self._local.tape = self._planned_tape()
        if self._recorder is not None and self._recorder.active:
            self._recorded_calls = self._calls
            self._checks = 0
            self._stop_recording()
        if self._meter is not None:
            self._stop_check()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _known(self) -> dict[int, tuple[Kind, str]]:
        """Kind and layer of the storages that exist before a step, by storage key."""
        known: dict[int, tuple[Kind, str]] = {}
        for name, ref in self._roots.items():
            model = ref()
            if model is None:
                continue
            for path, p in model.named_parameters():
                layer = ".".join([name, *path.split(".")[:-1]])
                known[compat.storage_key(p)] = (Kind.PARAMETER, layer)
                if p.grad is not None and compat.storage_key(p.grad) != -1:
                    known[compat.storage_key(p.grad)] = (Kind.GRADIENT, layer)
            for path, b in model.named_buffers():
                known[compat.storage_key(b)] = (Kind.BUFFER, ".".join([name, *path.split(".")[:-1]]))
        for t in self._optimizer_states():
            known[compat.storage_key(t)] = (Kind.OPTIMIZER_STATE, "")
        return known

    def _optimizer_states(self) -> list[torch.Tensor]:
        return [
            t
            for optimizer in list(self._optimizers)
            for state in optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor) and t.device == self.device
        ]

    def _lean(self) -> bool:
        """Must steps without a plan be spared memory too? They drop what a simple rule says (see ``_online``), at the
        price of an estimated baseline."""
        given = self.options.memory_budget is not None or self.options.memory_limit is not None
        return given or self._ran_out or (self.device is not None and self.device.type == "cuda")

    @property
    def warm_up(self) -> int:
        """Iterations before the first recording. The first of all is slow: the second tells how long a step takes, where the
        plan may add a fraction of that. A limit that is ours holds for the first one too."""
        return 0 if self.options.memory_limit is not None else 1 if self._lean() else 2

    def _the_limit(self) -> Limit:
        if self._limit is None:
            assert self.device is not None
            self._limit = Limit(self.device, self.options.limit_bytes(self.device))
        return self._limit

    def _online_tape(self) -> OnlineTape:
        return OnlineTape(set(self._known()), self._the_limit(), self._out_of_memory)

    def _planned_tape(self) -> Tape:
        """For steps with the plan. To be ready for the worst costs each op some time: it is where memory is nearly full, or
        has been."""
        if self._limit is None or self.plan is None:
            return Tape(self.options.reorder)
        limit = self._limit
        near = limit.nbytes is not None and self.plan.peak > (1 - HEADROOM) * limit.nbytes
        if not (near or limit.enforced or self._ran_out):
            return Tape(self.options.reorder)
        return RescueTape(limit, self._out_of_memory, self.options.reorder)

    def failed(self, error: BaseException) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        if self.phase is not Phase.OFF and self.device is not None and compat.is_out_of_memory(error):
            self._out_of_memory(error, self._the_limit().learn())

    def _out_of_memory(self, error: BaseException, live: int) -> None:
        """The script is going to see `error`, with so many bytes allocated. If it goes on, the next steps are prepared."""
        notes: list[str] = getattr(error, "__notes__", [])
        if any(note.startswith("torch-echo") for note in notes):
            return  # on its way out
        where = "backward" if Passes.running else "forward"
        limit = self._the_limit()
        tape = self._local.tape
        dropped = tape.freed if isinstance(tape, RescueTape) else 0
        self._ran_out = self._broken = True
        self._backward_seen = True  # what is called next begins a new iteration
        limit.tighten()
        again = self._records < MAX_RECORDS
        does = (
            f"the next step is recorded and planned for {format_bytes(limit.plannable or 0)} at most"
            if again
            else ("the next steps drop what the plan keeps where they must")
        )
        text = (
            f"torch-echo: out of memory in the {where} pass with {format_bytes(live)} allocated"
            f"{f', after {format_bytes(dropped)} that would be kept were dropped' if dropped else ''}. "
            f"What failed needs {format_bytes(live + compat.bytes_wanted(error))} at least. If the script goes on, {does}."
        )
        error.__notes__ = [*notes, text]  # type: ignore[attr-defined]
        self.on_event(text.removeprefix("torch-echo: "))

    def _start_recording(self) -> None:
        if self.device is None:
            return
        if compat.profiler_running():
            self._note("planning", "waits: a profiler of the script's is running", once=True)
            return
        known = self._known()
        tape: Tape | None = None
        tables = None
        if self._lean():
            if self.installed is None:
                tape = self._online_tape()
            elif isinstance(self._local.tape, RescueTape) or not self._ran_out:
                tape = self._local.tape
            else:
                tape = self._planned_tape()
            tables = self.installed.tables if self.installed is not None else None
            self._local.tape = tape
        self._recorder = Recorder(
            self.device, known, tape, tables, script=self._watch_all, reorder=self.options.reorder
        )
        self.installed = None
        for e in entries.values():
            if e is not None and e.owner is self:
                e.tables = None
        self._thread = threading.current_thread()
        self._recorder.start(self._gradients(), self._optimizer_states())
        self.phase = Phase.RECORD
        self._records += 1
        self.on_event("recording a step")

    def _stop_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None and self.device is not None
        recorder.stop()
        if not recorder.saved:
            self.phase = Phase.WAIT
            if self._records >= FAILED_RECORDS:
                self.phase = Phase.OFF
                self._note("training step", "autograd saved nothing that could be seen: compiled, or nothing to train")
            return
        try:
            cost = get_cost_model(self.options.cost, self.device)
            self.graph = build(recorder, cost, self._optimizer_states())
            cost.save()
            self.graph.rerun_overhead = RERUN_SECONDS
            if self.device is None or self.device.type == "cpu":
                self.graph.rebuilt_byte_seconds = REBUILT_BYTE_SECONDS
            # The recorded step was slowed by being watched; it can't take longer than one of its shapes that was not.
            plain = self._plain_seconds.get(tuple(self._recorded_calls), math.inf)
            self.graph.step_seconds = min(self.graph.step_seconds, plain)
            self._codes = recorder.codes
            self._make_plan(recorder)
            self._local.tape = self._planned_tape()
            self._local.tape.trusted = frozenset(recorder.known)
        except CaptureError as error:  # another thread may have been in the way
            self.phase = Phase.WAIT
            if self._records >= FAILED_RECORDS or self.options.strict:
                self._give_up(str(error), error)
        except BudgetInfeasible as error:
            self.phase = Phase.OFF
            self._failure = error

    def _make_plan(self, recorder: Recorder) -> None:
        assert self.graph is not None and self.device is not None
        options = self.options
        budget = options.budget_bytes(self.device)
        self.plan = plan(
            self.graph,
            budget=budget,
            max_overhead=options.max_overhead,
            policy=options.policy,
            on_infeasible=options.on_infeasible,
            fixed_seconds=engine_seconds(self.graph),
        )
        limit = None if self._limit is None else self._limit.plannable
        if limit is not None and self.plan.peak > limit:
            self.plan = plan(
                self.graph,
                budget=limit,
                policy=options.policy,
                on_infeasible="least",
                fixed_seconds=engine_seconds(self.graph),
            )
        self.installed = install_plan(self, self.graph, self.plan.dropped, recorder.nesting)
        self.phase = Phase.CHECK
        self.on_event("planned")

    def _abort_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None and recorder.active:
            if (
                threading.current_thread() is self._thread
            ):  # mode and hooks of another thread are not to be reached from here
                recorder.lift()
            recorder.stop()
            self.phase = Phase.WAIT

    def _start_check(self) -> None:
        if compat.profiler_running():
            return
        assert self.device is not None
        self._thread = threading.current_thread()
        self._meter = PeakMeter(self.device, self._gradients())

    def _stop_check(self) -> None:
        """Compare the measured peak with the plan's; a plan that is off is made again, once, on a newly recorded step."""
        if self._meter is None:
            return
        meter, self._meter = self._meter, None
        peak = meter.stop()
        if peak is None or self.phase is not Phase.CHECK or self.plan is None or self._calls != self._recorded_calls:
            return
        self.measured_peak = peak
        self.phase = Phase.STEADY
        if abs(peak - self.plan.peak) > CHECK_TOLERANCE * self.plan.peak and not self._remade:
            self._remade = True
            self.phase = Phase.WAIT

    def _gradients(self) -> list[torch.Tensor]:
        models = [m for ref in self._roots.values() if (m := ref()) is not None]
        return [
            p.grad for m in models for p in m.parameters() if p.grad is not None and compat.storage_key(p.grad) != -1
        ]

    def _give_up(self, why: str, error: TorchEchoError) -> None:
        self.phase = Phase.OFF
        self.installed = None
        if self.options.strict:
            self._failure = error
            return
        self._note("training step", why)
        warnings.warn(f"torch-echo leaves training to plain PyTorch: {why}", stacklevel=4)

    # --- engine and optimizer ----------------------------------------------------------------------------------------

    def before_backward(self, keep_graph: bool) -> Any:
        """See :class:`torch_echo.tape._entry.Owner`."""
        local = self._local
        if not local.depth:
            self._close_script()
            local.tape.forget()
            if not self._elsewhere():
                self._backward_seen = True
        if self._recorder is not None and threading.current_thread() is self._thread:
            self._recorder.mark("backward", keep_graph)
        before = Passes.rescue
        if isinstance(local.tape, RescueTape):
            Passes.rescue = local.tape
            local.tape.limit.live()  # a look, from which on it is counted what backward takes
        return before, self.lift()

    def after_backward(self, state: Any) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        Passes.rescue, state = state
        if self._recorder is not None and threading.current_thread() is self._thread:
            self._recorder.mark("done")
        elif self.phase is Phase.WAIT and self._calls:
            calls = tuple(self._calls)
            taken = self._clock() - self._begun
            self._plain_seconds[calls] = min(taken, self._plain_seconds.get(calls, math.inf))
        self.lower(state)

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        self._optimizers.add(optimizer)
        if not self._local.depth:
            self._close_script()
        if self._backward_seen and not self._elsewhere():
            self._finish_iteration()

    def _close_script(self) -> None:
        """The script's own code is not taped any longer on this thread."""
        local = self._local
        if local.open:
            local.open = False
            local.tape.lift()
            local.tape.watching = False
        if self._recorder is not None and threading.current_thread() is self._thread:
            self._recorder.lift()

    def lift(self) -> Any:
        """See :class:`torch_echo.tape._entry.Owner`."""
        tape = self._local.tape
        recorder = self._recorder if threading.current_thread() is self._thread else None
        self._local.lifted += 1
        above = recorder.lift() if recorder is not None else None
        return recorder, above, tape, tape.lift()

    def lower(self, state: Any) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        recorder, above, tape, places = state
        self._local.lifted -= 1
        tape.lower(places)
        if recorder is not None and recorder.active:
            recorder.lower(above)

    # --- notes -------------------------------------------------------------------------------------------------------

    def _note(self, what: str, why: str, once: bool = False) -> None:
        """Remember something that was left to plain PyTorch, with the line of the script that led there."""
        if once and any(w == what and y == why for w, y, _ in self.unhandled):
            return
        if self.options.strict:
            raise CaptureError(f"{what}: {why}")
        where = ""
        for frame in reversed(traceback.extract_stack()):
            if not frame.filename.startswith((_PACKAGE, _TORCH)) and "<frozen" not in frame.filename:
                where = f"{frame.filename}:{frame.lineno}"
                break
        self.unhandled.append((what, why, where))
