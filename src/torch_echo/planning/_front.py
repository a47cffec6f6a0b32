"""The front: plans of which none is both smaller and faster than another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Front", "Gap", "Point"]


@dataclass(frozen=True, slots=True)
class Point:
    """One plan, replayed."""

    dropped: frozenset[int]
    peak: int
    """Bytes, the replayed peak of the iteration."""
    extra_seconds: float
    """What the plan adds to the step."""
    origin: str
    """Which search found it."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Values that are rebuilt together, ahead of others that are made from them: see :mod:`torch_echo.nested`."""


Between = Callable[[list[Point], int], list[Point]]
Below = Callable[[], list[Point]]


class Front:
    """Plans for one graph by ascending peak and descending time. The plan that drops nothing is always the last one.

    A budget only picks from the points, so a smaller budget never gives a larger peak. Nor does it with :meth:`refine_by`: then the
    gap between two points that a budget or a time falls into is searched once more, and what is found there is neither smaller
    than its smaller end nor faster than its faster one. So it is as if all gaps had been. A budget below the smallest point, or a
    time beyond its, has smaller ones searched for, none of which is faster.
    """

    def __init__(self, baseline: Point) -> None:
        self.points: list[Point] = [baseline]
        """Those known so far."""
        self.candidates = 1
        """How many plans were replayed."""
        self._ends: list[Point] = []
        self._between: Between | None = None
        self._found: dict[int, list[Point]] = {}
        self._below: Below | None = None
        self._smaller: list[Point] | None = None

    @property
    def baseline(self) -> Point:
        """The plan that drops nothing."""
        return self.points[-1]

    @property
    def least(self) -> Point:
        """The plan with the least peak of those known so far."""
        return next(iter(self._smaller or self._ends or self.points))

    def refine_by(self, between: Between, below: Below) -> None:
        """From now on no points are added, but those between two neighbours when they are asked for: `between` is given all points
        that there are now, and the position of the smaller of the two; it gives that one, or one of the same peak, and those
        between it and the next. And those of `below` when they are asked for, which are smaller and slower than all others."""
        self._ends, self._between, self._below = list(self.points), between, below

    def add(self, point: Point) -> bool:
        """Take a point in, and those out that it beats; False if it is no better than one that is there."""
        at = bisect_right(self.points, point.peak, key=lambda p: p.peak)
        if at and self.points[at - 1].extra_seconds <= point.extra_seconds:
            return False
        if at == len(self.points):
            return False  # at or above the baseline's peak, which costs nothing
        first = at
        while first and self.points[first - 1].peak == point.peak:
            first -= 1
        last = at
        while last < len(self.points) and self.points[last].extra_seconds >= point.extra_seconds:
            last += 1
        if last == len(self.points):  # never below the baseline
            last -= 1
        self.points[first:last] = [point]
        return True

    def hull(self) -> list[Point]:
        """The points on the lower convex hull of (peak, extra seconds), by ascending peak."""
        hull: list[Point] = []
        for p in self.points:
            while len(hull) > 1 and _above(hull[-2], hull[-1], p):
                hull.pop()
            hull.append(p)
        return hull

    def for_budget(self, budget: int) -> Point | None:
        """The fastest plan whose peak fits into `budget` bytes; None if none does (then ``least`` is the nearest)."""
        points = self._ends or self.points
        at = bisect_right(points, budget, key=lambda p: p.peak) - 1
        if at < 0:
            return next((p for p in reversed(self._low_end()) if p.peak <= budget), None)
        return next(p for p in reversed(self._gap(at)) if p.peak <= budget)

    def for_overhead(self, seconds: float) -> Point:
        """The smallest plan that adds at most `seconds`; the fastest among those within 0.1% of its peak."""
        points = self._ends or self.points
        at = next((i for i, p in enumerate(points) if p.extra_seconds <= seconds), len(points) - 1)
        points = [*(self._gap(at - 1) if at else [*self._low_end(), *self._gap(0)]), *points[max(1, at) :]]
        least = next((p for p in points if p.extra_seconds <= seconds), self.baseline)
        near = [p for p in points if least.peak <= p.peak <= least.peak * 1.001 and p.extra_seconds <= seconds]
        return near[-1] if near else least

    def _low_end(self) -> list[Point]:
        """The points below all that were there first."""
        if self._below is None:
            return []
        if self._smaller is None:
            self._smaller = self._below()
            self._list()
        return self._smaller

    def _list(self) -> None:
        found = [p for i, end in enumerate(self._ends) for p in self._found.get(i, [end])]
        self.points = [*(self._smaller or ()), *found]

    def _gap(self, at: int) -> list[Point]:
        """The points from one of those that were there first, up to the next."""
        if not self._between or at == len(self._ends) - 1:
            return (self._ends or self.points)[at : at + 1]
        if at not in self._found:
            self._found[at] = self._between(self._ends, at)
            self._list()
        return self._found[at]


class Gap(Front):
    """What is found between two points of a front, or (`small` is None) beyond its smallest."""

    def __init__(self, small: Point | None, large: Point) -> None:
        super().__init__(large)
        self.least_peak = 0
        if small is not None:
            super().add(small)
            self.least_peak = small.peak

    def add(self, point: Point) -> bool:
        """As for a front, but for points that are smaller than one end or faster than the other."""
        inside = point.peak >= self.least_peak and point.extra_seconds >= self.baseline.extra_seconds
        return inside and super().add(point)


def _above(a: Point, b: Point, c: Point) -> bool:
    """Does b lie on or above the line from a to c?"""
    rise = (b.extra_seconds - a.extra_seconds) * (c.peak - a.peak)
    return rise >= (c.extra_seconds - a.extra_seconds) * (b.peak - a.peak)
