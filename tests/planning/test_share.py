"""Budgets shared by the graphs of a step, beside all combinations."""

from __future__ import annotations

import random
from itertools import product

import pytest
from tests.planning.graphs import transformer

from torch_echo.footprint import Replayer
from torch_echo.planning import Choice, Member, choice_of, front, share, shared_peak


def members_of(rng: random.Random, count: int) -> list[Member]:
    members = []
    for _ in range(count):
        choices, seconds, kept = [], 0.0, rng.randint(50, 100)
        for _ in range(rng.randint(1, 5)):
            forward = kept + rng.randint(0, 30)
            choices.append(Choice(forward, kept, forward + rng.randint(0, 40), seconds))
            kept, seconds = rng.randint(0, kept), seconds + rng.random()
        members.append(Member(choices[::-1], rng.randint(0, 20)))
    return members


def seconds_of(members: list[Member], order: list[int], chosen: tuple[int, ...] | list[int]) -> float:
    return sum(members[m].choices[chosen[m]].seconds for m in order)


def all_of(members: list[Member]) -> list[tuple[int, ...]]:
    return list(product(*(range(len(m.choices)) for m in members)))


@pytest.mark.parametrize("seed", range(40))
def test_beside_all_combinations(seed: int) -> None:
    rng = random.Random(seed)
    members = members_of(rng, rng.randint(1, 4))
    order = [*range(len(members)), *(rng.randrange(len(members)) for _ in range(rng.randint(0, 4)))]
    peaks = {c: shared_peak(members, order, c) for c in all_of(members)}
    low, high = min(peaks.values()), max(peaks.values())
    for budget in (low - 1, low, (low + high) // 2, high):
        fits = [seconds_of(members, order, c) for c, peak in peaks.items() if peak <= budget]
        found = share(members, order, budget=budget)
        assert (found is None) == (not fits)
        if found is not None:
            assert shared_peak(members, order, found) <= budget
            assert seconds_of(members, order, found) == pytest.approx(min(fits), abs=1e-6)
    for limit in (0.0, 0.5, 2.0, 100.0):
        least = min(peak for c, peak in peaks.items() if seconds_of(members, order, c) <= limit)
        found = share(members, order, seconds=limit)
        assert found is not None
        assert seconds_of(members, order, found) <= limit + 1e-6
        assert shared_peak(members, order, found) <= 1.002 * least


def test_the_peak_of_a_step() -> None:
    """Two runs of the first graph, then one of the second; gradients of the second are there in backward of the first."""
    first = Member([Choice(forward=10, kept=4, backward=12, seconds=0.0)], left=1)
    second = Member([Choice(forward=5, kept=3, backward=6, seconds=0.0)], left=7)
    assert shared_peak([first, second], [0, 0, 1], [0, 0]) == max(12 + 1 + 7, 4 + 12 + 7, 8 + 6)


def test_a_plan_as_others_see_it() -> None:
    graph = transformer(3)
    replayer = Replayer(graph)
    found = front(graph)
    for point in found.points:
        choice = choice_of(replayer, point)
        older = graph.start_bytes
        assert max(choice.forward, choice.backward) == point.peak - older
        assert 0 <= choice.kept <= choice.forward
    assert choice_of(replayer, found.least).kept < choice_of(replayer, found.baseline).kept
