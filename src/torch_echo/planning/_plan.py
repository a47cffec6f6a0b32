"""From a graph and what the user asks for to a plan that says what it does and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from torch_echo.errors import BudgetInfeasible, OptionError
from torch_echo.footprint import Footprint, Replayer, replay
from torch_echo.graph import TrainingGraph
from torch_echo.nested import replay as replay_nested
from torch_echo.planning._cut import MinCut
from torch_echo.planning._explain import Decision, explain
from torch_echo.planning._front import Front, Point
from torch_echo.planning._paper import paper_plan
from torch_echo.planning._prices import Prices
from torch_echo.planning._search import Search
from torch_echo.units import format_bytes

__all__ = ["DEFAULT_MAX_OVERHEAD", "Plan", "footprint_of", "plan", "unmet"]

DEFAULT_MAX_OVERHEAD = 0.05
"""Fraction of the step's time, where neither a budget nor an overhead is asked for."""


@dataclass(frozen=True)
class Plan:
    """Which values of one graph are dropped and rebuilt, and what that does."""

    dropped: frozenset[int]
    """Values dropped in forward and rebuilt in backward."""
    peak: int
    """Bytes: the replayed peak under the plan, or that of the code which a compiler makes of it."""
    base_peak: int
    """Bytes: the replayed peak of the script's own run, with everything kept."""
    floor: int
    """Bytes: the least peak that any plan found reaches."""
    extra_seconds: float
    """What the plan adds to a step."""
    step_seconds: float
    """Duration of the step without it."""
    rerun: list[int]
    """Ops that run again, in order; more than once where `groups` say so."""
    policy: str
    groups: tuple[tuple[int, ...], ...] = ()
    """Values that are rebuilt together, ahead of others that are made from them: see :mod:`torch_echo.nested`."""
    notes: list[str] = field(default_factory=list)
    """What was asked for, what was exact and what was searched."""
    decisions: list[Decision] = field(default_factory=list)
    """One per class of ops that backward needs something from, largest first."""

    @property
    def overhead(self) -> float:
        """Extra time as a fraction of the step's; 0 where the step's duration is not known."""
        return self.extra_seconds / self.step_seconds if self.step_seconds > 0 else 0.0


def plan(
    graph: TrainingGraph,
    *,
    budget: int | None = None,
    max_overhead: float | None = None,
    policy: Literal["echo", "paper"] = "echo",
    on_infeasible: Literal["raise", "least"] = "raise",
    fixed_seconds: Callable[[frozenset[int]], float] | None = None,
    front: Front | None = None,
    chosen: Point | None = None,
    nested: bool = False,
) -> Plan:
    """Plan a graph.

    `budget`: bytes that the replayed peak may reach; the fastest plan that fits is taken. `max_overhead`: fraction of
    the step's time that re-running may cost; the plan with the least peak is taken. With neither: an overhead of 0.05.
    `fixed_seconds`: see :func:`torch_echo.planning.front`. `front`: one that was made for this graph before, to choose
    from. `chosen`: the point of it to take; who names it knows of more than this graph, and minds the budget.
    `nested`: the engine can rebuild values more than once.

    Raises BudgetInfeasible if no plan fits and `on_infeasible` is "raise"; with "least" the plan with the least peak is
    taken.
    """
    _check(budget, max_overhead, policy, on_infeasible)
    replayer = Replayer(graph)
    prices = Prices(MinCut(replayer))
    notes: list[str] = []
    if policy == "paper":
        front, point = _paper(prices, fixed_seconds)
        notes.append("the paper's rule: bytes released against bytes newly kept; no search, and no regard to time")
        if budget is None:
            notes.append("the paper's rule knows no limit of time: max_overhead is not applied")
        fits = budget is None or point.peak <= budget
        floor = point.peak
    else:
        if front is None:
            front = Search(prices, fixed_seconds).run(nested)
        point, fits = (chosen, True) if chosen is not None else _choose(front, graph, budget, max_overhead)
        floor = front.least.peak
        notes.append(
            f"exact: each candidate is a minimum cut at its prices, or put together from such; "
            f"searched: the prices ({front.candidates} candidates replayed, {len(front.points)} on the front)"
        )
    base = replayer.replay()
    plain, base_peak = graph.plain, base.peak
    if plain is not graph:
        base_peak = replay(plain).peak
        notes.append(
            f"cross-entropy in one block: {format_bytes(base_peak - base.peak)} less at the peak, before anything is rebuilt"
        )
    footprint = footprint_of(replayer, point)
    if not fits and budget is not None:
        if on_infeasible == "raise":
            held = [(layer, kind, n) for (layer, kind), n in footprint.composition().items()]
            raise BudgetInfeasible(budget, point.peak, held)
        notes.append(unmet(budget))
    return Plan(
        dropped=point.dropped,
        peak=point.peak,
        base_peak=base_peak,
        floor=floor,
        extra_seconds=point.extra_seconds,
        step_seconds=graph.step_seconds,
        rerun=footprint.rerun,
        policy=policy,
        groups=point.groups,
        notes=notes,
        decisions=explain(prices, point.dropped, base, footprint),
    )


def footprint_of(replayer: Replayer, point: Point | Plan) -> Footprint:
    """The footprint of a plan."""
    if point.groups:
        return replay_nested(replayer, point.dropped, point.groups)
    return replayer.replay(point.dropped)


def unmet(budget: int) -> str:
    """The note of a plan that was taken although it takes more than so many bytes."""
    return f"the budget of {format_bytes(budget)} can't be met; this is the plan with the least peak"


def _check(budget: int | None, max_overhead: float | None, policy: str, on_infeasible: str) -> None:
    if budget is not None and max_overhead is not None:
        raise OptionError(f"budget={budget} and max_overhead={max_overhead} contradict each other: give one of them")
    if budget is not None and budget <= 0:
        raise OptionError(f"budget={budget} must be a positive number of bytes")
    if max_overhead is not None and not 0 <= max_overhead < math.inf:
        raise OptionError(f"max_overhead={max_overhead} must be a fraction of the step's time, 0 or more")
    if policy not in ("echo", "paper"):
        raise OptionError(f'policy={policy!r} must be "echo" or "paper"')
    if on_infeasible not in ("raise", "least"):
        raise OptionError(f'on_infeasible={on_infeasible!r} must be "raise" or "least"')


def _choose(front: Front, graph: TrainingGraph, budget: int | None, max_overhead: float | None) -> tuple[Point, bool]:
    if budget is not None:
        point = front.for_budget(budget)
        return (front.least, False) if point is None else (point, True)
    limit = DEFAULT_MAX_OVERHEAD if max_overhead is None else max_overhead
    return front.for_overhead(limit * graph.step_seconds), True


def _paper(prices: Prices, fixed_seconds: Callable[[frozenset[int]], float] | None) -> tuple[Front, Point]:
    replayer = prices.replayer
    mask = paper_plan(prices)
    dropped = frozenset(np.flatnonzero(mask).tolist())
    found: Footprint = replayer.replay(dropped)
    extra = found.extra_seconds + (fixed_seconds(dropped) if fixed_seconds and dropped else 0.0)
    point = Point(dropped, found.peak, extra, "paper")
    front = Front(Point(frozenset(), replayer.replay().peak, 0.0, "baseline"))
    front.add(point)
    return front, point
