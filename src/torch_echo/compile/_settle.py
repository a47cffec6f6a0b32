"""The plan that keeps what is asked for, where only trying tells what a plan takes.

The replay of a training graph knows nothing of the compiler's kernels. So the peak of the plan that it chose is looked up in the
code that the compiler makes of it (dear: seconds to tens of seconds), and if that is off, a few others are looked up. Between
those that were, the difference to the replay is taken to be that of the nearest one.

Cost: at most `tries` look-ups beyond the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch_echo.planning import Point

__all__ = ["LEVELS", "settle"]

LEVELS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.0)
"""Fractions of a step's time whose plans are looked up where one that takes longer takes more memory than they promise: the same
ones whatever is asked for, so that who allows more time is not given a plan with a larger peak."""


def settle(
    points: Sequence[Point],
    first: Point,
    peak_of: Callable[[Point], int],
    *,
    budget: int | None = None,
    seconds: float = math.inf,
    levels: Sequence[float] = (),
    eager: Callable[[], int] | None = None,
    tries: int = 2,
) -> tuple[Point, int]:
    """The plan to take, and its peak. `points`: a front. `first`: the one that the replay chose. `peak_of`: what it takes indeed,
    in bytes. With a `budget` it is the fastest that fits, else the one with the least peak among those of at most so many
    `seconds`, of which those that are best by the replay within each of `levels` (seconds, falling) are looked up; of those that
    were looked up, the least if none fits. One above `eager`, what it takes without a compiler, is taken only if to drop nothing
    takes more.
    """
    found = {first: peak_of(first)}
    lower = [level for level in levels if level < seconds]
    for _ in range(tries):
        more = _beyond(points, found, budget) if budget is not None else _below(points, found, lower)
        if more is None:
            break
        found[more] = peak_of(more)
    nothing = points[-1] if points else first
    if (
        nothing not in found
        and eager is not None
        and min(found.values()) > nothing.peak
        and min(found.values()) > eager()
    ):
        found[nothing] = peak_of(nothing)
    fitting = [p for p in found if budget is not None and found[p] <= budget]
    if fitting:
        return min(((p, found[p]) for p in fitting), key=lambda f: f[0].extra_seconds)
    return min(found.items(), key=lambda f: (f[1], f[0].extra_seconds))


def _estimate(point: Point, found: dict[Point, int]) -> int:
    near = min(found, key=lambda p: (abs(p.peak - point.peak), -found[p]))
    return point.peak + found[near] - near.peak


def _beyond(points: Sequence[Point], found: dict[Point, int], budget: int) -> Point | None:
    """The fastest plan that should fit; if none should, the least."""
    best = min((p.extra_seconds for p in found if found[p] <= budget), default=math.inf)
    open_ = [p for p in points if p not in found and p.extra_seconds < best]
    fitting = [p for p in open_ if _estimate(p, found) <= budget]
    if fitting:
        return min(fitting, key=lambda p: p.extra_seconds)
    if best < math.inf:
        return None
    return min(open_, key=lambda p: (_estimate(p, found), p.extra_seconds), default=None)


def _below(points: Sequence[Point], found: dict[Point, int], levels: Sequence[float]) -> Point | None:
    """The best plan by the replay at the next level, as long as it promises less than what was found."""
    least = min(found.values())
    for level in levels:
        point = min((p for p in points if p.extra_seconds <= level), key=lambda p: p.peak, default=None)
        if point is None or point.peak >= least:
            return None
        if point not in found:
            return point
    return None
