"""Peaks of training steps that are not run: on a device that is not here, or of sizes that do not fit.

One training step is recorded as a session records it, in a dry run (``dry``): no kernel is called and nothing is written to the
tensors' memory. What comes of it is the training graph that a recorded step would give, with durations from a model of the
device; it is planned like any other.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch

from torch_echo.cost import TYPICAL_GPU, CostModel, get_cost_model, gpu_cost
from torch_echo.dry import CUBLAS_WORKSPACE, GRANULE, DryRun
from torch_echo.errors import CaptureError, OptionError
from torch_echo.footprint import replay
from torch_echo.graph import Phase, TrainingGraph, Trait
from torch_echo.options import Options
from torch_echo.planning import Front, Plan, front, plan
from torch_echo.report.explanation import Explanation
from torch_echo.rules import nondeterministic_on
from torch_echo.tape._build import build
from torch_echo.tape._install import REBUILT_BYTE_SECONDS, RERUN_SECONDS, engine_seconds
from torch_echo.tape._kinds import StepKind
from torch_echo.tape._record import Recorder
from torch_echo.tape.session import Session
from torch_echo.units import format_bytes, parse_budget

__all__ = ["Prediction", "largest", "predict"]

_STEPS = 4
"""Steps within which one must have been recorded."""

_NODES = 1 << 62
"""Sequence numbers of autograd's nodes are below this; those of the nodes that add up gradients are not."""


class Prediction:
    """What a training step would take on a device. All of its figures are predicted; none was measured there."""

    def __init__(self, graph: TrainingGraph, device_memory: int | None = None, slack: float = 0.0) -> None:
        self.graph = graph
        """The training iteration, as on the device."""
        self.device_memory = device_memory
        """Bytes, where it was given."""
        self.slack = slack
        """Seconds that the host has left in a step: on a busy GPU Python's work for rebuilding is free until they are used up."""
        self._front: Front | None = None

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self.graph.meta["device"]

    @property
    def eager_peak(self) -> int:
        """Bytes: the peak of plain PyTorch, everything on the device included."""
        return replay(self.graph.plain).peak

    @property
    def step_seconds(self) -> float:
        """Duration of the plain step, by the model of the device."""
        return self.graph.step_seconds

    def plan(self, **options: Any) -> Plan:
        """The plan for these options, those of :func:`torch_echo.apply` that concern planning: `memory_budget` (a fraction is one
        of `device_memory`) or `max_overhead`, `policy`, `on_infeasible`. Its `peak` and `extra_seconds` are predicted.

        Raises OptionError, BudgetInfeasible.
        """
        asked = Options(**options)
        fixed = self._fixed_seconds()
        if self._front is None and asked.policy == "echo":
            self._front = front(self.graph, fixed)
        return plan(
            self.graph,
            budget=asked.budget_for(self.device_memory),
            max_overhead=asked.max_overhead,
            policy=asked.policy,
            on_infeasible=asked.on_infeasible,
            fixed_seconds=fixed,
            front=self._front,
        )

    def _fixed_seconds(self) -> Callable[[frozenset[int]], float]:
        """What the tape costs under a plan, the kernels that it re-runs aside."""
        engine = engine_seconds(self.graph)
        if self.device == "cpu":
            return engine
        producers = [value.producer for value in self.graph.values]

        def seconds(dropped: frozenset[int]) -> float:
            return max(0.0, engine(dropped) + RERUN_SECONDS * len({producers[v] for v in dropped}) - self.slack)

        return seconds

    def explanation(self, **options: Any) -> Explanation:
        """The plan as a table, with the composition of both peaks."""
        return Explanation.of(self.graph, self.plan(**options))

    def __repr__(self) -> str:
        fits = ""
        if self.device_memory is not None:
            fits = f", which {'fits' if self.eager_peak <= self.device_memory else 'does not fit'} into "
            fits += format_bytes(self.device_memory)
        return f"<Prediction for {self.device}: plain PyTorch peaks at {format_bytes(self.eager_peak)}{fits}>"


def predict(
    make: Callable[[], Callable[[], Any]],
    *,
    device: str = "cpu",
    device_memory: int | float | str | None = None,
    reorder: bool = False,
) -> Prediction:
    """Predict the peak of a training step without running it.

    `make` builds model, data and optimizer, on the CPU, and returns the step: a callable that does forward, backward and the
    optimizer's step. Both are called here, the step three times, and nothing of what they make takes memory. `device`: "cpu", or
    "cuda" for the ops that PyTorch chooses on a GPU (there need be none), with cuDNN's workspaces as estimates. `device_memory`:
    that of the device, as bytes or "24GiB". `reorder`: as that option of torch-echo.

    On a CPU the peak is that of a recorded step, to the byte. Raises CaptureError, with the line of the script, for a step whose
    course depends on what tensors contain (``.item()``), for a model that was made before, for ops that PyTorch can't tell the
    outputs of; OptionError for other devices.
    """
    if device not in ("cpu", "cuda"):
        raise OptionError(f"device={device!r}: must be 'cpu' or 'cuda'")
    memory = None if device_memory is None else parse_budget(device_memory, None, "device_memory")
    gc.collect()
    with DryRun(device) as run:
        step = make()
        session = _Recording(run, device, reorder)
        session.watch_all()
        try:
            for _ in range(_STEPS):
                step()
                session.finish()
                if session.recorded:
                    break
        finally:
            session.close()
        del step
    if not session.recorded:
        why = "; ".join(f"{what}: {reason}" for what, reason, _ in session.unhandled)
        raise CaptureError(f"no training step could be recorded{f': {why}' if why else ''}")
    graph = max(session.recorded, key=lambda each: replay(each[0].plain).peak)
    return Prediction(graph[0], memory, graph[1])


