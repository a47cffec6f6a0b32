"""The loss head of a joint graph in parts.

At a language model's loss a step holds up to four copies of the logits ([rows, vocabulary]), more than anything else in it. But
each row's loss and gradients need that row only: projection, log-softmax, loss and their gradients can be computed for some rows
after the others. What is summed over rows (the loss, the gradients of weight and bias) is summed part by part, which is the same
up to the order of summation; what is one value a row is put together again.

`find` starts from the largest matrix product of the forward pass and follows its rows through the joint graph (``_rows`` knows
how). The head is all that is as large as the logits, what reads it, and what lies between. It has to have a rule for all of that;
otherwise there is no head, and the graph stays as it is. Logits that the graph returns are made whole and read by slices.

`split` writes the parts: in forward one after the other where the head was, and so in backward. Parts of forward values are
separate values, so that a plan can drop each of them and rebuild it just before its part of backward.

Cost: linear in nodes, for each time that something as large as the logits but not made from them is taken in. Not done: rows that
are symbols; a second head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from torch_echo import compat
from torch_echo.compile._rows import RowRules, Rows, Rule, shape_of
from torch_echo.cost import is_view

__all__ = ["Head", "find", "split"]

aten = torch.ops.aten

_LARGE = 2
"""A tensor is as large as the logits if it has more than one in so many of their elements."""
_SMALL = 16
"""What forward hands on of the head has at most one element for so many of the logits."""
_PRODUCTS = ("aten::mm", "aten::addmm")
_INHERITED = (
    "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "fwd_source_fn_stack", "stack_trace", "seq_nr",
    "autograd_backward", "original_aten",
)  # fmt: skip
"""What a part's node says of itself as the whole one does."""


@dataclass
class Head:
    """The nodes of a joint graph that can be computed in parts."""

    units: int
    """Into how many parts at most."""
    logits: fx.Node
    rules: dict[fx.Node, Rule] = field(default_factory=dict)
    """By node, in order."""
    boundary: int = 0
    """Position from which on nodes are backward's."""


def find(joint: fx.GraphModule, num_fwd_outputs: int) -> Head | None:
    """The loss head of a joint graph, or None."""
    nodes = list(joint.graph.nodes)
    boundary = compat.boundary(nodes)
    products = [n for n in nodes[:boundary] if n.op == "call_function" and compat.node_name(n) in _PRODUCTS]
    logits = max(products, key=_numel, default=None)
    if logits is None or not _numel(logits):
        return None
    rows = shape_of(logits)[0]
    for units in dict.fromkeys([rows, *map(_leading, logits.users)]):
        if units > 1 and rows % units == 0:
            found = _Search(nodes, boundary, logits, units, num_fwd_outputs).run()
            if found is not None:
                return found
    return None


def split(joint: fx.GraphModule, head: Head, parts: int) -> fx.GraphModule | None:
    """The joint graph anew, with its head in so many parts; None where the parts don't fit together."""
    try:
        return _Split(joint, head, parts).run()
    except _NotSplit:
        return None


class _NotSplit(Exception):
    pass


