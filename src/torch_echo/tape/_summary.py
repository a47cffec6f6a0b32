"""What a session has to tell at the end, from its kinds of iterations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch_echo.footprint import replay
from torch_echo.graph import Kind, TrainingGraph
from torch_echo.planning import Plan
from torch_echo.report.explanation import Explanation
from torch_echo.report.summary import KindSummary, Summary, rebuilt_by_layer
from torch_echo.tape._kinds import StepKind

__all__ = ["explanation_of", "summarize"]

_STATE = (Kind.PARAMETER, Kind.OPTIMIZER_STATE, Kind.BUFFER)


def _planned(kinds: Iterable[StepKind]) -> list[tuple[StepKind, TrainingGraph, Plan]]:
    return [(k, k.graph, k.plan) for k in kinds if k.graph is not None and k.plan is not None]


def explanation_of(kinds: Iterable[StepKind]) -> Explanation | None:
    """Graph, plan and footprints of the kind that takes the most memory, with the others in `others`; None without a plan."""
    made = [Explanation.of(graph, plan, kind.name, kind.seen) for kind, graph, plan in _planned(kinds)]
    made.sort(key=lambda e: -e.plan.base_peak)
    return dataclasses.replace(made[0], others=tuple(made[1:])) if made else None


def summarize(summary: Summary, kinds: Iterable[StepKind]) -> None:
    """Put into a summary what the plans of these kinds did. Times are means over the steps."""
    plans = _planned(kinds)
    if not plans:
        return
    if any(k.measured_peak is not None for k, _, _ in plans):
        summary.measured_peak = max(p.peak if k.measured_peak is None else k.measured_peak for k, _, p in plans)
    summary.eager_peak = max(p.base_peak for _, _, p in plans)
    summary.predicted_peak = max(p.peak for _, _, p in plans)
    summary.base_bytes = max(
        sum(t.nbytes for t in graph.storages if t.alloc < 0 and t.kind in _STATE) for _, graph, _ in plans
    )
    summary.loss_bytes = max(p.base_peak - replay(graph).peak if graph.plain_storages else 0 for _, graph, p in plans)
    steps = sum(k.seen for k, _, _ in plans)
    summary.extra_seconds = sum(k.seen * p.extra_seconds for k, _, p in plans) / steps
    summary.step_seconds = sum(k.seen * p.step_seconds for k, _, p in plans) / steps
    summary.rebuilt = rebuilt_by_layer([(graph, p.dropped) for _, graph, p in plans])
    if len(plans) > 1:
        summary.kinds = [
            KindSummary(
                name=k.name,
                steps=k.seen,
                measured_peak=k.measured_peak,
                eager_peak=p.base_peak,
                predicted_peak=p.peak,
                extra_seconds=p.extra_seconds,
                step_seconds=p.step_seconds,
            )
            for k, _, p in plans
        ]
