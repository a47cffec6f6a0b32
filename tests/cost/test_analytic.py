from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_echo.cost import AnalyticCost, CostCache, spec_of
from torch_echo.cost import _analytic as module

from ._calls import aten, calls, randn

CALLS = calls()
CPU = torch.device("cpu")
KEY: dict[str, str | int] = {"device": "any", "torch": "any", "threads": 1}
RATES = {
    "launch": 1e-6, "peak float32": 1e11, "peak float64": 5e10, "peak bfloat16": 2e11, "per fresh byte": 5e-10,
    "copy 262144": 1e-5, "copy 1048576": 4e-5, "copy 8388608": 5e-4, "copy 33554432": 3e-3,
    **{f"per element {name}": 2e-9 for name in module._REPRESENTATIVES},
}  # fmt: skip


@pytest.fixture
def cost() -> AnalyticCost:
    """A device of known speed."""
    cache = CostCache(KEY)
    for name, rate in RATES.items():
        cache.set("rates", name, rate)
    return AnalyticCost(cache, CPU)


def seconds(cost: AnalyticCost, func: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> float:
    spec = spec_of(func, [torch.empty(s, dtype=dtype, device="meta") for s in shapes])
    return cost.seconds(func, spec)


def test_a_large_product_is_bound_by_flops(cost: AnalyticCost) -> None:
    assert seconds(cost, aten.mm.default, (1000, 1000), (1000, 1000)) == pytest.approx(2e9 / 1e11, rel=1e-3)
    assert seconds(cost, aten.mm.default, (1000, 1000), (1000, 1000), dtype=torch.bfloat16) == pytest.approx(
        0.01, rel=1e-3
    )


def test_a_thin_product_and_an_addition_are_bound_by_bytes(cost: AnalyticCost) -> None:
    thin = seconds(cost, aten.mm.default, (1, 2048), (2048, 1024))
    assert thin == pytest.approx(1e-6 + cost.copy_seconds(4 * (2048 + 2048 * 1024 + 1024)))
    assert seconds(cost, aten.add.Tensor, (512, 512), (512, 512)) == pytest.approx(1e-6 + cost.copy_seconds(3 << 20))


def test_transcendental_and_random_ops_by_elements(cost: AnalyticCost) -> None:
    for func in (aten.tanh.default, aten.tanh_.default, aten.erf.default, aten.exponential_.default):
        assert seconds(cost, func, (1000, 1000)) == pytest.approx(1e-6 + 2e-3)
    assert seconds(cost, aten.relu.default, (1000, 1000)) < 1e-3


def test_views_cost_a_launch(cost: AnalyticCost) -> None:
    assert cost.seconds(aten.view.default, spec_of(*CALLS["view"])) == 1e-6


def test_a_block_that_is_always_fresh_costs_its_pages(cost: AnalyticCost) -> None:
    below = seconds(cost, aten.relu.default, (31, 1 << 18))
    above = seconds(cost, aten.relu.default, (32, 1 << 18))
    assert above - below > (32 << 20) * 5e-10


@pytest.mark.parametrize("func", [aten.relu.default, aten.tanh.default, aten.native_dropout.default])
def test_more_elements_never_take_less_time(cost: AnalyticCost, func: Any) -> None:
    extra = (0.5, True) if func is aten.native_dropout.default else ()
    sizes = [1 << n for n in range(4, 28)]
    specs = [spec_of(func, (torch.empty(n, device="meta"), *extra)) for n in sizes]
    times = [cost.seconds(func, spec) for spec in specs]
    assert times == sorted(times)
    assert times[-1] > 100 * times[0]


def test_larger_products_never_take_less_time(cost: AnalyticCost) -> None:
    times = [seconds(cost, aten.mm.default, (n, n), (n, n)) for n in (8, 32, 128, 512, 2048)]
    assert times == sorted(times)


def test_copies_grow_even_if_the_calibration_was_disturbed(cost: AnalyticCost) -> None:
    cost._cache.set("rates", "copy 262144", 1e-3)
    times = [cost.copy_seconds(n) for n in range(0, 1 << 26, 1 << 17)]
    assert times == sorted(times)


class TestCalibration:
    def test_it_is_real_is_done_once_and_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = torch.get_rng_state()
        cost = AnalyticCost(CostCache(KEY), CPU)
        specs = [spec_of(*CALLS[name]) for name in ("addmm", "native_dropout", "add of an expanded tensor")]
        funcs = [CALLS[name][0] for name in ("addmm", "native_dropout", "add of an expanded tensor")]
        times = [cost.seconds(f, s) for f, s in zip(funcs, specs, strict=True)]
        assert min(times) > 0
        assert torch.equal(torch.get_rng_state(), before)
        cost.save()

        def never(*_: Any, **__: Any) -> float:
            raise AssertionError("calibrated again")

        monkeypatch.setattr(module, "measure", never)
        later = AnalyticCost(CostCache(KEY), CPU)
        assert [later.seconds(f, s) for f, s in zip(funcs, specs, strict=True)] == times

    @pytest.mark.parametrize("representative", module._REPRESENTATIVES)
    def test_every_representative_can_be_measured(self, representative: str) -> None:
        assert AnalyticCost(CostCache(KEY), CPU).rate(representative) > 0

    def test_dtypes_without_a_product_take_the_peak_of_another(self) -> None:
        cost = AnalyticCost(CostCache(KEY), CPU)
        cost._cache.set("rates", "peak float32", 1e11)
        assert cost.peak("bool") == 1e11


def test_real_arguments_give_the_same_as_their_description(cost: AnalyticCost) -> None:
    x = randn(64, 64)
    real = cost.seconds(aten.relu.default, spec_of(aten.relu.default, (x,)))
    assert real == seconds(cost, aten.relu.default, (64, 64))
