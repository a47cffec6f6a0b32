"""What Inductor makes of a graph of ops: which values its kernels never write to memory, and what re-running an op costs there.

Inductor inlines an element-wise op into the kernels that read its result, as long as these are its own: element-wise ops and
reductions. Matrix products, convolutions and the like are calls of libraries, which read memory. So

- a value is written only if a library call reads it (through views too), or if it leaves the graph;
- re-running an element-wise op inside a kernel that reads its operands anyway costs the arithmetic, and no pass over memory.

It is an estimate: Inductor writes some values of its own accord (long expressions, many readers), and reuses buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx

from torch_echo import compat
from torch_echo.cost import AnalyticCost, CostModel, OpSpec, TensorSpec, is_view, work_of

__all__ = ["FusedCost", "inlined", "is_elementwise", "laid_out"]

_REDUCTIONS = {
    "aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var", "aten::var_mean", "aten::prod", "aten::any", "aten::all",
    "aten::argmax", "aten::argmin", "aten::max", "aten::min", "aten::logsumexp", "aten::std", "aten::_softmax",
    "aten::_log_softmax", "aten::native_layer_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit_functional",
}  # fmt: skip
"""Ops that Inductor has loops of its own for, and that write their results."""

_GATHERS = {
    "aten::embedding", "aten::index", "aten::_unsafe_index", "aten::gather", "aten::index_select", "aten::cat", "aten::full",
    "aten::iota", "aten::constant_pad_nd", "aten::slice_scatter", "aten::select_scatter", "aten::full_like", "prims::iota",
    "prims::convert_element_type", "aten::upsample_nearest2d", "aten::_low_memory_max_pool_offsets_to_indices",
}  # fmt: skip
"""Ops without arithmetic that are inlined like element-wise ones."""


def is_elementwise(target: Any) -> bool:
    """Can Inductor inline this op into its readers?"""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or compat.op_name(target)[0] in _GATHERS


def _reads_inline(node: fx.Node) -> bool:
    return is_elementwise(node.target) or compat.node_name(node) in _REDUCTIONS


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads the value that a node makes, through views and choices of outputs."""
    stack = list(node.users)
    while stack:
        user = stack.pop()
        target = user.target
        if target is getitem or (isinstance(target, torch._ops.OpOverload) and is_view(target)):
            stack.extend(user.users)
        else:
            yield user


def inlined(node: fx.Node, position: dict[fx.Node, int], boundary: int) -> tuple[bool, bool]:
    """Is what a node makes inlined into all its readers in forward, and in backward, where those of forward may be re-run too?
    Nodes from `boundary` on are backward's. What leaves the graph is not inlined.
    """
    forward = backward = is_elementwise(node.target)
    for reader in _readers(node) if forward else ():
        inline = reader.op == "call_function" and _reads_inline(reader)
        if position[reader] < boundary:
            forward &= inline
        else:
            backward &= inline
    return forward, forward and backward


def laid_out(spec: OpSpec) -> OpSpec:
    """A convolution as Inductor calls it: on a CPU, with the channels of images last."""
    if spec.device().type != "cpu":
        return spec
    return spec._replace(args=tuple(_channels_last(a) if isinstance(a, TensorSpec) else a for a in spec.args))


def _channels_last(tensor: TensorSpec) -> TensorSpec:
    if len(tensor.shape) != 4:
        return tensor
    _, c, h, w = tensor.shape
    return tensor._replace(stride=(h * w * c, 1, w * c, c))


class FusedCost:
    """A cost model whose element-wise ops run inside other kernels: of what `inner` says that they take, the arithmetic is left,
    and the reading of more than they make."""

    def __init__(self, inner: CostModel, analytic: AnalyticCost) -> None:
        self._inner = inner
        self._analytic = analytic

    def seconds(self, func: Any, spec: OpSpec) -> float:
        """See :class:`torch_echo.cost.CostModel`."""
        if not is_elementwise(func):
            return self._inner.seconds(func, spec)
        work, pass_over = work_of(func, spec), self._analytic.copy_seconds
        reading = pass_over(max(0, work.bytes_read - work.bytes_written))
        if compat.op_name(func)[0] in _GATHERS:
            return reading  # the rest is what a kernel of its own takes to look indices up
        launched = self._analytic.launch() + pass_over(work.bytes_moved)
        return reading + max(0.0, self._inner.seconds(func, spec) - launched)

    def writing(self, nbytes: int) -> float:
        """Seconds to write a result that is not inlined."""
        return self._analytic.copy_seconds(nbytes)

    def save(self) -> None:
        """See :class:`torch_echo.cost.CostModel`."""
        self._inner.save()
