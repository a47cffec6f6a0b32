"""A session: watches training steps, plans them, applies the plans.

What it counts are *iterations*: a forward pass, or several, up to and with the backward pass that follows; the optimizer's step
belongs to it. Iterations are of several kinds (see ``_kinds``). Each kind has a plan of its own:

1. ``WAIT``: its first two iterations (with a memory budget, one) run without one: lazy initialisation and optimizer state are
   over then, and it is known how long a step takes.
2. ``RECORD``: one iteration is watched (see ``_record``), then planned.
3. ``CHECK``: the plan is in force, and the allocator is asked whether the peak is what the replay said. If it is off by more
   than 1%, the session records and plans once more.
4. ``STEADY``: the plan is in force.

Where a backward pass leaves much of what autograd saved, and one of the next three reads it (a GAN's fakes, judged twice), they are
one iteration.
"""

from __future__ import annotations

import itertools
import math
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from torch_echo import compat
from torch_echo._script import script_line
from torch_echo.cost import clock, get_cost_model
from torch_echo.errors import BudgetInfeasible, CaptureError, DifferenceFound, TorchEchoError, UnsupportedDevice
from torch_echo.graph import TrainingGraph
from torch_echo.options import Options
from torch_echo.planning import Plan, plan
from torch_echo.report.comparison import Comparison
from torch_echo.report.explanation import Explanation
from torch_echo.report.summary import Summary
from torch_echo.tape import _entry
from torch_echo.tape._build import build
from torch_echo.tape._check import Check, CheckedTape
from torch_echo.tape._entry import Entry, entries
from torch_echo.tape._heap import keep_heap
from torch_echo.tape._install import REBUILT_BYTE_SECONDS, RERUN_SECONDS, engine_seconds, install_plan
from torch_echo.tape._kinds import MOST_CALLS, MOST_KINDS, Kinds, Phase, RootCall, RootKey, StepKind
from torch_echo.tape._limit import Limit
from torch_echo.tape._loss import LossRunner, compute_by, computes
from torch_echo.tape._mode import OFF, Table, Tape, unpack
from torch_echo.tape._online import OnlineTape
from torch_echo.tape._pause import CollectorPause
from torch_echo.tape._ranks import Ranks
from torch_echo.tape._recipe import Passes
from torch_echo.tape._record import PeakMeter, Recorder
from torch_echo.tape._rescue import RescueTape
from torch_echo.tape._scope import Gathered, Scope
from torch_echo.tape._stack import alone
from torch_echo.tape._summary import explanation_of, summarize
from torch_echo.tape._trained import Trained
from torch_echo.units import format_bytes

__all__ = ["Phase", "Session"]

MAX_RECORDS = 12
"""Recordings of a kind of iteration: each makes one step slow and is followed by planning."""

FAILED_RECORDS = 3
"""Recordings that come to nothing, before a kind of iteration is left to plain PyTorch."""

GROWTH = 1.25
"""Inputs larger by this factor than those of the recorded step make the session record and plan again."""

BUDGET_GROWTH = 1.02
"""The same where a memory budget must hold for the largest step."""

REPLACED = 3
"""Recordings because modules were replaced by others (a model of its own for each fold of a cross-validation)."""

MOST_PASSES = 4
"""Backward passes of one iteration."""

LEFT = 0.1
"""Share of what autograd saved in an iteration that a backward pass leaves to later ones."""

TIMED = 64
"""Iterations whose durations without a plan are remembered."""

CHECK_PATIENCE = 50
"""Iterations in which the check waits for one with the recorded shapes."""

_ANYWHERE = nullcontext()

CHECK_TOLERANCE = 0.01
"""A measured peak further than this fraction from the plan's makes the session record and plan again."""


HEADROOM = 0.1
"""Where a plan's peak leaves less than this fraction of the device free, steps are ready to drop what the plan keeps."""


class _Local(threading.local):
    """State of one thread within a session."""

    def __init__(self, reorder: bool) -> None:
        self.planned = Tape(reorder)
        self.online: OnlineTape | None = None
        self.tape: Tape = self.planned
        """One of these two."""
        self.depth = 0
        """Nesting of module calls that are taped or recorded."""
        self.lifted = 0
        """Above 0: leave module calls alone (a backward pass, a functorch transform, a root that can't be taped)."""
        self.open = False
        """Between a root's call and the backward pass, the script's own code (the loss) is taped too."""


def _table(entry: Entry) -> Table:
    """What the plan says of this call of a module."""
    tables, call = entry.tables, entry.calls
    if tables is None:
        return OFF
    entry.calls = call + 1
    table: Table = tables[call] if call < len(tables) else entry.beyond
    return table


