"""From what the user asks for to a plan with reasons."""

from __future__ import annotations

import pytest

from torch_echo.errors import BudgetInfeasible, OptionError
from torch_echo.footprint import replay
from torch_echo.graph import Kind, TrainingGraph, Trait
from torch_echo.planning import Decision, Plan, front, plan

from .graphs import Builder, transformer

GRAPH = transformer(4)


def decision(made: Plan, name: str, layer: str) -> Decision:
    return next(d for d in made.decisions if (d.name, d.layer) == (name, layer))


def test_default_is_three_percent() -> None:
    made = plan(GRAPH)
    assert made == plan(GRAPH, max_overhead=0.05)
    assert 0 < made.overhead <= 0.05
    assert made.peak < made.base_peak
    assert made.policy == "echo"


def test_a_plan_is_what_the_replay_says() -> None:
    made = plan(GRAPH, max_overhead=0.1)
    footprint = replay(GRAPH, made.dropped)
    assert (made.peak, made.rerun) == (footprint.peak, footprint.rerun)
    assert made.extra_seconds == pytest.approx(footprint.extra_seconds)
    assert made.base_peak == replay(GRAPH).peak
    assert made.step_seconds == GRAPH.step_seconds


def test_a_budget_is_met() -> None:
    base, floor = plan(GRAPH).base_peak, plan(GRAPH).floor
    for budget in range(floor, base, (base - floor) // 7):
        assert plan(GRAPH, budget=budget).peak <= budget
    assert plan(GRAPH, budget=base).dropped == frozenset()


def test_no_overhead_means_nothing_that_costs_time() -> None:
    assert plan(GRAPH, max_overhead=0.0).extra_seconds == 0.0


def test_an_infeasible_budget_says_what_holds_the_floor() -> None:
    with pytest.raises(BudgetInfeasible, match="can't be met: the least reachable peak is") as caught:
        plan(GRAPH, budget=1000)
    assert caught.value.budget == 1000
    assert caught.value.floor == plan(GRAPH).floor
    assert sum(n for _, _, n in caught.value.composition) == caught.value.floor
    assert caught.value.composition[0][1] in set(Kind)
    assert "\n" not in str(caught.value)


def test_or_the_least_is_taken() -> None:
    made = plan(GRAPH, budget=1000, on_infeasible="least")
    assert made.peak == made.floor
    assert any("can't be met" in note for note in made.notes)


def test_a_front_can_be_reused() -> None:
    made = front(GRAPH)
    assert plan(GRAPH, max_overhead=0.05, front=made).dropped == plan(GRAPH, max_overhead=0.05).dropped


def test_paper_policy() -> None:
    made = plan(GRAPH, policy="paper")
    assert made.policy == "paper"
    assert all(GRAPH.ops[o].name not in ("addmm", "attention") for o in made.rerun)
    with pytest.raises(BudgetInfeasible):
        plan(GRAPH, policy="paper", budget=made.peak - 1)


def test_echo_is_never_worse_than_the_paper() -> None:
    paper = plan(GRAPH, policy="paper")
    echo = plan(GRAPH, budget=paper.peak)
    assert echo.extra_seconds <= paper.extra_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 5, "max_overhead": 0.1}, "contradict"),
        ({"budget": 0}, "budget=0"),
        ({"max_overhead": -0.1}, "max_overhead=-0.1"),
        ({"max_overhead": float("nan")}, "max_overhead=nan"),
        ({"policy": "best"}, "policy='best'"),
        ({"on_infeasible": "ignore"}, "on_infeasible='ignore'"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan(GRAPH, **options)


class TestDecisions:
    def test_totals(self) -> None:
        made = plan(GRAPH, max_overhead=0.1)
        assert sum(d.seconds_more for d in made.decisions) == pytest.approx(made.extra_seconds)
        assert sum(d.n_dropped for d in made.decisions) == len(made.rerun)
        assert {d.action for d in made.decisions} == {"keep", "rebuild"}
        assert [d.bytes_dropped for d in made.decisions] == sorted(
            (d.bytes_dropped for d in made.decisions), reverse=True
        )

    def test_a_rebuilt_one_says_from_what(self) -> None:
        d = decision(plan(GRAPH, max_overhead=0.1), "dropout", "h.0")
        assert (d.action, d.instances, d.n_dropped) == ("rebuild", 1, 1)
        assert d.rebuilt_from == ("h.0:gelu",)
        assert d.bytes_dropped == 5 * 256 * 64 * 4
        assert d.seconds_more > 0

    def test_reasons_to_keep(self) -> None:
        b = Builder()
        x = b.op("all_reduce", [b.outside(1)], [10], layer="a", traits=Trait.KEEP, saves=["out0"])[0]
        y = b.op("tanh", [x], [10], layer="b", saves=["out0"])[0]
        b.hold(y)
        b.op("mm", [y], [10], 100.0, layer="c", saves=["out0"])
        made = plan(b.backward())
        assert decision(made, "all_reduce", "a").reason == "the op must not be re-run"
        assert decision(made, "tanh", "b").reason == "in memory anyway for as long as backward needs it"
        assert "takes 1e+05 ms for 10 B" in decision(made, "mm", "c").reason

    def test_nothing_to_decide(self) -> None:
        assert plan(TrainingGraph()).decisions == []
