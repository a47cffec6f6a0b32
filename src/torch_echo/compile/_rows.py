"""Which ops can be computed in parts along the rows, and how.

A tensor's *rows* are one of its dimensions, or several next to each other that together count them ([batch, time, …]). They come
in `units`, which are what is parted: with n units in a part, a tensor with `factor` rows for each unit has n·factor rows there, in
one dimension. A table says of an op whose operands carry rows whether its result carries them too, or is a sum over them; which
operands are taken by part, the others being taken whole; and what is called for a part.

What is not in the table, or does not fit, has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any, Literal

import torch
from torch import fx

from torch_echo import compat

__all__ = ["Call", "RowRules", "Rows", "Rule", "shape_of"]

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Target, arguments and keyword arguments."""


@dataclass(frozen=True)
class Rows:
    """Where a tensor's rows are: in `dims` dimensions from `dim` on, `factor` of them for each unit."""

    dim: int
    dims: int = 1
    factor: int = 1

    def part(self, shape: Sequence[int], units: int) -> list[int]:
        """The shape of a part."""
        return [*shape[: self.dim], units * self.factor, *shape[self.dim + self.dims :]]

    def past(self, dim: int, ndim: int) -> int:
        """Where a dimension other than the rows is in a part."""
        dim %= ndim
        if self.dim <= dim < self.dim + self.dims:
            raise _NoRule("it goes along the rows")
        return dim if dim < self.dim else dim - self.dims + 1


@dataclass(frozen=True)
class Rule:
    """How one node is computed in parts."""

    out: Rows | None
    """Rows of the result; None: each part's result is a summand."""
    needs: dict[fx.Node, Rows] = field(default_factory=dict)
    """Operands that are taken by part."""
    call: Callable[[int], Call] | None = None
    """What is called for a part of so many units; None: what the node calls."""
    total: Literal["sum", "mean", "weighted"] = "sum"
    """What the summands make: their sum; a mean, each weighing as many rows as it has; or the loss of
    ``nll_loss_forward``, whose summands are divided by the sum of the weights."""


class _NoRule(Exception):
    pass


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise _NoRule(f"{node.name} is no tensor")
    if not all(type(n) is int for n in value.shape):
        raise _NoRule(f"{node.name} has a size that is a symbol")
    return tuple(value.shape)


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


