"""One budget, or one limit of time, for several graphs of a step.

Problem. A step runs graphs one after the other, forward in order, backward in reverse; what a graph keeps is there while later ones
run. Each has its own front of plans. Which plan for which graph, so that the peak of the whole step fits into a budget at the least
extra time, or is least within an extra time?

Method. An integer program, solved by HiGHS: one plan for each graph; at each run, what earlier ones keep and the peak of the graph
itself are at most the budget. A graph that runs several times in a step, as a decoder that is called from a loop, has one plan.
The price of a byte is the same in all graphs, then, as far as fronts with steps allow.

Cost. Graphs times points are the variables, runs the constraints: milliseconds for tens of each.

What it does not do. It knows nothing of memory that code between the graphs takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from torch_echo.footprint import Replayer
from torch_echo.planning._bound import silence
from torch_echo.planning._front import Point
from torch_echo.planning._plan import footprint_of

__all__ = ["Choice", "Member", "choice_of", "share", "shared_peak"]

SLACK = 1.001
"""Peaks that are as good as the least: the fastest among them is taken."""


@dataclass(frozen=True)
class Choice:
    """One plan of one graph, as the other graphs see it; bytes are those above what is alive when the graph's forward begins."""

    forward: int
    """Most bytes in forward."""
    kept: int
    """Bytes from the end of forward to the beginning of backward."""
    backward: int
    """Most bytes in backward."""
    seconds: float
    """What the plan adds to a run."""


@dataclass(frozen=True)
class Member:
    """One graph and the plans to choose from."""

    choices: Sequence[Choice]
    left: int
    """Bytes that its backward passes leave behind: the gradients of parameters."""


def choice_of(replayer: Replayer, point: Point) -> Choice:
    """A plan as the other graphs of a step see it."""
    graph = replayer.graph
    ticks, levels = footprint_of(replayer, point).curve()
    begin = graph.passes[0].start
    forward, backward = levels[ticks < begin], levels[ticks >= begin]
    older = graph.start_bytes
    kept = int(forward[-1]) - older if len(forward) else 0
    return Choice(
        int(forward.max()) - older if len(forward) else 0,
        kept,
        max(kept, int(backward.max()) - older if len(backward) else 0),
        point.extra_seconds,
    )


def shared_peak(members: Sequence[Member], order: Sequence[int], chosen: Sequence[int]) -> int:
    """Most bytes of a step that runs `order`, above what is alive before it; `chosen`: of each member, which choice."""
    held, most = 0, 0
    later = _left_later(members, order)
    for k, m in enumerate(order):
        choice = members[m].choices[chosen[m]]
        most = max(most, held + _own(choice, later[k]))
        held += choice.kept
    return most


def share(
    members: Sequence[Member], order: Sequence[int], *, budget: int | None = None, seconds: float | None = None
) -> list[int] | None:
    """Of each member, which choice. `order`: the members as they run in forward.

    `budget`: bytes above what is alive before the step; the least extra time that fits, None if nothing does. `seconds`: extra time
    of the step; the least peak, and of those within 0.1% of it the fastest. With neither, the least peak of all.
    """
    if budget is None:
        found = _solve(members, order, None, seconds)
        if found is None:
            return None
        budget = int(SLACK * shared_peak(members, order, found))
        return _solve(members, order, budget, None) or found
    limit = budget
    for _ in range(4):  # the solver works to a relative 1e-6
        found = _solve(members, order, limit, None)
        if found is None or shared_peak(members, order, found) <= budget:
            return found
        limit -= 2 * (shared_peak(members, order, found) - budget)
    return None


def _own(choice: Choice, later: int) -> int:
    return max(choice.forward, choice.backward + later)


def _left_later(members: Sequence[Member], order: Sequence[int]) -> list[int]:
    """For each run: what the backward passes of later ones have left behind by then."""
    left, seen, found = 0, set(), []
    for m in reversed(order):
        found.append(left)
        if m not in seen:
            seen.add(m)
            left += members[m].left
    return found[::-1]


def _solve(
    members: Sequence[Member], order: Sequence[int], budget: int | None, seconds: float | None
) -> list[int] | None:
    """The least time within `budget`, or the least peak within `seconds`."""
    solver = pywraplp.Solver.CreateSolver("HIGHS")
    takes = [[solver.BoolVar(f"{m},{c}") for c in range(len(member.choices))] for m, member in enumerate(members)]
    for row in takes:
        solver.Add(solver.Sum(row) == 1)
    scale = max(1, shared_peak(members, order, [len(m.choices) - 1 for m in members]))
    limit = solver.NumVar(0.0, solver.infinity(), "peak") if budget is None else budget / scale
    held: Counter[int] = Counter()
    for m, later in zip(order, _left_later(members, order), strict=True):
        terms = [
            n * choice.kept / scale * x
            for other, n in held.items()
            for choice, x in zip(members[other].choices, takes[other], strict=True)
        ]
        terms += [_own(c, later) / scale * x for c, x in zip(members[m].choices, takes[m], strict=True)]
        solver.Add(solver.Sum(terms) <= limit)
        held[m] += 1
    runs = Counter(order)
    time = solver.Sum(
        [
            runs[m] * c.seconds * x
            for m, member in enumerate(members)
            for c, x in zip(member.choices, takes[m], strict=True)
        ]
    )
    if seconds is not None:
        solver.Add(time <= seconds)
    solver.Minimize(limit if budget is None else time)
    with silence():
        status = solver.Solve()
    if status != pywraplp.Solver.OPTIMAL:
        return None
    return [max(range(len(row)), key=lambda c: row[c].solution_value()) for row in takes]
