"""Bytes that a CPU's kernels take, as they are extrapolated and as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torch_echo.cost import CostCache, gpu_cost, spec_of
from torch_echo.dry import _cpu
from torch_echo.dry._cpu import CPUKernels
from torch_echo.dry._cuda import GPUKernels

aten = torch.ops.aten


@pytest.fixture
def kernels(tmp_path: Path) -> CPUKernels:
    return CPUKernels(CostCache({"device": "any", "torch": "any", "threads": 1}, tmp_path))


def convolution(batch: int) -> tuple[Any, Any]:
    args = (
        torch.randn(batch, 16, 32, 32),
        torch.randn(16, 16, 3, 3),
        torch.randn(16),
        (1, 1),
        (1, 1),
        (1, 1),
        False,
        (0, 0),
        1,
    )
    return aten.convolution.default, spec_of(aten.convolution.default, args)


def test_a_call_that_is_too_large_is_run_with_fewer_samples(
    kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    func, spec = convolution(24)
    whole = kernels.workspace(func, spec)
    assert whole > 1 << 20
    monkeypatch.setattr(_cpu, "_CONVOLUTION_LIMITS", (1 << 20, 1e12))
    other = CPUKernels(kernels._cache)
    other._known.clear()
    assert other.workspace(func, spec) == pytest.approx(whole, rel=1e-3)
    assert spec not in other._known


def test_as_many_channels_as_samples(kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples, as many channels: a batch normalisation does not look whether its parameters are enough."""
    monkeypatch.setattr(_cpu, "_LIMITS", (1 << 19, 1e12))
    shapes: list[list[Any]] = []
    monkeypatch.setattr(kernels, "_of", lambda func, spec: shapes.append([t.shape for t in spec.tensors()]) or 0)
    x, parameter = torch.randn(32, 32, 16, 16), torch.randn(32)
    args = (x, parameter, parameter, parameter, parameter, True, 0.1, 1e-5)
    func = aten.native_batch_norm.default
    kernels.workspace(func, spec_of(func, args))
    assert shapes
    for given in shapes:
        assert given[0][0] < 32
        assert given[0][1:] == (32, 16, 16)
        assert given[1:] == [(32,)] * 4


def test_a_call_whose_parameters_alone_are_too_large_is_not_run(
    kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cpu, "_CONVOLUTION_LIMITS", (1 << 10, 1e12))
    func, spec = convolution(24)
    assert kernels.workspace(func, spec) == 0 and not kernels._known


@pytest.mark.parametrize("steps", [40, 100])
def test_an_lstm_layer_takes_what_it_does_when_it_runs(kernels: CPUKernels, steps: int) -> None:
    func = aten.mkldnn_rnn_layer.default
    x, states = torch.randn(steps, 8, 24), [torch.zeros(8, 32)] * 2
    weights = [torch.randn(128, 24), torch.randn(128, 32), torch.randn(128), torch.randn(128)]
    spec = spec_of(func, (x, *weights, *states, False, [], 2, 32, 1, True, False, False, True))
    with torch.enable_grad():
        (nbytes,) = kernels.own_outputs(spec).values()
        made = func(x, *weights, *states, False, [], 2, 32, 1, True, False, False, True)
    assert made[3].numel() == nbytes
    assert kernels.workspace(func, spec) == pytest.approx(int(kernels._of(func, spec)), abs=4 * 4096)
    with torch.no_grad():
        assert kernels.own_outputs(spec) == {}


def test_a_gpu_is_as_fast_as_its_data_sheet_says() -> None:
    cost, mm, tanh = gpu_cost(), aten.mm.default, aten.tanh.default
    a = torch.empty(8192, 8192, device="meta")
    assert cost.seconds(mm, spec_of(mm, (a, a))) == pytest.approx(2 * 8192**3 / 2e13, rel=0.01)
    half = a.to(torch.bfloat16)
    assert cost.seconds(mm, spec_of(mm, (half, half))) == pytest.approx(2 * 8192**3 / 6e13, rel=0.01)
    assert cost.seconds(tanh, spec_of(tanh, (a,))) == pytest.approx(2 * a.nbytes / 7e11, rel=0.02)
    assert cost.seconds(tanh, spec_of(tanh, (a[:1, :1],))) == pytest.approx(3e-6, rel=0.01)


def test_a_gpu_sorts_the_indices_of_embeddings() -> None:
    func = aten.embedding_dense_backward.default
    spec = spec_of(
        func, (torch.empty(50, 8, device="meta"), torch.empty(50, dtype=torch.int64, device="meta"), 100, -1, False)
    )
    assert GPUKernels().workspace(func, spec) == 50 * 32
