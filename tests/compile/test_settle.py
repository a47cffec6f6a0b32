"""Which plan is taken, where what plans take is known only from trying: on made-up fronts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compile.test_share import FixedCost
from torch import Tensor, nn

from torch_echo import compat
from torch_echo.compile import Partitioner, _backends, _partition, plans
from torch_echo.compile._settle import settle
from torch_echo.errors import BudgetInfeasible, CaptureError
from torch_echo.footprint import replay
from torch_echo.options import Options
from torch_echo.planning import Point
from torch_echo.report.explanation import Explanation

POINTS = [Point(frozenset(range(9 - i)), 100 + 20 * i, 8.0 - i, "made up") for i in range(9)]
"""By the replay: 100 bytes for 8 s … 260 bytes for nothing."""


class Tried:
    """What plans take, by what the replay says; notes what was asked."""

    def __init__(self, peak_of: Callable[[int], float]) -> None:
        self.peak_of, self.asked = peak_of, list[int]()

    def __call__(self, point: Point) -> int:
        assert point.peak not in self.asked
        self.asked.append(point.peak)
        return int(self.peak_of(point.peak))


def at(peak: int) -> Point:
    return next(p for p in POINTS if p.peak == peak)


def test_what_is_as_promised_is_taken_at_once() -> None:
    for arguments in ({"budget": 150}, {"seconds": 6.0}):
        tried = Tried(lambda n: n + 4)
        assert settle(POINTS, at(140), tried, **arguments) == (at(140), 144)  # type: ignore[arg-type]
        assert tried.asked == [140]


def test_a_budget_that_the_first_one_misses() -> None:
    tried = Tried(lambda n: n + 30)
    assert settle(POINTS, at(200), tried, budget=200) == (at(160), 190)
    assert tried.asked == [200, 160]


def test_a_budget_where_smaller_plans_are_further_off() -> None:
    tried = Tried(lambda n: n + 0.5 * (260 - n))
    assert settle(POINTS, at(200), tried, budget=200, tries=3) == (at(140), 200)
    assert tried.asked == [200, 160, 140]


def test_a_budget_with_room_for_a_faster_plan() -> None:
    tried = Tried(lambda n: n - 45)
    assert settle(POINTS, at(200), tried, budget=200) == (at(240), 195)
    assert tried.asked == [200, 240]


def test_of_those_that_fit_the_fastest() -> None:
    tried = Tried({200: 150, 240: 210, 220: 190}.__getitem__)
    assert settle(POINTS, at(200), tried, budget=200) == (at(220), 190)


def test_a_budget_that_nothing_meets() -> None:
    """The least of those that were tried."""
    tried = Tried(lambda n: n + 300)
    assert settle(POINTS, at(140), tried, budget=150, tries=1) == (at(100), 400)


def test_the_least_peak_within_a_time() -> None:
    """Dropping more makes it no smaller here: levels are looked up as long as they promise less."""
    tried = Tried({120: 200, 160: 170, 140: 230}.__getitem__)
    levels = [8.0, 7.0, 5.5, 5.0, 4.0, 0.0]
    assert settle(POINTS, at(120), tried, seconds=7.0, levels=levels) == (at(160), 170)
    assert tried.asked == [120, 160]
    tried = Tried({120: 200, 160: 240, 180: 250}.__getitem__)
    assert settle(POINTS, at(120), tried, seconds=7.0, levels=levels) == (at(120), 200)
    assert tried.asked == [120, 160, 180]
    tried = Tried(lambda n: 300)
    assert settle(POINTS, at(180), tried, seconds=4.0, levels=levels, tries=1) == (at(260), 300)
    assert tried.asked == [180, 260]


@pytest.mark.parametrize("code", [lambda n: 180, lambda n: max(n, 300 - n), lambda n: n + 5 * (n % 60)])
def test_who_allows_more_time_has_no_larger_peak(code: Callable[[int], float]) -> None:
    """At the levels, where tries don't run out and code takes no less than the replay says."""
    levels = [8.0, 6.0, 5.0, 3.0, 1.0, 0.0]

    def peak(seconds: float) -> int:
        first = min((p for p in POINTS if p.extra_seconds <= seconds), key=lambda p: p.peak)
        return settle(POINTS, first, Tried(code), seconds=seconds, levels=levels, tries=len(levels))[1]

    peaks = [peak(seconds) for seconds in levels]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(("eager", "taken"), [(250, 260), (400, 100)])
def test_never_above_eager(eager: int, taken: int) -> None:
    tried = Tried({100: 350, 260: 280}.__getitem__)
    assert settle(POINTS, at(100), tried, tries=0, eager=lambda: eager)[0] == at(taken)


def test_dropping_nothing_is_no_way_out_where_it_takes_more() -> None:
    tried = Tried({100: 350, 260: 380}.__getitem__)
    assert settle(POINTS, at(100), tried, tries=0, eager=lambda: 300) == (at(100), 350)


