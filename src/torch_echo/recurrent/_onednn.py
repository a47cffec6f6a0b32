"""The workspace of oneDNN's LSTM: what its forward pass leaves to its backward pass, some 15 times the layer's output.

PyTorch's shape functions call it empty. It is a row of sections, each in whole pages: gates, cell activations, hidden states, cell
states, and then the gradients of these, for which forward only makes room. Backward reads the gates and this layer's cell states,
and in the reverse direction the hidden states too, of which the input is the first half; the rest, two thirds of the workspace,
need not be kept. None of this is documented: a layer's sizes are used only after :func:`usable` has tried it on them,
and a workspace of another size than expected is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_echo import compat
from torch_echo.errors import TorchEchoError

__all__ = ["backward", "forward", "pack", "reserve_bytes", "unpack", "usable", "workspace_bytes"]

aten = torch.ops.aten

_LSTM = 2
"""oneDNN's number for it."""

_PAGE, _LINE = 4096, 64
_FLOAT = 4


class _Layout:
    """Of the workspace of one layer and direction. `steps` and `batch` may be symbols."""

    def __init__(self, steps: Any, batch: Any, inputs: int, hidden: int, itemsize: int, reverse: bool) -> None:
        cells, states = steps * batch, (steps + 1) * batch  # with the initial ones
        wide = max(inputs, hidden)
        gates = cells * _row(4 * hidden, itemsize)
        rows = 2 * states * _row(wide, itemsize)
        cell = states * hidden * itemsize
        at_rows = _pages(gates) + _pages(cells * _row(hidden, itemsize))
        at_cell = at_rows + _pages(rows)
        self.kept = [(0, gates), *([(at_rows, rows)] if reverse else []), (at_cell + cell, cell)]
        """(start, bytes) of what backward reads."""
        gradients = 2 * _pages(2 * states * _row(wide, _FLOAT)) + _pages(2 * states * hidden * _FLOAT)
        self.nbytes = at_cell + _pages(2 * cell) + gradients


def _pages(nbytes: Any) -> Any:
    return (nbytes + _PAGE - 1) // _PAGE * _PAGE


