"""The front: plans of which none is both smaller and faster than another."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

__all__ = ["Front", "Point"]


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


class Front:
    """Plans for one graph by ascending peak and descending time. The plan that drops nothing is always the last one.

    A budget only picks from the points, so a smaller budget never gives a larger peak.
    """

    def __init__(self, baseline: Point) -> None:
        self.points: list[Point] = [baseline]
        self.candidates = 1
        """How many plans were replayed."""

    @property
    def baseline(self) -> Point:
        """The plan that drops nothing."""
        return self.points[-1]

    @property
    def least(self) -> Point:
        """The plan with the least peak."""
        return self.points[0]

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
        at = bisect_right(self.points, budget, key=lambda p: p.peak)
        return self.points[at - 1] if at else None

    def for_overhead(self, seconds: float) -> Point:
        """The smallest plan that adds at most `seconds`; the fastest among those within 0.1% of its peak."""
        least = next((p for p in self.points if p.extra_seconds <= seconds), self.baseline)
        near = [p for p in self.points if least.peak <= p.peak <= least.peak * 1.001 and p.extra_seconds <= seconds]
        return near[-1] if near else least


def _above(a: Point, b: Point, c: Point) -> bool:
    """Does b lie on or above the line from a to c?"""
    rise = (b.extra_seconds - a.extra_seconds) * (c.peak - a.peak)
    return rise >= (c.extra_seconds - a.extra_seconds) * (b.peak - a.peak)
