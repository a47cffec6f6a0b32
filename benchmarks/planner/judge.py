"""What a partition costs, whoever made it: read off its forward and backward graphs, run by PyTorch's kernels with boxed
arguments, so that everything goes when it was read for the last time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_echo import compat
from torch_echo.compile import Capture
from torch_echo.compile._capture import tensors_of
from torch_echo.graph import Kind

__all__ = ["Judge", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """Bytes above parameters and inputs at the highest moment, and what runs again."""

    peak: int
    seconds: float
    rerun: int


class Judge:
    """Judges partitions of one joint graph, by the seconds and workspaces that were captured with it."""

    def __init__(self, joint: fx.GraphModule, found: Capture, outputs: int) -> None:
        nodes = list(joint.graph.nodes)
        graph = found.graph
        self.outputs = outputs
        self.seconds = {node.name: graph.ops[o].seconds for node, o in found.op_of.items()}
        self.workspace = {node.name: graph.ops[o].workspace for node, o in found.op_of.items()}
        self.workspace |= {nodes[s.alloc // 2].name: s.nbytes for s in graph.storages if s.kind is Kind.TEMPORARY}
        self.forward = {n.name for n in nodes if n.op == "call_function" and compat.is_forward_node(n)}
        self.live = self.peak = 0

    def __call__(self, forward: fx.GraphModule, backward: fx.GraphModule) -> Verdict:
        """Go through both graphs."""
        self.live = self.peak = 0
        first, second = list(forward.graph.nodes), list(backward.graph.nodes)
        older = _storages(n for n in first if n.op == "placeholder")
        returned, made = first[-1].args[0], second[-1].args[0]
        self._run(first, older, older | _storages(returned))
        users = _storages(returned[: self.outputs])
        for node in second:
            if node.op == "placeholder" and compat.is_backward_input(node):
                self.live += sum(
                    compat.size_hint(t.untyped_storage().nbytes()) for t in tensors_of(node.meta.get("val"))
                )
        given = _storages(n for n in second if n.op == "placeholder")
        self._run(second, given | older | users, older | users | _storages(made))
        again = [n.name for n in second if n.op == "call_function" and n.name in self.forward]
        return Verdict(self.peak, sum(self.seconds.get(name, 0.0) for name in again), len(again))

    def _run(self, nodes: list[fx.Node], there: set[int], stay: set[int]) -> None:
        size: dict[int, int] = {}
        last: dict[int, int] = {}
        for i, node in enumerate(nodes[:-1]):
            for t in (
                *tensors_of(node.meta.get("val")),
                *(t for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))),
            ):
                key = compat.storage_key(t)
                size[key], last[key] = compat.size_hint(t.untyped_storage().nbytes()), i
        going: dict[int, list[int]] = {}
        for key, i in last.items():
            if key not in stay:
                going.setdefault(i, []).append(key)
        there = set(there)
        for i, node in enumerate(nodes[:-1]):
            if node.op != "placeholder":
                for t in tensors_of(node.meta.get("val")):
                    key = compat.storage_key(t)
                    if key not in there:
                        there.add(key)
                        self.live += size[key]
                self.peak = max(self.peak, self.live + self.workspace.get(node.name, 0))
            self.live -= sum(size[key] for key in going.get(i, ()) if key in there)
            there.difference_update(going.get(i, ()))


def _storages(nodes: Any) -> set[int]:
    return {
        compat.storage_key(t) for node in nodes if isinstance(node, fx.Node) for t in tensors_of(node.meta.get("val"))
    }
