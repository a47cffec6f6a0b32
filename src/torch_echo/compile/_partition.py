"""A partitioner for AOTAutograd: plans a joint graph and has PyTorch split it accordingly.

The plan is written as recompute tags on the nodes of the forward pass, all in one region, for PyTorch's own partitioner, which
knows how to extract the two graphs, to replay random numbers and to put what is recomputed just before its first reader. Where
values are rebuilt more than once, which tags can't say, the re-runs are written into the graph (see ``_clone``).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_echo import compat, nested
from torch_echo.compile._capture import Capture, capture, is_alias
from torch_echo.compile._clone import clone
from torch_echo.compile._fusion import FusedCost
from torch_echo.compile._head import find, split
from torch_echo.cost import AnalyticCost, CostCache, CostModel, Workspaces, device_key, get_cost_model
from torch_echo.errors import BudgetInfeasible, CaptureError, TorchEchoError
from torch_echo.footprint import Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.memory import live_bytes
from torch_echo.options import OnInfeasible, Options
from torch_echo.planning import DEFAULT_MAX_OVERHEAD, Plan, footprint_of, plan
from torch_echo.report.explanation import Explanation

__all__ = ["Partitioner", "left", "plans", "tag"]

plans: list[Explanation] = []
"""Of the graphs that were compiled in this process, in order."""


left: list[str] = []
"""Why graphs were left to PyTorch's own partition, in order."""


_PARTS = (2, 4, 8, 16)
"""In which a loss head is tried, until more of them don't help."""
_WORTH = 0.02
"""Of the peak: logits below are left alone."""
_SMALLER, _FASTER = 0.02, 0.005
"""Fractions of peak and step by which a head in parts has to be better."""


