"""The search: what it claims is what a replay says, and it comes near the best where all can be tried."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_echo.footprint import Replayer, check_plan, replay
from torch_echo.graph import TrainingGraph
from torch_echo.planning import Effort, front

from .brute import legal_plans
from .graphs import Builder, examples, random_graph, random_graphs, residual_chain, transformer


@examples(60)
@given(random_graphs(10))
def test_every_point_is_legal_and_as_replayed(graph: TrainingGraph) -> None:
    found = front(graph)
    for p in found.points:
        check_plan(graph, p.dropped)
        footprint = replay(graph, p.dropped)
        assert (footprint.peak, footprint.extra_seconds) == (p.peak, pytest.approx(p.extra_seconds))
    assert found.points[-1].dropped == frozenset()
    assert found.least.peak <= found.baseline.peak


@examples(60)
@given(random_graphs(10), st.randoms(use_true_random=False))
def test_a_smaller_budget_never_gives_a_larger_peak_or_a_faster_plan(graph: TrainingGraph, rng: random.Random) -> None:
    """Whatever was asked for before."""
    found, again = front(graph), front(graph)
    top = found.baseline.peak
    budgets = [top * k // 20 for k in range(20, 0, -1)]
    picks = [found.for_budget(budget) or found.least for budget in budgets]
    assert all(a.peak >= b.peak and a.extra_seconds <= b.extra_seconds for a, b in pairwise(picks))
    shuffled = rng.sample(range(len(budgets)), len(budgets))
    for i in shuffled:
        again.for_overhead(picks[i].extra_seconds)
        assert (again.for_budget(budgets[i]) or again.least) == picks[i]
    for p in again.points:
        check_plan(graph, p.dropped)
        assert replay(graph, p.dropped).peak == p.peak


def test_the_gap_that_is_asked_for_is_filled() -> None:
    graph = transformer(6)
    plain, found = front(graph, effort=replace(Effort.for_size(len(graph.ops)), gap=0)), front(graph)
    before = len(found.points)
    budgets = range(found.least.peak, found.baseline.peak, (found.baseline.peak - found.least.peak) // 40)
    pairs = [(plain.for_budget(b), found.for_budget(b)) for b in budgets]
    assert all(one and other and other.extra_seconds <= one.extra_seconds for one, other in pairs)
    assert sum(one.extra_seconds > other.extra_seconds for one, other in pairs if one and other) >= 5
    assert len(found.points) > before
    seconds = [p.extra_seconds for p in found.points]
    assert seconds == sorted(seconds, reverse=True)


def test_the_low_end_is_searched_when_it_is_asked_for() -> None:
    """By a budget below all that was found, or a time beyond that of the smallest; both find the same."""
    graph = transformer(6)
    rng = random.Random(1)
    for op in graph.ops:
        op.seconds *= rng.uniform(0.5, 2.0)
    found, again = front(graph), front(graph)
    least = found.least
    smaller = found.for_budget(least.peak - 1)
    assert smaller is not None and smaller.peak < least.peak and smaller.extra_seconds >= least.extra_seconds
    same = found.for_budget(least.peak)
    assert same is not None and same.peak == least.peak, "what is there already is left as it is"
    assert found.points[0] == found.least and found.least.peak <= smaller.peak
    assert found.least.peak <= again.for_overhead(math.inf).peak <= 1.001 * found.least.peak
    assert found.for_budget(1) is None
    assert replay(graph, found.least.dropped).peak == found.least.peak
    check_plan(graph, found.least.dropped)


def test_near_the_best_on_small_graphs() -> None:
    """Over 100 seeded graphs, at every budget that some plan meets: feasible, and within 2% of the least extra time."""
    levels, excess = 0, 0.0
    for seed in range(200):
        graph = random_graph(random.Random(seed), 8)
        replayer = Replayer(graph)
        every = [(f.peak, f.extra_seconds) for f in map(replayer.replay, legal_plans(graph, 9))]
        if len(every) < 4:
            continue
        found = front(graph)
        for peak in {p for p, _ in every if p < found.baseline.peak}:
            best = min(extra for p, extra in every if p <= peak)
            mine = found.for_budget(peak)
            assert mine is not None, (seed, peak)
            levels += 1
            if best > 0:  # a value whose save is never read costs nothing
                excess += mine.extra_seconds / best - 1.0
            else:
                assert mine.extra_seconds == 0
    assert levels > 50
    assert excess / levels < 0.02


def test_deterministic() -> None:
    graph = transformer(3)
    one, other = front(graph), front(graph)
    assert one.points == other.points
    assert one.candidates == other.candidates


def test_identical_layers_are_split_by_a_threshold() -> None:
    """Where a sweep of one price jumps from no layer to all layers, the front has points for some of them."""
    graph = transformer(6)
    found = front(graph)
    cheap = [p for p in found.points if not any(graph.ops[o].name == "addmm" for o in replay(graph, p.dropped).rerun)]
    assert len(cheap) >= 6
    assert found.least.peak < 0.5 * found.baseline.peak
    gaps = [b.peak - a.peak for a, b in pairwise(found.points)]
    assert max(gaps) < 0.1 * found.baseline.peak


def test_stretches_of_a_deep_chain_are_rebuilt_one_at_a_time() -> None:
    """Dropping everything brings everything back at once; the search finds what to keep in between."""
    graph = residual_chain(100)
    everything = replay(graph, {v for v, ok in enumerate(graph.droppable()) if ok})
    found = front(graph)
    assert everything.peak > 0.9 * found.baseline.peak
    assert found.least.peak < 0.45 * found.baseline.peak


def test_recomputation_that_frees_nothing_is_not_done() -> None:
    b = Builder()
    x = b.op("mm", [b.outside(1)], [100], saves=["out0"])[0]
    b.hold(x)
    found = front(b.backward())
    assert [p.dropped for p in found.points] == [frozenset()]


def test_fixed_seconds_count() -> None:
    graph = transformer(2)
    plain, costly = front(graph), front(graph, lambda dropped: 1.0)
    assert costly.baseline.extra_seconds == 0.0
    assert all(p.extra_seconds > 1.0 for p in costly.points[:-1])
    assert costly.least.peak == plain.least.peak


def test_graph_without_anything_to_decide() -> None:
    assert front(TrainingGraph()).candidates == 1


class TestEffort:
    @pytest.mark.parametrize(("ops", "most"), [(100, 600), (5_000, 300), (100_000, 60), (1_000_000, 60)])
    def test_fewer_candidates_for_larger_graphs(self, ops: int, most: int) -> None:
        e = Effort.for_size(ops)
        assert 2 * e.sweep + e.segments + e.moments + e.order + e.moves <= most

    def test_fifty_thousand_forward_ops(self) -> None:
        graph = transformer(4600)
        assert sum(op.phase == 0 for op in graph.ops) > 50_000
        found = front(graph)
        assert found.candidates <= 60
        assert found.least.peak < 0.4 * found.baseline.peak
        assert len(found.points) >= 10
