"""The rule of the Echo paper, as a baseline.

Problem. Decide by bytes alone, without prices, times or the footprint of the whole, which cheap ops to re-run.

Method. Compute-heavy ops (matrix products, convolutions, recurrent layers, attention) are never re-run; they cut the
forward pass into regions of cheap ops. Inside the regions, from the input side: the *frontier* are the undecided ops
all of whose reads are available. Ops of the frontier that share a read form a group, and for the group

- *released* are the bytes of its reads that nobody else reads, forward or backward,
- *new* are the bytes of its outputs that anybody reads, and of its reads that are still read elsewhere; each tensor
  once.

Released >= new: keep the outputs (a tie keeps), and go on behind them. Otherwise the group is re-run, and all behind it
up to the next heavy ops, whose backward then reads rebuilt inputs. Parameters and inputs of the iteration count on
neither side.

Cost. Linear in reads, times the depth of the regions at worst.

What it does not do. It knows neither budget nor time, and its plan may even have a higher peak than none. Released
bytes count although the script may hold them.

Source. Zheng, Vijaykumar, Pekhimenko: "Echo: Compiler-based GPU Memory Footprint Reduction for LSTM RNN Training", ISCA
2020, and the pass that its authors merged into MXNet. Unlike there, the cell state of an LSTM is not exempted by name.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from torch_echo.footprint import Replayer
from torch_echo.graph import Op
from torch_echo.planning._prices import Prices

__all__ = ["is_heavy", "paper_plan"]

Mask = NDArray[np.bool_]

_HEAVY = re.compile(
    r"(^|_)(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|addmv|mv|dot|einsum|conv\w*|convolution\w*|rnn\w*|lstm\w*|gru\w*|"
    r"\w*attention\w*)(_|$)"
)
_INTENSITY = 8.0
"""FLOPs per byte moved from which an op counts as compute-heavy whatever its name."""


def is_heavy(op: Op) -> bool:
    """Is the op compute-heavy: by name, or by its FLOPs per byte?"""
    name = op.name.rsplit("::", 1)[-1].removeprefix("aten.").split(".", 1)[0]
    return bool(_HEAVY.search(name)) or (op.bytes_moved > 0 and op.flops >= _INTENSITY * op.bytes_moved)


def paper_plan(prices: Prices) -> Mask:
    """The values that the paper's rule drops."""
    cut, replayer = prices.cut, prices.replayer
    graph = replayer.graph
    free: list[bool] = prices.free.tolist()
    saved: list[bool] = (replayer.v_saved > 0).tolist()

    # The regions: cheap ops that can be re-run from what is kept or made by such ops.
    region: set[int] = set()
    for o in cut.ops.tolist():
        op = graph.ops[o]
        reachable = all(graph.values[r].keepable or graph.values[r].producer in region for r in op.reads)
        if reachable and not is_heavy(op):
            region.add(o)
    readers: dict[int, set[int]] = {}
    for o, op in enumerate(graph.ops):
        for r in op.reads:
            readers.setdefault(r, set()).add(o)

    rerun: set[int] = set()
    kept: set[int] = set()
    waiting = {o: sum(graph.values[r].producer in region for r in set(graph.ops[o].reads)) for o in sorted(region)}
    frontier = [o for o, n in waiting.items() if not n]
    while frontier:
        done = []
        for group in _groups(frontier, replayer, free):
            if _worth_keeping(group, replayer, free, saved, readers):
                kept.update(group)
            else:
                _add_all_behind(group, rerun, region, replayer, readers)
            done.extend(group)
        frontier = []
        for o in done:
            for w in set(graph.ops[o].writes):
                for reader in readers.get(w, set()) & region:
                    waiting[reader] -= 1
                    if not waiting[reader] and reader not in rerun:
                        frontier.append(reader)
        frontier = sorted(set(frontier) - rerun - kept)

    mask = np.zeros(replayer.n_values, bool)
    for o in rerun:
        mask[list(graph.ops[o].writes)] = True
    mask &= replayer.v_droppable & ~np.array(free, bool)
    completed = cut.complete(cut.prune(mask))
    return completed if completed is not None else np.zeros(replayer.n_values, bool)


def _groups(frontier: list[int], replayer: Replayer, free: list[bool]) -> list[list[int]]:
    """Ops that share a read, directly or through others, in order."""
    parent = {o: o for o in frontier}

    def root(o: int) -> int:
        while parent[o] != o:
            parent[o] = parent[parent[o]]
            o = parent[o]
        return o

    first: dict[int, int] = {}
    for o in frontier:
        for r in replayer.reads[o]:
            if not free[r]:
                parent[root(o)] = root(first.setdefault(r, o))
    groups: dict[int, list[int]] = {}
    for o in frontier:
        groups.setdefault(root(o), []).append(o)
    return list(groups.values())


def _worth_keeping(
    group: list[int], replayer: Replayer, free: list[bool], saved: list[bool], readers: dict[int, set[int]]
) -> bool:
    """Does keeping the group's outputs release at least as much as it adds?"""
    graph = replayer.graph
    members = set(group)
    released: dict[int, int] = {}
    new: dict[int, int] = {}  # by storage: each tensor counts once
    for o in group:
        for r in replayer.reads[o]:
            if free[r]:
                continue
            side = new if saved[r] or readers[r] - members else released
            side[graph.values[r].storage] = graph.nbytes(r)
        for w in graph.ops[o].writes:
            if saved[w] or w in readers:
                new[graph.values[w].storage] = graph.nbytes(w)
    return sum(released.values()) >= sum(new.values())


def _add_all_behind(
    group: list[int], found: set[int], region: set[int], replayer: Replayer, readers: dict[int, set[int]]
) -> None:
    """Add the group, and the ops of the regions that depend on it, to `found`, which is closed in this way already."""
    todo = [o for o in group if o not in found]
    found.update(todo)
    while todo:
        for w in replayer.graph.ops[todo.pop()].writes:
            for reader in readers.get(w, ()):
                if reader in region and reader not in found:
                    found.add(reader)
                    todo.append(reader)
