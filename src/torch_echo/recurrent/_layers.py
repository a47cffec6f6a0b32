"""What Dynamo traces where ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call into PyTorch: stacks of layers, made of our ops.

Arguments are those of ``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` and ``torch.rnn_relu``. Between layers, dropout draws the
numbers that eager PyTorch draws. What our ops don't do (devices other than the CPU, autocast) breaks the graph, and runs as without
us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from torch_echo.recurrent import _onednn
from torch_echo.recurrent._ops import lstm_layer, rnn_layer

__all__ = ["FUNCTIONS", "step_by_step"]


def _lstm(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    if isinstance(args[0], Tensor):
        return step_by_step("LSTM", x, *args)
    hidden, weights, *_ = args
    width = hidden[1].shape[-1]
    if hidden[0].shape[-1] != width or guard_or_false(x.numel() == 0):  # projected, or empty
        return step_by_step("LSTM", x, None, *args)
    if not all(_onednn.usable(x.dtype, w.shape[1], width) for w in weights if w.dim() > 1):
        return step_by_step("LSTM", x, None, *args)
    return _by_onednn(x, *args)


def _other(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    def function(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        if isinstance(args[1], Tensor):
            return step_by_step(mode, x, args[0], (args[1],), *args[2:])
        return step_by_step(mode, x, None, (args[0],), *args[1:])

    return function


def _by_onednn(
    x: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    _check(x)
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    hx, cx = (h.contiguous() for h in hidden)
    directions, each = 1 + bidirectional, 4 if biases else 2
    last_h, last_c = [], []
    for layer in range(layers):
        outputs = []
        for i in range(layer * directions, (layer + 1) * directions):
            w_ih, w_hh, *bias = weights[i * each : (i + 1) * each]
            reverse = i % directions > 0
            y, hy, cy, _ = lstm_layer(x, hx[i], cx[i], w_ih, w_hh, bias, reverse, torch.is_grad_enabled())
            outputs.append(y)
            last_h.append(hy)
            last_c.append(cy)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if train and layer < layers - 1:
            x = _dropout(x, dropout)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_h), torch.stack(last_c)


def step_by_step(
    mode: str,
    x: Tensor,
    batch_sizes: Tensor | None,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    _check(x)
    x = x.transpose(0, 1) if batch_first else x
    directions, each = 1 + bidirectional, len(weights) // layers
    lasts = []
    for layer in range(layers):
        states = [h[layer * directions : (layer + 1) * directions] for h in hidden]
        own = weights[layer * each : (layer + 1) * each]
        x, *last = rnn_layer(mode, x, batch_sizes, states, own, biases, bidirectional)
        lasts.append(last)
        if train and layer < layers - 1:
            x = _dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.cat([last[k] for last in lasts]) for k in range(len(hidden)))


def _check(x: Tensor) -> None:
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        torch._dynamo.graph_break()


def _dropout(x: Tensor, p: float) -> Tensor:
    """As ``torch.dropout`` runs in training on a CPU: traced, it would draw other numbers."""
    if p == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype)
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


FUNCTIONS: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _lstm,
    torch.gru: _other("GRU"),
    torch.rnn_tanh: _other("RNN_TANH"),
    torch.rnn_relu: _other("RNN_RELU"),
}
"""By the function of PyTorch's that each stands for."""
