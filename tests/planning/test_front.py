"""The front keeps exactly the plans that nothing beats."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from torch_echo.planning import Front, Point

from .graphs import examples

BASE = Point(frozenset(), 100, 0.0, "baseline")
points = st.builds(
    lambda peak, extra: Point(frozenset([peak, 1000 + extra]), peak, float(extra), "test"),
    st.integers(1, 120),
    st.integers(0, 20),
)


def front_of(given_points: list[Point]) -> Front:
    front = Front(BASE)
    for p in given_points:
        front.add(p)
    return front


@examples(500)
@given(st.lists(points, max_size=30))
def test_the_front_is_what_nothing_beats(candidates: list[Point]) -> None:
    front = front_of(candidates)
    every = [*candidates, BASE]
    for p in front.points[:-1]:
        assert not any(q.peak <= p.peak and q.extra_seconds < p.extra_seconds for q in every)
        assert not any(q.peak < p.peak and q.extra_seconds <= p.extra_seconds for q in every)
    peaks = [p.peak for p in front.points]
    extras = [p.extra_seconds for p in front.points]
    assert peaks == sorted(set(peaks))
    assert extras == sorted(extras, reverse=True)
    assert front.baseline == BASE
    for p in every:
        assert any(q.peak <= p.peak and q.extra_seconds <= p.extra_seconds for q in front.points)


@examples(300)
@given(st.lists(points, max_size=30), st.integers(0, 130))
def test_a_budget_picks_the_fastest_that_fits(candidates: list[Point], budget: int) -> None:
    front = front_of(candidates)
    found = front.for_budget(budget)
    fitting = [p.extra_seconds for p in [*candidates, BASE] if p.peak <= budget]
    if not fitting:
        assert found is None
        assert front.least.peak > budget
    else:
        assert found is not None
        assert found.peak <= budget
        assert found.extra_seconds == min(fitting)


@examples(300)
@given(st.lists(points, max_size=30), st.integers(0, 20))
def test_an_overhead_picks_the_smallest(candidates: list[Point], seconds: int) -> None:
    front = front_of(candidates)
    found = front.for_overhead(float(seconds))
    assert found.extra_seconds <= seconds
    assert found.peak == min(p.peak for p in [*candidates, BASE] if p.extra_seconds <= seconds)


def test_peaks_within_a_thousandth_are_equal() -> None:
    front = Front(Point(frozenset(), 20_000, 0.0, "baseline"))
    front.add(Point(frozenset([1]), 10_000, 9.0, "slow"))
    front.add(Point(frozenset([2]), 10_005, 1.0, "fast"))
    assert front.for_overhead(10.0).origin == "fast"


@examples(200)
@given(st.lists(points, max_size=30))
def test_hull_is_convex(candidates: list[Point]) -> None:
    front = front_of(candidates)
    hull = front.hull()
    assert hull[0] == front.least
    assert hull[-1] == front.baseline
    slopes = [(b.extra_seconds - a.extra_seconds) / (b.peak - a.peak) for a, b in pairwise(hull)]
    assert all(a < b for a, b in pairwise(slopes))
