"""The dynamic part of a replay: what backward rebuilds, event by event. The rules stand in :mod:`torch_echo.footprint`.

This is the planner's inner loop; it is written for speed in plain Python: few calls, one list entry per change of
bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch_echo.footprint import Replayer

__all__ = ["DEATH", "PASS_END", "UNPACK", "Run"]

IntArray = NDArray[np.int64]
UNPACK, PASS_END, DEATH = 0, 1, 2
_ABSENT, _REBUILT, _ADOPTED = 0, 1, 2
_GONE, _RECORDED, _QUEUED = 0, 1, 2


class Run:
    """One run through the backward events.

    Bytes belong to *owners*: storages, then ``n_storages + op`` for the workspace of a re-run op, then ``n_storages +
    n_ops + op`` for the generator's state that its record holds, then one without bytes for what is fused away. A change is
    an owner plus one, negative when its bytes go.
    """

    def __init__(
        self,
        replayer: Replayer,
        mask: NDArray[np.bool_],
        ops: IntArray,
        reads: IntArray,
        pending: IntArray,
        end: IntArray,
    ) -> None:
        self.replayer = replayer
        self.dropped = bytearray(mask.tobytes())
        self.pending: list[int] = pending.tolist()
        pinned = replayer.v_storage[reads[~mask[reads]]]
        self.holds: list[int] = np.bincount(pinned, minlength=replayer.n_storages).tolist()
        """References that records and adoptions have on each original block."""
        self.hold_until: dict[int, int] = {}
        """For original blocks that nodes hold longer than any record: until when."""
        self.end: list[int] = end.tolist()
        record = np.zeros(replayer.n_ops, np.uint8)
        record[ops] = _RECORDED
        self.record = bytearray(record.tobytes())
        self.state = bytearray(replayer.n_values)
        self.release = [-1] * replayer.n_values
        """Latest release of a save that has been unpacked: the node holds the tensor until then."""

        self.changes: list[int] = []
        self._ticks: list[int] = []
        self._ends: list[int] = []  # number of changes after each of `_ticks`
        self.later: list[int] = []  # changes after the tick at which they become known
        self.later_ticks: list[int] = []
        self.rerun: list[int] = []
        self.reused: list[int] = []
        """Re-runs that wrote over their first read."""
        self._rerun_changes: list[int] = []  # number of changes before each re-run
        self.extended: list[int] = []
        self.extended_to: list[int] = []

    def result(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """All changes in order: their ticks, bytes, owners, and serial numbers for :meth:`op_at`."""
        r = self.replayer
        ends = np.array(self._ends, np.int64)
        ticks = np.repeat(np.array(self._ticks, np.int64), np.diff(ends, prepend=0))
        codes = np.array(self.changes, np.int64)
        serial = np.arange(len(codes))
        if self.later:
            ticks = np.concatenate([ticks, np.array(self.later_ticks, np.int64)])
            codes = np.concatenate([codes, np.array(self.later, np.int64)])
            # Before what happens at the same tick: a release is over when the next node unpacks.
            serial = np.concatenate([serial, np.full(len(self.later), -1)])
            order = np.lexsort((serial, ticks))
            ticks, codes, serial = ticks[order], codes[order], serial[order]
        owners = np.abs(codes) - 1
        return ticks, np.sign(codes) * r.owner_bytes[owners], owners, serial

    def op_at(self, serial: int) -> int:
        """The re-run op to which a change belongs; -1 if none."""
        i = bisect_right(self._rerun_changes, serial) - 1
        return self.rerun[i] if i >= 0 and serial >= 0 else -1

    def go(self) -> None:
        """Run through all events."""
        r = self.replayer
        wanted = (r.ev_code == PASS_END) | np.frombuffer(self.dropped, bool)[r.ev_value]
        if r.keep_spans:
            self._go_general(np.flatnonzero(wanted))
            return
        pending, state, release = self.pending, self.state, self.release
        changes, ends, block = self.changes, self._ends, r.block_list
        later, later_ticks = self.later, self.later_ticks
        self._ticks = r.ev_tick[wanted].tolist()
        columns = (self._ticks, r.ev_code[wanted].tolist(), r.ev_value[wanted].tolist(), r.ev_extra[wanted].tolist())
        for t, code, v, until in zip(*columns, strict=True):
            if code == DEATH:
                self._unread(v, t)
                ends.append(len(changes))
                continue
            if not state[v]:
                self._materialise(v, t)
            pending[v] = left = pending[v] - 1
            if release[v] < until:
                release[v] = until
            if not left:
                if state[v] == _REBUILT:  # as in _free
                    if release[v] <= t:
                        changes.append(-1 - block[v])
                    else:
                        later.append(-1 - block[v])
                        later_ticks.append(release[v])
                    state[v] = _ABSENT
                else:
                    self._let_go(v, t)
            ends.append(len(changes))

    def _go_general(self, wanted: IntArray) -> None:
        """The same with passes that keep the graph: what they rebuild dies at their end, and their records stay."""
        r = self.replayer
        made: list[int] = []
        reran: list[int] = []
        seen: list[tuple[int, int]] = []
        for i in wanted.tolist():
            t, code, v, extra = int(r.ev_tick[i]), int(r.ev_code[i]), int(r.ev_value[i]), int(r.ev_extra[i])
            keeping = any(start <= t <= end for start, end in r.keep_spans)
            if code == UNPACK and keeping:
                if not self.state[v]:
                    self._materialise(v, t, made, reran)
                seen.append((v, extra))
            elif code == UNPACK:
                if not self.state[v]:
                    self._materialise(v, t)
                self.release[v] = max(self.release[v], extra)
                self.pending[v] -= 1
                if not self.pending[v]:
                    self._let_go(v, t)
            elif code == PASS_END:
                for v in made:
                    self._free(v, t, t)
                for o in reran:
                    self.record[o] = _RECORDED
                for v, until in seen:
                    if until <= t:  # otherwise its handle lives on, and dies at its release
                        self._unread(v, t)
                made.clear()
                reran.clear()
                seen.clear()
            else:
                self._unread(v, t)
            self._ticks.append(t)
            self._ends.append(len(self.changes))

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _let_go(self, v: int, t: int) -> None:
        """Nothing is pending on v any more: its block lives until the last node that unpacked it lets go."""
        self._free(v, t, max(t, self.release[v]))

    def _free(self, v: int, t: int, until: int) -> None:
        """Known at tick t: the block of v goes at `until`."""
        s = self.replayer.storage_list[v]
        if self.state[v] == _REBUILT:
            self._gone(self.replayer.block_list[v], t, until)
        elif self.state[v] == _ADOPTED:
            if until > t:
                self.hold_until[s] = max(until, self.hold_until.get(s, -1))
            self._unhold(s, t)
        self.state[v] = _ABSENT

    def _gone(self, s: int, t: int, until: int) -> None:
        if until > t:
            self.later.append(-1 - s)
            self.later_ticks.append(until)
        else:
            self.changes.append(-1 - s)

    def _unhold(self, s: int, t: int) -> None:
        """Release one hold on the original block of storage s."""
        self.holds[s] -= 1
        if not self.holds[s]:
            self._last_hold(s, t)

    def _last_hold(self, s: int, t: int) -> None:
        until = max(t, self.hold_until.get(s, -1))
        if until > self.end[s]:
            self._gone(s, t, until)
            self.extended.append(s)
            self.extended_to.append(until)

    def _unread(self, v: int, t: int) -> None:
        """One pending reader of v is gone without having been served by a rebuild at this moment."""
        self.pending[v] -= 1
        if not self.pending[v]:
            if self.state[v]:
                self._let_go(v, t)
            else:
                self._cancel(self.replayer.producer_list[v], t)

    def _cancel(self, op: int, t: int) -> None:
        """Drop the record of `op`, and those that only it waited for, if nothing waits for its outputs any more."""
        r = self.replayer
        stack = [op]
        while stack:
            o = stack.pop()
            if self.record[o] != _RECORDED:
                continue
            if any(self.dropped[w] and self.pending[w] and not self.state[w] for _, w, _ in r.blocks[o]):
                continue
            self.record[o] = _GONE
            if r.random_list[o]:
                self.changes.append(-1 - r.n_storages - r.n_ops - o)
            for x in r.live_reads[o]:
                if not self.dropped[x]:
                    self._unhold(r.storage_list[x], t)
                    continue
                self.pending[x] -= 1
                if not self.pending[x]:
                    if self.state[x]:
                        self._let_go(x, t)
                    else:
                        stack.append(r.producer_list[x])

    # -- rebuilding --------------------------------------------------------------------------------------------------

    def _adopt(self, v: int, t: int, made: list[int] | None) -> None:
        """Use the original block of v, which the script still holds."""
        self.state[v] = _ADOPTED
        self.holds[self.replayer.storage_list[v]] += 1
        if made is None:
            self._cancel(self.replayer.producer_list[v], t)
        else:
            made.append(v)

    def _materialise(self, v: int, t: int, made: list[int] | None = None, reran: list[int] | None = None) -> None:
        """Make v available at tick t. In a pass that keeps the graph, `made` and `reran` collect what it did."""
        r = self.replayer
        adoptable = r.adoptable_list  # last tick at which the original block can be adopted
        if t <= adoptable[v]:
            self._adopt(v, t, made)
            return
        dropped, state, record, reads, producer = self.dropped, self.state, self.record, r.live_reads, r.producer_list
        todo = [producer[v]]
        record[todo[0]] = _QUEUED
        for o in todo:  # grows
            for x in reads[o]:
                if dropped[x] and not state[x]:
                    if t <= adoptable[x]:
                        self._adopt(x, t, made)
                    elif record[producer[x]] == _RECORDED:
                        record[producer[x]] = _QUEUED
                        todo.append(producer[x])
        if len(todo) > 1:
            todo.sort()
        if made is None or reran is None:
            self._execute(todo, t)
        else:
            self._execute_keeping(todo, made)
            reran.extend(todo)

    def _execute(self, ops: list[int], t: int) -> None:
        """Re-run ops. Of each: its outputs appear; those that nothing waits for and the reads that nothing else needs
        go."""
        r = self.replayer
        dropped, state, pending, holds, record = self.dropped, self.state, self.pending, self.holds, self.record
        changes, blocks, workspace, reads, storage = self.changes, r.blocks, r.workspace, r.live_reads, r.storage_list
        change, release, block = changes.append, self.release, r.block_list
        for o in ops:
            self.rerun.append(o)
            self._rerun_changes.append(len(changes))
            for s, _, old in blocks[o]:
                # In place, or over its first read, unless that is still needed: then in a block of its own.
                if old >= 0 and state[old] == _REBUILT and pending[old] == 1 and release[old] <= t:
                    state[old] = _ABSENT
                    if block[old] != s:
                        self.reused.append(o)
                        change(-1 - block[old])
                        change(s + 1)
                else:
                    change(s + 1)
            if workspace[o]:
                change(1 + r.n_storages + o)
                change(-1 - r.n_storages - o)
            for s, w, _ in blocks[o]:
                if dropped[w] and pending[w] and not state[w]:
                    state[w] = _REBUILT
                else:
                    change(-1 - s)
            for x in reads[o]:
                if dropped[x]:
                    pending[x] = left = pending[x] - 1
                    if not left and state[x]:
                        if state[x] == _REBUILT and release[x] <= t:
                            change(-1 - block[x])
                            state[x] = _ABSENT
                        else:
                            self._let_go(x, t)
                else:
                    s = storage[x]
                    holds[s] = left = holds[s] - 1
                    if not left:
                        self._last_hold(s, t)
            record[o] = _GONE
            if r.random_list[o]:
                change(-1 - r.n_storages - r.n_ops - o)

    def _execute_keeping(self, ops: list[int], made: list[int]) -> None:
        """Re-run ops in a pass that keeps the graph: nothing is overwritten, freed or unpinned before its end."""
        r = self.replayer
        for o in ops:
            self.rerun.append(o)
            self._rerun_changes.append(len(self.changes))
            self.changes.extend(s + 1 for s, _, _ in r.blocks[o])
            if r.workspace[o]:
                self.changes += [1 + r.n_storages + o, -1 - r.n_storages - o]
            for s, w, _ in r.blocks[o]:
                if self.dropped[w] and self.pending[w] and not self.state[w]:
                    self.state[w] = _REBUILT
                    made.append(w)
                else:
                    self.changes.append(-1 - s)
