"""Replays of many dropped sets at once, in closed form. The rules stand in :mod:`torch_echo.footprint`.

Problem. A search judges hundreds of plans of one graph, and an interpreter that goes through each one event by event is most of its
time.

Method. With one backward pass, an op is re-run at the first event that needs one of its dropped outputs, by itself or for an op
that reads it; a rebuilt block goes with its last reader. So one pass over the ops, last first, gives the *event* at which each is
re-run, and the lives of all blocks are minima and maxima over it. All of it is done on arrays with a column for each plan. The
place of a change is (event, op): ops that are re-run at one event run in their order, and what the event's own reader was the
last to need goes after them. Ticks between which no decision changes anything are taken together.

Cost. Some tens of microseconds a plan for graphs of some hundred ops that may be re-run, where :class:`Run` takes a millisecond.

What it does not do. It gives peak, tick and seconds, nothing to look into. Plans that drop what the script holds into backward, or
what a node saves and never reads, and iterations whose passes keep the graph, are left to :meth:`Replayer.replay`, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torch_echo._rerun import DEATH, UNPACK

if TYPE_CHECKING:
    from torch_echo.footprint import Replayer

__all__ = ["Batch", "Replays"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Masks = NDArray[np.bool_]
"""A row for each plan, a column for each value."""

_NEVER = np.iinfo(np.int32).max
_TOGETHER = 32
"""Plans in one go: more would spread the cost of a call further, but their arrays leave the processor's caches."""
_CELLS = 4_000_000
"""Of all arrays together, where the graph is large."""


@dataclass(frozen=True, slots=True)
class Replays:
    """What was found, a row for each plan."""

    masks: Masks
    """The values that are dropped, without those that nothing in backward waits for."""
    peaks: IntArray
    """Bytes."""
    ticks: IntArray
    """Of the peaks; the first, if one is reached more than once."""
    seconds: FloatArray
    """What the re-runs cost."""


