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
from torch_echo.recurrent._ops import gru_layer, lstm_layer, rnn_layer

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
    return _by_direction(x, *args)


def _gru(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    if isinstance(args[1], Tensor):
        return step_by_step("GRU", x, args[0], (args[1],), *args[2:])
    return _by_direction(x, (args[0],), *args[1:])


def _rnn(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    def function(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        if isinstance(args[1], Tensor):
            return step_by_step(mode, x, args[0], (args[1],), *args[2:])
        return step_by_step(mode, x, None, (args[0],), *args[1:])

    return function


def _by_direction(
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
    """LSTM, if there are two states, else GRU."""
    _check(x)
    x = x.transpose(0, 1) if batch_first else x
    if len(hidden) == 2:  # oneDNN's layouts
        x, *hidden = (t.contiguous() for t in (x, *hidden))
    directions, each = 1 + bidirectional, 4 if biases else 2
    lasts = []
    for layer in range(layers):
        outputs = []
        for i in range(layer * directions, (layer + 1) * directions):
            w_ih, w_hh, *bias = weights[i * each : (i + 1) * each]
            given = (x, *(h[i] for h in hidden), w_ih, w_hh, bias, i % directions > 0, torch.is_grad_enabled())
            y, *last, _ = lstm_layer(*given) if len(hidden) == 2 else gru_layer(*given, x.requires_grad)
            outputs.append(y)
            lasts.append(last)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if train and layer < layers - 1:
            x = _dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack([last[k] for last in lasts]) for k in range(len(hidden)))


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
        x, *last = rnn_layer(mode, x, batch_sizes, states, own, biases, bidirectional, x.requires_grad)
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
    torch.gru: _gru,
    torch.rnn_tanh: _rnn("RNN_TANH"),
    torch.rnn_relu: _rnn("RNN_RELU"),
}
"""By the function of PyTorch's that each stands for."""
