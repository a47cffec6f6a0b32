"""The exact trade of bytes against seconds at given prices: a minimum cut.

Problem. Every value that backward needs is either kept, at a price in seconds, or rebuilt by re-running its producer,
which costs the op's time and needs the op's own reads, kept or rebuilt in turn. Find the cheapest choice for the whole
graph.

Method. A flow network: a node A(o) per forward op ("o is re-run") and V(v) per value ("v is available in backward");
being on the sink side means yes.

- source -> A(o), capacity seconds(o): cut when o is re-run.
- A(o) -> V(v), capacity price(v), for each output: cut when v is kept. Infinite if v is overwritten before backward.
- source -> V(v), capacity price(v), for values whose producer cannot be re-run: they can only be kept.
- V(u) -> A(o), infinite, for each read u of o: re-running o needs u.
- V(v) -> sink, infinite, for each v that backward reads.

A value of price 0 that can be kept is available for nothing and has no node; parameters and inputs are such. The
minimum cut is the cheapest choice; among equally cheap ones, the one that re-runs least (the smallest sink side) is
returned.

Cost. One run of OR-Tools' SimpleMaxFlow: about 5 ms for 4,000 ops, below half a second for 50,000.

What it does not do. Prices are constants: that a value's lifetime depends on other decisions is for the caller's
search. Each value has one producer. Two versions of one storage that can both be kept are charged twice.

Source. Checkpointing as a cut: Zheng, Vijaykumar, Pekhimenko, "Echo" (ISCA 2020) cuts greedily at compute-heavy ops;
the exact form over joint graphs is folklore of project selection (Picard 1976) and is also used by PyTorch's min-cut
partitioner, with other capacities.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow  # type: ignore[import-untyped]

from torch_echo.footprint import Replayer
from torch_echo.graph import Phase

__all__ = ["MinCut"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]

_LARGEST = 2**60
_FINEST = 1e10
"""Seconds are rounded to 1e-10; coarser only where the sum of all capacities would not fit."""


class MinCut:
    """The network of one graph, ready to be solved at any prices."""

    def __init__(self, replayer: Replayer) -> None:
        self.replayer = replayer
        graph = replayer.graph
        n_ops, n_values = replayer.n_ops, replayer.n_values
        self.keepable = np.fromiter((v.keepable for v in graph.values), bool, n_values)
        droppable: list[bool] = replayer.v_droppable.tolist()
        keepable: list[bool] = self.keepable.tolist()

        # Values that backward cannot have at all, and ops that cannot be re-run because they read one.
        lost = [not keepable[i] and not droppable[i] for i in range(n_values)]
        rerunnable = [False] * n_ops
        for o, op in enumerate(graph.ops):
            if op.phase != Phase.FORWARD or not op.writes:
                continue
            if droppable[op.writes[0]] and not any(lost[r] for r in op.reads):
                rerunnable[o] = True
            else:
                for w in op.writes:
                    lost[w] = not keepable[w]
        # Only what is upstream of something that backward reads matters.
        wanted: list[bool] = (replayer.v_saved > 0).tolist()
        relevant = [False] * n_ops
        for o in range(n_ops - 1, -1, -1):
            if rerunnable[o] and any(wanted[w] for w in graph.ops[o].writes):
                relevant[o] = True
                for r in graph.ops[o].reads:
                    wanted[r] = True

        self.rebuildable = np.array([r and droppable[v] for v, r in enumerate(self._by_producer(rerunnable))], bool)
        """Values that can be rebuilt at all."""
        self.lost = np.array(lost, bool)
        self.ops = np.flatnonzero(relevant)
        """Ops that may be worth re-running, in order."""
        self.values = np.flatnonzero(np.array(wanted, bool) & ~self.lost)
        """Values that backward may need, in order."""
        self._op_node = np.full(n_ops, -1, np.int64)
        self._op_node[self.ops] = 2 + np.arange(len(self.ops))
        self._value_node = np.full(n_values, -1, np.int64)
        self._value_node[self.values] = 2 + len(self.ops) + np.arange(len(self.values))
        reads, owner = replayer.reads_of(self.ops)
        self._reads, self._readers = reads, self.ops[owner]
        producer = replayer.v_producer[self.values]
        self._made_by = np.where((producer >= 0) & self.rebuildable[self.values], producer, -1)
        self._saved = self.values[replayer.v_saved[self.values] > 0]

    def _by_producer(self, of_op: list[bool]) -> list[bool]:
        return [p >= 0 and of_op[p] for p in self.replayer.producer_list]

    def solve(self, price: FloatArray, op_price: FloatArray | None = None) -> Mask:
        """The cheapest choice: a mask of the values to drop and rebuild.

        `price`: seconds charged for keeping each value. `op_price`: seconds charged for re-running each op, beyond its
        own.
        """
        cost = self.replayer.op_cost if op_price is None else self.replayer.op_cost + op_price
        free = self.keepable & (price <= 0)
        at = ~free[self.values]
        values, made_by = self.values[at], self._made_by[at]
        saved = self._saved[~free[self._saved]]
        link = ~free[self._reads] & (self._value_node[self._reads] >= 0)
        kept_price = np.where(self.keepable[values], price[values], 0.0)

        scale = min(_FINEST, _LARGEST / max(1e-30, float(cost[self.ops].sum() + kept_price.sum())))
        cost_units = np.maximum(1, np.rint(cost[self.ops] * scale)).astype(np.int64)
        price_units = np.maximum(1, np.rint(kept_price * scale)).astype(np.int64)
        infinite = int(cost_units.sum() + price_units.sum()) + 1
        price_units[~self.keepable[values]] = infinite

        node = self._value_node
        own = np.where(made_by >= 0, self._op_node[made_by], 0)
        tails = [np.zeros(len(self.ops), np.int64), own, node[self._reads[link]], node[saved]]
        heads = [
            self._op_node[self.ops], node[values], self._op_node[self._readers[link]], np.ones(len(saved), np.int64)
        ]  # fmt: skip
        units = [
            cost_units, price_units, np.full(int(link.sum()), infinite), np.full(len(saved), infinite)
        ]  # fmt: skip
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(np.concatenate(tails), np.concatenate(heads), np.concatenate(units))
        dropped = np.zeros(self.replayer.n_values, bool)
        if not len(saved) or not len(self.ops):
            return dropped
        status = flow.solve(0, 1)
        if status != flow.OPTIMAL:
            raise RuntimeError(f"minimum cut of {len(self.ops)} ops and {len(values)} values failed: {status}")
        rebuilt = np.zeros(2 + len(self.ops) + len(self.values), bool)
        rebuilt[flow.get_sink_side_min_cut()] = True
        both = rebuilt[node[values]] & (made_by >= 0) & rebuilt[own]
        dropped[values[both]] = True
        return self.prune(self.together(dropped))

    def together(self, mask: Mask) -> Mask:
        """`mask` with the groups that its values are dropped together with."""
        some = np.zeros(len(mask), bool)
        some[self.replayer.v_needs[mask]] = True
        whole: Mask = mask | some[self.replayer.v_group]
        return whole

    def prune(self, mask: Mask) -> Mask:
        """`mask` without the values that nothing in backward waits for."""
        _, _, pending = self.replayer.records(mask)
        return mask & (pending > 0)

    def complete(self, mask: Mask) -> Mask | None:
        """The smallest legal plan that drops `mask`: reads that cannot be kept are rebuilt too. None if there is
        none."""
        mask = self.together(mask)
        todo = np.flatnonzero(mask)
        while len(todo):
            if not self.rebuildable[todo].all():
                return None
            reads, _ = self.replayer.reads_of(np.unique(self.replayer.v_producer[todo]))
            todo = np.unique(reads[~self.keepable[reads] & ~mask[reads]])
            mask[todo] = True
        return self.prune(mask)

    def cost(self, mask: Mask, price: FloatArray, op_price: FloatArray | None = None) -> float:
        """Seconds of the choice `mask` at the given prices: re-runs, and every value that must be kept for them."""
        records, reads, _ = self.replayer.records(mask)
        total = self.replayer.op_cost[records].sum()
        if op_price is not None:
            total += op_price[records].sum()
        needed = np.zeros(len(mask), bool)
        needed[reads] = True
        needed |= self.replayer.v_saved > 0
        return float(total + np.maximum(price, 0)[needed & ~mask & self.keepable].sum())