class Batch:
    """The arrays of one graph, made once."""

    def __init__(self, replayer: Replayer) -> None:
        self.replayer = r = replayer
        self._choose_ops()
        self._index_events()
        self._index_reads()
        self._index_writes()
        self._index_storages()
        self._grid()
        n = len(self.points) + 2 * len(r.ev_tick) + 6 * len(self.made) + 4 * len(self.ops) + 2 * len(self.edge_op)
        self.most = int(min(_TOGETHER, max(1, _CELLS // max(1, n))))

    def _choose_ops(self) -> None:
        """Ops that may be re-run for something that backward reads, and the values they make: a row each."""
        r = self.replayer
        wanted: list[bool] = (r.v_saved > 0).tolist()
        droppable: list[bool] = r.v_droppable.tolist()
        ops: list[int] = []
        made: list[int] = []
        for o in range(r.n_ops - 1, -1, -1):
            writes = [w for w in r.graph.ops[o].writes if droppable[w]]
            if any(wanted[w] for w in writes):
                ops.append(o)
                made += writes
                for x in r.reads[o]:
                    wanted[x] = True
        self.ops = np.array(ops[::-1], np.int64)
        self.made = np.array(sorted(made), np.int64)
        self.row = np.full(r.n_values, -1, np.int64)
        self.row[self.made] = np.arange(len(self.made))
        self.cost = r.op_cost[self.ops]
        self.saved = r.op_saved[self.ops]

    def _index_events(self) -> None:
        r = self.replayer
        n, last = r.n_values, len(r.ev_tick)
        first, final, release = np.full(n, _NEVER, np.int32), np.full(n, -1, np.int64), np.full(n, -1, np.int64)
        reads = np.flatnonzero(r.ev_code == UNPACK)
        np.minimum.at(first, r.ev_value[reads], reads.astype(np.int32))
        np.maximum.at(final, r.ev_value[reads], reads)
        np.maximum.at(release, r.ev_value[reads], r.ev_extra[reads])
        self.first, self.release = first[self.made], release[self.made]
        self.shift = len(self.ops).bit_length()
        self.low = (1 << self.shift) - 1
        """A *place* is an event and, in the low bits, an op that is re-run at it, or their number: the end of the event."""
        self.last_read = np.where(final >= 0, (final << self.shift) + len(self.ops), -1)[self.made]
        self.tick = np.append(r.ev_tick, r.graph.ticks + 1)
        odd = np.array(r.adoptable_list, np.int64) >= (self.tick[0] if last else 0)
        odd[r.ev_value[r.ev_code == DEATH]] = True
        self.odd = np.flatnonzero(odd & r.v_droppable)
        """Values that plans drop only in replays one by one."""

    def _index_reads(self) -> None:
        """Which ops read a value, by value: of all that can be dropped, and of what is freed at some time."""
        r = self.replayer
        owner = np.repeat(np.arange(len(self.ops)), [len(r.live_reads[o]) for o in self.ops])
        reads = np.array([x for o in self.ops for x in r.live_reads[o]], np.int64)
        order = np.argsort(reads, kind="stable")
        self.edge_op = owner[order]
        self.read, self.edge_at = np.unique(reads[order], return_index=True)
        self.read_row = self.row[self.read]
        """Of each value that is read, its row; -1 if it can't be dropped."""
        self.chosen = np.flatnonzero(self.read_row >= 0)
        self.steps = [
            ([int(self.row[w]) for w in r.graph.ops[o].writes if self.row[w] >= 0],
             [int(self.row[x]) for x in r.live_reads[o] if self.row[x] >= 0])
            for o in self.ops.tolist()
        ][::-1]  # fmt: skip

    def _index_writes(self) -> None:
        """What a re-run allots, and of which dropped value it may take the block."""
        r = self.replayer
        at: list[int] = []
        row: list[int] = []
        size: list[int] = []
        taker: list[tuple[int, int, bool]] = []
        for i, o in enumerate(self.ops.tolist()):
            for owner, w, old in r.blocks[o]:
                at.append(i)
                row.append(int(self.row[w]))
                size.append(int(r.owner_bytes[owner]))
                if old >= 0 and self.row[old] >= 0:
                    taker.append((i, int(self.row[old]), r.block_list[old] != owner))
        self.out_op, self.out_row, self.out_bytes = np.array([at, row, size], np.int64).reshape(3, -1)
        table = np.array(taker, np.int64).reshape(-1, 3).T
        self.taker, self.taken, self.reuses = table[0], table[1], table[2].astype(bool)
        self.block_bytes = r.owner_bytes[np.array(r.block_list, np.int64)[self.made]]
        self.workspace = np.array(r.workspace, np.int64)[self.ops]
        self.allotted = np.bincount(self.out_op, self.out_bytes, len(self.ops)).astype(np.int64) + self.workspace
        several = (
            np.bincount(self.out_op, minlength=len(self.ops))[self.out_op] > 1
        )  # the only one is wanted, or the op not re-run
        several |= self.out_row < 0
        self.out_op, self.out_row, self.out_bytes = self.out_op[several], self.out_row[several], self.out_bytes[several]
        self.state_bytes = np.where(r.op_random[self.ops], r.graph.rng_state_bytes, 0)
        self.own_fall = self.workspace + self.state_bytes

    def _index_storages(self) -> None:
        """Storages whose lives depend on the plan: by their last version being dropped, or by being read in re-runs."""
        r = self.replayer
        last = r.s_last[r.v_storage[self.made]]
        self.storages = np.unique(np.concatenate([r.v_storage[self.made], r.v_storage[self.read]]))
        place = np.full(r.n_storages, -1, np.int64)
        place[self.storages] = np.arange(len(self.storages))
        ends = np.flatnonzero(last == self.made)
        self.ending, self.ended = ends, place[r.v_storage[self.made[ends]]]
        """Rows of last versions, and their storages."""
        self.bytes = r.s_bytes[self.storages]
        self.alloc, self.held, self.free = (a[self.storages] for a in (r.s_alloc, r.s_held, r.s_free))
        self.passing = r.s_passing[self.storages]
        at = place[r.v_storage[self.read]]
        self.read_order = np.argsort(at, kind="stable")
        self.pinned, self.pinned_at = np.unique(at[self.read_order], return_index=True)
        kept = np.flatnonzero((r.v_saved[self.made] > 0) & self.passing[place[r.v_storage[self.made]]])
        self.saved_row, self.saved_storage = kept, place[r.v_storage[self.made[kept]]]
        always = np.unique(r.v_storage[(r.v_saved > 0) & (self.row < 0) & r.s_passing[r.v_storage]])
        self.always = np.isin(self.storages, always)
        self.kept = always[place[always] < 0]
        """Storages that no plan changes, and that are there because backward reads them."""

    def _grid(self) -> None:
        """The ticks at which a decision may change something, and the highest level of all else up to the next."""
        r = self.replayer
        ticks = r.graph.ticks
        starts = r.op_start[self.ops[self.state_bytes > 0]]
        parts = [r.ev_tick, self.release, self.held, self.free, self.alloc[self.passing], starts, [0]]
        points = np.unique(np.concatenate(parts))
        self.points = points[(points >= 0) & (points <= ticks)]
        fixed = r._changes.copy()
        np.add.at(fixed, r.s_alloc[self.kept], r.s_bytes[self.kept])
        ending = self.kept[r.s_free[self.kept] < ticks]
        np.subtract.at(fixed, r.s_free[ending], r.s_bytes[ending])
        fixed = np.cumsum(fixed[: ticks + 1])
        self.level = fixed[self.points]
        self.highest = np.maximum.reduceat(fixed, self.points)
        start = np.append(self.points, ticks + 1)
        self.highest_tick = np.array(
            [a + int(np.argmax(fixed[a:b])) for a, b in zip(start[:-1].tolist(), start[1:].tolist(), strict=True)],
            np.int64,
        )
        self.event_point = np.searchsorted(self.points, r.ev_tick)
        self.events_before = np.searchsorted(r.ev_tick, self.points, side="left")
        self.events_until = np.searchsorted(r.ev_tick, self.points, side="right")
        self.held_point, self.free_point, self.alloc_point = (
            np.searchsorted(self.points, np.maximum(x, 0)) for x in (self.held, self.free, self.alloc)
        )
        self.release_point = np.searchsorted(self.points, self.release)
        self.start_point = np.searchsorted(self.points, r.op_start[self.ops])

    def replay(self, masks: Masks) -> Replays:
        """Replay legal plans."""
        n = len(masks)
        found = Replays(masks.copy(), np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n))
        alone = np.full(n, bool(self.replayer.keep_spans))
        if len(self.odd):
            alone |= masks[:, self.odd].any(axis=1)
        together = np.flatnonzero(~alone)
        for i in range(0, len(together), self.most):
            part = together[i : i + self.most]
            found.masks[part], found.peaks[part], found.ticks[part], found.seconds[part] = self._replay(masks[part])
        for i in np.flatnonzero(alone).tolist():
            found.masks[i] &= self.replayer.records(masks[i])[2] > 0
            one = self.replayer.replay(np.flatnonzero(found.masks[i]).tolist())
            found.peaks[i], found.ticks[i], found.seconds[i] = one.peak, one.tick, one.extra_seconds
        return found

    def _replay(self, masks: Masks) -> tuple[Masks, IntArray, IntArray, FloatArray]:
        n, ops = len(masks), len(self.ops)
        dropped = np.ascontiguousarray(masks[:, self.made].T)
        at, needed = self._events(dropped)
        dropped &= needed < _NEVER
        again = at < _NEVER
        place = np.where(again, (at.astype(np.int64) << self.shift) + np.arange(ops)[:, None], -1)
        read = np.maximum.reduceat(place[self.edge_op], self.edge_at, axis=0) if len(self.read) else place[:0]
        seconds = (again * self.cost[:, None]).sum(axis=0)

        # A rebuilt block goes with the last that needs it, unless a node holds it for longer.
        last = np.full(dropped.shape, -1, np.int64)
        last[self.read_row[self.chosen]] = read[self.chosen]
        last = np.maximum(last, self.last_read[:, None])
        row, plan = np.nonzero(dropped)
        until, size = last[row, plan], self.block_bytes[row]
        event, slot = until >> self.shift, until & self.low
        later = self.release[row] > self.tick[event]
        rise: IntArray | None = None
        if len(self.taker):  # re-runs that take the block of what only they still need
            there = np.zeros(dropped.shape, bool)
            there[row[~later], plan[~later]] = True
            takes = there[self.taken] & again[self.taker] & (last[self.taken] == place[self.taker])
            took, by = np.nonzero(takes)
            rise = np.repeat(self.allotted[:, None], n, axis=1)
            np.subtract.at(rise, (self.taker[took], by), self.block_bytes[self.taken[took]])
            seconds -= (takes * (self.reuses * self.saved[self.taker])[:, None]).sum(axis=0)
            there[self.taken[took], by] = False
            size = np.where(there[row, plan] | later, size, 0)

        # What goes with a re-run, at the end of an event, and at other ticks.
        static, pinned_by, pinned_plan, pinned_bytes = self._originals(dropped, read, again)
        within, ended = ~later & (slot < ops), ~later & (slot == ops)
        places = [slot[within] * n + plan[within], pinned_by * n + pinned_plan]
        sizes = [size[within], pinned_bytes]
        if len(self.out_op):  # outputs that nothing waits for
            out, by = np.nonzero(~dropped[self.out_row] | (self.out_row < 0)[:, None])
            places.append(self.out_op[out] * n + by)
            sizes.append(self.out_bytes[out])
        fall = _sums(np.concatenate(places), np.concatenate(sizes), ops, n)
        freed = _sums(event[ended] * n + plan[ended], size[ended], len(self.tick), n)
        late = _sums(self.release_point[row[later]] * n + plan[later], size[later], len(self.points), n)

        by, op = np.nonzero(again.T)
        when = at[op, by].astype(np.int64)
        order = np.argsort(by * len(self.tick) + when, kind="stable")
        by, op, when = by[order], op[order], when[order]
        up = (self.allotted[op] if rise is None else rise[op, by]).astype(np.float64)
        down = fall[op, by] + self.own_fall[op]
        peaks, ticks = self._peaks(static, freed, late, by, when, up, down)
        pruned = np.zeros_like(masks)
        pruned[:, self.made] = dropped.T
        return pruned, peaks.astype(np.int64), ticks, seconds

    def _peaks(
        self,
        static: FloatArray,
        freed: FloatArray,
        late: FloatArray,
        by: IntArray,
        when: IntArray,
        up: FloatArray,
        down: FloatArray,
    ) -> tuple[FloatArray, IntArray]:
        """Peaks and their ticks. Given are changes against the baseline by point; bytes freed at the end of each event; bytes freed
        at each point before its events; and of each re-run, in order: its plan, its event, the bytes it takes, and gives back."""
        n = static.shape[1]
        changes = np.zeros((len(self.tick) + 1, n))
        changes[1:] -= freed
        left = up - down
        net = np.cumsum(left)
        if len(by):
            start = np.flatnonzero(np.append(True, (by[1:] != by[:-1]) | (when[1:] != when[:-1])))
            changes[when[start] + 1, by[start]] += np.add.reduceat(left, start)
            before = net - left - np.repeat((net - left)[start], np.diff(np.append(start, len(by))))
        np.cumsum(changes, axis=0, out=changes)  # before each event

        static -= late
        np.cumsum(static, axis=0, out=static)
        levels = static + changes[self.events_until]
        levels += self.highest[:, None]
        entry = static + late
        entry += changes[self.events_before]
        entry += self.level[:, None]
        np.maximum(levels, entry, out=levels)
        best, column = np.argmax(levels, axis=0), np.arange(n)
        peaks = levels[best, column]
        ticks = np.where(entry[best, column] >= peaks, self.points[best], self.highest_tick[best])
        if len(by):
            point = self.event_point[when]
            during = self.level[point] + static[point, by] + changes[when, by] + before + up
            first = np.flatnonzero(np.append(True, by[1:] != by[:-1]))
            plans, most = by[first], np.maximum.reduceat(during, first)
            hit = during >= np.repeat(most, np.diff(np.append(first, len(by))))
            tick = np.minimum.reduceat(np.where(hit, self.tick[when], self.tick[-1]), first)
            sooner = (most > peaks[plans]) | (most == peaks[plans]) & (tick < ticks[plans])
            ticks[plans[sooner]] = tick[sooner]
            peaks[plans] = np.maximum(peaks[plans], most)
        return peaks, ticks

    def _events(self, dropped: Masks) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """For each op the event at which it is re-run, and for each value that at which it is needed first."""
        n = dropped.shape[1]
        needed = np.repeat(self.first[:, None], n, axis=1)
        kept = np.where(dropped, np.int32(0), np.int32(_NEVER))
        at = np.empty((len(self.ops), n), np.int32)
        need, keep, rerun = list(needed), list(kept), list(at)[::-1]
        scratch = np.empty(n, np.int32)
        least, most = np.minimum, np.maximum
        for t, (writes, reads) in zip(rerun, self.steps, strict=True):
            w = writes[0]
            most(need[w], keep[w], out=t)
            for w in writes[1:]:
                least(t, most(need[w], keep[w], out=scratch), out=t)
            for x in reads:
                least(need[x], t, out=need[x])
        return at, needed

    def _originals(
        self, dropped: Masks, read: IntArray, again: Masks
    ) -> tuple[FloatArray, IntArray, IntArray, IntArray]:
        """Of the original blocks: changes against the baseline at each point; and of those that live on until a re-run has read
        them, the op, the plan and the bytes."""
        n, ticks, height = dropped.shape[1], self.replayer.graph.ticks, len(self.points)
        gone = np.zeros((len(self.storages), n), bool)
        gone[self.ended] = dropped[self.ending]
        held = np.full(gone.shape, -1, np.int64)
        if len(self.read):
            hold = read.copy()
            hold[self.chosen] = np.where(dropped[self.read_row[self.chosen]], -1, hold[self.chosen])
            held[self.pinned] = np.maximum.reduceat(hold[self.read_order], self.pinned_at, axis=0)
        end = np.where(gone, self.held[:, None], self.free[:, None])
        longer = self.tick[held >> self.shift] > end
        longer &= held >= 0
        shorter = gone & ~self.passing[:, None]
        known = (self.free < ticks)[:, None]
        changes = [
            (shorter & known, self.free_point, 1),
            (shorter & (self.held < ticks)[:, None] & ~longer, self.held_point, -1),
            (longer & ~gone & known & ~self.passing[:, None], self.free_point, 1),
        ]
        if self.passing.any():
            kept = held >= 0
            kept[self.always] = True
            np.logical_or.at(kept, self.saved_storage, ~dropped[self.saved_row])
            kept &= self.passing[:, None]
            longer &= kept | ~self.passing[:, None]
            changes += [(kept, self.alloc_point, 1), (kept & known & ~longer, self.free_point, -1)]
        at, weights = [], []
        for where, points, sign in changes:
            s, plan = np.nonzero(where)
            at.append(points[s] * n + plan)
            weights.append(sign * self.bytes[s])
        if self.state_bytes.any():
            op, plan = np.nonzero(again & (self.state_bytes > 0)[:, None])
            at.append(self.start_point[op] * n + plan)
            weights.append(self.state_bytes[op])
        static = _sums(np.concatenate(at), np.concatenate(weights), height, n)
        s, plan = np.nonzero(longer)
        return static, held[s, plan] & self.low, plan, self.bytes[s]


def _sums(places: IntArray, weights: IntArray, height: int, width: int) -> FloatArray:
    """Sums of weights by place in an array, the rows one after the other. Whole numbers below 2**53: they are exact."""
    found: FloatArray = (
        np.bincount(places, weights, height * width).reshape(height, width).astype(np.float64, copy=False)
    )
    return found
