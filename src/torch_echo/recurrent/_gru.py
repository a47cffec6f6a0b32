"""One direction of a GRU layer, step by step as eager PyTorch runs it, without autograd's record.

Kernels, their order and the layouts that they see are eager's, so that results and gradients are equal to the bit: backward is
what autograd does, gradients of the weights added from the last step to the first. Of each step the gates are kept: reset, update,
new, and the hidden part of the new gate, four times the layer's output; eager keeps twice as much. States are not kept, which are
outputs, and may be written to: backward has them from the gates, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["backward", "forward"]

aten = torch.ops.aten


def _next(h: Tensor, update: Tensor, new: Tensor) -> Tensor:
    return (h - new).mul_(update).add_(new)


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


def forward(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Sequence[Tensor], reverse: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, last hidden state, gates [4, time, batch, features] or nothing)"""
    b_ih, b_hh = bias or (None, None)
    steps = x.shape[0]
    gates = h.new_empty(4, steps if keep else 0, *h.shape)
    given = F.linear(x, w_ih, b_ih).unbind(0)
    outputs: list[Tensor] = [h] * steps
    for t in _order(steps, reverse):
        reset_in, update_in, new_in = given[t].unsafe_chunk(3, 1)
        reset, update, new_hidden = F.linear(h, w_hh, b_hh).unsafe_chunk(3, 1)
        if keep:
            gates[3, t] = new_hidden
        reset.add_(reset_in).sigmoid_()
        update.add_(update_in).sigmoid_()
        new = new_in.add(new_hidden.mul_(reset)).tanh_()
        if keep:
            gates[0, t], gates[1, t], gates[2, t] = reset, update, new
        outputs[t] = h = _next(h, update, new)
    return torch.stack(outputs), h.clone(), gates


def backward(
    grad_y: Tensor | None,
    grad_hy: Tensor | None,
    x: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    gates: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, hx, w_ih, w_hh and both biases."""
    order = _order(x.shape[0], reverse)
    states = [hx]  # ahead of each step
    for t in order[:-1]:
        states.append(_next(states[-1], gates[1, t], gates[2, t]))
    given = hx.new_empty(*x.shape[:2], w_ih.shape[0])  # gradient of what x gives to the gates
    g = _sum(grad_hy, grad_y[order[-1]] if grad_y is not None else None)
    g_w: Tensor | None = None
    g_b: Tensor | None = None
    for i in range(len(order) - 1, -1, -1):
        t = order[i]
        h = states.pop()
        reset, update, new, new_hidden = gates[:, t]
        g_mixed = g * update
        g_new = aten.tanh_backward(g - g_mixed, new)
        g_update = aten.sigmoid_backward(g * (h - new), update)
        g_reset = aten.sigmoid_backward(g_new * new_hidden, reset)
        torch.cat([g_reset, g_update, g_new], 1, out=given[t])
        g_hidden = torch.cat([g_reset, g_update, g_new * reset], 1)
        g = _sum(grad_y[order[i - 1]] if i and grad_y is not None else None, g_mixed) + g_hidden.mm(w_hh)
        g_w, g_b = _sum(g_w, g_hidden.t().mm(h)), _sum(g_b, g_hidden.sum(0))
    assert g_w is not None and g_b is not None
    rows = given.flatten(0, 1)
    g_x = rows.mm(w_ih).view(x.shape)
    return g_x, g, rows.t().mm(x.reshape(-1, x.shape[2])), g_w, rows.sum(0), g_b


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        found = b if a is None else a
        assert found is not None
        return found
    return a + b