class Partitioner:
    """Called by AOTAutograd with each joint graph. `options` as for the tape. `fused`: the parts are for Inductor."""

    def __init__(self, options: Options, fused: bool = False) -> None:
        self.options = options
        self.fused = fused

    def __call__(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        try:
            joint.graph.eliminate_dead_code()
            device = _device_of(joint)
            cache = CostCache(device_key(device))
            cost = get_cost_model(self.options.cost, device, cache)
            if self.fused:
                cost = FusedCost(cost, AnalyticCost(cache, device))
            chosen = _Planner(self.options, device, cost, Workspaces(cache), kwargs["num_fwd_outputs"]).run(joint)
            cost.save()  # the cache, with the workspaces in it
        except BudgetInfeasible:
            raise
        except TorchEchoError as error:
            if self.options.strict:
                raise
            left.append(str(error))
            warnings.warn(f"torch-echo leaves a graph to PyTorch's own partition: {error}", stacklevel=2)
            return compat.partition(joint, inputs, tagged=False, **kwargs)
        plans.append(chosen.explanation)
        made, found = chosen.explanation.plan, chosen.found
        if made.groups:
            clone(
                chosen.joint,
                found,
                made.dropped,
                made.groups,
                nested.schedule(chosen.replayer, made.dropped, made.groups),
            )
        else:
            tag(found, made.dropped, made.rerun)
        return compat.partition(chosen.joint, inputs, tagged=True, **kwargs)


@dataclass
class _Planned:
    """A joint graph with its plan."""

    joint: fx.GraphModule
    found: Capture
    replayer: Replayer
    explanation: Explanation

    @property
    def plan(self) -> Plan:
        return self.explanation.plan


class _Planner:
    """Plans a joint graph, and where the options allow it the same graph with its loss head in parts; takes the better one."""

    def __init__(
        self, options: Options, device: torch.device, cost: CostModel, workspaces: Workspaces, num_fwd_outputs: int
    ) -> None:
        self.options, self.cost, self.workspaces = options, cost, workspaces
        self.num_fwd_outputs = num_fwd_outputs
        self.budget = options.budget_bytes(device)
        self.live = live_bytes(device)

    def run(self, joint: fx.GraphModule) -> _Planned:
        best = first = self._as_it_is(joint)
        head = find(joint, self.num_fwd_outputs) if self.options.reorder else None
        if head is not None and _nbytes(head.logits) >= _WORTH * first.plan.peak:
            for parts in (n for n in _PARTS if n <= head.units):
                divided = split(joint, head, parts)
                found = None if divided is None else self._divided(divided, first, parts)
                if found is not None and self._better(found.plan, best.plan):
                    best = found
                elif best is not first:
                    break
        if self.budget is not None and best.plan.peak > self.budget and self.options.on_infeasible == "raise":
            self._plan(best.found.graph, self.options.max_overhead, "raise")
        return best

    def _as_it_is(self, joint: fx.GraphModule) -> _Planned:
        found = self._capture(joint)
        made = self._plan(found.graph, self.options.max_overhead, "least" if self.options.reorder else None)
        replayer = Replayer(found.graph)
        return _Planned(
            joint, found, replayer, Explanation(found.graph, made, replayer.replay(), footprint_of(replayer, made))
        )

    def _divided(self, joint: fx.GraphModule, first: _Planned, parts: int) -> _Planned | None:
        """A graph with its head in parts, planned to take no longer in all than what is asked for; None if it does anyway."""
        found = self._capture(joint)
        graph, whole = found.graph, first.plan.step_seconds
        slower = max(0.0, graph.step_seconds - whole)
        limit = self.options.max_overhead
        if self.budget is None and graph.step_seconds:
            limit = ((DEFAULT_MAX_OVERHEAD if limit is None else limit) * whole - slower) / graph.step_seconds
            if limit < 0:
                return None
        made = self._plan(graph, limit, "least")
        made = replace(
            made,
            base_peak=first.plan.base_peak,
            extra_seconds=made.extra_seconds + slower,
            step_seconds=whole,
            notes=[f"loss head in {parts} parts: results are equal up to the order of summation", *made.notes],
        )
        replayer = Replayer(graph)
        before = first.explanation.before
        return _Planned(joint, found, replayer, Explanation(graph, made, before, footprint_of(replayer, made)))

    def _capture(self, joint: fx.GraphModule) -> Capture:
        found = capture(joint, self.num_fwd_outputs, self.cost, self.workspaces)
        found.graph.base_bytes = max(0, self.live - found.graph.older_bytes)
        return found

    def _plan(self, graph: TrainingGraph, max_overhead: float | None, on_infeasible: OnInfeasible | None) -> Plan:
        return plan(
            graph,
            budget=self.budget,
            max_overhead=max_overhead,
            policy=self.options.policy,
            on_infeasible=on_infeasible or self.options.on_infeasible,
            nested=True,
        )

    def _better(self, one: Plan, other: Plan) -> bool:
        """Is a plan better than another for what is asked, by more than is lost in the noise of estimates?"""
        if self.budget is not None and one.peak <= self.budget:
            return other.peak > self.budget or one.extra_seconds < other.extra_seconds - _FASTER * one.step_seconds
        return one.peak < (1 - _SMALLER) * other.peak


def tag(found: Capture, dropped: Collection[int], ops: Collection[int]) -> None:
    """Write a plan on the nodes of a joint graph: the values that it drops, and the ops that it re-runs for them. What reads an
    input that is overwritten is kept, whatever the plan says. Of what is kept, views are made again: Inductor writes over what
    backward was given when it has been read, and does not see that two saved tensors share memory."""
    graph = found.graph
    rerun = set(ops)
    for node, value in found.value_of.items():
        if node.op != "placeholder":
            again = value in dropped or graph.values[value].producer < 0 or is_alias(node)
            compat.tag_recompute(node, again and node not in found.stale)
    for node, op in found.op_of.items():
        if node not in found.value_of:  # several outputs
            compat.tag_recompute(node, op in rerun)


def _nbytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return value.untyped_storage().nbytes()


def _device_of(joint: fx.GraphModule) -> torch.device:
    devices = {t.device for n in joint.graph.nodes if isinstance(t := n.meta.get("val"), torch.Tensor)}
    kinds = {d.type for d in devices}
    other = kinds - {"cpu", "cuda"}
    if other or not kinds:
        raise CaptureError(f"tensors on {', '.join(sorted(other)) or 'no device'}; torch-echo handles cpu and cuda")
    return next((d for d in sorted(devices, key=str) if d.type == "cuda"), torch.device("cpu"))
