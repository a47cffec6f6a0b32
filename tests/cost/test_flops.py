from __future__ import annotations

import pytest
import torch

from torch_echo.cost import spec_of, work_of

from ._calls import aten, calls, lstm_calls, randn

CALLS = calls()


def test_matrix_products_and_convolutions() -> None:
    assert work_of(aten.mm.default, spec_of(aten.mm.default, (randn(3, 4), randn(4, 5)))).flops == 2 * 3 * 4 * 5
    assert work_of(aten.addmm.default, spec_of(*CALLS["addmm"])).flops == 2 * 3 * 4 * 5
    assert work_of(aten.convolution.default, spec_of(*CALLS["convolution"])).flops == 2 * (2 * 8 * 8) * 6 * 4 * 9


def test_backward_of_a_convolution_with_a_part_left_out() -> None:
    args = (randn(2, 6, 8, 8), randn(2, 4, 8, 8), randn(6, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    func = aten.convolution_backward.default
    both = work_of(func, spec_of(func, (*args, [True, True, False]))).flops
    weight = work_of(func, spec_of(func, (*args, [False, True, False]))).flops
    assert both == 2 * weight > 0


def test_recurrent_layer() -> None:
    work = next(work_of(f, spec_of(f, a, k)) for f, a, k in lstm_calls() if "rnn_layer" in str(f))
    assert work.flops == 2 * 5 * 3 * (4 * 16 * 8 + 4 * 16 * 16)


def test_attention_on_the_cpu() -> None:
    func = aten._scaled_dot_product_flash_attention_for_cpu.default
    work = work_of(func, spec_of(func, (randn(2, 4, 16, 8), randn(2, 4, 16, 8), randn(2, 4, 16, 8))))
    assert work.flops == 2 * (2 * 2 * 4 * 16 * 16 * 8)


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("add of an expanded tensor", 4 * (24 + 8), 4 * 24),
        ("embedding", 4 * 21 * 4 + 8 * 21, 4 * 21 * 4),  # the rows that it copies, not the table
        ("bernoulli_", 0, 4 * 64),
        ("view", 0, 0),
        ("native_dropout", 4 * 64, 4 * 64 + 64),
        ("_to_copy", 4 * 24, 8 * 24),
        ("cat", 4 * 18, 4 * 18),
        ("full", 0, 4 * 6),
        ("index_put_", 4 * 45 + 8 * 3 + 4 * 15, 4 * 45),
        ("bfloat16 mm", 2 * (12 + 20), 2 * 15),
    ],
)
def test_bytes(name: str, read: int, written: int) -> None:
    func, args, kwargs = CALLS[name]
    work = work_of(func, spec_of(func, args, kwargs))
    assert (work.bytes_read, work.bytes_written) == (read, written)
    assert work.bytes_moved == read + written


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_an_estimate_and_leaves_the_generator_alone(name: str) -> None:
    func, args, kwargs = CALLS[name]
    before = torch.get_rng_state()
    work = work_of(func, spec_of(func, args, kwargs))
    assert min(work.flops, work.bytes_read, work.bytes_written, work.elements) >= 0
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_that_depend_on_data_are_bounded_by_the_input() -> None:
    func, args, kwargs = CALLS["index by a mask"]
    assert work_of(func, spec_of(func, args, kwargs)).bytes_written == 4 * 45
