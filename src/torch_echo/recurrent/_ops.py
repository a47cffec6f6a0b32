"""The ops: a layer forward and backward.

``torch_echo::lstm_layer`` is one direction of an LSTM layer by oneDNN, as eager PyTorch runs it on a CPU; its *reserve* is what the
backward pass reads of oneDNN's workspace. A planner may keep it, or drop it and have it rebuilt by running the layer again.

``torch_echo::gru_layer`` is one direction of a GRU layer, step by step as in eager PyTorch; its reserve is the gates.

``torch_echo::rnn_layer`` is a layer, all its directions, of what else eager PyTorch runs step by step: RNN, an LSTM with
projections or in float64, anything on a packed sequence. It leaves nothing to its backward pass, which runs the layer again under
autograd: one layer's steps are in memory at a time.

All call what eager PyTorch calls, in the same order: results and gradients are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_echo import compat
from torch_echo.recurrent import _gru, _onednn

__all__ = ["gru_layer", "lstm_layer", "rnn_layer"]

aten = torch.ops.aten


@torch.library.custom_op("torch_echo::lstm_layer", mutates_args=())
def lstm_layer(
    x: Tensor, hx: Tensor, cx: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Sequence[Tensor], reverse: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(outputs, last hidden state, last cell state, reserve), for inputs [time, batch, features]. `bias`: two or none.
    Without `train` the reserve is empty."""
    y, hy, cy, workspace = _onednn.forward(x, hx, cx, w_ih, w_hh, list(bias), reverse, train)
    reserve = _onednn.pack(workspace, x, w_hh, reverse) if train else x.new_empty(0, dtype=torch.uint8)
    return y, hy, cy, reserve


