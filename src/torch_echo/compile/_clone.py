"""A plan in which values are rebuilt more than once, written into a joint graph.

PyTorch's recompute tags rebuild a value once. Here each re-run of the schedule (:mod:`torch_echo.nested`) becomes a node of the
backward part, in its place before the node that first needs it; views are made anew on what was rebuilt. What backward still
reads of the forward part is kept by PyTorch's own partitioner.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from torch_echo import compat
from torch_echo.compile._capture import Capture, is_alias
from torch_echo.errors import CaptureError
from torch_echo.nested import Groups, Step

__all__ = ["clone"]


def clone(
    joint: fx.GraphModule, found: Capture, dropped: Collection[int], groups: Groups, steps: Sequence[Step]
) -> None:
    """Insert the re-runs, and have backward read them. Cost: linear in nodes and steps.

    Raises CaptureError where a node needs what no step rebuilds; the graph is not to be used then.
    """
    _Cloner(joint, found, dropped, groups, steps).run()


class _Cloner:
    def __init__(
        self, joint: fx.GraphModule, found: Capture, dropped: Collection[int], groups: Groups, steps: Sequence[Step]
    ) -> None:
        self.graph, self.found = joint.graph, found
        self.joint = joint
        self.dropped = set(dropped)
        self.members = [set(group) for group in groups]
        self.node_of = {op: node for node, op in found.op_of.items()}
        self.steps: dict[int, list[Step]] = {}
        """By position of the node before which they run."""
        for step in steps:
            self.steps.setdefault((step.tick + 1) // 2, []).append(step)
        self.lasting: dict[fx.Node, fx.Node] = {}
        """What backward reads in place of a node of the forward part."""
        self.passing: dict[fx.Node, fx.Node] = {}
        """The same for the rebuild ahead that is being written."""
        self.group = -1
        self.forward: set[fx.Node] = set()

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        boundary = compat.boundary(nodes)
        self.forward = {n for n in nodes[:boundary] if n.op == "call_function"}
        for i in range(boundary, len(nodes)):
            node = nodes[i]
            if node.op != "call_function":
                continue
            with self.graph.inserting_before(node):
                for step in self.steps.get(i, ()):
                    self._run(step)
                self._turn_to(-1)
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._standing)  # type: ignore[assignment,misc]
        self.graph.lint()
        self.joint.recompile()

    def _run(self, step: Step) -> None:
        self._turn_to(step.group)
        node = self.node_of[step.op]
        writes = self.found.graph.ops[step.op].writes
        lasts = step.group < 0 or any(w in self.members[step.group] for w in writes)
        (self.lasting if lasts else self.passing)[node] = self._copy(node)

    def _turn_to(self, group: int) -> None:
        if group != self.group:
            self.group, self.passing = group, {}

    def _copy(self, node: fx.Node) -> fx.Node:
        copied = self.graph.node_copy(node, self._standing)
        copied.meta = {**node.meta, "partitioner_tag": "is_backward"}
        return copied

    def _lost(self, node: fx.Node) -> bool:
        """Is what a node of the forward part makes, or views, dropped?"""
        value = self.found.value_of.get(node)
        if value is not None:
            return value in self.dropped
        op = self.found.op_of.get(node)
        if op is not None:  # of several outputs
            return any(w in self.dropped for w in self.found.graph.ops[op].writes)
        several = isinstance(node.meta.get("val"), (tuple, list))  # views; a number is kept
        return several and node in self.forward and any(self._lost(n) for n in node.all_input_nodes)

    def _view(self, node: fx.Node) -> bool:
        """Is it a view of what is kept? It is made again: see :func:`torch_echo.compile._partition.tag`."""
        return node in self.forward and is_alias(node) and node not in self.found.stale

    def _standing(self, node: fx.Node) -> fx.Node:
        """What is to be read in place of a node."""
        for table in (self.passing, self.lasting):
            if node in table:
                return table[node]
        if not self._lost(node) and not self._view(node):
            return node
        if node in self.found.op_of:
            raise CaptureError(f"{node.name} is read in backward, but nothing rebuilds it")
        copied = self._copy(node)  # a view, or one of several outputs
        passes = any(n in self.passing.values() for n in copied.all_input_nodes)
        (self.passing if passes else self.lasting)[node] = copied
        return copied