def _row(elements: int, itemsize: int) -> int:
    """Bytes of a row of a matrix: whole cache lines, and no multiple of 256 elements, whose rows would share cache sets."""
    nbytes = -(-elements * itemsize // _LINE) * _LINE
    return nbytes + _LINE if nbytes // itemsize % 256 == 0 else nbytes


def reserve_bytes(x: Tensor, w_hh: Tensor, reverse: bool) -> Any:
    """Bytes that :func:`pack` leaves of the workspace."""
    return sum(nbytes for _, nbytes in _layout(x, w_hh, reverse).kept)


def workspace_bytes(steps: int, batch: int, inputs: int, hidden: int, itemsize: int) -> int:
    """Bytes of the workspace of a layer and direction."""
    return int(_Layout(steps, batch, inputs, hidden, itemsize, False).nbytes)


def _layout(x: Tensor, w_hh: Tensor, reverse: bool) -> _Layout:
    steps, batch, inputs = x.shape
    return _Layout(steps, batch, inputs, w_hh.shape[1], x.dtype.itemsize, reverse)


def pack(workspace: Tensor, x: Tensor, w_hh: Tensor, reverse: bool) -> Tensor:
    """What backward reads of the workspace of a layer."""
    layout = _layout(x, w_hh, reverse)
    if (
        workspace.numel() != layout.nbytes
    ):  # where sizes that were tried were as thought, but not with this batch or length
        raise TorchEchoError(
            f"oneDNN's workspace of an LSTM layer with input {list(x.shape)} and hidden size {w_hh.shape[1]} has "
            f"{workspace.numel()} bytes instead of {layout.nbytes}: compile and run the model within "
            "torch.backends.mkldnn.flags(enabled=False)"
        )
    return torch.cat([workspace[start : start + nbytes] for start, nbytes in layout.kept])


def unpack(reserve: Tensor, x: Tensor, w_hh: Tensor, reverse: bool) -> Tensor:
    """A workspace as backward wants it."""
    layout, at = _layout(x, w_hh, reverse), 0
    workspace = reserve.new_empty(layout.nbytes)
    for start, nbytes in layout.kept:
        workspace[start : start + nbytes] = reserve[at : at + nbytes]
        at += nbytes
    return workspace


def forward(
    x: Tensor, hx: Tensor, cx: Tensor, w_ih: Tensor, w_hh: Tensor, bias: list[Tensor], reverse: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(outputs, last hidden state, last cell state, workspace), as eager PyTorch calls it."""
    b_ih, b_hh = _biases(w_hh, bias)
    with torch.set_grad_enabled(train):  # without, there is no workspace
        made: tuple[Tensor, Tensor, Tensor, Tensor] = aten.mkldnn_rnn_layer(
            x, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, [], _LSTM, w_hh.shape[1], 1, bool(bias), False, False, train
        )
    return made


def backward(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    x: Tensor,
    hx: Tensor,
    cx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    bias: list[Tensor],
    made: Sequence[Tensor],
    workspace: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Gradients of x, w_ih, w_hh, both biases, hx and cx; `grads` are those of what the layer `made`."""
    b_ih, b_hh = _biases(w_hh, bias)
    found: tuple[Tensor, ...] = aten.mkldnn_rnn_layer_backward(
        x, w_ih, w_hh, b_ih, b_hh, hx, cx, *made, *grads, reverse, _LSTM, w_hh.shape[1], 1, bool(bias), True, False, [],
        False, workspace,
    )  # fmt: skip
    return found


def _biases(w_hh: Tensor, bias: list[Tensor]) -> list[Tensor]:
    return bias or [w_hh.new_zeros(w_hh.shape[0])] * 2


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def usable(dtype: torch.dtype, inputs: int, hidden: int) -> bool:
    """Does eager PyTorch go to oneDNN for an LSTM layer of these sizes on a CPU, and is its workspace as we think?"""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    by_onednn = dtype is torch.float32 or (dtype is torch.bfloat16 and compat.bfloat16_by_onednn())
    return by_onednn and all(_as_thought(dtype, inputs, hidden, reverse) for reverse in (False, True))


@functools.cache
def _as_thought(dtype: torch.dtype, inputs: int, hidden: int, reverse: bool) -> bool:
    """Is the workspace as large as we think, and does backward give the same without what we leave out?"""

    def made_up(*shape: int) -> Tensor:
        return torch.linspace(-1, 1, torch.Size(shape).numel()).sin().view(shape).to(dtype)

    x, states = made_up(3, 2, inputs), (made_up(2, hidden), made_up(2, hidden))
    w_ih, w_hh = made_up(4 * hidden, inputs), made_up(4 * hidden, hidden)
    bias = [made_up(4 * hidden)] * 2
    *made, workspace = forward(x, *states, w_ih, w_hh, bias, reverse, True)
    if workspace.numel() != _layout(x, w_hh, reverse).nbytes:
        return False
    thinned = unpack(pack(workspace, x, w_hh, reverse), x, w_hh, reverse)
    for start, nbytes in _gaps(_layout(x, w_hh, reverse)):
        thinned[start : start + nbytes] = 255
    grads = made_up(3, 2, hidden), made_up(2, hidden), made_up(2, hidden)
    found = [backward(grads, x, *states, w_ih, w_hh, bias, made, w, reverse) for w in (workspace, thinned)]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _gaps(layout: _Layout) -> list[tuple[int, int]]:
    ends = [0, *(start + nbytes for start, nbytes in layout.kept)]
    starts = [*(start for start, _ in layout.kept), layout.nbytes]
    return [(a, b - a) for a, b in zip(ends, starts, strict=True)]