@lstm_layer.register_fake
def _(
    x: Tensor, hx: Tensor, cx: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Sequence[Tensor], reverse: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = x.new_empty(*x.shape[:2], w_hh.shape[1])
    nbytes = _onednn.reserve_bytes(x, w_hh, reverse) if train else 0
    return y, hx.new_empty(hx.shape), cx.new_empty(cx.shape), x.new_empty(nbytes, dtype=torch.uint8)


@torch.library.custom_op("torch_echo::lstm_layer_backward", mutates_args=())
def lstm_layer_backward(
    grad_y: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    x: Tensor,
    hx: Tensor,
    cx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    bias: Sequence[Tensor],
    y: Tensor,
    hy: Tensor,
    cy: Tensor,
    reserve: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, hx, cx, w_ih, w_hh and either bias."""
    workspace = _onednn.unpack(reserve, x, w_hh, reverse)
    grads, made = (grad_y, grad_hy, grad_cy), (y, hy, cy)
    found = _onednn.backward(grads, x, hx, cx, w_ih, w_hh, list(bias), made, workspace, reverse)
    gx, gw_ih, gw_hh, gb, _, ghx, gcx = (g.to(x.dtype) for g in found)  # some are float32; autograd casts them
    return gx, ghx, gcx, gw_ih, gw_hh, gb


@lstm_layer_backward.register_fake
def _(
    grad_y: Any, grad_hy: Any, grad_cy: Any, x: Tensor, hx: Tensor, cx: Tensor, w_ih: Tensor, w_hh: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = [t.new_empty(t.shape) for t in (x, hx, cx, w_ih, w_hh)]
    return like[0], like[1], like[2], like[3], like[4], w_hh.new_empty(w_hh.shape[0])


def _save_lstm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, hx, cx, w_ih, w_hh, bias, reverse, _ = inputs
    ctx.save_for_backward(x, hx, cx, w_ih, w_hh, *bias, *output)
    ctx.reverse = reverse
    ctx.set_materialize_grads(False)


def _lstm_gradients(ctx: Any, grad_y: Any, grad_hy: Any, grad_cy: Any, _: Any) -> tuple[Any, ...]:
    x, hx, cx, w_ih, w_hh, *bias, y, hy, cy, reserve = ctx.saved_tensors
    gx, ghx, gcx, gw_ih, gw_hh, gb = lstm_layer_backward(
        grad_y, grad_hy, grad_cy, x, hx, cx, w_ih, w_hh, bias, y, hy, cy, reserve, ctx.reverse
    )
    return gx, ghx, gcx, gw_ih, gw_hh, [gb] * len(bias), None, None


lstm_layer.register_autograd(_lstm_gradients, setup_context=_save_lstm)


@torch.library.custom_op("torch_echo::gru_layer", mutates_args=())
def gru_layer(
    x: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    bias: Sequence[Tensor],
    reverse: bool,
    train: bool,
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, last hidden state, reserve); else as for lstm_layer. `differentiable`: x needs a gradient."""
    with compat.views_as_usual():
        return _gru.forward(_as_given(x, differentiable), hx, w_ih, w_hh, bias, reverse, train)


@gru_layer.register_fake
def _(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Any, reverse: bool, train: bool, differentiable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    steps, *shape = x.shape[0], *hx.shape
    return hx.new_empty(steps, *shape), hx.new_empty(shape), hx.new_empty(4, steps if train else 0, *shape)


@torch.library.custom_op("torch_echo::gru_layer_backward", mutates_args=())
def gru_layer_backward(
    grad_y: Tensor | None,
    grad_hy: Tensor | None,
    x: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    reserve: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, hx, w_ih, w_hh and both biases."""
    return _gru.backward(grad_y, grad_hy, x, hx, w_ih, w_hh, reserve, reverse)


@gru_layer_backward.register_fake
def _(
    grad_y: Any, grad_hy: Any, x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = [t.new_empty(t.shape) for t in (x, hx, w_ih, w_hh)]
    bias = [w_hh.new_empty(w_hh.shape[0]) for _ in range(2)]
    return like[0], like[1], like[2], like[3], bias[0], bias[1]


def _save_gru(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, hx, w_ih, w_hh, bias, reverse, *_ = inputs
    ctx.save_for_backward(x, hx, w_ih, w_hh, output[2])  # not the outputs: whoever gets them may write to them
    ctx.layout = len(bias), reverse
    ctx.set_materialize_grads(False)


def _gru_gradients(ctx: Any, grad_y: Any, grad_hy: Any, _: Any) -> tuple[Any, ...]:
    biases, reverse = ctx.layout
    *found, gb_ih, gb_hh = gru_layer_backward(grad_y, grad_hy, *ctx.saved_tensors, reverse)
    return *found, [gb_ih, gb_hh][:biases], None, None, None


gru_layer.register_autograd(_gru_gradients, setup_context=_save_gru)


def _as_given(x: Tensor, differentiable: bool) -> Tensor:
    """For kernels that choose by whether x needs a gradient."""
    return x.detach().requires_grad_() if differentiable else x


_FUNCTIONS: dict[str, Any] = {"LSTM": aten.lstm, "GRU": aten.gru, "RNN_TANH": aten.rnn_tanh, "RNN_RELU": aten.rnn_relu}


def _run(
    mode: str,
    x: Tensor,
    batch_sizes: Tensor | None,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """One layer, by eager PyTorch."""
    function = _FUNCTIONS[mode]
    state = list(hidden) if mode == "LSTM" else hidden[0]
    options = (list(weights), biases, 1, 0.0, False, bidirectional)
    with compat.views_as_usual():
        if batch_sizes is not None:
            return tuple(function.data(x, batch_sizes, state, *options))
        return tuple(function.input(x, state, *options, False))


@torch.library.custom_op("torch_echo::rnn_layer", mutates_args=())
def rnn_layer(
    mode: str,
    x: Tensor,
    batch_sizes: Tensor | None,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    bidirectional: bool,
    differentiable: bool,
) -> list[Tensor]:
    """[outputs, last hidden states, and cell states for an LSTM], for inputs [time, batch, features], or those of a packed sequence
    with its `batch_sizes`; states [directions, batch, features]. `mode` as in ``nn.RNNBase``."""
    with torch.enable_grad():  # kernels ask
        return list(_run(mode, _as_given(x, differentiable), batch_sizes, hidden, weights, biases, bidirectional))


@rnn_layer.register_fake
def _(
    mode: str,
    x: Tensor,
    batch_sizes: Tensor | None,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    bidirectional: bool,
    differentiable: bool,
) -> list[Tensor]:
    features = hidden[0].shape[2] * (1 + bidirectional)
    return [x.new_empty(*x.shape[:-1], features), *(h.new_empty(h.shape) for h in hidden)]


@torch.library.custom_op("torch_echo::rnn_layer_backward", mutates_args=())
def rnn_layer_backward(
    grads: Sequence[Tensor | None],
    mode: str,
    x: Tensor,
    batch_sizes: Tensor | None,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    bidirectional: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, of hidden and of weights, in this order: of those that are `needed`."""
    n = len(hidden)
    with compat.above_autograd():
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, *hidden, *weights), needed, strict=True)]
        outputs = _run(mode, leaves[0], batch_sizes, leaves[1 : n + 1], leaves[n + 1 :], biases, bidirectional)
        wanted = [t for t in leaves if t.requires_grad]
        given = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None]
        ends, directions = zip(*given, strict=True)
        found = torch.autograd.grad(ends, wanted, directions, allow_unused=True)
    del leaves, outputs
    return [torch.zeros_like(t) if g is None else g.contiguous() for t, g in zip(wanted, found, strict=True)]


@rnn_layer_backward.register_fake
def _(
    grads: Any, mode: str, x: Tensor, batch_sizes: Any, hidden: Sequence[Tensor], weights: Sequence[Tensor],
    biases: bool, bidirectional: bool, needed: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    return [t.new_empty(t.shape) for t, need in zip((x, *hidden, *weights), needed, strict=True) if need]


def _save_rnn(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    mode, x, batch_sizes, hidden, weights, *layout, _ = inputs
    ctx.save_for_backward(x, *hidden, *weights, *(() if batch_sizes is None else (batch_sizes,)))
    ctx.given = mode, len(hidden), len(weights), layout
    ctx.set_materialize_grads(False)


def _rnn_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    mode, states, count, layout = ctx.given
    x, *rest = ctx.saved_tensors
    hidden, weights, batch_sizes = rest[:states], rest[states : states + count], (*rest[states + count :], None)[0]
    _, need_x, _, need_hidden, need_weights, *_ = ctx.needs_input_grad
    needed = [need_x, *need_hidden, *need_weights]
    made = iter(rnn_layer_backward(grads, mode, x, batch_sizes, hidden, weights, *layout, needed))
    found = [next(made) if need else None for need in needed]
    return None, found[0], None, found[1 : states + 1], found[states + 1 :], None, None, None


rnn_layer.register_autograd(_rnn_gradients, setup_context=_save_rnn)
