"""Train a model twice from the same state, plainly and taped; compare the bits and the bytes. Plans can be forced.

A *step* is the user's code for one iteration: ``step(model, optimizer, i)`` does everything from ``zero_grad`` to
``optimizer.step()`` and returns the loss (or several tensors that are to be compared).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torch_echo import compat
from torch_echo.footprint import Replayer, check_plan, replay
from torch_echo.graph import Phase as OpPhase
from torch_echo.graph import TrainingGraph
from torch_echo.memory import live_bytes
from torch_echo.options import Options
from torch_echo.planning import Plan
from torch_echo.tape._kinds import StepKind
from torch_echo.tape._mode import Dropped
from torch_echo.tape._recipe import Leaf, Passes, Recipe, Slot, View
from torch_echo.tape._record import PeakMeter, Recorder
from torch_echo.tape.session import CHECK_TOLERANCE, Session

__all__ = [
    "Case",
    "Choice",
    "ForcedSession",
    "Trace",
    "check_baseline",
    "check_footprint",
    "check_same",
    "compare",
    "everything",
    "forced",
    "leaked",
    "bits",
    "legal",
    "loop",
    "nothing",
    "producers",
    "randomly",
    "tape_objects",
    "train",
]

Step = Callable[[torch.nn.Module, torch.optim.Optimizer, int], Any]
Choice = Callable[[TrainingGraph], Collection[int]]
CPU = torch.device("cpu")


# --- forced plans ------------------------------------------------------------------------------------------------


def legal(graph: TrainingGraph, wanted: Collection[int]) -> frozenset[int]:
    """The largest legal plan within `wanted`: whole chains of in-place ops only, no op re-run from a value that is
    overwritten, and nothing that backward never asks for."""
    ok = graph.droppable()
    dropped = {v for v in wanted if ok[v]}
    chains = {v: graph.chain([v]) for v in dropped}
    while True:
        bad = {v for v in dropped if not chains[v] <= dropped}
        for v in dropped:
            op = graph.ops[graph.values[v].producer]
            if any(r not in dropped and not graph.values[r].keepable for r in op.reads):
                bad.add(v)
        if not bad:
            replayer = Replayer(graph)
            needed = set(replayer.records(replayer.mask(dropped))[0].tolist())
            return frozenset(v for v in dropped if graph.values[v].producer in needed)
        dropped -= bad


def nothing(graph: TrainingGraph) -> frozenset[int]:
    """Keep all."""
    return frozenset()


def everything(graph: TrainingGraph) -> frozenset[int]:
    """Drop all that may be dropped."""
    return legal(graph, range(len(graph.values)))


def randomly(seed: int, share: float = 0.5) -> Choice:
    """Drop values at random."""

    def choose(graph: TrainingGraph) -> frozenset[int]:
        rng = random.Random(seed)
        return legal(graph, [v for v in range(len(graph.values)) if rng.random() < share])

    return choose


def producers(*names: str) -> Choice:
    """Drop what ops of these names make (``aten::tanh``), where that is legal."""

    def choose(graph: TrainingGraph) -> frozenset[int]:
        return legal(
            graph, [v for op in graph.ops if op.phase is OpPhase.FORWARD and op.name in names for v in op.writes]
        )

    return choose


class PlannedSession(Session):
    """A session that takes what its step adds for all that there is: other tests leave tensors in the process."""

    @staticmethod
    def _tolerance(made: Plan, graph: TrainingGraph) -> float:
        return CHECK_TOLERANCE * (made.peak - graph.start_bytes)


class ForcedSession(Session):
    """A session whose plan is chosen by the test."""

    warm_up = 1

    def __init__(self, choose: Choice, options: Options | None = None) -> None:
        super().__init__(options or Options(cost="analytic"))
        self.choose = choose
        self.checks: list[tuple[int, int]] = []
        """Measured and planned peak of each step that was checked."""
        self.reruns: list[int] = []
        """Ops re-run in each step, as `compare` found."""

    def _stop_check(self, kind: StepKind | None) -> None:
        watching, plan = self._meter is not None, None if kind is None else kind.plan
        super()._stop_check(kind)
        if watching and plan is not None and kind is not None and kind.measured_peak is not None:
            self.checks.append((kind.measured_peak, plan.peak))

    def _make_plan(self, kind: StepKind, graph: TrainingGraph, recorder: Recorder) -> None:
        dropped = frozenset(self.choose(graph))
        check_plan(graph, dropped)
        footprint = replay(graph, dropped)
        base = replay(graph)
        plan = Plan(
            dropped=dropped,
            peak=footprint.peak,
            base_peak=base.peak,
            floor=footprint.peak,
            extra_seconds=footprint.extra_seconds,
            step_seconds=graph.step_seconds,
            rerun=footprint.rerun,
            policy="forced",
        )
        self._install(kind, graph, plan, recorder.nesting)


@contextmanager
def forced(
    model: torch.nn.Module | None, choose: Choice = everything, reorder: bool = False
) -> Iterator[ForcedSession]:
    """A session with a forced plan over one model, or over all modules (None)."""
    session = ForcedSession(choose, Options(cost="analytic", reorder=reorder))
    if model is None:
        session.watch_all()
    else:
        session.watch(model)
    try:
        yield session
    finally:
        session.close()


# --- training ----------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The contents of a tensor, in order of its indices, as bytes outside of PyTorch's memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.contiguous().clone().reshape(-1).view(torch.uint8).numpy().copy()  # numpy() marks storages


@dataclass
class Trace:
    """What a training run did. Nothing in it is a tensor, so that keeping it changes no peak."""

    losses: list[list[NDArray[np.uint8]]] = field(default_factory=list)
    parameters: list[dict[str, NDArray[np.uint8]]] = field(default_factory=list)
    buffers: list[dict[str, NDArray[np.uint8]]] = field(default_factory=list)
    gradients: list[dict[str, NDArray[np.uint8]]] = field(default_factory=list)
    rng: list[NDArray[np.uint8]] = field(default_factory=list)
    reruns: list[int] = field(default_factory=list)
    """Ops re-run in each step."""
    rise: int = 0
    """Measured peak of the third step of a plain run, above the bytes alive when it began."""


def loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    steps: int,
    trace: Trace,
    measure: bool = False,
) -> None:
    """Run the steps and note what they did. `measure`: the peak of the third, from the call of the model on."""
    meters: list[tuple[PeakMeter, int]] = []

    def start(*_: object) -> None:
        if not meters:
            gc.collect()
            base = live_bytes(CPU)
            meters.append((PeakMeter(CPU, [p.grad for p in model.parameters() if p.grad is not None]), base))

    for i in range(steps):
        hook = model.register_forward_pre_hook(start) if measure and i == 2 else None
        before = Passes.rerun
        result = step(model, optimizer, i)
        if hook is not None:
            hook.remove()
        if hook is not None and meters:
            meter, base = meters[0]
            peak = meter.stop()
            assert peak is not None
            trace.rise = peak - base
        results = result if isinstance(result, (list, tuple)) else [result]
        trace.losses.append([bits(t) for t in results])
        del result, results
        trace.reruns.append(Passes.rerun - before)
        trace.parameters.append({k: bits(p) for k, p in model.named_parameters()})
        trace.buffers.append({k: bits(b) for k, b in model.named_buffers()})
        trace.gradients.append({k: bits(p.grad) for k, p in model.named_parameters() if p.grad is not None})
        trace.rng.append(torch.get_rng_state().numpy().copy())


def tape_objects() -> list[str]:
    """Kinds of what is still there of the tape: without a session and a graph, there should be nothing."""
    gc.collect()
    kinds = (Slot, Recipe, Leaf, View, Dropped)
    return [type(o).__name__ for o in gc.get_objects() if type(o) in kinds]


def leaked(step: Callable[[], object]) -> int:
    """Bytes that `step` allocates and that are not free when it is over."""
    gc.collect()
    profile = compat.MemoryProfile()
    profile.start()
    step()
    gc.collect()
    profile.stop()
    live: dict[int, int] = {}
    for event in profile.events(CPU)[0]:
        if event.nbytes > 0:
            live[event.ptr] = event.nbytes
        else:
            live.pop(event.ptr, None)
    return sum(live.values())


@dataclass
class Case:
    """A model and a step."""

    build: Callable[[], torch.nn.Module]
    step: Step
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3
    )
    passes: int = 1
    """Iterations (a forward and its backward) in a step."""
    static: bool = True
    """Each step runs the same ops on the same shapes."""
    tolerance: float = 0.005
    """Of predicted against measured peaks, relative to the bytes that the step adds to those from before it."""


def train(case: Case, session: Session | None = None, *, every: bool = False, steps: int = 5, seed: int = 7) -> Trace:
    """One run from the seed. With a session: over the model, or (`every`) over all modules as `torch-echo run` does."""
    torch.manual_seed(seed)
    model = case.build()
    model.train()
    trace = Trace()
    optimizer = case.optimizer(model)
    torch.manual_seed(seed + 1)
    if session is None:
        loop(model, optimizer, case.step, steps, trace, measure=True)
    else:
        if every:
            session.watch_all()
        else:
            session.watch(model)
        try:
            loop(model, optimizer, case.step, steps, trace)
        finally:
            session.close()
    del model, optimizer
    gc.collect()
    return trace


def check_same(plain: Trace, taped: Trace) -> None:
    """Bit-equal in losses, gradients, parameters, buffers and generator state, in every step."""
    assert len(plain.losses) == len(taped.losses)
    for i in range(len(plain.losses)):
        for what in ("gradients", "parameters", "buffers"):
            a, b = getattr(plain, what)[i], getattr(taped, what)[i]
            assert a.keys() == b.keys(), f"step {i}: other {what}"
        same = all(np.array_equal(a, b) for a, b in zip(plain.losses[i], taped.losses[i], strict=True))
        assert same, f"step {i}: losses differ"
        for what in ("gradients", "buffers", "parameters"):
            a, b = getattr(plain, what)[i], getattr(taped, what)[i]
            differ = [k for k in a if not np.array_equal(a[k], b[k])]
            assert not differ, f"step {i}: {what} differ: {differ[:8]} ({len(differ)} of {len(a)})"
        assert np.array_equal(plain.rng[i], taped.rng[i]), f"step {i}: the generator's state differs"


def check_footprint(session: Session, tolerance: float = 0.005) -> None:
    """The measured peak of the first planned step against the plan's."""
    assert session.graph is not None
    assert session.plan is not None
    assert session.measured_peak is not None, f"no step was measured: {session.phase} {session.unhandled}"
    checks = session.checks if isinstance(session, ForcedSession) else [(session.measured_peak, session.plan.peak)]
    less = unknown_inside(session.graph, session.plan)
    for measured, planned in checks:
        rise = planned - session.graph.start_bytes
        assert -less - tolerance * rise <= measured - planned <= tolerance * rise, (
            f"measured {measured - planned:+d} bytes from the plan, which adds {rise}"
        )