class RowRules:
    """Rules for the nodes of a graph, by what carries rows (`marks`) so far."""

    def __init__(self, units: int, marks: dict[fx.Node, Rows]) -> None:
        self.units = units
        self.marks = marks

    def rule(self, node: fx.Node, out: Rows | None = None) -> Rule | None:
        """The rule of a node with operands that carry rows, or (`out`) with a result that shall carry them; None without one."""
        make = self._maker(node)
        if make is None:
            return None
        try:
            found = make(node, out)
            for operand in node.all_input_nodes:
                if operand in self.marks and found.needs.get(operand) != self.marks[operand]:
                    return None
        except _NoRule:
            return None
        return found if out is None or found.out == out else None

    def _maker(self, node: fx.Node) -> Callable[[fx.Node, Rows | None], Rule] | None:
        if node.op != "call_function":
            return None
        if node.target is getitem:
            return self._getitem
        if not isinstance(node.target, torch._ops.OpOverload) or compat.written_nodes(node):
            return None
        if node.kwargs.keys() & {a.name for a in node.target._schema.arguments if not a.kwarg_only}:
            return None  # the rules look for these among the positional arguments
        name = compat.node_name(node)
        if name in _RULES:
            return partial(_RULES[name], self)
        tags = node.target.tags
        if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
            return self._pointwise
        return None

    # --- element by element ------------------------------------------------------------------------------------------------

    def _pointwise(self, node: fx.Node, out: Rows | None) -> Rule:
        shape = shape_of(node)
        operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        for operand in operands:
            if out is None and operand in self.marks:
                mark = self.marks[operand]
                out = Rows(mark.dim + len(shape) - len(shape_of(operand)), mark.dims, mark.factor)
        if out is None:
            raise _NoRule("no operand has rows")
        return Rule(out, self._broadcast(operands, shape, out))

    def _broadcast(self, operands: Sequence[fx.Node], shape: Sequence[int], out: Rows) -> dict[fx.Node, Rows]:
        """What is taken of operands by part where they are broadcast to a shape whose rows are `out`."""
        needs = {}
        for operand in operands:
            own = shape_of(operand)
            first = out.dim - len(shape) + len(own)
            last = first + out.dims
            if last <= 0 or (first >= 0 and out.dims == 1 and own[first] == 1):
                continue
            if first < 0 or own[first:last] != tuple(shape[out.dim : out.dim + out.dims]):
                raise _NoRule("broadcast along some of the rows")
            needs[operand] = Rows(first, out.dims, out.factor)
        return needs

    def _like(self, node: fx.Node, out: Rows | None) -> Rule:
        """All tensor operands have the shape of the result, and one dimension is gone through."""
        found = self._pointwise(node, out)
        assert found.out is not None
        position = 2 if compat.node_name(node).endswith("_backward_data") else 1
        dim = found.out.past(_args(node)[position], max(1, len(shape_of(node))))
        args = [*_args(node)]
        args[position] = dim
        return Rule(found.out, found.needs, lambda n: (node.target, tuple(args), node.kwargs))

    # --- shapes ------------------------------------------------------------------------------------------------------------

    def _view(self, node: fx.Node, out: Rows | None) -> Rule:
        source = _args(node)[0]
        if node.target is torch.ops.aten.view.dtype:
            raise _NoRule("elements of another size")
        before, after = shape_of(source), shape_of(node)
        if out is None:
            out = self._reshaped(before, after, self._mark(source))
            need = self._mark(source)
        else:
            need = self._reshaped(after, before, out)
        made = out
        return Rule(out, {source: need}, lambda n: (torch.ops.aten.view.default, (source, made.part(after, n)), {}))

    def _reshaped(self, before: Sequence[int], after: Sequence[int], rows: Rows) -> Rows:
        """Where rows are after a view: of as few dimensions as can be, after the same number of elements' worth of dimensions."""
        outer = math.prod(before[: rows.dim])
        for dims in range(1, len(after) + 1):
            for dim in range(len(after) - dims + 1):
                count = math.prod(after[dim : dim + dims])
                if math.prod(after[:dim]) == outer and count and count % self.units == 0:
                    return Rows(dim, dims, count // self.units)
        raise _NoRule("the view goes across rows")

    def _unsqueeze(self, node: fx.Node, out: Rows | None) -> Rule:
        source, at = _args(node)
        at %= len(shape_of(node))
        if out is not None:
            out.past(at, len(shape_of(node)))
            need = Rows(out.dim - (at < out.dim), out.dims, out.factor)
        else:
            need = self._mark(source)
            if need.dim < at < need.dim + need.dims:
                raise _NoRule("between rows")
            out = Rows(need.dim + (at <= need.dim), need.dims, need.factor)
        place = at if at <= out.dim else at - out.dims + 1
        return Rule(out, {source: need}, lambda n: (node.target, (source, place), {}))

    def _squeeze(self, node: fx.Node, out: Rows | None) -> Rule:
        if out is not None or len(_args(node)) < 2:
            raise _NoRule("for its result, or of all dimensions of size 1")
        source, at = _args(node)
        ndim, need = len(shape_of(source)), self._mark(source)
        gone = {d % ndim for d in (at if isinstance(at, (list, tuple)) else [at])}
        gone = {d for d in gone if shape_of(source)[d] == 1}
        places = sorted(need.past(d, ndim) for d in gone)
        made = Rows(need.dim - sum(d < need.dim for d in gone), need.dims, need.factor)
        return Rule(made, {source: need}, lambda n: (torch.ops.aten.squeeze.dims, (source, places), {}))

    def _permute(self, node: fx.Node, out: Rows | None) -> Rule:
        source = _args(node)[0]
        order = list(range(len(shape_of(source))))
        if compat.node_name(node) == "aten::permute":
            order = [d % len(order) for d in _args(node)[1]]
        else:
            a, b = (0, 1) if compat.node_name(node) == "aten::t" else (d % len(order) for d in _args(node)[1:])
            if len(order) > 1:
                order[a], order[b] = order[b], order[a]
        if out is None:
            need = self._mark(source)
            out = Rows(order.index(need.dim), need.dims, need.factor)
        else:
            need = Rows(order[out.dim], out.dims, out.factor)
        if need.dims > 1:
            raise _NoRule("rows of several dimensions, permuted")
        return Rule(out, {source: need})

    def _expand(self, node: fx.Node, out: Rows | None) -> Rule:
        source = _args(node)[0]
        shape = shape_of(node)
        if out is None:
            mark = self._mark(source)
            out = Rows(mark.dim + len(shape) - len(shape_of(source)), mark.dims, mark.factor)
        made = out
        needs = self._broadcast([source], shape, out)
        return Rule(out, needs, lambda n: (node.target, (source, made.part(shape, n)), {}))

    def _full(self, node: fx.Node, out: Rows | None) -> Rule:
        """Constants of a given shape."""
        if out is None:
            raise _NoRule("it has no rows of its own")
        shape, made = shape_of(node), out
        at = 1 if isinstance(_args(node)[0], fx.Node) else 0  # new_full and full
        needs = {n: self.marks[n] for n in node.all_input_nodes if n in self.marks}
        return Rule(
            out,
            needs,
            lambda n: (node.target, (*_args(node)[:at], made.part(shape, n), *_args(node)[at + 1 :]), node.kwargs),
        )

    def _slice(self, node: fx.Node, out: Rows | None) -> Rule:
        source, dim, *rest = (*_args(node), 0)[: max(2, len(_args(node)))]
        need = out or self._mark(source)
        at = need.past(dim, len(shape_of(node)))
        return Rule(need, {source: need}, lambda n: (node.target, (source, at, *rest), node.kwargs))

    def _slice_backward(self, node: fx.Node, out: Rows | None) -> Rule:
        source, _, dim, *rest = _args(node)
        shape, need = shape_of(node), out or self._mark(source)
        at = need.past(dim, len(shape))
        return Rule(need, {source: need}, lambda n: (node.target, (source, need.part(shape, n), at, *rest), {}))

    def _slice_scatter(self, node: fx.Node, out: Rows | None) -> Rule:
        base, source, dim, *rest = (*_args(node), 0)[: max(3, len(_args(node)))]
        need = out or self.marks.get(base) or self._mark(source)
        at = need.past(dim, len(shape_of(node)))
        return Rule(need, {base: need, source: need}, lambda n: (node.target, (base, source, at, *rest), node.kwargs))

    def _pad(self, node: fx.Node, out: Rows | None) -> Rule:
        source, pads, *rest = _args(node)
        ndim, need = len(shape_of(source)), out or self._mark(source)
        moved = [0] * 2 * (ndim - need.dims + 1)
        for i, width in enumerate(pads):  # from the last dimension on, before and behind
            if width:
                moved[2 * (ndim - need.dims - need.past(ndim - 1 - i // 2, ndim)) + i % 2] = width
        return Rule(need, {source: need}, lambda n: (node.target, (source, moved, *rest), node.kwargs))

    # --- sums and products -------------------------------------------------------------------------------------------------

    def _reduction(self, node: fx.Node, out: Rows | None) -> Rule:
        source = _args(node)[0]
        if out is not None:
            raise _NoRule("it is not taken in for its result")
        ndim, need = len(shape_of(source)), self._mark(source)
        given = _args(node)[1] if len(_args(node)) > 1 else None
        at = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
        reduced = {d % ndim for d in at} or set(range(ndim))
        rows = set(range(need.dim, need.dim + need.dims))
        keep = len(_args(node)) > 2 and bool(_args(node)[2])
        if reduced & rows:
            total: Any = {"aten::sum": "sum", "aten::mean": "mean"}.get(compat.node_name(node))
            if total is None or not rows <= reduced or (keep and need.dims > 1):
                raise _NoRule("reduced along some of the rows, or not to a sum")
            if need.dims > 1 and at:
                places = sorted({d if d < need.dim else max(need.dim, d - need.dims + 1) for d in reduced})
                args = (source, places, *_args(node)[2:])
                return Rule(None, {source: need}, lambda n: (node.target, args, node.kwargs), total)
            return Rule(None, {source: need}, None, total)
        places = [need.past(d, ndim) for d in sorted(reduced)]
        made = Rows(need.dim if keep else need.dim - sum(d < need.dim for d in reduced), need.dims, need.factor)
        dims: Any = places if isinstance(given, (list, tuple)) else places[0]
        return Rule(made, {source: need}, lambda n: (node.target, (source, dims, *_args(node)[2:]), node.kwargs))

    def _matmul(self, node: fx.Node, out: Rows | None) -> Rule:
        """``mm``, ``bmm`` and ``addmm``."""
        *added, a, b = _args(node)
        ndim = len(shape_of(node))
        left, right = self.marks.get(a), self.marks.get(b)
        mark = out or left or right
        if mark is None or mark.dims > 1:
            raise _NoRule("no rows, or of several dimensions")
        row, column = ndim - 2, ndim - 1
        contracted = Rows(column, 1, mark.factor), Rows(row, 1, mark.factor)
        if out is None and (left or contracted[0], right or contracted[1]) == contracted:
            if added:
                raise _NoRule("something is added to a sum over rows")
            return Rule(None, {a: contracted[0], b: contracted[1]})
        made = Rows(mark.dim, 1, mark.factor)
        needs = {a: made} if made.dim == row else {b: made} if made.dim == column else {a: made, b: made}
        return Rule(made, {**needs, **self._broadcast(added, shape_of(node), made)})

    # --- losses and look-ups -----------------------------------------------------------------------------------------------

    def _nll_forward(self, node: fx.Node, out: Rows | None) -> Rule:
        scores, targets, weight, reduction, ignored = _args(node)
        mark = self._mark(scores)
        if mark.dim or mark.dims > 1 or len(shape_of(scores)) != 2:
            raise _NoRule("rows are not the first of two dimensions")
        args = scores, targets, weight, 2 if reduction else 0, ignored  # a mean is made of sums
        return Rule(mark, {scores: mark, targets: mark}, lambda n: (node.target, args, {}))

    def _nll_backward(self, node: fx.Node, out: Rows | None) -> Rule:
        gradient, scores, targets, _, reduction, *_ = _args(node)
        mark = out or self._mark(scores)
        if mark.dim or mark.dims > 1 or len(shape_of(scores)) != 2:
            raise _NoRule("rows are not the first of two dimensions")
        return Rule(mark, {scores: mark, targets: mark, **({} if reduction else {gradient: mark})})

    def _getitem(self, node: fx.Node, out: Rows | None) -> Rule:
        source, index = _args(node)
        if compat.node_name(source) != "aten::nll_loss_forward" or source not in self.marks:
            raise _NoRule("one of several results")
        mark, reduction = self.marks[source], _args(source)[3]
        if index == 0 and reduction == 0:
            return Rule(mark, {source: mark})
        return Rule(None, {source: mark}, total="weighted" if index == 0 and reduction == 1 else "sum")

    def _lookup(self, node: fx.Node, out: Rows | None) -> Rule:
        """``gather`` and ``scatter``: all tensors have the same rows."""
        source, dim, *others = _args(node)
        tensors = [n for n in (source, *others) if isinstance(n, fx.Node)]
        mark = out or next((self.marks[n] for n in tensors if n in self.marks), None)
        if mark is None:
            raise _NoRule("no operand has rows")
        at = mark.past(dim, len(shape_of(node)))
        last = mark.dim + mark.dims
        if len({shape_of(n)[mark.dim : last] for n in tensors}) > 1:
            raise _NoRule("operands have different rows")
        return Rule(mark, dict.fromkeys(tensors, mark), lambda n: (node.target, (source, at, *others), node.kwargs))

    def _mark(self, node: fx.Node) -> Rows:
        if node not in self.marks:
            raise _NoRule(f"{node.name} has no rows")
        return self.marks[node]


_RULES: dict[str, Callable[[RowRules, fx.Node, Rows | None], Rule]] = {
    **dict.fromkeys(("aten::detach", "aten::alias", "aten::_to_copy", "aten::masked_fill"), RowRules._pointwise),
    **dict.fromkeys(("aten::full_like", "aten::zeros_like", "aten::ones_like"), RowRules._pointwise),
    **dict.fromkeys(("aten::_softmax", "aten::_log_softmax"), RowRules._like),
    **dict.fromkeys(("aten::_softmax_backward_data", "aten::_log_softmax_backward_data"), RowRules._like),
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::reshape"), RowRules._view),
    **dict.fromkeys(("aten::t", "aten::transpose", "aten::permute"), RowRules._permute),
    **dict.fromkeys(("aten::full", "aten::zeros", "aten::new_zeros", "aten::new_full"), RowRules._full),
    **dict.fromkeys(("aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::logsumexp"), RowRules._reduction),
    **dict.fromkeys(("aten::argmax", "aten::argmin"), RowRules._reduction),
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::addmm"), RowRules._matmul),
    **dict.fromkeys(("aten::gather", "aten::scatter", "aten::scatter_add"), RowRules._lookup),
    "aten::unsqueeze": RowRules._unsqueeze,
    "aten::squeeze": RowRules._squeeze,
    "aten::expand": RowRules._expand,
    "aten::slice": RowRules._slice,
    "aten::slice_backward": RowRules._slice_backward,
    "aten::slice_scatter": RowRules._slice_scatter,
    "aten::constant_pad_nd": RowRules._pad,
    "aten::nll_loss_forward": RowRules._nll_forward,
    "aten::nll_loss_backward": RowRules._nll_backward,
}
