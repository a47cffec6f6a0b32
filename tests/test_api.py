"""The functions that scripts call: torch_echo.apply, torch_echo.explain."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import torch_echo
from torch_echo.graphio import load_graph, save_graph
from torch_echo.report.explanation import Explanation


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(32) for _ in range(4)])


def train(net: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    losses = []
    for i in range(steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = net(torch.randn(256, 32)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class TestApply:
    def test_same_bits_in_less_memory(self) -> None:
        plain = train(model(), 6)
        net = model()
        with torch_echo.apply(net, max_overhead=1.0, cost="analytic") as handle:
            assert train(net, 6) == plain
            report = handle.report()
        assert report.after.peak < 0.9 * report.before.peak
        summary = handle.summary()
        assert summary.measured_peak == pytest.approx(report.after.peak, rel=0.005)
        assert summary.steps == 6
        assert summary.rebuilt

    def test_the_model_is_untouched(self) -> None:
        net = model()
        keys, kind = list(net.state_dict()), type(net)
        with torch_echo.apply(net, max_overhead=1.0, cost="analytic"):
            train(net, 4)
            assert list(net.state_dict()) == keys
            assert type(net) is kind
            again = pickle.loads(pickle.dumps(net))
            torch.save(net, io.BytesIO())
            average = copy.deepcopy(net)
        assert "torch_echo" not in repr(vars(net))
        for other in (again, average):
            assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))

    def test_remove_is_idempotent_and_leaves_nothing(self) -> None:
        call, backward = nn.Module.__call__, torch.autograd.graph._engine_run_backward
        net = model()
        handle = torch_echo.apply(net)
        assert nn.Module.__call__ is not call
        train(net, 4)
        handle.remove()
        handle.remove()
        assert nn.Module.__call__ is call
        assert torch.autograd.graph._engine_run_backward is backward

    def test_a_step_under_way_ends_as_it_began(self) -> None:
        reference = model()
        train(reference, 5)
        net = model()
        handle = torch_echo.apply(net, max_overhead=1.0, cost="analytic")
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for i in range(5):
            torch.manual_seed(i)
            optimizer.zero_grad()
            loss = net(torch.randn(256, 32)).square().mean()
            if i == 4:
                handle.remove()
            loss.backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), reference.parameters(), strict=True))

    def test_no_plan_yet(self) -> None:
        with (
            torch_echo.apply(model()) as handle,
            pytest.raises(torch_echo.CaptureError, match="no plan yet: 0 training steps"),
        ):
            handle.report()

    def test_infeasible_budget(self) -> None:
        net = model()
        with (
            torch_echo.apply(net, memory_budget="100KiB", cost="analytic"),
            pytest.raises(torch_echo.BudgetInfeasible, match=r"100\.0 KiB") as error,
        ):
            train(net, 5)
        assert error.value.budget == 100 * 1024
        assert error.value.floor > error.value.budget
        assert error.value.composition

    def test_least(self) -> None:
        net = model()
        plain = train(model(), 5)
        with torch_echo.apply(net, memory_budget="100KiB", cost="analytic", on_infeasible="least") as handle:
            assert train(net, 5) == plain
            report = handle.report()
        assert report.after.peak == report.plan.floor

    def test_a_feasible_budget_is_met_at_the_allocator(self) -> None:
        net = model()
        with torch_echo.apply(net, max_overhead=1.0, cost="analytic") as handle:
            train(net, 4)
            least, most = handle.report().after.peak, handle.report().before.peak
        net = model()
        budget = (least + most) // 2
        with torch_echo.apply(net, memory_budget=budget, cost="analytic") as handle:
            train(net, 5)
            peak = handle.summary().measured_peak
        assert peak is not None
        assert peak <= budget * 1.005

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"memory_budget": "lots"}, "memory_budget='lots'"),
            ({"memory_budget": -1}, "memory_budget=-1"),
            ({"max_overhead": -0.1}, r"max_overhead=-0\.1"),
            ({"max_overhead": float("nan")}, "max_overhead=nan"),
            ({"max_overhead": 0.1, "memory_budget": "1GiB"}, "contradict"),
            ({"policy": "magic"}, "policy='magic'"),
            ({"cost": "guess"}, "cost='guess'"),
            ({"on_infeasible": "pray"}, "on_infeasible='pray'"),
            ({"strict": "yes"}, "strict='yes'"),
        ],
    )
    def test_bad_options(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(torch_echo.OptionError, match=message):
            torch_echo.apply(model(), **options)  # type: ignore[arg-type]

    def test_not_a_model(self) -> None:
        with pytest.raises(torch_echo.OptionError, match="must be a torch"):
            torch_echo.apply("model")  # type: ignore[arg-type]

    def test_unsupported_device(self) -> None:
        with pytest.raises(torch_echo.UnsupportedDevice, match="meta"):
            torch_echo.apply(model().to("meta"))

    def test_the_papers_rule(self) -> None:
        net, plain = model(), train(model(), 5)
        with torch_echo.apply(net, policy="paper", cost="analytic") as handle:
            assert train(net, 5) == plain
            assert handle.report().plan.policy == "paper"

    def test_evaluation_is_left_alone(self) -> None:
        net = model()
        with torch_echo.apply(net, max_overhead=1.0, cost="analytic") as handle:
            train(net, 4)
            steps = handle.summary().steps
            net.eval()
            with torch.no_grad():
                net(torch.randn(8, 32))
            net(torch.randn(8, 32)).sum().backward()
            assert handle.summary().steps == steps


class TestExplain:
    def step(self, net: nn.Module) -> None:
        net(torch.randn(256, 32)).square().mean().backward()
        net.zero_grad()

    def test_prints_as_a_table(self) -> None:
        net = model()
        text = str(torch_echo.explain(lambda: self.step(net), max_overhead=1.0, cost="analytic"))
        assert "peak memory" in text
        assert "Sequential" in text
        assert "gelu" in text

    def test_nothing_stays_installed(self) -> None:
        call = nn.Module.__call__
        net = model()
        torch_echo.explain(lambda: self.step(net), cost="analytic")
        assert nn.Module.__call__ is call

    def test_not_a_training_step(self) -> None:
        with pytest.raises(torch_echo.CaptureError, match="called no module for training"):
            torch_echo.explain(lambda: None)

    def test_no_backward(self) -> None:
        net = model()
        with pytest.raises(torch_echo.CaptureError):
            torch_echo.explain(lambda: net(torch.randn(4, 32)))

    def test_a_graph_file_says_the_same(self, tmp_path: object) -> None:
        net = model()
        explanation = torch_echo.explain(lambda: self.step(net), max_overhead=0.5, cost="analytic")
        path = f"{tmp_path}/graph"
        save_graph(explanation.graph, path)
        assert load_graph(path) == explanation.graph
        from torch_echo.options import Options

        assert Explanation.of_file(path, Options(max_overhead=0.5)).before.peak == explanation.before.peak


def test_strict_makes_an_error_of_what_is_left_out() -> None:
    net = model()
    handle = torch_echo.apply(net, strict=True, cost="analytic")
    try:
        with pytest.raises(torch_echo.CaptureError, match="hooks of another tool"), torch.autograd.graph.save_on_cpu():
            train(net, 4)
    finally:
        handle.remove()


def test_left_out_once_with_its_line() -> None:
    net = model()
    with torch_echo.apply(net, cost="analytic") as handle:
        with warnings.catch_warnings(), torch.autograd.graph.save_on_cpu():
            train(net, 4)
        what, why, where = handle.summary().unhandled[0]
    assert what == "Sequential"
    assert "saved-tensor hooks of another tool" in why
    assert "test_api.py:" in where
    assert len(handle.summary().unhandled) == 1
