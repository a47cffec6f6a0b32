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

A value of price 0 that can be kept, as parameters and inputs are, is available for nothing. The
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
_INFINITE = 2**61
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
        self._arcs()
        self._index_closure()

    def _index_closure(self) -> None:
        """What is dropped together, and which reads of an op must be rebuilt with its outputs because they can't be kept."""
        replayer = self.replayer
        every = np.arange(replayer.n_values)
        needs, group = replayer.v_needs, replayer.v_group
        odd = np.flatnonzero((needs != every) | (group != every) | np.isin(every, needs[needs != every]))
        odd = odd[np.argsort(needs[odd], kind="stable")]
        self._needing = odd
        of_group, self._needing_at = np.unique(needs[odd], return_index=True)
        self._grouped = np.flatnonzero(np.isin(group, of_group)) if len(odd) else odd
        self._group_of = np.searchsorted(of_group, group[self._grouped])
        made = np.flatnonzero(self.rebuildable)
        reads, owner = replayer.reads_of(replayer.v_producer[made])
        lost = ~self.keepable[reads]
        reads, made = reads[lost], made[owner[lost]]
        order = np.argsort(reads, kind="stable")
        self._made_from = made[order]
        self._must, self._must_at = np.unique(reads[order], return_index=True)

    def _arcs(self) -> None:
        """The network: only capacities change from price to price."""
        replayer, ops, values = self.replayer, self.ops, self.values
        op_node = np.zeros(replayer.n_ops, np.int64)
        op_node[ops] = 2 + np.arange(len(ops))
        node = np.full(replayer.n_values, -1, np.int64)
        node[values] = 2 + len(ops) + np.arange(len(values))
        reads, owner = replayer.reads_of(ops)
        linked = node[reads] >= 0
        made_by = replayer.v_producer[values]
        self._rebuilt_by = np.where((made_by >= 0) & self.rebuildable[values], op_node[made_by], 0)
        """Node of the op that a value is rebuilt by; the source's if none."""
        saved = values[replayer.v_saved[values] > 0]
        tails = [np.zeros(len(ops), np.int64), self._rebuilt_by, node[reads[linked]], node[saved]]
        heads = [op_node[ops], node[values], op_node[ops[owner[linked]]], np.ones(len(saved), np.int64)]
        self._worthless = not len(ops) or not len(saved)
        self._flow = max_flow.SimpleMaxFlow()
        limits = np.full(sum(len(t) for t in tails), _INFINITE)
        self._flow.add_arcs_with_capacity(np.concatenate(tails), np.concatenate(heads), limits)
        self._priced = np.arange(len(ops) + len(values), dtype=np.int32)

    def _by_producer(self, of_op: list[bool]) -> list[bool]:
        return [p >= 0 and of_op[p] for p in self.replayer.producer_list]

    def solve(self, price: FloatArray, op_price: FloatArray | None = None) -> Mask:
        """The cheapest choice: a mask of the values to drop and rebuild.

        `price`: seconds charged for keeping each value. `op_price`: seconds charged for re-running each op, beyond its
        own.
        """
        dropped = np.zeros(self.replayer.n_values, bool)
        if self._worthless:
            return dropped
        cost = self.replayer.op_cost if op_price is None else self.replayer.op_cost + op_price
        values, keepable = self.values, self.keepable[self.values]
        kept_price = np.where(keepable, np.maximum(price[values], 0.0), 0.0)
        scale = min(_FINEST, _LARGEST / max(1e-30, float(cost[self.ops].sum() + kept_price.sum())))
        cost_units = np.maximum(1, np.rint(cost[self.ops] * scale)).astype(np.int64)
        free = kept_price <= 0
        price_units = np.where(free, 0, np.maximum(1, np.rint(kept_price * scale))).astype(np.int64)
        price_units[~keepable] = _INFINITE

        self._flow.set_arcs_capacity(self._priced, np.concatenate([cost_units, price_units]))
        status = self._flow.solve(0, 1)
        if status != self._flow.OPTIMAL:
            raise RuntimeError(f"minimum cut of {len(self.ops)} ops and {len(values)} values failed: {status}")
        rebuilt = np.zeros(2 + len(self.ops) + len(values), bool)
        rebuilt[self._flow.get_sink_side_min_cut()] = True
        rebuilt[0] = False
        both = rebuilt[2 + len(self.ops) :] & rebuilt[self._rebuilt_by] & ~(free & keepable)
        dropped[values[both]] = True
        return self.prune(self.together(dropped)) if len(self._needing) else dropped

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
        masks, legal = self.complete_all(mask[None])
        return self.prune(masks[0]) if legal[0] else None

    def complete_all(self, masks: Mask) -> tuple[Mask, Mask]:
        """For each row of `masks`, the smallest legal plan that drops it, and whether there is one. What nothing in backward waits
        for is still in it."""
        masks = masks.copy()
        size = -1
        while size != (size := int(np.count_nonzero(masks))):
            if len(self._needing):
                some = np.logical_or.reduceat(masks[:, self._needing], self._needing_at, axis=1)
                masks[:, self._grouped] |= some[:, self._group_of]
            if len(self._must):
                masks[:, self._must] |= np.logical_or.reduceat(masks[:, self._made_from], self._must_at, axis=1)
            if not len(self._must):
                break
        return masks, ~(masks & ~self.rebuildable).any(axis=1)

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