def test_without_others_to_choose_from() -> None:
    assert settle([], at(100), lambda _: 7, budget=5, seconds=math.inf, tries=0, eager=lambda: 1) == (at(100), 7)


class TestPartitioner:
    """It holds the peaks of Inductor's code against what is asked for; they are made up here, and PyTorch's kernels run."""

    @pytest.fixture
    def explained(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Explanation]:
        monkeypatch.setattr(_partition, "get_cost_model", lambda *_: FixedCost())

        class Chain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = torch.tanh(layer(x)).sin()
                return x.square().mean()

        def run(takes: Callable[[], int], **options: Any) -> Explanation:
            monkeypatch.setattr(_partition, "peak_of_code", lambda *_: takes())
            backend = _backends._errors_pass(compat.eager_kernels(Partitioner(Options(**options), fused=True)))
            torch._dynamo.reset()
            torch.compile(Chain(), backend=backend)(torch.ones(256, 64)).backward()
            return plans[-1]

        return run

    @staticmethod
    def above(found: Explanation) -> int:
        return found.graph.start_bytes

    def test_promises_the_peak_of_the_code(self, explained: Any) -> None:
        found = explained(lambda: 12345, max_overhead=0.0)
        assert found.plan.peak == self.above(found) + 12345
        assert found.after.peak == replay(found.graph, found.plan.dropped).peak != found.plan.peak
        assert "the peak is that of Inductor's code" in found.plan.notes[-1]

    def test_takes_another_plan_where_the_first_one_misses_the_budget(self, explained: Any) -> None:
        fitting = explained(lambda: 0, max_overhead=10.0)
        budget = fitting.after.peak + 200_000
        first = explained(lambda: 1, memory_budget=budget)  # fits
        sizes = itertools.chain([10**9, 2], itertools.repeat(10**9))
        other = explained(lambda: next(sizes), memory_budget=budget)
        assert other.plan.dropped != first.plan.dropped
        assert other.plan.peak == self.above(other) + 2 <= budget
        assert other.after.peak < first.after.peak

    def test_a_budget_that_no_code_meets(self, explained: Any) -> None:
        """Though the replay's peaks do."""
        sizes = iter([9 * 10**9, 7 * 10**9, 8 * 10**9, 9 * 10**9])
        with pytest.raises(BudgetInfeasible) as caught:
            explained(lambda: next(sizes), memory_budget="1GiB")
        assert 7 * 10**9 <= caught.value.floor < 8 * 10**9
        least = explained(lambda: 7 * 10**9, memory_budget="1GiB", on_infeasible="least")
        assert any("can't be met" in note for note in least.plan.notes)

    def test_a_budget_that_only_the_code_meets(self, explained: Any) -> None:
        found = explained(lambda: 0, max_overhead=0.0)
        found = explained(lambda: 0, memory_budget=self.above(found) + 1000)
        assert found.after.peak > self.above(found) + 1000 > found.plan.peak
        assert not any("can't be met" in note for note in found.plan.notes)

    def test_other_plans_of_a_variant_are_told_from_where_the_given_graph_stands(
        self, explained: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Here it is the same graph, said to take a tenth of a step longer, and to be the better one."""
        monkeypatch.setattr(_partition._Planner, "_much_for_layout", lambda *_: True)
        monkeypatch.setattr(_partition._Planner, "_better", lambda *_: True)
        told = _partition._Variant

        def slower(given: Explanation, _: float, note: str) -> Any:
            return told(given, 0.1 * given.plan.step_seconds, note)

        monkeypatch.setattr(_partition, "_Variant", slower)
        first = explained(lambda: 0, max_overhead=10.0)
        sizes = itertools.chain([10**9, 2], itertools.repeat(10**9))
        other = explained(lambda: next(sizes), max_overhead=10.0)
        assert other.plan.dropped != first.plan.dropped
        assert other.plan.peak == self.above(other) + 2
        for found in (first, other):
            made = found.plan
            assert "laid out as they come" in made.notes[0]
            assert made.step_seconds == found.graph.step_seconds
            assert made.extra_seconds >= 0.1 * made.step_seconds
            assert made.base_peak == replay(found.graph, set()).peak

    @pytest.mark.parametrize("error", [CaptureError("its code is in C++"), KeyError("another torch")])
    def test_the_replay_stands_where_the_code_cant_be_looked_at(self, explained: Any, error: Exception) -> None:
        def fail() -> int:
            raise error

        if isinstance(error, CaptureError):
            found = explained(fail, max_overhead=0.0)
        else:
            with pytest.warns(UserWarning, match="the peak is the replay's"):
                found = explained(fail, max_overhead=0.0)
        assert found.plan.peak == found.after.peak
        assert str(error) in found.plan.notes[-1]