class _Search:
    def __init__(
        self, nodes: Sequence[fx.Node], boundary: int, logits: fx.Node, units: int, num_fwd_outputs: int
    ) -> None:
        self.nodes, self.boundary, self.logits = nodes, boundary, logits
        self.index = {node: i for i, node in enumerate(nodes)}
        self.limit = _numel(logits) // _LARGE
        self.units = units
        self.whole: set[fx.Node] = set()
        """What the graph returns, and what that is a view of."""
        outputs: Any = nodes[-1].args[0]
        for node in outputs[:num_fwd_outputs]:
            while isinstance(node, fx.Node):
                self.whole.add(node)
                node = node.args[0] if is_view(node.target) and node.args else None
        self.marks: dict[fx.Node, Rows] = {}
        self.rules: dict[fx.Node, Rule] = {}
        self.given: dict[fx.Node, Rows] = {logits: Rows(0, 1, _numel(logits) // shape_of(logits)[1] // units)}
        """Rows that don't follow from those of operands."""

    def run(self) -> Head | None:
        while self._mark():
            pass
        core = [n for n in self.marks if _numel(n) > self.limit and n not in self.whole]
        chosen = set(core)
        for node in core:
            if any(user not in self.rules for user in node.users):
                return None
            chosen.update(node.users)
        chosen |= self._between(chosen)
        for node in list(chosen):
            if isinstance(node.meta.get("val"), (tuple, list)):
                chosen.update(node.users)
        order = sorted(chosen, key=self.index.__getitem__)
        rules = {n: self.rules[n] for n in order if n in self.rules}
        forward = [n for n in order if self.index[n] < self.boundary]
        if len(rules) < len(order) or not 0 < len(forward) < len(order):
            return None
        handed_on = [n for n in forward if rules[n].out and any(user not in chosen for user in n.users)]
        if any(_numel(n) * _SMALL > _numel(self.logits) for n in handed_on):
            return None
        return Head(self.units, self.logits, rules, self.boundary)

    def _mark(self) -> bool:
        """Find the rules of all nodes from the logits on; False when there is nothing more to take in."""
        self.marks, self.rules = {}, {}
        book = RowRules(self.units, self.marks)
        for node in self.nodes:
            if node in self.given or any(n in self.marks for n in node.all_input_nodes):
                rule = book.rule(node, self.given.get(node))
                if rule is not None:
                    self.rules[node] = rule
                    if rule.out is not None:
                        self.marks[node] = rule.out
        needs = [item for rule in self.rules.values() for item in rule.needs.items()]
        wanted = {operand: need for operand, need in needs if self._apart(operand) and self._fits(operand, need)}
        self.given |= wanted
        return bool(wanted)

    def _apart(self, node: fx.Node) -> bool:
        """Is a node as large as the logits, but not made from them?"""
        known = node in self.marks or node in self.given or node in self.whole or node.op != "call_function"
        return not known and _numel(node) > self.limit

    def _fits(self, node: fx.Node, rows: Rows) -> bool:
        """Can a node be computed in parts with these rows, and be read in parts by all that read it?"""
        book = RowRules(self.units, {**self.marks, node: rows})
        return (
            all(book.rule(n) is not None for n in node.users)
            and RowRules(self.units, self.marks).rule(node, rows) is not None
        )

    def _between(self, chosen: set[fx.Node]) -> set[fx.Node]:
        """Nodes with rows that read some of the chosen and are read by some, directly or not."""
        after, before = set(chosen), set(chosen)
        for node in self.nodes:
            if node in self.rules and any(n in after and n in self.marks for n in self.rules[node].needs):
                after.add(node)
        for node in reversed(self.nodes):
            if node in self.marks and any(
                u in before and node in self.rules[u].needs for u in node.users if u in self.rules
            ):
                before.add(node)
        return (after & before) - self.whole


class _Split:
    def __init__(self, joint: fx.GraphModule, head: Head, parts: int) -> None:
        self.joint, self.head = joint, head
        self.nodes: list[fx.Node] = list(joint.graph.nodes)
        self.forward = set(self.nodes[: head.boundary])
        self.bounds = [head.units * k // parts for k in range(parts + 1)]
        self.new = fx.Graph()
        self.of: dict[fx.Node, fx.Node] = {}
        """New nodes of old ones, whole."""
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        """The same, by part."""
        self.flat: dict[tuple[fx.Node, Rows], fx.Node] = {}
        """Operands with their rows in one dimension."""
        self.slices: dict[tuple[fx.Node, Rows], fx.Node] = {}
        """Of the part that is being written."""

    def run(self) -> fx.GraphModule:
        first, second = self._regions()
        for region, nodes in ((first, self.nodes[: self.head.boundary]), (second, self.nodes[self.head.boundary :])):
            later = self._later(region, nodes)
            for node in nodes:
                if node not in later and node not in region:
                    self._keep(node)
                if node is region[-1]:
                    self._write(region)
                    for other in later:
                        self._keep(other)
        self.new.lint()
        return fx.GraphModule(self.joint, self.new)

    def _regions(self) -> tuple[list[fx.Node], list[fx.Node]]:
        order = list(self.head.rules)
        return [n for n in order if n in self.forward], [n for n in order if n not in self.forward]

    def _later(self, region: Sequence[fx.Node], nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """Nodes among the region's that need its results, and so come after it."""
        inside, later = set(region), dict[fx.Node, None]()
        for node in nodes:
            if node in inside:
                if any(n in later for n in node.all_input_nodes):
                    raise _NotSplit(f"{node.name} needs results of the head that it is part of")
                if node is region[-1]:
                    break
            elif compat.written_nodes(node):
                raise _NotSplit(f"{node.name} writes among the nodes of the head")
            elif any(n in inside or n in later for n in node.all_input_nodes):
                if not _movable(node):
                    raise _NotSplit(f"{node.name} has to stay among the nodes of the head")
                later[node] = None
        return later

    def _keep(self, node: fx.Node) -> None:
        self.of[node] = self.new.node_copy(node, self.of.__getitem__)

    # --- parts -------------------------------------------------------------------------------------------------------------

    def _write(self, region: Sequence[fx.Node]) -> None:
        sums: dict[fx.Node, fx.Node] = {}
        self.flat = {}
        for k in range(len(self.bounds) - 1):
            self.slices = {}
            for node in region:
                self._part(node, k, sums)
        for node in region:
            rule = self.head.rules[node]
            if rule.out is None:
                made = sums[node]
                if rule.total == "weighted":
                    made = self._call(node, aten.div.Tensor, (made, self._weight(node, sums)))
            elif any(user not in self.head.rules for user in node.users):
                made = self._call(node, aten.cat.default, (self.parts[node], rule.out.dim))
                if rule.out.dims > 1:
                    made = self._call(node, aten.view.default, (made, list(shape_of(node))))
            else:
                continue
            self._check(node, made)
            self.of[node] = made

    def _part(self, node: fx.Node, k: int, sums: dict[fx.Node, fx.Node]) -> None:
        rule, units = self.head.rules[node], self.bounds[k + 1] - self.bounds[k]
        target, args, kwargs = rule.call(units) if rule.call else (node.target, node.args, node.kwargs)

        def operand(n: fx.Node) -> fx.Node:
            if n in rule.needs:
                return self.parts[n][k] if n in self.parts else self._slice(node, n, rule.needs[n], k)
            return self._whole(n)

        args, kwargs = fx.map_arg((args, kwargs), operand)  # type: ignore[arg-type, assignment, misc]
        known = sums.get(node)
        if rule.out is None and known is not None and target is aten.mm.default:
            sums[node] = self._call(node, aten.addmm.default, (known, *args))
            return
        made = self._call(node, target, args, kwargs)
        if rule.out is not None:
            self.parts.setdefault(node, []).append(made)
            return
        if rule.total == "mean":
            made = self._call(node, aten.mul.Tensor, (made, units / self.head.units))
        sums[node] = made if known is None else self._call(node, aten.add.Tensor, (known, made))

    def _weight(self, node: fx.Node, sums: dict[fx.Node, fx.Node]) -> fx.Node:
        """The weight of all rows, for the mean that ``nll_loss_forward`` takes."""
        for other in node.all_input_nodes[0].users:
            if other.args[1] == 1:
                return sums[other]
        raise _NotSplit("a mean loss without its weight")

    def _slice(self, node: fx.Node, operand: fx.Node, rows: Rows, k: int) -> fx.Node:
        key = operand, rows
        if key not in self.slices:
            whole = self._whole(operand)
            if rows.dims > 1:
                if key not in self.flat:
                    shape = rows.part(shape_of(operand), self.head.units)
                    self.flat[key] = self._call(node, aten.view.default, (whole, shape))
                whole = self.flat[key]
            low, high = (rows.factor * unit for unit in self.bounds[k : k + 2])
            self.slices[key] = self._call(node, aten.slice.Tensor, (whole, rows.dim, low, high))
        return self.slices[key]

    def _whole(self, node: fx.Node) -> fx.Node:
        if node not in self.of:
            raise _NotSplit(f"{node.name} is needed whole before its parts are there")
        return self.of[node]

    def _call(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """A new node in place of an old one, or of a part of it."""
        made = self.new.call_function(target, args, kwargs or {})
        made.meta = {name: node.meta[name] for name in _INHERITED if name in node.meta}
        made.meta["partitioner_tag"] = "is_forward" if node in self.forward else "is_backward"
        values: Any = fx.map_arg((made.args, made.kwargs), lambda n: n.meta["val"])
        try:
            with compat.fake_mode(node.meta["val"]):
                made.meta["val"] = target(*values[0], **values[1])
        except RuntimeError as error:  # a view of a part whose strides don't allow it
            raise _NotSplit(f"{node.name}: {error}") from error
        return made

    def _check(self, node: fx.Node, made: fx.Node) -> None:
        old, new = node.meta["val"], made.meta["val"]
        if (old.dtype, old.shape, old.stride()) != (new.dtype, new.shape, new.stride()):
            raise _NotSplit(f"{node.name} would have another layout")


def _movable(node: fx.Node) -> bool:
    """Can a node run after others that it does not depend on? Not if it draws random numbers or has effects."""
    target = node.target
    if target is getitem:
        return True
    plain = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    return plain and not compat.is_nondeterministic(target)


def _numel(node: fx.Node) -> int:
    """Elements of a node's tensor; 0 if it is none, or has sizes that are symbols."""
    value = node.meta.get("val")
    return math.prod(value.shape) if isinstance(value, torch.Tensor) and _known(value) else 0


def _known(value: torch.Tensor) -> bool:
    return all(type(n) is int for n in value.shape)


def _leading(node: fx.Node) -> int:
    """The first size of a view of the logits in which their rows have several dimensions; 0 for another node."""
    return shape_of(node)[0] if is_view(node.target) and _numel(node) and len(shape_of(node)) > 2 else 0
