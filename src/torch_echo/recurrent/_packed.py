"""Packed sequences: ``pack_padded_sequence``, recurrent layers on what it makes, ``pad_packed_sequence``.

How long a packed batch is depends on its data, so Dynamo leaves these functions out of its graphs. Here they are ops whose sizes
are symbols of their own. How many sequences there are is known from the padded batch; a :class:`PackedSequence` that is packed in
the graph carries it on, as an attribute.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torch_echo import compat
from torch_echo.recurrent._layers import step_by_step

__all__ = ["forward", "pack_padded_sequence", "pad_packed_sequence"]

aten = torch.ops.aten

# --- ops ---------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("torch_echo::pack", mutates_args=())
def pack(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(rows of a batch [time, sequence, …] that are within the lengths, how many of each time)"""
    data, batch_sizes = aten._pack_padded_sequence(x, lengths, False)
    return data, batch_sizes


@pack.register_fake
def _(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    steps, width, *features = x.shape
    rows = compat.unknown_size(x, steps * width)
    return x.new_empty(rows, *features), lengths.new_empty(compat.unknown_size(x, steps))


@torch.library.custom_op("torch_echo::pack_backward", mutates_args=())
def pack_backward(grad: Tensor, shape: Sequence[int], batch_sizes: Tensor) -> Tensor:
    """The gradient of the padded batch."""
    found: Tensor = aten._pack_padded_sequence_backward(grad, shape, batch_sizes, False)
    return found


@pack_backward.register_fake
def _(grad: Tensor, shape: Sequence[int], batch_sizes: Tensor) -> Tensor:
    return grad.new_empty(shape)


def _save_pack(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.shape = inputs[0].shape


def _pack_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    return pack_backward(grad, ctx.shape, *ctx.saved_tensors), None


pack.register_autograd(_pack_gradient, setup_context=_save_pack)


@torch.library.custom_op("torch_echo::pad", mutates_args=())
def pad(data: Tensor, batch_sizes: Tensor, steps: int, width: int, value: float) -> tuple[Tensor, Tensor]:
    """(batch [time, sequence, …], lengths)"""
    padded, lengths = aten._pad_packed_sequence(data, batch_sizes, False, value, steps)
    return padded, lengths


@pad.register_fake
def _(data: Tensor, batch_sizes: Tensor, steps: int, width: int, value: float) -> tuple[Tensor, Tensor]:
    return data.new_empty(steps, width, *data.shape[1:]), batch_sizes.new_empty(width)


@torch.library.custom_op("torch_echo::pad_backward", mutates_args=())
def pad_backward(grad: Tensor, batch_sizes: Tensor, rows: int) -> Tensor:
    """The gradient of the packed data."""
    return torch.cat([step[:n] for step, n in zip(grad, batch_sizes.tolist(), strict=False)])


@pad_backward.register_fake
def _(grad: Tensor, batch_sizes: Tensor, rows: int) -> Tensor:
    return grad.new_empty(rows, *grad.shape[2:])


def _save_pad(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    data, batch_sizes, *_ = inputs
    ctx.save_for_backward(batch_sizes)
    ctx.rows = data.shape[0]


def _pad_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    return pad_backward(grad, *ctx.saved_tensors, ctx.rows), None, None, None, None


pad.register_autograd(_pad_gradient, setup_context=_save_pad)


@torch.library.custom_op("torch_echo::sequences", mutates_args=())
def sequences(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """A tensor without elements, with as many rows as there are sequences."""
    return batch_sizes.new_empty(int(batch_sizes[0]), 0)


@sequences.register_fake
def _(data: Tensor, batch_sizes: Tensor) -> Tensor:
    return batch_sizes.new_empty(compat.unknown_size(data, data.shape[0] // batch_sizes.shape[0]), 0)


# --- what Dynamo traces ---------------------------------------------------------------------------------------------------


def pack_padded_sequence(
    input: Tensor, lengths: Tensor | list[int], batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """As that of ``torch.nn.utils.rnn``."""
    lengths = (
        lengths.to(torch.int64)
        if isinstance(lengths, Tensor)
        else torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    )
    x = input.transpose(0, 1) if batch_first else input
    order = None
    if not enforce_sorted:
        lengths, order = torch.sort(lengths, descending=True)  # on the CPU, whatever the input is on
        order = order.to(input.device)
        x = x.index_select(1, order)
    data, batch_sizes = pack(x, lengths)
    packed = PackedSequence(data, batch_sizes, order, None)
    return _of_width(packed, x.shape[1])


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """As that of ``torch.nn.utils.rnn``."""
    data, batch_sizes, _, order = sequence
    steps = batch_sizes.shape[0] if total_length is None else total_length
    padded, lengths = pad(data, batch_sizes, steps, _width(sequence), float(padding_value))
    if order is not None:
        padded, lengths = padded.index_select(1, order), lengths[order.cpu()]
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _copy(f: Any) -> Callable[..., Any]:
    """The same, but not what Dynamo traces :func:`forward` for."""
    return types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)


FORWARD = {"LSTM": _copy(nn.LSTM.forward), "GRU": _copy(nn.GRU.forward)}
FORWARD |= dict.fromkeys(("RNN_TANH", "RNN_RELU"), _copy(nn.RNN.forward))


def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """As that of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``."""
    if not isinstance(input, PackedSequence):
        return FORWARD[self.mode](self, input, hx)
    data, batch_sizes, order, back = input
    several = self.mode == "LSTM"
    if hx is None:
        count = self.num_layers * (1 + self.bidirectional)
        sizes = [self.proj_size or self.hidden_size, *([self.hidden_size] if several else [])]
        hidden = [data.new_zeros(count, _width(input), size) for size in sizes]
    else:
        hidden = [_permuted(h, order) for h in (hx if several else (hx,))]
    weights = compat.flat_weights(self)
    options = (self.bias, self.num_layers, self.dropout, self.training, self.bidirectional)
    y, *last = step_by_step(self.mode, data, batch_sizes, hidden, weights, *options)
    made = _of_width(PackedSequence(y, batch_sizes, order, back), hidden[0].shape[1])
    last = [_permuted(h, back) for h in last]
    return made, tuple(last) if several else last[0]


def _permuted(hidden: Any, order: Tensor | None) -> Any:
    return hidden if order is None else hidden.index_select(1, order)


def _of_width(packed: PackedSequence, width: int) -> PackedSequence:
    packed._torch_echo_width = width  # type: ignore[attr-defined]
    return packed


def _width(packed: PackedSequence) -> int:
    """How many sequences there are."""
    if packed.sorted_indices is not None:
        return packed.sorted_indices.shape[0]
    known: int | None = getattr(packed, "_torch_echo_width", None)
    return sequences(packed.data, packed.batch_sizes).shape[0] if known is None else known