def largest(
    make: Callable[[int], Callable[[], Any]],
    peak: Callable[[Prediction], int],
    limit: int,
    *,
    device: str = "cpu",
    start: int = 1,
    reorder: bool = False,
) -> tuple[int, Prediction | None]:
    """The largest size whose predicted peak is within `limit` bytes, from `start` on, and its prediction; (0, None) if that of
    `start` is not.

    `make(size)`: as in :func:`predict`, for a batch size, a number of layers, a length. `peak`: which peak is meant, as in
    ``lambda p: p.plan(max_overhead=0.15).peak``. Peaks grow along a line, nearly, so few sizes are tried: where the line through
    the two nearest meets the limit, until two neighbours are on both sides of it.
    """
    tried: dict[int, Prediction] = {}

    def at(size: int) -> int:
        if size not in tried:
            tried[size] = predict(lambda: make(size), device=device, reorder=reorder)
        return peak(tried[size])

    if at(start) > limit:
        return 0, None
    fits, fails, size = start, 0, 2 * start  # `fails`: the least size known not to fit
    for turn in itertools.count():
        growth = (at(size) - at(fits)) / (size - fits)
        if at(size) <= limit:
            fits = size
        else:
            fails = size
        if fails == fits + 1:
            return fits, tried[fits]
        size = fits + int((limit - at(fits)) / growth) if growth > 0 else 2 * size
        if fails and turn > 5:
            size = (fits + fails) // 2
        size = min(max(size, fits + 1), fails - 1 if fails else 16 * fits)
    raise AssertionError


class _Recording(Session):
    """A session that records steps in a dry run, and plans none."""

    def __init__(self, run: DryRun, device: str, reorder: bool) -> None:
        super().__init__(Options(cost="analytic", reorder=reorder), name="prediction")
        self._run = run
        self._target = device
        self._begins = 0
        self.recorded: list[tuple[TrainingGraph, float]] = []
        """Graphs, with the host's slack in seconds."""

    def _start_recording(self, kind: StepKind) -> None:
        self._begins = len(self._run.calls)
        super()._start_recording(kind)
        if self._recorder is not None and self._target != "cpu":
            self._recorder.stretches, self._recorder.as_on_gpu = False, True

    def _graph_of(self, recorder: Recorder, apart: bool = True) -> TrainingGraph:
        cost = _cost_of(self._target)
        seconds: dict[int, float] = {}
        calls = self._run.calls[self._begins :]
        for node, call in calls:
            seconds[node] = seconds.get(node, 0.0) + cost.seconds(call.func, call.spec)
        nodes = {node: s for node, s in seconds.items() if 0 <= node < _NODES}
        graph = build(recorder, cost, self.trained.optimizer_states(self.device), nodes, apart)
        cost.save()
        graph.step_seconds = busy = sum(seconds.values())
        graph.meta |= {"device": self._target, "predicted": "yes"}
        slack = 0.0
        if self._target == "cuda":
            host = TYPICAL_GPU.host * len(calls)
            graph.step_seconds, slack = max(host, busy), max(0.0, busy - host)
            _on_gpu(graph, recorder)
        else:
            graph.rerun_overhead, graph.rebuilt_byte_seconds = RERUN_SECONDS, REBUILT_BYTE_SECONDS
        self.recorded.append((graph, slack))
        return graph

    def _make_plan(self, kind: StepKind, graph: TrainingGraph, recorder: Recorder) -> None:
        pass  # whoever asked for the prediction does


def _cost_of(device: str) -> CostModel:
    if device == "cuda" and not torch.cuda.is_available():
        return gpu_cost()
    return get_cost_model("analytic", device)


def _on_gpu(graph: TrainingGraph, recorder: Recorder) -> None:
    """What is different on a GPU with the same ops."""
    graph.rng_state_bytes = 0  # generators keep their states in the host's memory
    graph.base_bytes += CUBLAS_WORKSPACE
    for storage in (*graph.storages, *graph.plain_storages):
        storage.nbytes = -(-storage.nbytes // GRANULE) * GRANULE
    forward = (op for op in graph.ops if op.phase is Phase.FORWARD)
    for op, call in zip(forward, recorder.calls, strict=True):
        if nondeterministic_on(call.rule, "cuda", recorder.reorder):
            op.traits |= Trait.KEEP
