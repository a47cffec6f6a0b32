"""The footprint: live bytes over one training iteration, replayed for a given set of dropped values.

Problem. Given a :class:`TrainingGraph` and a set D of values that are dropped in the forward pass and rebuilt in the
backward pass, say which bytes are alive at every moment, which ops run again, and when.

Method. A replay of what the runtime does. Blocks that no decision touches are one array of changes per tick, made once
per graph. For D, the lifetimes of dropped blocks are cut in that array, and the backward pass is run event by event:

- An op that makes a dropped value which something still needs leaves a *record*. A record pins the values outside D
  that the op read, and the generator's state if it is random, until the op has been re-run.
- ``pending(w)`` counts the saves of w not yet unpacked and the records that read w. A save that is never unpacked is
  pending until it is let go.
- A save of w that is unpacked uses w if it is materialised, adopts the original block if the script still holds it
  (then a record that nothing waits for any more is cancelled), or re-runs the unexecuted producers that w depends on,
  in their order. Each op is re-run once.
- A rebuilt block lives until nothing is pending on it and every node that unpacked it has let go.

Cost. Linear in ops, reads and ticks: about 5 µs per re-run op, the rest is NumPy.

What it does not do. Ops of the original run add nothing beyond the storages of the graph (their temporaries are
storages); ``Op.workspace`` counts when the op is re-run. A save that is unpacked in several passes counts in the first
only. Fragmentation of the allocator is not modelled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from torch_echo._rerun import DEATH, PASS_END, UNPACK, Run
from torch_echo.graph import Fused, Kind, Phase, TrainingGraph, Trait

__all__ = ["UNTRACKED", "Footprint", "Replayer", "check_plan", "replay"]

UNTRACKED = "(untracked)"
"""Layer under which a composition reports ``graph.base_bytes``."""

IntArray = NDArray[np.int64]


@dataclass
class Footprint:
    """What one replay found."""

    peak: int
    """Most bytes alive at any moment, those from before the iteration included."""
    tick: int
    """Tick of the peak (the first, if it is reached more than once)."""
    op: int
    """Op of the original run that the peak falls into; -1 between ops."""
    rerun: list[int]
    """Ops that ran again, in order of execution."""
    extra_seconds: float
    """What the re-runs cost."""
    rerun_op: int = -1
    """Op whose re-run the peak falls into; -1 if none."""
    _trace: _Trace = field(repr=False, default=None)  # type: ignore[assignment]

    @property
    def graph(self) -> TrainingGraph:
        """What was replayed."""
        return self._trace.replayer.graph

    def composition(self) -> dict[tuple[str, Kind], int]:
        """Bytes alive at the peak by (layer, kind), largest first; they add up to the peak."""
        return self._trace.composition()

    def storages_at(self, tick: int | None = None) -> dict[int, int]:
        """Bytes alive by storage after `tick`, or at the peak. A rebuilt copy counts for its storage."""
        if tick is None:
            return self._trace.owners(self.tick, self._trace.at)[0]
        return self._trace.owners(tick, int(np.searchsorted(self._trace.ticks, tick, side="right")) - 1)[0]

    def curve(self) -> tuple[IntArray, IntArray]:
        """Ticks and the bytes alive after each change, in order; a tick repeats where a rebuild changes several
        things."""
        return self._trace.curve()

    def lifetimes(self) -> tuple[IntArray, IntArray]:
        """For each storage, the ticks from which and until which its original block is alive."""
        return self._trace.replayer.s_alloc, self._trace.end


@dataclass
class _Trace:
    """Everything needed to look into a replay later."""

    replayer: Replayer
    end: IntArray  # of each original block
    extended: IntArray  # storages whose original block is freed by a dynamic event
    rng_ops: IntArray
    rng_start: IntArray
    base: IntArray  # level per tick without dynamic events
    ticks: IntArray  # of dynamic events
    deltas: IntArray
    event_owners: IntArray
    at: int  # index of the dynamic event after which the peak stands; -1 before the first
    tick: int

    def owners(self, tick: int, at: int) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """Bytes after dynamic event `at`, at `tick`: by storage, by op for workspace, by op for generator states."""
        r = self.replayer
        total = np.zeros(len(r.owner_bytes), np.int64)
        end = self.end.copy()
        end[self.extended] = r.graph.ticks + 1  # their death is among the dynamic events
        alive = (r.s_alloc <= tick) & (tick < end)
        total[: r.n_storages][alive] = r.s_bytes[alive]
        started = self.rng_ops[self.rng_start <= tick]
        total[r.n_storages + r.n_ops + started] += r.graph.rng_state_bytes
        np.add.at(total, self.event_owners[: at + 1], self.deltas[: at + 1])
        parts = np.split(total[:-1], [r.n_storages, r.n_storages + r.n_ops])
        found = [{int(i): int(p[i]) for i in np.flatnonzero(p)} for p in parts]
        return found[0], found[1], found[2]

    def composition(self) -> dict[tuple[str, Kind], int]:
        graph = self.replayer.graph
        storages, workspaces, states = self.owners(self.tick, self.at)
        out: dict[tuple[str, Kind], int] = {}

        def add(layer: str, kind: Kind, nbytes: int) -> None:
            out[layer, kind] = out.get((layer, kind), 0) + nbytes

        if graph.base_bytes:
            add(UNTRACKED, Kind.TEMPORARY, graph.base_bytes)
        for s, nbytes in storages.items():
            add(graph.storages[s].layer, graph.storages[s].kind, nbytes)
        for o, nbytes in workspaces.items():
            add(graph.ops[o].layer, Kind.TEMPORARY, nbytes)
        for o, nbytes in states.items():
            add(graph.ops[o].layer, Kind.RNG_STATE, nbytes)
        return dict(sorted(out.items(), key=lambda item: (-item[1], item[0])))

    def curve(self) -> tuple[IntArray, IntArray]:
        n = len(self.base)
        changes = np.flatnonzero(np.diff(self.base, prepend=self.base[:1] - 1))
        dyn = np.cumsum(self.deltas)
        before = np.concatenate([[0], dyn])[np.searchsorted(self.ticks, changes, side="left")]
        ticks = np.concatenate([changes, self.ticks])
        levels = np.concatenate([self.base[changes] + before, self.base[np.minimum(self.ticks, n - 1)] + dyn])
        order = np.argsort(ticks, kind="stable")
        return ticks[order], levels[order]


def replay(graph: TrainingGraph, dropped: Collection[int] = ()) -> Footprint:
    """Footprint of one iteration in which the values `dropped` are dropped and rebuilt.

    Raises ValueError if a value of `dropped` may not be dropped or if `dropped` is not closed under ``graph.chain``.
    Several replays of one graph: make one :class:`Replayer`.
    """
    return Replayer(graph).replay(dropped)


class Replayer:
    """Index arrays of one graph, made once, and the replay over them. The graph must not change afterwards."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        n_ops, n_values, n_storages = len(graph.ops), len(graph.values), len(graph.storages)
        self.n_ops, self.n_values, self.n_storages = n_ops, n_values, n_storages

        self.v_storage = np.fromiter((v.storage for v in graph.values), np.int64, n_values)
        self.v_producer = np.fromiter((v.producer for v in graph.values), np.int64, n_values)
        self.v_droppable = np.array(graph.droppable(), dtype=bool)
        self.s_bytes = np.fromiter((s.nbytes for s in graph.storages), np.int64, n_storages)
        self.s_alloc = np.fromiter((s.alloc for s in graph.storages), np.int64, n_storages)
        self.s_free = np.fromiter((s.free for s in graph.storages), np.int64, n_storages)
        held = np.fromiter((s.held for s in graph.storages), np.int64, n_storages)
        fused = np.fromiter((s.fused for s in graph.storages), np.int64, n_storages)
        self.s_passing = fused & Fused.FORWARD > 0
        """Storages that are there only if their content is kept."""
        self.op_start = np.fromiter((o.start for o in graph.ops), np.int64, n_ops)
        self.op_end = np.fromiter((o.end for o in graph.ops), np.int64, n_ops)
        self.op_random = np.fromiter((bool(o.traits & Trait.RANDOM) for o in graph.ops), bool, n_ops)
        self.op_cost = np.fromiter((graph.rerun_seconds(o) for o in graph.ops), np.float64, n_ops)
        self.op_saved = np.fromiter((o.seconds - o.reuse_seconds for o in graph.ops), np.float64, n_ops)

        self.s_last = np.full(n_storages, -1, np.int64)
        versions = [-1] * n_storages
        produced = np.full(n_storages, -1, np.int64)
        for i, v in enumerate(graph.values):
            if v.version >= versions[v.storage]:
                versions[v.storage], self.s_last[v.storage] = v.version, i
            if v.producer >= 0 and graph.ops[v.producer].phase == Phase.FORWARD:
                produced[v.storage] = max(produced[v.storage], graph.ops[v.producer].end)
        # End of a dropped storage's original block: the script's last reference, or the op that made it.
        self.s_held = np.minimum(np.where(held >= self.s_alloc, held, produced), self.s_free)
        self.s_held = np.where(self.s_passing, self.s_alloc, np.maximum(self.s_held, self.s_alloc))
        # Owner of the bytes of a rebuilt block; the last of all has none.
        nobody = n_storages + 2 * n_ops
        block_of: list[int] = np.where(fused & Fused.BACKWARD > 0, nobody, np.arange(n_storages)).tolist()
        self.block_list: list[int] = [block_of[v.storage] for v in graph.values]

        self._prepare_events()
        self.reads: list[tuple[int, ...]] = []
        self.blocks: list[
            tuple[tuple[int, int, int], ...]
        ] = []  # (owner of the block, value, value whose block a re-run may take or -1)
        self.live_reads: list[tuple[int, ...]] = []  # without what is never freed and never dropped
        mortal = (self.v_droppable | (self.s_free[self.v_storage] < graph.ticks)).tolist()
        pairs: list[tuple[int, int]] = []
        for op in graph.ops:
            reads = tuple(dict.fromkeys(op.reads))
            by_storage = {graph.values[r].storage: r for r in reads}
            outputs = {graph.values[w].storage: w for w in op.writes}
            self.reads.append(reads)
            self.live_reads.append(tuple(r for r in reads if mortal[r]))
            if op.traits & Trait.REUSES and len(outputs) == 1 and reads:
                (s,) = outputs
                if graph.storages[s].nbytes == graph.nbytes(reads[0]):
                    by_storage.setdefault(s, reads[0])
            self.blocks.append(tuple((block_of[s], w, by_storage.get(s, -1)) for s, w in outputs.items()))
            for w in op.writes:
                s = graph.values[w].storage
                pairs.extend((w, r) for r in reads if graph.values[r].storage == s and graph.values[r].producer >= 0)
        self.v_group = np.arange(n_values)
        """The first of the values that are dropped together or not at all: those inside a composite op."""
        self.v_needs = self.v_group.copy()
        """The group that is dropped too where a value is: outputs of a composite op only with what is inside it."""
        for op in graph.ops:
            inside = [w for w in graph.inside(op) if self.v_saved[w]]
            if inside:
                self.v_group[inside] = inside[0]
                self.v_needs[list(op.writes)] = inside[0]
                pairs.extend((w, inside[0]) for w in op.writes)
                pairs.extend((inside[0], w) for w in inside)
        self._chain = np.array(pairs, np.int64).reshape(-1, 2)
        self.read_ptr = np.concatenate([[0], np.cumsum([len(r) for r in self.reads], dtype=np.int64)])
        self.read_val = np.fromiter((r for reads in self.reads for r in reads), np.int64, int(self.read_ptr[-1]))
        self.workspace = [op.workspace for op in graph.ops]
        self.producer_list: list[int] = self.v_producer.tolist()
        self.storage_list: list[int] = self.v_storage.tolist()
        last = self.s_last[self.v_storage] == np.arange(n_values)
        self.adoptable_list: list[int] = np.where(last, self.s_held[self.v_storage], -1).tolist()
        self.owner_bytes = np.concatenate(
            [self.s_bytes, np.array(self.workspace, np.int64), np.full(n_ops, graph.rng_state_bytes, np.int64), [0]]
        )
        self.random_list: list[bool] = self.op_random.tolist()

        self._changes = np.zeros(graph.ticks + 2, np.int64)
        there = np.flatnonzero(~self.s_passing)
        np.add.at(self._changes, np.maximum(self.s_alloc[there], 0), self.s_bytes[there])
        there = there[self.s_free[there] < graph.ticks]
        np.subtract.at(self._changes, self.s_free[there], self.s_bytes[there])
        self._changes[0] += graph.base_bytes

    def _prepare_events(self) -> None:
        """Saves in the order in which backward unpacks them; ends of passes that keep the graph, and handle deaths
        after."""
        graph = self.graph
        keeping = [p for p in graph.passes if p.keeps_graph]
        backward = min((p.start for p in graph.passes), default=0)
        events: list[tuple[int, int, int, int]] = []
        saved: list[int] = []
        for save in graph.saves:
            if save.unpack < 0 and save.release < backward:
                continue  # nothing is rebuilt for a node that dies in the forward pass: no reason to drop what it saved
            saved.append(save.value)
            if save.unpack < 0:  # its handle holds the record, and what is rebuilt for others, until it dies
                events.append((save.release, DEATH, save.value, save.release))
                continue
            events.append((save.unpack, UNPACK, save.value, save.release))
            for p in keeping:
                if p.start <= save.unpack <= p.end and save.release > p.end:
                    events.append((save.release, DEATH, save.value, save.release))
        events.extend((p.end, PASS_END, -1, i) for i, p in enumerate(graph.passes) if p.keeps_graph)
        events.sort(key=lambda e: e[0])
        table = np.array(events, np.int64).reshape(-1, 4)
        self.ev_tick, self.ev_code, self.ev_value, self.ev_extra = table.T.copy()
        self.begin = int(self.ev_tick[0]) if len(events) else 0
        """Tick of the first event of backward."""
        self.keep_spans = [(p.start, p.end) for p in keeping]
        self.v_saved = np.bincount(np.array(saved, np.int64), minlength=self.n_values).astype(np.int64)

    def reads_of(self, ops: IntArray) -> tuple[IntArray, IntArray]:
        """The distinct reads of `ops`, concatenated, and for each the position of its op in `ops`."""
        first, count = self.read_ptr[ops], self.read_ptr[ops + 1] - self.read_ptr[ops]
        owner = np.repeat(np.arange(len(ops)), count)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        return self.read_val[first[owner] + within], owner

    def mask(self, dropped: Collection[int]) -> NDArray[np.bool_]:
        """`dropped` as a mask over values, checked."""
        mask = np.zeros(self.n_values, bool)
        index = np.fromiter(dropped, np.int64, len(dropped))
        if len(index) and (index.min() < 0 or index.max() >= self.n_values):
            raise ValueError(f"dropped values must be indices below {self.n_values}, got {index.min()}..{index.max()}")
        mask[index] = True
        bad = np.flatnonzero(mask & ~self.v_droppable)
        if len(bad):
            raise ValueError(f"value {bad[0]} may not be dropped: no forward op that may be re-run makes it")
        child, parent = self._chain[:, 0], self._chain[:, 1]
        broken = np.flatnonzero(mask[child] & ~mask[parent])
        if len(broken):
            w, r = self._chain[broken[0]]
            raise ValueError(f"value {w} is dropped but not value {r}, which it is made from or with")
        return mask

    def records(self, mask: NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray]:
        """Ops that leave a record under the dropped set `mask`, their reads, and pending readers per value."""
        ops = self._producers(mask)
        while True:
            reads, _ = self.reads_of(ops)
            pending = np.bincount(reads, minlength=self.n_values)
            pending += self.v_saved
            pending[~mask] = 0
            # The graph is acyclic: if every op of `ops` is wanted by a save or by another of them, it is the closure.
            wanted = self._producers(pending > 0)
            if len(np.setdiff1d(ops, wanted, assume_unique=True)) == 0:
                return ops, reads, pending
            ops = self._needed(ops, mask)

    def _producers(self, mask: NDArray[np.bool_]) -> IntArray:
        """The ops that make the values of `mask`, in order."""
        flags = np.zeros(self.n_ops, bool)
        flags[self.v_producer[mask]] = True
        return np.flatnonzero(flags)

    def _needed(self, ops: IntArray, mask: NDArray[np.bool_]) -> IntArray:
        """Those of `ops` that something waits for: one pass in reverse order."""
        wanted = (self.v_saved > 0) & mask
        want: list[bool] = wanted.tolist()
        kept = []
        for o in reversed(ops.tolist()):
            if any(want[w] and mask[w] for w in self.graph.ops[o].writes):
                kept.append(o)
                for r in self.reads[o]:
                    want[r] = True
        return np.array(kept[::-1], np.int64)

    def originals(self, mask: NDArray[np.bool_], pinned: IntArray) -> tuple[IntArray, IntArray]:
        """Of the original blocks, when `mask` is dropped and re-runs read the values `pinned`, which are not: the ends, and the
        changes of bytes at each tick. That `pinned` ones may live on is not in it."""
        ticks = self.graph.ticks
        end = self.s_free.copy()
        gone = np.flatnonzero((self.s_last >= 0) & mask[self.s_last])
        end[gone] = self.s_held[gone]
        changes = self._changes.copy()
        if self.s_passing.any():
            kept = np.zeros(self.n_storages, bool)
            kept[self.v_storage[(self.v_saved > 0) & ~mask]] = True
            kept[self.v_storage[pinned]] = True
            there = np.flatnonzero(kept & self.s_passing)
            np.add.at(changes, self.s_alloc[there], self.s_bytes[there])
            there = there[self.s_free[there] < ticks]
            np.subtract.at(changes, self.s_free[there], self.s_bytes[there])
            end[self.s_passing & ~kept] = self.s_alloc[self.s_passing & ~kept]
            gone = gone[~self.s_passing[gone]]
        sooner = gone[end[gone] < ticks]
        np.subtract.at(changes, end[sooner], self.s_bytes[sooner])
        outlived = gone[self.s_free[gone] < ticks]
        np.add.at(changes, self.s_free[outlived], self.s_bytes[outlived])
        return end, changes

    def replay(self, dropped: Collection[int] = ()) -> Footprint:
        """See :func:`replay`."""
        mask = self.mask(dropped)
        ops, reads, pending = self.records(mask)
        ticks = self.graph.ticks
        end, changes = self.originals(mask, reads[~mask[reads]])

        rng_ops = ops[self.op_random[ops]]
        np.add.at(changes, self.op_start[rng_ops], self.graph.rng_state_bytes)

        run = Run(self, mask, ops, reads, pending, end)
        if len(ops):
            run.go()
        ev_ticks, deltas, owners, serial = run.result()
        extended = np.array(run.extended, np.int64)
        known = end[extended] < ticks
        np.add.at(changes, end[extended[known]], self.s_bytes[extended[known]])
        for s, t in zip(run.extended, run.extended_to, strict=True):
            end[s] = t

        base = np.cumsum(changes[: ticks + 1])
        peak, tick, at = self._peak(base, ev_ticks, deltas)
        rerun = run.rerun
        extra = float(self.op_cost[rerun].sum() - self.op_saved[run.reused].sum()) if rerun else 0.0
        trace = _Trace(self, end, extended, rng_ops, self.op_start[rng_ops], base, ev_ticks, deltas, owners, at, tick)
        rerun_op = -1
        if at >= 0 and ev_ticks[at] == tick:
            rerun_op = run.op_at(int(serial[at]))
        return Footprint(peak, tick, self._op_at(tick), rerun, extra, rerun_op, trace)

    @staticmethod
    def _peak(base: IntArray, ticks: IntArray, deltas: IntArray) -> tuple[int, int, int]:
        """Most bytes alive, its tick, and the dynamic event after which it stands."""
        if not len(ticks):
            tick = int(np.argmax(base))
            return int(base[tick]), tick, -1
        dyn = np.cumsum(deltas)
        during = base[ticks] + dyn
        entry = during - deltas
        first = np.concatenate([[True], ticks[1:] != ticks[:-1]])
        steps = np.zeros(len(base), np.int64)
        np.add.at(steps, ticks, deltas)
        after = base + np.cumsum(steps)
        best = max(int(after.max()), int(during.max()), int(entry[first].max()))
        t_after = int(np.argmax(after >= best)) if after.max() >= best else len(base)
        k = int(np.argmax(during >= best)) if during.max() >= best else -1
        t_during = int(ticks[k]) if k >= 0 else len(base)
        entry_hits = np.flatnonzero(first & (entry >= best))
        t_entry = int(ticks[entry_hits[0]]) if len(entry_hits) else len(base)
        tick = min(t_after, t_during, t_entry)
        if tick == t_entry:
            return best, tick, int(entry_hits[0]) - 1
        if tick == t_during:
            return best, tick, k
        return best, tick, int(np.searchsorted(ticks, tick, side="right")) - 1

    def _op_at(self, tick: int) -> int:
        inside = np.flatnonzero((self.op_start <= tick) & (tick <= self.op_end))
        return int(inside[np.argmax(self.op_start[inside])]) if len(inside) else -1


