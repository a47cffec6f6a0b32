"""Kinds of iteration: which one is coming, what makes two alike, and that each has its plan within the budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torch_echo
from torch_echo.options import Options
from torch_echo.tape import _kinds
from torch_echo.tape._entry import Entry
from torch_echo.tape._kinds import MOST_KINDS, Kinds, RootCall, RootKey, StepKind
from torch_echo.tape._recipe import Passes
from torch_echo.tape._record import PeakMeter
from torch_echo.tape.session import Phase, Session

from .models import normal

WIDTH = 64
ROWS = 128


def call(path: str, trained: bool = False, *shape: int) -> RootCall:
    return RootCall(RootKey(path, trained, 0), (shape,))


def missed(iterations: list[list[RootCall]]) -> list[int]:
    """Those that were guessed wrong by their first call."""
    kinds = Kinds()
    wrong = []
    for i, calls in enumerate(iterations):
        guess = kinds.guess((calls[0].key,))
        if kinds.note(calls) is not guess:
            wrong.append(i)
    return wrong


class TestGuess:
    def test_in_turn(self) -> None:
        a, b = [call("g"), call("d")], [call("g"), call("d", True)]
        assert missed([a, b] * 6) == [0, 1, 2]  # the third could have been another b

    def test_five_of_one_and_one_of_the_other(self) -> None:
        a, b = [call("g"), call("d")], [call("g"), call("d", True)]
        assert missed(([a] * 5 + [b]) * 5) == [0, 5, 10]

    def test_by_the_first_call_alone(self) -> None:
        kinds = [[call("a")], [call("b"), call("a")], [call("c")]]
        assert missed([kinds[i] for i in (0, 1, 2, 2, 1, 0, 0, 2, 1, 1)]) == [0, 1, 2]

    def test_again_when_a_call_does_not_fit(self) -> None:
        kinds = Kinds()
        first, second = ([call("trunk"), call(head)] for head in ("a", "b"))
        for calls in (first, second, first):
            kinds.note(calls)
        assert kinds.guess((call("trunk").key, call("b").key)) is kinds.note(second)
        assert kinds.guess((call("other").key,)) is None

    def test_the_past_is_bounded(self) -> None:
        kinds = Kinds()
        for i in range(10 * _kinds.PAST):
            kinds.note([call(f"module{i}")])
        assert len(list(kinds)) <= _kinds.PAST + 1


class TestAlike:
    def test_number_of_calls_and_shapes_do_not_matter(self) -> None:
        kinds = Kinds()
        encoder, decoder = call("encoder", False, 4, 4), call("decoder")
        kind = kinds.note([encoder, decoder, decoder, decoder])
        assert kinds.note([call("encoder", False, 9, 9), decoder]) is kind
        assert kinds.note([encoder]) is not kind
        assert kinds.note([encoder, call("decoder", True)]) is not kind

    def test_which_parameters_are_trained_matters(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        entry = Entry(Session(), model, "model")
        x = torch.ones(2, 2)
        plain = RootCall.of(entry, model, (x,), {})
        assert RootCall.of(entry, model, (), {"x": [x + 1]}) == plain
        assert RootCall.of(entry, model, (x.clone().requires_grad_(),), {}).key != plain.key
        model[1].bias.requires_grad_(False)
        assert RootCall.of(entry, model, (x,), {}).key != plain.key

    def test_the_most_like_of_those_that_have_a_plan(self) -> None:
        kinds = Kinds()
        a, b = kinds.note([call("a")]), kinds.note([call("a"), call("b"), call("c")])
        a.plan = b.plan = object()  # type: ignore[assignment]
        assert kinds.like((call("a", True).key, call("b").key)) is b
        assert kinds.like((call("d").key,)) is None
        assert kinds.like((call("a").key, call("d").key)) is not None
        assert kinds.like((call("a").key, call("d").key), whole=True) is None


class TestDue:
    def test_the_recorded_iteration_was_an_exception(self) -> None:
        kind = StepKind((call("a").key,))
        kind.recorded = [call("a"), call("a")]
        for _ in range(_kinds.UNLIKE):
            assert not kind.due
            kind.compare([call("a")], 1.25)
        assert kind.due

    def test_random_numbers_of_calls_are_none(self) -> None:
        kind = StepKind((call("a").key,))
        kind.recorded = [call("a", False, 5)] * 4
        for n in (2, 3, 4, 3, 2, 4, 1, 3, 4):
            kind.compare([call("a", False, 5)] * n, 1.25)
            assert not kind.due

    def test_far_more_calls_than_the_recorded(self) -> None:
        kind = StepKind((call("a").key,))
        kind.recorded = [call("a", False, 5)] * 4
        for n in (8, 9, 7):
            assert not kind.due
            kind.compare([call("a", False, 5)] * n, 1.25)
        assert kind.due


def net(width: int = WIDTH) -> nn.Module:
    layers = [nn.Linear(WIDTH, width), nn.Tanh(), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def train(models: list[nn.Module], steps: int, first: int = 0) -> None:
    """The models in turn, each with an optimizer; those after the first come from step `first` on."""
    optimizers = [torch.optim.Adam(m.parameters()) for m in models]
    for i in range(steps):
        for model, optimizer in list(zip(models, optimizers, strict=True))[: None if i >= first else 1]:
            optimizer.zero_grad()
            model(normal(i, ROWS, WIDTH)).square().mean().backward()
            optimizer.step()


def planned(session: Session) -> dict[str, StepKind]:
    return {kind.name: kind for kind in session.kinds.planned}


class TestPlans:
    def test_each_kind_is_under_the_budget(self) -> None:
        """With what the other has: gradients and the optimizer's states, also those that come later."""
        torch.manual_seed(0)
        session = Session(Options(max_overhead=100.0, cost="analytic"))
        session.watch_all()
        train([net(), net(2 * WIDTH)], 6)
        session.close()
        kinds = planned(session)
        least = max(kind.plan.peak for kind in kinds.values() if kind.plan)
        most = max(kind.plan.base_peak for kind in kinds.values() if kind.plan)
        assert least < most
        budget = (3 * least + most) // 4
        session = Session(Options(memory_budget=budget, cost="analytic"))
        session.watch_all()
        train([net(2 * WIDTH), net()], 14, first=6)
        session.close()
        kinds = planned(session)
        assert len(kinds) == 2
        assert kinds["Sequential"].records == 2, "recorded again: the other model's optimizer has come"
        for kind in kinds.values():
            assert kind.phase is Phase.STEADY
            assert kind.measured_peak is not None
            assert kind.measured_peak <= budget * 1.005

    def test_a_budget_holds_where_the_peak_was_above_the_plans(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is measured beyond the plan is taken off the budget when it is planned again."""
        torch.manual_seed(0)
        session = Session(Options(max_overhead=100.0, cost="analytic"))
        session.watch_all()
        train([net()], 6)
        session.close()
        (kind,) = session.kinds.planned
        assert kind.plan is not None
        budget = (kind.plan.peak + kind.plan.base_peak) // 2
        unseen = (kind.plan.base_peak - kind.plan.peak) // 4
        measure = PeakMeter.stop
        monkeypatch.setattr(PeakMeter, "stop", lambda meter: (measure(meter) or 0) + unseen)
        session = Session(Options(memory_budget=budget, cost="analytic"))
        session.watch_all()
        train([net()], 8)
        session.close()
        (kind,) = session.kinds.planned
        assert kind.plan is not None
        assert kind.measured_peak is not None
        assert kind.records == 2
        assert kind.plan.peak < kind.measured_peak <= budget

    def test_more_kinds_than_get_a_plan(self) -> None:
        torch.manual_seed(0)
        session = Session(Options(max_overhead=100.0, cost="analytic"))
        session.watch_all()
        train([nn.Linear(WIDTH, 4) for _ in range(MOST_KINDS + 2)], 4)
        session.close()
        assert len(session.kinds.planned) == MOST_KINDS
        (note,) = [why for _, why, _ in session.unhandled]
        assert "of more than" in note

    def test_what_never_gets_a_plan_leaves_nothing_behind(self) -> None:
        """With a budget it runs by the rule that needs none."""
        torch.manual_seed(0)
        session = Session(Options(memory_budget=1 << 40, cost="analytic"))
        session.watch_all()
        models = [nn.Linear(WIDTH, 4) for _ in range(MOST_KINDS)]
        train([*models, net()], 6)
        session.close()
        tape = session._local.online
        assert tape is not None
        assert not tape.slots
        assert sum(map(len, tape.pinned.values())) < 20

    def test_another_model_in_place_of_the_planned_one(self) -> None:
        torch.manual_seed(0)
        session = Session(Options(max_overhead=100.0, cost="analytic"))
        session.watch_all()
        train([net()], 4)
        train([net()], 4)
        session.close()
        (kind,) = session.kinds.planned
        assert kind.records >= 2

    def test_a_graph_that_is_left_to_the_next_iteration(self) -> None:
        """The two are one then, and what is saved in the first is dropped too."""
        torch.manual_seed(0)
        session = Session(Options(max_overhead=100.0, cost="analytic"))
        session.watch_all()
        trunk, head = net(), nn.Linear(8, 8)
        optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.01)
        for i in range(6):
            optimizer.zero_grad()
            features = trunk(normal(i, ROWS, WIDTH))
            head(features.detach()).mean().backward()
            head(features).square().mean().backward()
            optimizer.step()
        session.close()
        (kind,) = session.kinds.planned
        assert kind.passes == 2
        assert kind.plan is not None
        assert kind.graph is not None
        assert any(kind.graph.ops[o].layer.startswith("Sequential") for o in kind.plan.rerun)

    def test_the_plan_that_fits_from_the_second_call_on(self) -> None:
        """Which head an iteration takes does not show in its first call."""
        torch.manual_seed(0)
        trunk, heads = (
            net(),
            [nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.GELU(), nn.Linear(512, 8)) for _ in range(2)],
        )
        session = Session(Options(max_overhead=100.0, cost="analytic"))
        session.watch_all()
        coins = torch.Generator().manual_seed(2)
        for i in range(24):
            before = Passes.rerun
            heads[int(torch.randint(2, (), generator=coins))](trunk(normal(i, ROWS, WIDTH))).mean().backward()
            if i >= 16:
                kind = session._in_force
                assert kind is not None
                assert kind.plan is not None
                assert Passes.rerun - before == len(kind.plan.rerun)
                assert any(kind.graph.ops[o].layer.startswith(kind.key[1].path) for o in kind.plan.rerun)  # type: ignore[union-attr]
        session.close()
        assert len(session.kinds.planned) == 2

    def test_reports_of_several_kinds(self) -> None:
        torch.manual_seed(0)
        session = Session(Options(max_overhead=100.0, cost="analytic"))
        session.watch_all()
        train([net(), net(2 * WIDTH)], 6)
        session.close()
        summary, explanation = session.summary(), session.explanation()
        assert explanation is not None
        assert [k.steps for k in summary.kinds] == [6, 6]
        assert summary.eager_peak == max(k.eager_peak for k in summary.kinds) == explanation.before.peak
        assert summary.measured_peak == max(k.measured_peak or 0 for k in summary.kinds)
        assert len(explanation.others) == 1
        assert "iterations of Sequential#2 (6 so far)" in str(explanation)
        assert str(explanation).count("least reachable") == 2

    def test_explain(self) -> None:
        models = [net(), net(2 * WIDTH)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]

        def step() -> Tensor:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(normal(0, ROWS, WIDTH)).square().mean()
                loss.backward()
                optimizer.step()
            return loss

        assert len(torch_echo.explain(step, cost="analytic").others) == 1