def _better(one: Plan, other: Plan, budget: int | None) -> bool:
    """Is a plan better than another for what is asked?"""
    if budget is not None and one.peak <= budget and other.peak <= budget:
        return one.extra_seconds < other.extra_seconds
    return (one.peak, one.extra_seconds) < (other.peak, other.extra_seconds)


class Session:
    """One planner and its plans over a set of modules. See the module's docstring."""

    def __init__(
        self, options: Options | None = None, name: str = "session", on_event: Callable[[str], None] | None = None
    ) -> None:
        self.options = options or Options()
        self.name = name
        self.on_event = on_event or (lambda _: None)
        self.ranks = Ranks(name, self._remark)
        self._remarks: list[str] = []
        """Of the planning of several ranks."""
        self._recordings = 0
        """Begun so far: ranks tell each other's by their number."""
        self.iterations = 0
        self.kinds = Kinds()
        self.unhandled: list[tuple[str, str, str]] = []
        self.device: torch.device | None = None
        self.trained = Trained()
        self._sharded: list[weakref.ref[torch.nn.Module]] = []
        """Modules whose parameters are gathered in each call (see ``_scope``)."""
        self._local = _Local(self.options.reorder)
        self._recorder: Recorder | None = None
        self._thread: threading.Thread | None = None
        """Where the iteration is watched."""
        self._meter: PeakMeter | None = None
        self.comparison: Comparison | None = None
        """Of the iteration that was compared with plain PyTorch."""
        self._check: Check | None = None
        self._check_due = self.options.check
        self._off = False
        self._kind: StepKind | None = None
        """Of which kind the iteration is taken to be that is under way, or over."""
        self._in_force: StepKind | None = None
        """The kind whose plan is in force."""
        self._running = False
        """Is an iteration under way?"""
        self._passes = 0
        """Backward passes in it."""
        self._calls: list[RootCall] = []
        """Calls of root modules in it."""
        self._keys: dict[RootKey, None] = {}
        """Of which, in order: each once."""
        self._segments: list[int] = []
        """How many of these were there at each backward pass."""
        self._needed = 1
        """Backward passes after which the recorded iteration was found to go on, and one."""
        self._left: set[int] = set()
        """What the first of these had left."""
        self._clock: Callable[[], float] = perf_counter
        self._begun = 0.0
        self._plain_seconds: dict[tuple[RootCall, ...], float] = {}
        """Least time that forward and backward took without profiler and plan, by the calls between two backward passes."""
        self._failure: TorchEchoError | None = None
        self._limit: Limit | None = None
        """What the device can hold, where that is of interest."""
        self._ran_out = False
        """Has an allocation failed, so that the script saw it?"""
        self._broken = False
        """Did that happen in this iteration?"""
        self._watch_all = False
        self._losses = self.options.policy == "echo"
        """May cross-entropies be computed in one block (see ``_loss``)?"""

    # --- what it knows -----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the kind of iteration stands that is under way, or was the last."""
        if self._off:
            return Phase.OFF
        if self._recorder is not None:
            return Phase.RECORD
        return self._kind.phase if self._kind is not None and not self._kind.due else Phase.WAIT

    @property
    def graph(self) -> TrainingGraph | None:
        """Of the kind of iteration that takes the most memory. None before it is planned."""
        kind = self.kinds.heaviest
        return kind.graph if kind is not None else None

    @property
    def plan(self) -> Plan | None:
        """As `graph`."""
        kind = self.kinds.heaviest
        return kind.plan if kind is not None else None

    @property
    def measured_peak(self) -> int | None:
        """The peak at the allocator under `plan`, if it was measured."""
        kind = self.kinds.heaviest
        return kind.measured_peak if kind is not None else None

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
        self._stop_check(None)
        self._stop_comparison()
        self._use(None)
        compute_by(None)
        self._off = True
        _entry.uninstall(self)

    def finish(self) -> None:
        """The step under way is complete: plan now what was recorded. Raises what planning raised."""
        self._finish_iteration()
        self._raise_failure()

    def compare_next(self) -> None:
        """Compare the next iteration under a plan with plain PyTorch, as the option `check` does."""
        self._check_due = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, this thread's training steps are plain PyTorch, and are not counted."""
        self._local.depth += 1
        state = self.lift()
        try:
            yield
        finally:
            self.lower(state)
            self._local.depth -= 1

    def explanation(self) -> Explanation | None:
        """Graph, plan and footprints, for printing; None before a plan is made. Of several kinds of iteration that which takes the
        most memory comes first, with the others in `others`."""
        return explanation_of(self.kinds.planned)

    def summary(self) -> Summary:
        """What the session did."""
        self.ranks.collect(last=True)
        s = Summary(steps=self.iterations, unhandled=list(self.unhandled), comparison=self.comparison)
        s.rank, s.ranks, s.rank_peaks = self.ranks.rank, self.ranks.size, dict(self.ranks.peaks)
        s.plan_notes = list(self._remarks)
        mine = {(what, why) for what, why, _ in s.unhandled}
        for rank, notes in sorted(self.ranks.notes.items()):
            s.unhandled += [
                (f"rank {rank}: {what}", why, where) for what, why, where in notes if (what, why) not in mine
            ]
        summarize(s, self.kinds.planned)
        return s

    # --- modules -----------------------------------------------------------------------------------------------------

    def _add_root(self, model: torch.nn.Module) -> None:
        device = next((p.device for p in model.parameters()), None)
        if any(compat.is_flat_sharded(module) for module in model.modules()):
            raise CaptureError(
                "FullyShardedDataParallel overwrites parameters that recipes would read; torch-echo handles fully_shard"
            )
        if device is not None:
            if device.type not in ("cpu", "cuda"):
                raise UnsupportedDevice(f"{type(model).__name__} is on {device}; torch-echo handles cpu and cuda")
            if self.device is None:
                self.device = device
                if device.type == "cpu":
                    keep_heap()  # now, so that the steps before the plan, which tell how long a step takes, are like those after it
        name = self.trained.add(model)
        self._add_modules(name, model)
        if any(compat.is_sharded(module) for module in model.modules()):
            self._find_sharded()
        for kind in self.kinds.planned if device is not None else ():
            if kind.replaced < REPLACED and any(key.path == name for key in kind.key):
                kind.replaced += 1
                kind.due = True  # another model than the planned one

    def _add_modules(self, name: str, model: torch.nn.Module) -> bool:
        """Take in the modules of a root; True if some were not known."""
        new = False
        for path, module in model.named_modules():
            known = entries.get(id(module))
            if id(module) not in entries or (known is not None and known.module() is not module):
                entry = entries[id(module)] = Entry(self, module, f"{name}.{path}" if path else name)
                new = True
                for kind in self.kinds.planned:
                    if kind.installed is not None:
                        kind.installed.bind(entry)
        if new and self._in_force is not None and self._in_force.installed is not None:
            self._in_force.installed.put_in()
        return new

    def meet(self, module: torch.nn.Module) -> Entry | None:
        """A module that no session knows is called for training. See :class:`torch_echo.tape._entry.Owner`."""
        if self._local.depth or self._local.lifted or compat.current_node() is not None:
            return None
        try:
            self._add_root(module)
        except (CaptureError, UnsupportedDevice) as error:
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
            if entry.sharded and local.tape.mode_on:
                with self._scope(entry, module):
                    return original(module, *args, **kwargs)
            return original(module, *args, **kwargs)
        if not local.depth:
            if not torch.is_grad_enabled() or not module.training or compat.current_node() is not None:
                return original(module, *args, **kwargs)
            free = self._may_tape(module)
            self._enter_root(entry, module, args, kwargs, free)
            compute_by(None)
            if not free or (self._in_force is None and self._recorder is None):
                lean = free and self._lean() and self.phase is not Phase.OFF
                return self._call_unplanned(lean, entry, module, args, kwargs)
        recorder = self._recorder
        if recorder is not None and recorder.active:
            if threading.current_thread() is not self._thread:
                return original(module, *args, **kwargs)
            if not local.depth:
                self._compute_losses(recorder)
            return self._call_recorded(recorder, entry, module, args, kwargs)
        if local.depth:
            if entry.tables is None and not entry.sharded:
                return original(module, *args, **kwargs)
            return self._call_taped(entry, module, args, kwargs)
        if self._in_force is None:
            return original(module, *args, **kwargs)
        check = self._check if threading.current_thread() is self._thread else None
        local.tape = local.planned
        local.tape.prune()
        self._compute_losses(local.tape)
        with CollectorPause():
            try:
                if check is None:
                    return self._call_taped(entry, module, args, kwargs)
                with check.call(module, args, kwargs) as tell:
                    out = self._call_taped(entry, module, args, kwargs)
                    tell(out)
                return out
            finally:
                local.tape.prune()

    def _compute_losses(self, runner: LossRunner) -> None:
        """From here to the backward pass, cross-entropies are computed in one block."""
        compute_by(runner if self._losses else None)

    def _scope(self, entry: Entry, module: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context: a call of this module runs, within which its parameters are gathered if it is sharded."""
        return self._within(module) if entry.sharded else _ANYWHERE

    @contextmanager
    def _within(self, module: torch.nn.Module) -> Iterator[None]:
        scope = Scope(module)
        stacks = [self._local.tape.scopes]
        if self._recorder is not None and threading.current_thread() is self._thread:
            stacks.append(self._recorder.scopes)
        for stack in stacks:
            stack.append(scope)
        try:
            yield
        finally:
            for stack in stacks:
                stack.pop()

    def _call_unplanned(self, lean: bool, entry: Entry, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a root's call as plain PyTorch, or with the rule that needs no plan."""
        local = self._local
        if lean:
            local.tape = self._online()
            local.tape.prune()
            self._compute_losses(local.tape)
            local.tape.switch(True, True)
        local.lifted += 1
        try:
            with self._scope(entry, module):
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
        table = tape.table if local.depth or local.open else OFF
        if not local.depth and not local.open and self._watch_all and self._in_force is not None:
            assert self._in_force.installed is not None
            script = self._in_force.installed.script
            # From here to the backward pass; possible where no context of the script's will be left in between.
            if (script is not OFF or isinstance(tape, RescueTape)) and alone():
                local.open = True
                table = script
        tape.watching = isinstance(tape, RescueTape)
        tape.use(_table(entry))
        local.depth += 1
        try:
            with self._scope(entry, module):
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
            with self._scope(entry, module):
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

    def _enter_root(self, entry: Entry, module: torch.nn.Module, args: Any, kwargs: Any, free: bool) -> None:
        """A training call outside of any other begins; `free`: it can be taped."""
        _entry.watch_compiled()
        if self._elsewhere():
            return
        if self._off:
            self._raise_failure()
            return
        call = RootCall.of(entry, module, args, kwargs)
        if not self.iterations or self._over(begins=True):
            self._close_script()
            self._next_iteration(call, free)
        elif self._recorder is None and call.key not in self._keys:
            self._guess((*self._keys, call.key))
        self._keys[call.key] = None
        if len(self._calls) == (self._segments[-1] if self._segments else 0):
            self._clock = clock(self.device or torch.device("cpu"))
            self._begun = self._clock()
        if len(self._calls) < MOST_CALLS:
            self._calls.append(call)
        if self._limit is not None:
            self._limit.sufficient = self._fits()

    # --- iterations --------------------------------------------------------------------------------------------------

    def _elsewhere(self) -> bool:
        """Is an iteration watched on another thread? Then this one's steps do not count."""
        watching = self._recorder is not None or self._meter is not None or self._check is not None
        if not watching or threading.current_thread() is self._thread:
            return False
        if self._thread is not None and self._thread.is_alive():
            return True
        self._abort_recording()  # that thread has ended in the middle of its iteration
        if self._meter is not None:
            self._meter.stop()
            self._meter = None
        self._check = None
        return False

    def _over(self, begins: bool) -> bool:
        """Is the iteration complete, unless one more backward pass comes? `begins`: a root is called."""
        if self._broken:
            return True  # it ran out of memory, and what comes is another
        if not self._passes or not self._running:
            return not self._running
        recorder = self._recorder
        if recorder is None or not recorder.active:
            return self._passes >= (self._kind.passes if self._kind is not None else 1)
        if self._passes < self._needed:
            return False
        left, first = recorder.left(), self._needed == 1
        little = recorder.share(left) < LEFT
        if self._kind is None or (first and (little or self._kind.alone)):
            return True
        read = not first and recorder.is_read(self._left)
        if read and (little or self._passes == MOST_PASSES):
            return True
        if not begins:
            return False  # the script may let go of it yet
        if first:
            self._left = left
        if self._passes < MOST_PASSES and (read or self._left & left):
            self._needed = self._passes + 1
            return False
        self._kind.alone = True  # nobody reads what is left: these were iterations of their own
        self._abort_recording()
        *early, self._calls = self._parts()
        for calls in early:
            self.kinds.note(calls)
        return True

    def _parts(self) -> list[list[RootCall]]:
        """The calls of the iteration between backward passes."""
        bounds = itertools.pairwise([0, *self._segments])
        return [self._calls[a:b] for a, b in bounds if a < b]

    def _next_iteration(self, first: RootCall, free: bool) -> None:
        """A new iteration begins with the call `first`; it is watched only if that call can be taped."""
        self._begin_iteration(first, free)
        if self._limit is not None and (self._limit.enforced or self.phase is Phase.CHECK):
            self._limit.settle()

    def _begin_iteration(self, first: RootCall, free: bool) -> None:
        self._finish_iteration()
        self._raise_failure()
        self.iterations += 1
        self._running, self._passes = True, 0
        self._calls, self._keys, self._segments, self._needed = [], {}, [], 1
        if self.iterations == 1:
            self._find_sharded()
        for tape in (self._local.planned, self._local.online):
            if tape is not None:
                tape.gathered = Gathered(self._sharded)
        self._follow()
        kind = self._guess((first.key,))
        if self._in_force is not None and self._in_force.installed is not None:
            self._in_force.installed.reset()
        if not free:
            return
        if kind is None:
            if not self.warm_up and len(self.kinds.planned) < MOST_KINDS:
                self._start_recording(StepKind((first.key,)))
            return
        if kind.plan is not None and kind.outgrown(first, self._growth):
            kind.due = True
        kind.due &= kind.records < MAX_RECORDS
        waits = kind.phase is Phase.WAIT and kind.seen >= self.warm_up
        if waits and len(self.kinds.planned) >= MOST_KINDS:
            self._note(
                "training step", f"iterations are of more than {MOST_KINDS} kinds: others have no plan", once=True
            )
        elif kind.due or (waits and kind.records < MAX_RECORDS):
            self._start_recording(kind)
        elif self._check_due and kind.plan is not None and kind is self._in_force:
            self._start_comparison()
        elif kind.phase is Phase.CHECK:
            kind.checks += 1
            if kind.checks > CHECK_PATIENCE:
                kind.phase = Phase.STEADY
            elif kind.recorded[:1] == [first]:
                self._start_check()

    def _guess(self, begun: tuple[RootKey, ...]) -> StepKind | None:
        """The kind of an iteration that has begun with these roots. Its plan is put in force, or where it has none, that of the
        kind most like it. But where it is to be recorded next, it runs once without, to see how long it takes; and where memory
        must be spared, all its roots must be in that plan: the rule that needs none spares more."""
        kind = self._kind = self.kinds.guess(begun)
        if kind is None or kind.plan is None:
            timed = kind is not None and kind.seen == self.warm_up - 1 and not self._lean()
            self._use(None if timed else self.kinds.like(begun, whole=self._lean()))
        else:
            self._use(kind)
        return kind

    def _use(self, kind: StepKind | None) -> None:
        """Put a kind's plan in force."""
        if kind is self._in_force:
            return
        self._close_script()
        if self._in_force is not None and self._in_force.installed is not None:
            self._in_force.installed.take_out()
        if kind is not None and kind.installed is not None:
            kind.installed.reset()
            kind.installed.put_in()
        self._in_force = kind

    @property
    def _growth(self) -> float:
        return BUDGET_GROWTH if self.options.memory_budget is not None else GROWTH

    def _finish_iteration(self) -> None:
        """The iteration under way is complete."""
        if not self._running:
            return
        self._running = False
        kind = self.kinds.note(self._calls)
        if self._broken:
            self._recover(kind)
        if self._recorder is not None and self._recorder.active:
            self._stop_recording(kind)
        else:
            self._stop_check(kind)
            self._stop_comparison()
            if kind.plan is not None:
                kind.compare(self._calls, self._growth)
        self._kind = kind

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

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

    def _online(self) -> OnlineTape:
        """This thread's tape for what has no plan."""
        local = self._local
        if local.online is None:
            local.online = OnlineTape(set(self.trained.known(self.device)), self._the_limit(), self._out_of_memory)
            local.online.gathered = Gathered(self._sharded)
        return local.online

    def _planned_tape(self) -> Tape:
        """For steps with a plan. To be ready for the worst costs each op some time: it is where memory is nearly full, or has
        been."""
        limit, before = self._limit, self._local.planned
        most = max((kind.plan.peak for kind in self.kinds.planned if kind.plan is not None), default=0)
        near = limit is not None and limit.nbytes is not None and most > (1 - HEADROOM) * limit.nbytes
        if limit is not None and (near or limit.enforced or self._ran_out):
            tape: Tape = RescueTape(limit, self._out_of_memory, self.options.reorder)
        else:
            tape = Tape(self.options.reorder)
        tape.trusted, tape.gathered = before.trusted, before.gathered
        return tape

    def _fits(self) -> bool:
        """Is it known, by the plan, that what the device holds is enough for what runs? Not once it was not."""
        kind, limit = self._in_force, self._limit
        if kind is None or kind.plan is None or limit is None or limit.nbytes is None or self._ran_out:
            return False
        same = self._calls == kind.recorded[: len(self._calls)]
        return same and max(kind.plan.peak, kind.measured_peak or 0) <= limit.nbytes

    def failed(self, error: BaseException) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        if not self._off and self.device is not None and compat.is_out_of_memory(error):
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
        limit.tighten()
        again = self._kind is None or self._kind.records < MAX_RECORDS
        does = (
            f"the next step is recorded and planned for {format_bytes(limit.plannable or 0)} at most"
            if again
            else "the next steps drop what the plan keeps where they must"
        )
        # An error of ours says by how much the limit is exceeded; an allocator's, how much it did not give.
        needed = compat.bytes_wanted(error) + (live if limit.nbytes is None or not limit.enforced else limit.nbytes)
        text = (
            f"torch-echo: out of memory in the {where} pass with {format_bytes(live)} allocated"
            f"{f', after {format_bytes(dropped)} that would be kept were dropped' if dropped else ''}. "
            f"What failed needs {format_bytes(needed)} at least. If the script goes on, {does}."
        )
        error.__notes__ = [*notes, text]  # type: ignore[attr-defined]
        self.on_event(text.removeprefix("torch-echo: "))

    def _recover(self, kind: StepKind) -> None:
        """The iteration that is over ran out of memory: its kind is recorded again, and planned for less."""
        self._broken = False
        self._abort_recording()
        self._stop_check(None)
        if kind.records < MAX_RECORDS:
            kind.due = kind.plan is not None
            kind.phase = Phase.WAIT
        self._local.planned = self._planned_tape()

    def _start_recording(self, kind: StepKind) -> None:
        if self.device is None:
            return
        if (why := compat.no_profile()) is not None:
            self._note("planning", f"waits: {why}", once=True)
            return
        for name, model in self.trained.roots().items():
            self._add_modules(name, model)  # those put into it since
        known = self.trained.known(self.device)
        self._find_sharded()
        tape: Tape | None = None
        tables = None
        if self._lean():
            tape = self._local.tape = self._online() if kind.installed is None else self._local.planned
            tables = kind.installed.tables if kind.installed is not None else None
        self._use(None)
        self._recorder = Recorder(
            self.device, known, tape, tables, self._watch_all, self.options.reorder, Gathered(self._sharded)
        )
        self._thread = threading.current_thread()
        self._recorder.start(self.trained.gradients(), self.trained.optimizer_states(self.device))
        kind.records += 1
        self._recordings += 1
        self.ranks.begin(self._recordings)
        self.on_event("recording a step" if not self.kinds.planned else f"recording a step ({kind.name})")

    def _stop_recording(self, kind: StepKind) -> None:
        """What was recorded has turned out to be of this kind."""
        recorder, self._recorder = self._recorder, None
        assert recorder is not None and self.device is not None
        recorder.stop()
        planned = False
        try:
            planned = self._plan_recorded(kind, recorder)
        finally:
            if not planned:
                self.ranks.give_up(self._recordings)

    def _plan_recorded(self, kind: StepKind, recorder: Recorder) -> bool:
        """Plan a kind of iteration from a recording of it. False if that has come to nothing."""
        assert self.device is not None
        if kind.plan is not None and not kind.due:
            return False  # the guess was wrong
        if not recorder.saved:
            self._failed(kind, "autograd saved nothing that could be seen: compiled, or nothing to train")
            return False
        try:
            self._make_plan(kind, self._graph_of(recorder), recorder)
        except CaptureError as error:  # another thread may have been in the way
            self._failed(kind, str(error), error)
            return False
        except BudgetInfeasible as error:
            self._off = True
            self._failure = error
            return False
        except Exception as error:  # a mistake of ours must not end the script's training
            frame = traceback.extract_tb(error.__traceback__)[-1]
            why = f"planning failed: {type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
            failure = CaptureError(why)
            failure.__cause__ = error
            kind.graph = kind.plan = kind.installed = None
            self._give_up(why, failure)
            return False
        kind.due, kind.checks, kind.phase = False, 0, Phase.CHECK
        kind.passes, kind.recorded, kind.codes = self._needed, self._calls, recorder.codes
        self._local.planned = self._planned_tape()
        self._local.planned.trusted = frozenset(recorder.known)
        if self.options.memory_budget is not None:
            for other in self.kinds.planned:
                if other is not kind and other.phase is Phase.STEADY:
                    # What is there beside it may have become more: the other models' gradients and optimizer states.
                    other.phase, other.checks, other.remade = Phase.CHECK, 0, False
        self.on_event("planned")
        return True

    def _graph_of(self, recorder: Recorder, apart: bool = True) -> TrainingGraph:
        """The training graph of the iteration that was recorded. `apart`: see `build`."""
        assert self.device is not None
        cost = get_cost_model(self.options.cost, self.device)
        graph = build(recorder, cost, self.trained.optimizer_states(self.device), apart=apart)
        cost.save()
        graph.rerun_overhead = RERUN_SECONDS
        if self.device.type == "cpu":
            graph.rebuilt_byte_seconds = REBUILT_BYTE_SECONDS
        # The recorded step was slowed by being watched; it can't take longer than one of its shapes that was not.
        plain = sum(self._plain_seconds.get(tuple(part), math.inf) for part in self._parts())
        graph.step_seconds = min(graph.step_seconds, plain)
        return graph

    def _make_plan(self, kind: StepKind, graph: TrainingGraph, recorder: Recorder) -> None:
        assert self.device is not None
        options = self.options
        budget = options.budget_bytes(self.device)
        if budget is not None:
            budget = max(1, budget - kind.excess)

        def plan_for(graph: TrainingGraph, least: bool = False) -> Plan:
            return plan(
                graph,
                budget=budget,
                max_overhead=options.max_overhead,
                policy=options.policy,
                on_infeasible="least" if least else options.on_infeasible,
                fixed_seconds=engine_seconds(graph),
            )

        tried: Plan | None = None
        if any(call.outputs is not None for call in recorder.calls):
            # A layer that is one op makes outputs and inside in one run, so there are plans that the other graph does not have.
            whole = self._graph_of(recorder, apart=False)
            if not self.ranks.alone:
                graph = whole
            else:
                tried, other = plan_for(graph, least=True), plan_for(whole, least=True)
                if not _better(tried, other, budget):
                    graph, tried = whole, other

        def own() -> Plan:
            infeasible = tried is not None and budget is not None and tried.peak > budget
            return plan_for(graph) if tried is None or infeasible else tried  # the former raises what is to be raised

        made = self.ranks.agree(self._recordings, graph, recorder.codes, budget, own)
        limit = None if self._limit is None else self._limit.plannable
        if limit is not None and made.peak > limit - kind.excess:
            made = plan(
                graph,
                budget=max(1, limit - kind.excess),
                policy=options.policy,
                on_infeasible="least",
                fixed_seconds=engine_seconds(graph),
            )
        self._install(kind, graph, made, recorder.nesting)

    def _install(self, kind: StepKind, graph: TrainingGraph, made: Plan, nesting: set[tuple[str, str]]) -> None:
        kind.graph, kind.plan, kind.nesting = graph, made, nesting
        kind.installed = install_plan(self, graph, made.dropped, nesting)

    def _follow(self) -> None:
        """Take over what other ranks have told since: rank 0's newer plans, and on rank 0 the others' peaks."""
        self.ranks.collect()
        if not self.ranks.newer(self.iterations):
            return
        for kind in self.kinds.planned:
            assert kind.graph is not None
            given = self.ranks.given(kind.graph, kind.codes)
            if given is not None:
                if kind is self._in_force:
                    self._use(None)
                self._install(kind, kind.graph, given, kind.nesting)

    def _abort_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None and recorder.active:
            if (
                threading.current_thread() is self._thread
            ):  # mode and hooks of another thread are not to be reached from here
                recorder.lift()
            recorder.stop()
            self.ranks.give_up(self._recordings)

    def _start_check(self) -> None:
        if compat.no_profile() is not None:
            return
        assert self.device is not None
        self._thread = threading.current_thread()
        self._meter = PeakMeter(self.device, self.trained.gradients())

    def _stop_check(self, kind: StepKind | None) -> None:
        """Compare the measured peak with the plan's; a plan that is off is made again, once, on a newly recorded step. `kind`: what
        the iteration has turned out to be."""
        if self._meter is None:
            return
        meter, self._meter = self._meter, None
        peak = meter.stop()
        if peak is None or kind is None or kind is not self._in_force or kind.phase is not Phase.CHECK:
            return
        if kind.plan is None or self._calls != kind.recorded:
            return
        kind.measured_peak = peak
        self._tell_ranks()
        kind.phase = Phase.STEADY
        assert kind.graph is not None
        if abs(peak - kind.plan.peak) > self._tolerance(kind.plan, kind.graph) and not kind.remade:
            kind.remade = kind.due = True
            # What came before the step (another model's optimizer state) will be in what is recorded next.
            kind.excess = max(0, peak - kind.plan.peak - max(0, meter.base - kind.graph.start_bytes))

    @staticmethod
    def _tolerance(made: Plan, graph: TrainingGraph) -> float:
        """By how many bytes a measured peak may be off."""
        return CHECK_TOLERANCE * made.peak

    def _start_comparison(self) -> None:
        if self._sharded:
            self._check_due = False
            self._note("check", "a step of a sharded model can't be run twice: it communicates", once=True)
            return
        self._thread = threading.current_thread()
        self._check = Check(self.iterations, self.device, not self.options.reorder, self.paused)
        self._check_due = False
        self._local.planned = CheckedTape(self._check, self._local.planned)

    def _stop_comparison(self) -> None:
        """Tell what the comparison with plain PyTorch found; where that is a difference, training is left to plain PyTorch."""
        check, self._check = self._check, None
        if check is None:
            return
        if isinstance(self._local.planned, CheckedTape):
            self._local.planned = self._planned_tape()
        self.comparison = check.close()
        self.on_event("compared a step with plain PyTorch")
        if not self.comparison.equal:
            why = f"step {self.comparison.iteration} differs from plain PyTorch: {self.comparison.differences[0]}"
            self._give_up(why, DifferenceFound(why))

    def _find_sharded(self) -> None:
        """A model may have been sharded after it was taken in."""
        self._sharded = []
        for entry in entries.values():
            if entry is not None and entry.owner is self:
                module = entry.module()
                entry.sharded = module is not None and compat.is_sharded(module)
                if entry.sharded:
                    self._sharded.append(entry.module)

    def _give_up(self, why: str, error: TorchEchoError) -> None:
        """Leave training to plain PyTorch from here on."""
        self._use(None)
        self._off = True
        if self.options.strict:
            self._failure = error
            return
        self._note("training step", why)
        warnings.warn(f"torch-echo leaves training to plain PyTorch: {why}", stacklevel=4)

    def _failed(self, kind: StepKind, why: str, error: CaptureError | None = None) -> None:
        """A recording has come to nothing; after some, the kind is left to plain PyTorch."""
        kind.failures += 1
        kind.due = False
        if kind.failures < FAILED_RECORDS and not (self.options.strict and error is not None):
            return
        if kind.plan is None:
            kind.phase = Phase.OFF
        if error is not None and self.options.strict:
            self._off, self._failure = True, error
            return
        self._note("training step", why)
        if error is not None:
            warnings.warn(f"torch-echo leaves training to plain PyTorch: {why}", stacklevel=4)

    # --- engine and optimizer ----------------------------------------------------------------------------------------

    def before_backward(self, keep_graph: bool, create_graph: bool) -> Any:
        """See :class:`torch_echo.tape._entry.Owner`."""
        local = self._local
        self._losses &= not create_graph
        compute_by(None)
        if not local.depth:
            self._close_script()
            if self._watch_all and not self.iterations and not self.unhandled:
                self._note("backward", "no module was called in training mode before it", once=True)
            elif not self._elsewhere() and self._running:
                self._passes += 1
                self._segments.append(len(self._calls))
            if self._kind is not None and self._passes < self._kind.passes:
                local.tape.prune()
            else:
                local.tape.forget()
        if self._recorder is not None and threading.current_thread() is self._thread:
            self._recorder.mark("backward", keep_graph)
        before = Passes.rescue
        if isinstance(local.tape, RescueTape):
            Passes.rescue = local.tape
            local.tape.limit.live()  # a look, from which on it is counted what backward takes
        return before, self.lift()

    def rehearse(self, backward: Callable[[list[torch.Tensor]], Any]) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        if self._check is not None and threading.current_thread() is self._thread and not self._local.depth:
            leaves = self.trained.leaves()
            self._check.rehearse(backward, list({id(p): p for p in leaves}.values()))

    def after_backward(self, state: Any) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        Passes.rescue, state = state
        if self._check is not None and threading.current_thread() is self._thread and not self._local.depth:
            self._check.backward_done()
        if self._recorder is not None and threading.current_thread() is self._thread:
            self._recorder.mark("done")
        elif self._in_force is None and self._recorder is None and self._segments and not self._off:
            calls = tuple(self._calls[self._segments[-2] if len(self._segments) > 1 else 0 :])
            taken = self._clock() - self._begun
            if calls:
                self._plain_seconds[calls] = min(taken, self._plain_seconds.pop(calls, math.inf))
            while len(self._plain_seconds) > TIMED:
                del self._plain_seconds[next(iter(self._plain_seconds))]
        self.lower(state)

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        for tape in (self._local.planned, self._local.online):
            if tape is not None:
                tape.spare(p for group in optimizer.param_groups for p in group["params"])

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        self.trained.stepped(optimizer)
        if not self._local.depth:
            self._close_script()
        if self._running and not self._elsewhere() and self._over(begins=False):
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
        runner = computes()
        compute_by(None)
        tape = self._local.tape
        recorder = self._recorder if threading.current_thread() is self._thread else None
        self._local.lifted += 1
        above = recorder.lift() if recorder is not None else None
        return recorder, above, tape, tape.lift(), runner

    def lower(self, state: Any) -> None:
        """See :class:`torch_echo.tape._entry.Owner`."""
        recorder, above, tape, places, runner = state
        compute_by(runner)
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
        self.unhandled.append((what, why, script_line()))
        self._tell_ranks()

    def _remark(self, text: str) -> None:
        if text not in self._remarks:
            self._remarks.append(text)

    def _tell_ranks(self) -> None:
        self.ranks.tell(self.measured_peak, [*self.unhandled, *(("planning", remark, "") for remark in self._remarks)])
