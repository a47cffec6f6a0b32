"""Equal ops of the forward pass are computed once: a mask that every layer makes anew is one value to keep or to rebuild.

PyTorch's min-cut partitioner does so too, but not the one that goes by tags. Only ops of ``aten`` whose results are the same each
time are merged: none that draw, write or leave memory as they find it, none whose result the graph returns, and none of a user's
checkpoint region.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import getitem

import torch
from torch import fx

from torch_echo import compat
from torch_echo.compile._capture import tensors_of
from torch_echo.rules import rule_of

__all__ = ["merge"]


def merge(joint: fx.GraphModule) -> None:
    """Merge equal ops in the forward part of a joint graph."""
    nodes = list(joint.graph.nodes)
    returned = {key for node in nodes[-1].all_input_nodes for key in _storages(node)}
    first: dict[Hashable, fx.Node] = {}
    for node in nodes[: compat.boundary(nodes)]:
        if not _same_each_time(node) or not returned.isdisjoint(_storages(node)):
            continue
        known = first.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if known is not node:
            node.replace_all_uses_with(known)
            joint.graph.erase_node(node)


def _storages(node: fx.Node) -> set[Hashable]:
    return {compat.storage_key(t) for t in tensors_of(node.meta.get("val"))}


def _same_each_time(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or compat.is_checkpointed(node):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return target is getitem
    rule = rule_of(target)
    return rule.name.startswith("aten::") and not (rule.mutates or rule.random or "empty" in rule.name)