def check_plan(graph: TrainingGraph, dropped: Collection[int]) -> None:
    """Raise ValueError unless the plan `dropped` is legal. The rules:

    1. Only values that may be dropped are, together with the versions that they are made from in place.
    2. No op that must be kept (``Trait.KEEP``) is re-run.
    3. Whatever a re-run op reads is rebuilt too, or pinned. A pinned value is alive when the op runs first and keeps
       its contents: nothing overwrites it before backward.
    4. Whatever backward unpacks is kept or rebuilt.
    5. Outside passes that keep the graph, each op is re-run at most once.
    """
    replayer = Replayer(graph)
    mask = replayer.mask(dropped)  # rule 1
    records = set(replayer.records(mask)[0].tolist())

    def name(o: int) -> str:
        return f"op {o} ({graph.ops[o].layer}:{graph.ops[o].name})"

    for o in records:
        op = graph.ops[o]
        if op.traits & Trait.KEEP:
            raise ValueError(f"{name(o)} would be re-run, but must not be")
        for r in op.reads:
            value = graph.values[r]
            if mask[r]:
                if value.producer not in records:
                    raise ValueError(f"{name(o)} reads the dropped value {r}, which nothing rebuilds")
                continue
            if not value.keepable:
                raise ValueError(f"{name(o)} would be re-run from value {r}, which is overwritten before backward")
            storage = graph.storages[value.storage]
            if not storage.alloc <= op.start <= max(storage.free, storage.held):
                raise ValueError(f"{name(o)} reads value {r} at tick {op.start}, when its storage is not alive")
    for i, save in enumerate(graph.saves):
        if save.unpack >= 0 and mask[save.value] and graph.values[save.value].producer not in records:
            raise ValueError(f"save {i} needs the dropped value {save.value}, which nothing rebuilds")

    footprint = replayer.replay(dropped)
    if set(footprint.rerun) - records:
        raise ValueError(f"{name(min(set(footprint.rerun) - records))} is re-run without a record")
    if not any(p.keeps_graph for p in graph.passes) and len(set(footprint.rerun)) < len(footprint.rerun):
        twice = next(o for o in footprint.rerun if footprint.rerun.count(o) > 1)
        raise ValueError(f"{name(twice)} is re-run more than once")
