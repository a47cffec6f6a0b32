"""Both partitioners over the points of PyTorch's memory budget, on one joint graph."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.planner.judge import Judge, Verdict
from benchmarks.planner.models import make
from torch_echo import compat
from torch_echo.compile import Capture, capture, merge, tag
from torch_echo.cost import CostCache, Workspaces, device_key, get_cost_model
from torch_echo.footprint import replay
from torch_echo.planning import Point, front

__all__ = ["BUDGETS", "Sweep", "sweep"]

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03)
CPU = torch.device("cpu")


@dataclass
class Row:
    """One budget. Bytes above parameters and inputs; seconds added to a step."""

    budget: float
    torch_peak: int
    torch_seconds: float
    torch_planning: float
    echo_peak: int
    echo_judged: int
    """The same, read off the two graphs."""
    echo_seconds: float
    echo_planning: float
    """The whole search, and that of the gap into which the budget falls."""

    @property
    def gain(self) -> float:
        """Share of PyTorch's extra time that is saved at its peak."""
        return 1 - self.echo_seconds / self.torch_seconds if self.torch_seconds > 1e-9 else 0.0


@dataclass
class Sweep:
    """One model."""

    model: str
    nodes: int
    ops: int
    step_seconds: float
    eager_peak: int
    floor: int
    capture_seconds: float
    rows: list[Row]
    front: list[tuple[int, float]]
    """(peak, extra seconds) of all of torch-echo's plans worth having."""

    def on_their_front(self) -> list[Row]:
        """The rows at which PyTorch's peak has not risen again."""
        return [r for r in self.rows if not any(_beats(o, r) for o in self.rows)]

    def summary(self) -> dict[str, float]:
        """The figures that the bars are about."""
        low = [r.gain for r in self.on_their_front() if r.budget <= 0.3]
        planning = statistics.median(r.echo_planning / r.torch_planning for r in self.rows)
        return {
            "worst extra time against PyTorch's, points of a step": max(
                100 * (r.echo_seconds - r.torch_seconds) / self.step_seconds for r in self.rows
            ),
            "mean gain at budgets up to 0.3 on PyTorch's front": statistics.fmean(low) if low else 0.0,
            "planning against PyTorch's, median": planning,
            "least peak, PyTorch's against torch-echo's": min(r.torch_peak for r in self.rows) / self.floor,
            "largest error of the replayed peak": max(abs(r.echo_peak / r.echo_judged - 1) for r in self.rows),
        }

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "summary": self.summary()}


def _beats(one: Row, other: Row) -> bool:
    """Less of one and not more of the other."""
    return (one.torch_peak < other.torch_peak and one.torch_seconds <= other.torch_seconds) or (
        one.torch_peak <= other.torch_peak and one.torch_seconds < other.torch_seconds
    )


class _Sweeper:
    """The partitioner that AOTAutograd calls: it sweeps, and leaves the graph as it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.result: Sweep | None = None

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint.graph.eliminate_dead_code()
        merge(joint)
        outputs = kwargs["num_fwd_outputs"]
        cache = CostCache(device_key(CPU))
        cost = get_cost_model("measured", CPU, cache)
        capture(joint, outputs, cost, Workspaces(cache))  # measures what is not known yet
        cost.save()
        began = time.process_time()
        found = capture(joint, outputs, cost, Workspaces(cache))
        captured = time.process_time() - began
        graph = found.graph
        base = graph.older_bytes
        judge = Judge(joint, found, outputs)
        rows = []
        for budget in BUDGETS:
            copied = copy.deepcopy(joint)
            with torch._functorch.config.patch(activation_memory_budget=budget):
                began = time.process_time()
                theirs = min_cut_rematerialization_partition(copied, inputs, **kwargs)
                planning = time.process_time() - began
            them = judge(*theirs)
            began = time.process_time()
            plans = front(graph)
            point = plans.for_budget(base + them.peak) or plans.least
            searched = time.process_time() - began
            us = self._judge(joint, inputs, found, point, judge, kwargs)
            rows.append(
                Row(budget, them.peak, them.seconds, planning, point.peak - base, us.peak, us.seconds, searched)
            )
        self.result = Sweep(
            self.name, len(joint.graph.nodes), len(graph.ops), graph.step_seconds, replay(graph).peak - base,
            plans.least.peak - base, captured, rows, [(p.peak - base, p.extra_seconds) for p in plans.points],
        )  # fmt: skip
        return compat.partition(joint, inputs, tagged=False, **kwargs)

    @staticmethod
    def _judge(
        joint: fx.GraphModule, inputs: Any, found: Capture, point: Point, judge: Judge, kwargs: dict[str, Any]
    ) -> Verdict:
        copied = copy.deepcopy(joint)
        there = {node.name: node for node in copied.graph.nodes}
        moved = Capture(
            found.graph,
            {there[n.name]: o for n, o in found.op_of.items()},
            {there[n.name]: v for n, v in found.value_of.items()},
            {there[n.name] for n in found.stale},
        )
        tag(moved, point.dropped, replay(found.graph, point.dropped).rerun)
        return judge(*compat.partition(copied, inputs, tagged=True, **kwargs))


def sweep(name: str) -> Sweep:
    """Compile a model once, with a partitioner that sweeps."""
    model, inputs = make(name)
    sweeper = _Sweeper(name)
    torch._dynamo.reset()
    torch.compile(model, backend=compat.eager_kernels(sweeper))(*inputs)
    assert sweeper.result is not None
    return sweeper.result