def unknown_inside(graph: TrainingGraph, made: Plan) -> int:
    """Bytes by which the peak may be less than planned: those of the last values within a layer that runs as one op, where the
    peak is there in forward. They are taken to live to the layer's end when they are dropped."""
    footprint = replay(graph, made.dropped)
    if footprint.op < 0 or footprint.rerun_op >= 0:
        return 0
    return sum(graph.nbytes(v) for v in graph.inside(graph.ops[footprint.op]) if v in made.dropped)


def check_baseline(plain: Trace, session: Session, tolerance: float = 0.005) -> None:
    """The replay of the recorded step against the peak of the same step in plain PyTorch."""
    assert session.graph is not None
    rise = replay(session.graph.plain).peak - session.graph.start_bytes
    assert abs(plain.rise - rise) <= tolerance * max(rise, 1), (
        f"plain PyTorch measured {plain.rise - rise:+d} bytes from the replay, which adds {rise}"
    )


def compare(
    case: Case,
    choose: Choice | None = everything,
    *,
    every: bool = False,
    steps: int = 5,
    plain: Trace | None = None,
    options: Options | None = None,
) -> Session:
    """Train plainly and taped; check the bits, the two peaks and the number of re-run ops. Returns the closed session.

    `choose` None: the planner's own plan for `options`.
    """
    if plain is None:
        plain = train(case, steps=steps)
    session = (
        ForcedSession(choose)
        if choose is not None
        else PlannedSession(options or Options(max_overhead=0.3, cost="analytic"))
    )
    taped = train(case, session, every=every, steps=steps)
    if isinstance(session, ForcedSession):
        session.reruns = taped.reruns
    check_same(plain, taped)
    assert session.plan is not None, f"no plan: {session.phase}, {session.unhandled}"
    if case.static:
        if case.passes == 1:
            check_baseline(plain, session, case.tolerance)
        check_footprint(session, case.tolerance)
        planned = case.passes * len(session.plan.rerun)
        first = session.warm_up + 1
        assert taped.reruns[first:] == [planned] * (steps - first), f"{taped.reruns} ops re-run, {planned} planned"
    return session
