"""Gradients of values with many readers: sums of as many parts.

Inductor inlines: it computes all parts of such a sum in the kernel that adds them up, until which everything lives that they are
computed from. So the parts and the partial sums are marked, to be written each by itself, when they can be.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_echo import compat
from torch_echo.compile._fusion import is_elementwise
from torch_echo.cost import is_view

__all__ = ["write_parts"]

_PARTS = 4
"""Sums of fewer are left alone."""


def write_parts(joint: fx.GraphModule) -> None:
    """Mark the parts of a joint graph's long sums of gradients. Cost: linear in nodes."""
    nodes = list(joint.graph.nodes)
    sums = {node for node in nodes[compat.boundary(nodes) :] if _is_sum(node)}
    for last in sums:
        if len(last.users) == 1 and not sums.isdisjoint(last.users):
            continue
        chain = _chain(last, sums)
        parts = {part for node in chain for part in node.all_input_nodes} - chain
        if len(parts) < _PARTS:
            continue
        for node in chain | parts:
            maker = _maker(node)
            if maker is not None:
                compat.realize(maker)


def _is_sum(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    shapes = [n.meta["val"].shape for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), torch.Tensor)]
    return len(shapes) == 3 and shapes[0] == shapes[1] == shapes[2]


def _chain(last: fx.Node, sums: set[fx.Node]) -> set[fx.Node]:
    """A sum and the partial sums that go into it alone."""
    found: set[fx.Node] = set()
    stack = [last]
    while stack:
        node = stack.pop()
        found.add(node)
        stack.extend(n for n in node.all_input_nodes if n in sums and len(n.users) == 1)
    return found


def _maker(node: fx.Node) -> fx.Node | None:
    """What computes a part, if Inductor might inline it."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and is_view(node.target):
        node = node.all_input_nodes[0]
    return node if node.op == "call_function" and is_elementwise(node.target) else None
