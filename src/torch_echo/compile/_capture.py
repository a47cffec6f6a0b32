"""From the joint graph of AOTAutograd to a :class:`TrainingGraph`.

The joint graph holds forward, then backward, as functions of *primals* (parameters, buffers, inputs) and *tangents*. Its nodes
carry fake tensors, whose storages tell what aliases what. Time is counted in two ticks a node: what it makes is there from its
first, what it was the last to read is gone with its second. That is how the code that FX generates runs, if arguments are boxed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from torch_echo import compat
from torch_echo.compile._fusion import FusedCost, inlined, laid_out
from torch_echo.cost import CostModel, SpecError, Workspaces, is_view, spec_of, work_of
from torch_echo.errors import CaptureError
from torch_echo.graph import BackwardPass, Fused, Kind, Op, OpClass, Phase, Save, Storage, TrainingGraph, Trait, Value
from torch_echo.rules import nondeterministic_on, rule_of

__all__ = ["Capture", "capture", "is_alias", "tensors_of"]

_RERUN = ("aten", "torch_echo")
"""Namespaces of ops that may be re-run."""


@dataclass
class Capture:
    """A training graph, and how its values are found in the joint graph."""

    graph: TrainingGraph
    op_of: dict[fx.Node, int] = field(default_factory=dict)
    """The op that a node of the forward pass is."""
    value_of: dict[fx.Node, int] = field(default_factory=dict)
    """The value that a node of the forward pass makes, or a view of which it is."""
    stale: set[fx.Node] = field(default_factory=set)
    """Nodes that read an input which the forward pass overwrites at its end: backward would find other contents."""
    region: bool = False
    """Is it a nested region, which other graphs call?"""


def capture(
    joint: fx.GraphModule, num_fwd_outputs: int, cost: CostModel | None = None, workspaces: Workspaces | None = None
) -> Capture:
    """The training graph of a joint graph. Ops get the seconds of `cost` and the bytes of `workspaces`; with a
    :class:`FusedCost`, what Inductor's kernels inline takes no memory.

    Raises CaptureError for what is not understood: a node that is neither a tensor's nor a symbol's.
    """
    return _Walk(joint, num_fwd_outputs, cost, workspaces).run()


class _Walk:
    def __init__(
        self, joint: fx.GraphModule, num_fwd_outputs: int, cost: CostModel | None, workspaces: Workspaces | None
    ) -> None:
        self.nodes = list(joint.graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.cost = cost
        self.workspaces = workspaces
        self.graph = TrainingGraph(ticks=2 * len(self.nodes))
        self.found = Capture(self.graph, region=compat.is_region(joint.graph))
        outputs = self.nodes[-1].args[0]
        self.returned = [n for n in outputs[:num_fwd_outputs] if isinstance(n, fx.Node)]
        self.gradients = [n for n in outputs[num_fwd_outputs:] if isinstance(n, fx.Node)]
        self.boundary = compat.boundary(self.nodes)
        """Nodes from here on are backward's."""
        self.storages: dict[Hashable, int] = {}
        """Graph storage of each fake storage."""
        self.of: dict[fx.Node, list[int]] = {}
        """Graph storages of a node's tensors."""
        self.values: dict[int, int] = {}
        """Value of each graph storage."""
        self.last_read: dict[int, int] = {}
        """Last tick at which a graph storage is used."""
        self.last_forward: dict[int, int] = {}
        """The same, in forward."""
        self.overwritten: set[fx.Node] = set()
        """Primals that the forward pass writes to, in the graph or when it has ended."""
        self.classes: dict[tuple[str, str], int] = {}
        self.counts: list[int] = []
        self.paid = 0.0
        """Seconds of the ops that are run twice anyway: a user's checkpoint says so."""
        self.fusing = cost if isinstance(cost, FusedCost) else None

    def run(self) -> Capture:
        for i, node in enumerate(self.nodes):
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op in ("call_function", "get_attr"):
                self._call(i, node)
            elif node.op != "output":
                raise CaptureError(f"{node.op} node {node.name} in the joint graph")
        self._lifetimes()
        graph = self.graph
        begin = 2 * self.boundary
        graph.passes = [BackwardPass(begin, graph.ticks)] if begin < graph.ticks else []
        graph.step_seconds = sum(op.seconds for op in graph.ops) + 2 * self.paid
        if self.fusing is not None:
            made = (s for s in graph.storages if s.alloc >= 0 and s.kind is not Kind.TEMPORARY)
            graph.step_seconds += sum(self.fusing.writing(s.nbytes) for s in made if s.nbytes and not s.fused)
        graph.meta = {"engine": "compile", "torch": torch.__version__}
        graph.check()
        return self.found

    # --- storages ----------------------------------------------------------------------------------------------------

    def _storage(
        self, tensor: torch.Tensor, kind: Kind, layer: str, alloc: int, key: Hashable | None = None
    ) -> tuple[int, bool]:
        """Graph storage of a fake tensor, and whether it is new. `key`: what tells it from others, if not its own storage."""
        key = compat.storage_key(tensor) if key is None else key
        known = self.storages.get(key) if key != -1 else None
        if known is not None:
            return known, False
        nbytes = compat.size_hint(tensor.untyped_storage().nbytes())
        self.graph.storages.append(Storage(nbytes, kind, layer, alloc, self.graph.ticks))
        number = len(self.graph.storages) - 1
        if key != -1:
            self.storages[key] = number
        return number, True

    def _keys(self, node: fx.Node, tensors: list[torch.Tensor]) -> list[Hashable | None]:
        """Keys for the storages of what a node makes. Calls of one nested region have the same fake tensors: there, the region's
        own graph tells what is an input, and what is made anew."""
        region = compat.region_of(node)
        if region is None:
            return [None] * len(tensors)
        *inside, output = region.nodes
        for inner, outer in zip((n for n in inside if n.op == "placeholder"), node.args[2:], strict=True):
            if isinstance(outer, fx.Node) and self.of.get(outer):
                self.storages[node, compat.storage_key(inner.meta["val"])] = self.of[outer][0]
        returned: Any = [n.meta["val"] for n in output.args[0] if n is not None]  # type: ignore[union-attr,misc]
        return [(node, compat.storage_key(t)) for t in tensors_of(returned)]

    def _viewed(self, node: fx.Node) -> int | None:
        """The graph storage that a node makes views of. Inductor's passes make fake tensors anew, which share nothing then."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not self.of.get(source):
            return None
        if node.target is getitem:
            values = source.meta["val"]
            if not isinstance(values, (tuple, list)):
                return self.of[source][0]
            return self.of[source][len(list(tensors_of(values[: node.args[1]])))]  # type: ignore[index]
        return self.of[source][0] if is_view(node.target) else None

    def _placeholder(self, node: fx.Node) -> None:
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return
        tangent = compat.is_backward_input(node)
        kind = Kind.GRADIENT if tangent else Kind.INPUT
        alloc = 2 * self.boundary if tangent else -1
        s, new = self._storage(tensor, kind, "", alloc)
        self.of[node] = [s]
        if new:
            self.values[s] = len(self.graph.values)
            self.graph.values.append(Value(s, 0, -1))
        if not tangent:
            self.found.value_of[node] = self.values[s]

    # --- ops -----------------------------------------------------------------------------------------------------------

    def _call(self, i: int, node: fx.Node) -> None:
        start, end = 2 * i, 2 * i + 1
        layer = compat.layer_of(node)
        forward = i < self.boundary
        for written in compat.written_nodes(node):
            if written.op != "placeholder":
                raise CaptureError(f"{node.name} overwrites {written.name}: the joint graph is not functional")
            self.overwritten.add(written)
        if not forward and compat.must_be_in_forward(
            node
        ):  # it stands at the end of the graph, and runs when forward ends
            self.of[node] = self.of.get(compat.written_nodes(node)[0], []) if compat.written_nodes(node) else []
            for source in node.all_input_nodes:
                self._read_when_forward_ends(source)
            return
        reads = self._reads(node, end, forward)
        tensors = list(tensors_of(node.meta.get("val")))
        made: list[int] = []
        here: list[int] = []
        viewed = self._viewed(node)
        for t, key in zip(tensors, self._keys(node, tensors), strict=True):
            s, new = viewed, False
            if s is None:
                s, new = self._storage(t, Kind.FEATURE_MAP if forward else Kind.GRADIENT, layer, start, key)
            here.append(s)
            self.last_read[s] = end
            if new:
                made.append(s)
        self.of[node] = here
        if self.fusing is not None and len(made) == len(here) == 1:
            first, second = inlined(node, self.index, self.boundary)
            if forward:
                self.graph.storages[made[0]].fused = Fused(Fused.FORWARD * first | Fused.BACKWARD * second)
            elif second:
                self.graph.storages[made[0]].nbytes = 0
        if forward and made:
            op = self._op(node, layer, Phase.FORWARD, start, end, reads)
            op.traits |= self._traits(node, tensors)
            if compat.is_checkpointed(node):
                self.paid, op.seconds = self.paid + op.seconds, 0.0
            if op.traits & Trait.RANDOM:
                if tensors[0].device.type == "cuda":
                    self.graph.rng_state_bytes = 0  # seed and offset
                op.workspace += self.graph.rng_state_bytes  # the generator's own state, while it is set back
            for s in made:
                self.values[s] = len(self.graph.values)
                self.graph.values.append(Value(s, 0, len(self.graph.ops)))
            op.writes = tuple(self.values[s] for s in made)
            self.graph.ops.append(op)
            self.found.op_of[node] = len(self.graph.ops) - 1
        elif not forward and tensors and node.target is not getitem:
            self.graph.ops.append(self._op(node, layer, Phase.BACKWARD, start, end, reads))
        if not forward:
            self._save(reads, start, end)
        elif len(here) == 1 and here[0] in self.values:
            self.found.value_of[node] = self.values[here[0]]

    def _save(self, reads: list[int], start: int, end: int) -> None:
        """Backward reads these values."""
        graph = self.graph
        before = max(start - 1, 2 * self.boundary)  # what is rebuilt is so before the reader makes its own
        for v in reads:
            if graph.values[v].producer >= 0:
                layer = graph.storages[graph.values[v].storage].layer
                graph.saves.append(Save(v, 2 * self.boundary, before, end, len(graph.ops) - 1, layer))

    def _op(self, node: fx.Node, layer: str, phase: Phase, start: int, end: int, reads: list[int]) -> Op:
        name = compat.node_name(node)
        key = (name, layer)
        cls = self.classes.setdefault(key, len(self.graph.classes))
        if cls == len(self.graph.classes):
            self.graph.classes.append(OpClass(name, layer, (cls,)))
            self.counts.append(0)
        op = Op(name, layer, phase, cls, self.counts[cls], start, end, tuple(reads))
        self.counts[cls] += 1
        if not isinstance(node.target, torch._ops.OpOverload):
            return op
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))  # type: ignore[arg-type]
        try:
            spec = spec_of(node.target, args, kwargs)
        except SpecError:
            op.traits |= Trait.KEEP
            return op
        if self.fusing is not None and compat.is_convolution(node) and not compat.keeps_layout(node):
            spec = laid_out(spec)
        work = work_of(node.target, spec)
        op.flops, op.bytes_moved = work.flops, work.bytes_moved
        if self.cost is not None:
            op.seconds = self.cost.seconds(node.target, spec)
        if self.workspaces is not None and (nbytes := self.workspaces.nbytes(node.target, spec)):
            op.workspace = nbytes
            self.graph.storages.append(Storage(nbytes, Kind.TEMPORARY, layer, start, end))
        return op

    def _traits(self, node: fx.Node, tensors: list[torch.Tensor]) -> Trait:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return Trait.KEEP
        rule = rule_of(target)
        if (
            target.namespace not in _RERUN
            or nondeterministic_on(rule, tensors[0].device.type)
            or any(t.layout is not torch.strided for t in tensors)
        ):
            return Trait.KEEP
        if rule.random and self.found.region:  # PyTorch replays random numbers in whole graphs only
            return Trait.KEEP
        return Trait.RANDOM if rule.random else Trait.NONE

    def _reads(self, node: fx.Node, tick: int, forward: bool) -> list[int]:
        """Values whose storages a node uses, as a view or for their contents."""
        reads: dict[int, None] = {}
        for source in node.all_input_nodes:
            for s in self.of.get(source, ()):
                self.last_read[s] = tick
                if forward:
                    self.last_forward[s] = tick
                if s in self.values:
                    reads[self.values[s]] = None
        return list(reads)

    def _read_when_forward_ends(self, node: fx.Node) -> None:
        last = 2 * self.boundary - 1
        for s in self.of.get(node, ()):
            self.last_read[s] = max(self.last_read.get(s, -1), last)
            self.last_forward[s] = last

    # --- lives -----------------------------------------------------------------------------------------------------------

    def _lifetimes(self) -> None:
        graph = self.graph
        outlive: set[int] = set()
        mutated_inputs = (
            [None] * len(self.returned) if self.found.region else compat.mutated_inputs(self.nodes[-1].graph)
        )
        for node, mutated in zip(self.returned, mutated_inputs, strict=False):
            if mutated is None:
                outlive.update(self.of.get(node, ()))
            else:  # copied into the input when forward ends
                self._read_when_forward_ends(node)
                self.overwritten.add(mutated)
        for node in self.gradients:
            outlive.update(self.of.get(node, ()))
        for i, storage in enumerate(graph.storages):
            if storage.alloc < 0 or storage.kind is Kind.TEMPORARY:
                continue
            storage.free = graph.ticks if i in outlive else max(self.last_read.get(i, -1), storage.alloc + 1)
            if i in self.values:
                end = graph.ticks if i in outlive else self.last_forward.get(i, storage.alloc + 1)
                storage.held = max(storage.alloc, min(end, storage.free))
        for s in outlive:
            graph.storages[s].fused &= ~Fused.FORWARD
        for node in self.overwritten:
            if node in self.found.value_of:
                graph.values[self.found.value_of[node]].keepable = False
                self.found.stale |= {user for user in node.users if self.index[user] < self.boundary}


def is_alias(node: fx.Node) -> bool:
    """Does a node make a view, or is it one of several views that another one makes?"""
    source = node.args[0] if node.target is getitem else node
    return isinstance(source, fx.Node) and is_view(source.target)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the value of a node."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
