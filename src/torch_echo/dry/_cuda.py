"""How PyTorch's functions choose their ops on a GPU, for steps that are run on a CPU.

Some functions look at the device: dropout is one op there, a recurrent layer is cuDNN's, the cells of LSTM and GRU and attention
are fused, optimizers take all parameters at once. All else is made of the same ops on both. What cuDNN's and cuBLAS's
kernels allocate for themselves depends on their choice of algorithms on the device, and is an estimate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_echo import compat
from torch_echo.cost import OpSpec

__all__ = ["CUBLAS_WORKSPACE", "GRANULE", "GPUKernels", "as_on_gpu"]

GRANULE = 512
"""PyTorch's allocator gives out multiples of this many bytes."""

CUBLAS_WORKSPACE = 8_519_680
"""Bytes that the first matrix product allocates for good: 2 blocks of 4 MiB and 8 of 16 KiB."""


class GPUKernels:
    """What is known of a GPU's kernels."""

    def own_outputs(self, spec: OpSpec) -> dict[int, int]:
        """See :class:`torch_echo.dry._kernels.Kernels`."""
        return {}

    def workspace(self, func: Any, spec: OpSpec) -> int:
        """See :class:`torch_echo.dry._kernels.Kernels`."""
        if spec.op == "aten.embedding_dense_backward.default":
            return 32 * int(spec.args[1].numel())  # indices and their origins, before and after sorting
        return 0


def as_on_gpu() -> Any:
    """Context: functions that look at the device of their arguments choose as if that were a GPU."""
    return compat.instead(_INSTEAD)


def _dropout(input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    if not train or not 0 < p < 1 or not input.numel():
        return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


def _lstm_cell(
    input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    gates = input @ w_ih.t(), hx[0] @ w_hh.t()
    out: tuple[Tensor, ...] = torch.ops.aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return out[0], out[1]


def _gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    gates = input @ w_ih.t(), hx @ w_hh.t()
    out: tuple[Tensor, ...] = torch.ops.aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)
    return out[0]


def _rnn(mode: int, packed: bool) -> Any:
    def run(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        if packed:
            sizes, state, weights, biased, layers, dropout, train, both = rest
            first = False
        else:
            sizes, (state, weights, biased, layers, dropout, train, both, first) = None, rest
        hx, cx = (state, None) if isinstance(state, Tensor) else state
        hidden = (hx if cx is None else cx).shape[2]
        projected = hx.shape[2] if hx.shape[2] != hidden else 0
        out: tuple[Tensor, ...] = torch.ops.aten._cudnn_rnn(
            x, weights, 2 + 2 * bool(biased) + bool(projected), None, hx, cx, mode, hidden, projected, layers, first, dropout,
            train, both, [] if sizes is None else sizes.tolist(), None,
        )  # fmt: skip
        return out[:2] if cx is None else out[:3]

    return run


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # Flash attention, for half precision and without a mask, keeps and makes the same tensors.
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), float("-inf")
            )
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    out: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )
    return out[0]


_INSTEAD: dict[str, Any] = {
    "dropout": _dropout,
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "scaled_dot_product_attention": _attention,
    **{
        f"{name}.{sort}": _rnn(mode, sort == "data")
        for mode, name in enumerate(("rnn_relu", "rnn_tanh", "lstm", "gru"))
        for sort in ("input", "data")
    },
}
"""By the op that PyTorch's functions in C++ dispatch on."""
