"""What keeping a value costs: prices for the minimum cut.

A kept value occupies bytes from its allocation to its last use; a dropped one until the script lets go of it, and again
from its rebuild on. Only the difference can be saved, so only the difference is charged. When a value would be rebuilt
depends on what else is dropped; the lifetimes here are estimates from the graph alone, and the replay judges what comes
out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_echo.planning._cut import MinCut

__all__ = ["Prices"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Prices:
    """Lifetimes of the values of one graph, and prices made from them. Cost: linear, once."""

    def __init__(self, cut: MinCut) -> None:
        r = cut.replayer
        graph = r.graph
        self.cut, self.replayer = cut, r
        n = r.n_values
        never = graph.ticks + 1
        unpack = np.full(n, never, np.int64)
        release = np.full(n, -1, np.int64)
        for save in graph.saves:
            if save.unpack >= 0:
                unpack[save.value] = min(unpack[save.value], save.unpack)
                release[save.value] = max(release[save.value], save.release)
        self.first_unpack, self.last_release = unpack, release

        # Until when a record that reads v holds it: its op re-runs when backward first wants one of its outputs; an
        # output that is not saved is wanted when the last of its own readers re-runs at the latest.
        first: list[int] = unpack.tolist()
        pinned = [-1] * n
        for o in cut.ops[::-1].tolist():
            rerun = -1
            for w in graph.ops[o].writes:
                rerun = max(rerun, first[w] if first[w] < never else pinned[w])
            for x in graph.ops[o].reads:
                pinned[x] = max(pinned[x], rerun)
        self._rerun_at = np.full(r.n_ops, never, np.int64)
        """Tick at which each op re-runs at the latest, if backward reads what it makes and that is dropped."""
        made = r.v_producer >= 0
        np.minimum.at(self._rerun_at, r.v_producer[made], unpack[made])
        s = r.v_storage
        self.alloc, self.held = r.s_alloc[s], r.s_held[s]
        last_use = np.maximum(release, np.array(pinned, np.int64))
        self.kept_until = np.maximum(r.s_free[s], last_use)
        outlives = (self.alloc < 0) | (r.s_free[s] >= graph.ticks) | (self.held >= last_use)
        self.free = outlives & cut.keepable
        """Values that are there anyway for as long as backward can need them."""
        self.nbytes = np.where(self.free, 0, r.s_bytes[s]).astype(np.float64)
        self.position = r.v_producer
        """Place along the forward order."""

    def states(self, tick: int | None = None) -> FloatArray:
        """Bytes of the generator's state that the record of each op holds: ever, or at `tick`."""
        held = self.replayer.op_random
        if tick is not None:
            held = held & (self.replayer.op_start <= tick) & (tick < self._rerun_at)
        return held * float(self.replayer.graph.rng_state_bytes)

    def waists(self, seconds_per_byte: float, mask: Mask, segments: int, window: float) -> FloatArray:
        """The uniform price, but what the plan `mask` keeps becomes dear, except in a window (a fraction of a stretch)
        at the end of each of `segments` stretches: those are rebuilt one at a time, from what is kept between them."""
        kept = self._kept(mask)
        places, rank = np.unique(self.position[kept], return_inverse=True)
        within = rank * segments / max(1, len(places)) % 1.0
        rate = np.full(len(self.nbytes), seconds_per_byte)
        rate[kept[within < 1.0 - max(window, 0.5 * segments / max(1, len(places)))]] *= 100
        result: FloatArray = self.nbytes * rate
        return result

    def places(self, mask: Mask) -> int:
        """How many ops make something that the plan `mask` keeps for a price, and need not."""
        return len(np.unique(self.position[self._kept(mask)]))

    def _kept(self, mask: Mask) -> IntArray:
        values = self.cut.values
        kept: IntArray = values[~mask[values] & (self.nbytes[values] > 0) & self.cut.rebuildable[values]]
        return kept

    def charged(self, tick: int) -> Mask:
        """Values that are alive at `tick` if kept, and not if dropped."""
        kept = (self.alloc <= tick) & (tick < self.kept_until)
        rebuilt = (self.first_unpack <= tick) & (tick < self.last_release)
        return kept & (tick >= self.held) & ~rebuilt

    def at_moments(self, weights: dict[int, float]) -> tuple[FloatArray, FloatArray]:
        """Bytes charged for the moments (ticks) that they live through, by weight: of values, and of records of ops."""
        total = np.zeros(len(self.nbytes))
        states = np.zeros(self.replayer.n_ops)
        for tick, weight in weights.items():
            total[self.charged(tick)] += weight
            states += self.states(tick) * weight
        return self.nbytes * total, states

    def early_rebuilds(self, mask: Mask, tick: int, seconds_per_byte: float) -> FloatArray:
        """Per op: a charge for re-running it early. Under the plan `mask`, a value that backward itself reads only
        after `tick` but that a reader's rebuild brings back before is charged to that reader."""
        charge = np.zeros(self.replayer.n_ops)
        records, _, _ = self.replayer.records(mask)
        reads, owner = self.replayer.reads_of(records)
        early = mask[reads] & (self.first_unpack[reads] > tick) & (tick < self.last_release[reads])
        early &= self._rerun_at[records[owner]] <= tick
        np.add.at(charge, records[owner[early]], self.nbytes[reads[early]] * seconds_per_byte)
        return charge
