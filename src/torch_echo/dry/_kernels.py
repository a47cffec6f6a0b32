"""What is known of a device's kernels beyond what fake tensors tell: sizes of some outputs, and bytes that kernels allocate for
themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torch_echo.cost import OpSpec

__all__ = ["OUTPUTS", "Kernels", "Made"]


class Kernels(Protocol):
    """The kernels of one device."""

    def own_outputs(self, spec: OpSpec) -> dict[int, int]:
        """Bytes of those outputs of a call that fake tensors declare as empty, by position."""
        ...

    def workspace(self, func: Any, spec: OpSpec) -> int:
        """Most bytes that the kernel of a call holds beyond its outputs."""
        ...


@dataclass(slots=True)
class Made:
    """A tensor that a call makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def dense(cls, dtype: torch.dtype, *shape: int) -> Made:
        """With its elements in order."""
        stride, n = [], 1
        for size in reversed(shape):
            stride.append(n)
            n *= size
        return cls(shape, tuple(reversed(stride)), dtype)

    def make(self) -> torch.Tensor:
        """Memory for it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


def _ctc_loss(scores: torch.Tensor, _: Any, lengths: Any, targets: Any, *rest: Any) -> tuple[Made, ...]:
    losses, steps = len(lengths), scores.shape[0]
    return Made.dense(scores.dtype, losses), Made.dense(scores.dtype, losses, steps, 2 * int(max(targets)) + 1)


def _ctc_loss_backward(grad: torch.Tensor, scores: torch.Tensor, *rest: Any) -> Made:
    return Made.dense(scores.dtype, *scores.shape)


def _cudnn_rnn(
    x: torch.Tensor, weights: Any, stride: int, buffer: Any, hx: torch.Tensor, cx: Any, mode: int, hidden: int, projected: int,
    layers: int, batch_first: bool, dropout: float, train: bool, both: bool, sizes: Any, *rest: Any,
) -> tuple[Made, ...]:  # fmt: skip
    directions, batch, dtype = 1 + both, hx.shape[1], x.dtype
    width = directions * (projected or hidden)
    rows = x.shape[0] if sizes else x.shape[0] * x.shape[1]
    if sizes:
        out = Made.dense(dtype, x.shape[0], width)
    elif batch_first:
        out = Made((batch, x.shape[1], width), (width, batch * width, 1), dtype)
    else:
        out = Made.dense(dtype, x.shape[0], batch, width)
    states = [
        Made.dense(dtype, layers * directions, batch, n) for n in (projected or hidden, hidden if cx is not None else 0)
    ]
    # Gates, cell states and their activations of each step; what goes from layer to layer, and its dropout mask.
    values = rows * hidden * directions * (_CUDNN_VALUES[mode] * layers + 2 * (layers - 1))
    return out, *states, Made.dense(torch.uint8, values * dtype.itemsize if train else 0), Made.dense(dtype, 0)


_CUDNN_VALUES = {0: 1, 1: 1, 2: 6, 3: 5}
"""Values that cuDNN's RNN, with ReLU or tanh, LSTM and GRU keep for each unit and step: an estimate, for it does not say."""


def _cudnn_rnn_backward(
    x: torch.Tensor, weights: Any, stride: int, buffer: Any, hx: torch.Tensor, cx: Any, *rest: Any
) -> Any:
    grads = [Made.dense(w.dtype, *w.shape) for w in weights]
    states = [Made.dense(h.dtype, *h.shape) if h is not None else Made.dense(x.dtype, 0) for h in (hx, cx)]
    return Made.dense(x.dtype, *x.shape), *states, grads


def _fused_gru_cell(gates: torch.Tensor, _: Any, hx: torch.Tensor, *rest: Any) -> tuple[Made, ...]:
    rows, width = hx.shape
    return Made.dense(hx.dtype, rows, width), Made.dense(hx.dtype, rows, 5 * width)


def _fused_gru_cell_backward(grad: torch.Tensor, left: Any, biased: bool) -> tuple[Made, ...]:
    rows, width = grad.shape
    bias = Made.dense(grad.dtype, 3 * width if biased else 0)
    gates = Made.dense(grad.dtype, rows, 3 * width)
    return gates, gates, Made.dense(grad.dtype, rows, width), bias, bias


OUTPUTS: dict[str, Callable[..., Any]] = {
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "_thnn_fused_gru_cell": _fused_gru_cell,
    "_thnn_fused_gru_cell_backward": _fused_gru_cell_backward,
}
"""What ops return that PyTorch has no fake version of."""
