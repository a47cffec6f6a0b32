from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_echo.cost import CostModel, MeasuredCost, OpSpec, get_cost_model, measure, spec_of
from torch_echo.cost import _measured as module
from torch_echo.errors import OptionError, UnsupportedDevice

from ._calls import aten, calls, lstm_calls, randn, record

CALLS = calls()


@pytest.fixture
def cost() -> MeasuredCost:
    model = get_cost_model("measured", "cpu")
    assert isinstance(model, MeasuredCost)
    return model


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops that are measured."""
    seen: list[str] = []

    def counted(func: Any, spec: OpSpec, **_: Any) -> float:
        seen.append(spec.op)
        return 1e-6

    monkeypatch.setattr(module, "measure", counted)
    return seen


class TestMeasure:
    @pytest.mark.parametrize("name", CALLS)
    def test_every_call_can_be_measured_and_leaves_no_trace(self, name: str) -> None:
        func, args, kwargs = CALLS[name]
        before = torch.get_rng_state()
        assert 0 < measure(func, spec_of(func, args, kwargs)) < 10
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.is_grad_enabled()

    def test_random_ops_go_on_as_if_nothing_had_been_measured(self) -> None:
        torch.manual_seed(1)
        expected = torch.rand(4)
        torch.manual_seed(1)
        measure(aten.native_dropout.default, spec_of(*CALLS["native_dropout"]))
        assert torch.equal(torch.rand(4), expected)

    def test_an_op_that_fails_leaves_no_trace_either(self) -> None:
        specs = [spec_of(aten.mm.default, (randn(2, 3), randn(4, 5))), spec_of(aten.tanh.default, (randn(3),))]
        before = torch.get_rng_state()

        def broken(x: torch.Tensor) -> None:
            torch.rand(3)
            raise RuntimeError("broken")

        with pytest.raises(RuntimeError):
            measure(aten.mm.default, specs[0])
        broken._schema = aten.tanh.default._schema  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="broken"):
            measure(broken, specs[1])
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.is_grad_enabled()

    def test_it_is_below_autograd_and_autocast(self) -> None:
        seen: list[tuple[bool, torch.dtype]] = []

        def spy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = aten.mm.default(a, b)
            seen.append((torch.is_grad_enabled(), out.dtype))
            return out

        spy._schema = aten.mm.default._schema  # type: ignore[attr-defined]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            measure(spy, spec_of(aten.mm.default, (randn(4, 4), randn(4, 4))))
            assert torch.is_autocast_enabled("cpu")
        assert set(seen) == {(True, torch.float32)}  # as in a training forward: kernels ask

    def test_a_dispatch_mode_does_not_see_it(self) -> None:
        spec = spec_of(aten.tanh.default, (randn(4),))
        assert not record(lambda: measure(aten.tanh.default, spec))

    def test_an_in_place_op_starts_each_run_from_the_same_content(self) -> None:
        seen: list[float] = []

        def spy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.append(float(x[0]))
            return x.add_(y)

        spy._schema = aten.add_.Tensor._schema  # type: ignore[attr-defined]
        measure(spy, spec_of(aten.add_.Tensor, (randn(4), randn(4))))
        assert len(seen) >= 4
        assert len(set(seen)) == 1

    def test_a_long_op_runs_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LONG", 0.0)
        seen: list[int] = []

        def spy(x: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return x

        spy._schema = aten.tanh.default._schema  # type: ignore[attr-defined]
        measure(spy, spec_of(aten.tanh.default, (randn(4),)))
        assert len(seen) == 2


class TestModel:
    def test_each_op_is_measured_once(self, cost: MeasuredCost, runs: list[str]) -> None:
        spec = spec_of(aten.tanh.default, (randn(4),))
        assert cost.seconds(aten.tanh.default, spec) == cost.seconds(aten.tanh.default, spec) == 1e-6
        cost.seconds(aten.tanh.default, spec_of(aten.tanh.default, (randn(5),)))
        assert runs == ["aten.tanh.default"] * 2

    def test_and_not_again_in_a_later_process(self, cost: MeasuredCost, runs: list[str]) -> None:
        spec = spec_of(aten.tanh.default, (randn(4),))
        cost.seconds(aten.tanh.default, spec)
        cost.save()
        later = get_cost_model("measured", "cpu")
        assert later.seconds(aten.tanh.default, spec) == 1e-6
        assert len(runs) == 1

    def test_views_of_one_op_are_measured_once(self, cost: MeasuredCost, runs: list[str]) -> None:
        x = randn(9, 4)
        for t in range(9):
            cost.seconds(aten.select.int, spec_of(aten.select.int, (x, 0, t)))
        assert len(runs) == 1

    def test_what_a_recurrent_layer_dispatches(self, cost: MeasuredCost) -> None:
        for func, args, kwargs in lstm_calls():
            assert cost.seconds(func, spec_of(func, args, kwargs)) > 0
        assert not cost.fallbacks


class TestFallback:
    def test_made_up_data_that_does_not_suit(self, cost: MeasuredCost) -> None:
        func = aten._pack_padded_sequence.default
        spec = spec_of(func, (randn(3, 2, 4), torch.tensor([3, 2]), False))
        assert cost.seconds(func, spec) > 0
        [(key, reason)] = cost.fallbacks.items()
        assert key == spec.key()
        assert "RuntimeError" in reason
        assert "\n" not in reason

    def test_sparse_arguments(self, cost: MeasuredCost) -> None:
        spec = spec_of(aten.neg.default, (torch.eye(3).to_sparse(),))
        assert cost.seconds(aten.neg.default, spec) > 0
        assert "sparse_coo" in cost.fallbacks[spec.key()]

    def test_ops_that_may_do_more_than_compute_are_not_run(self, cost: MeasuredCost) -> None:
        seen: list[int] = []

        @torch.library.custom_op("echo_cost_test::send", mutates_args=())
        def send(x: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return x.clone()

        func = torch.ops.echo_cost_test.send.default
        assert cost.seconds(func, spec_of(func, (randn(4),))) > 0
        assert not seen
        assert "echo_cost_test" in next(iter(cost.fallbacks.values()))

    def test_what_does_not_fit_into_memory_is_not_tried(
        self, cost: MeasuredCost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_free_bytes", lambda device: 1000)
        spec = spec_of(aten.tanh.default, (randn(100),))
        assert cost.seconds(aten.tanh.default, spec) > 0
        assert "800 bytes needed, 1000 free" in cost.fallbacks[spec.key()]

    def test_an_estimate_is_not_stored_as_a_measurement(self, cost: MeasuredCost) -> None:
        spec = spec_of(aten.neg.default, (torch.eye(3).to_sparse(),))
        cost.seconds(aten.neg.default, spec)
        cost.save()
        later = get_cost_model("measured", "cpu")
        assert isinstance(later, MeasuredCost)
        later.seconds(aten.neg.default, spec)
        assert len(later.fallbacks) == 1


def test_unknown_names() -> None:
    model: CostModel = get_cost_model("analytic", torch.device("cpu"))
    assert model.seconds(aten.view.default, spec_of(*CALLS["view"])) > 0
    with pytest.raises(OptionError, match=r"cost='exact'.*'measured', 'analytic'"):
        get_cost_model("exact", "cpu")
    with pytest.raises(UnsupportedDevice, match="meta"):
        get_cost_model("measured", "meta")
