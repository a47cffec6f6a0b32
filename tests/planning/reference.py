"""A slow replay that states the rules directly: every quantity is computed anew from the state whenever it is asked
for."""

from __future__ import annotations

from collections.abc import Collection

from torch_echo.graph import Fused, Phase, TrainingGraph, Trait

__all__ = ["Reference"]


class Reference:
    """Replays one iteration tick by tick. Results: `peak`, `rerun`."""

    def __init__(self, graph: TrainingGraph, dropped: Collection[int]) -> None:
        self.g, self.dropped = graph, set(dropped)
        self.now = -1
        self.peak = 0
        self.rerun: list[int] = []
        self.reused: list[int] = []
        self.executed: set[int] = set()
        self.rebuilt: set[int] = set()  # values with a block of their own
        self.adopted: set[int] = set()
        self.passing: set[int] = set()  # made available in the current pass that keeps the graph
        self.unpacked: set[int] = set()  # saves
        self.kept_on: set[int] = set()  # saves unpacked in a pass that keeps the graph, pending until they are released
        self.scratch = 0
        self.noted = self.records()  # before anything is re-run
        for t in range(graph.ticks + 1):
            self.now = t
            self.sample()
            for p in graph.passes:
                if p.keeps_graph and p.end == t:
                    self.rebuilt -= self.passing
                    self.adopted -= self.passing
                    self.passing.clear()
                    self.sample()
            for i in sorted(range(len(graph.saves)), key=lambda i: graph.saves[i].unpack):
                if graph.saves[i].unpack == t and graph.saves[i].value in self.dropped:
                    self.unpack(i)

    # -- state -------------------------------------------------------------------------------------------------------

    def keeping(self) -> bool:
        return any(p.keeps_graph and p.start <= self.now <= p.end for p in self.g.passes)

    def storage(self, v: int) -> int:
        return self.g.values[v].storage

    def last_version(self, s: int) -> int:
        return max((i for i, v in enumerate(self.g.values) if v.storage == s), key=lambda i: self.g.values[i].version)

    def has_values(self, s: int) -> bool:
        return any(v.storage == s for v in self.g.values)

    def script_end(self, s: int) -> int:
        """When a dropped storage's original block goes."""
        storage = self.g.storages[s]
        end = storage.alloc if storage.fused & Fused.FORWARD else storage.held
        if end < storage.alloc:
            end = max(
                self.g.ops[v.producer].end
                for v in self.g.values
                if v.storage == s and v.producer >= 0 and self.g.ops[v.producer].phase == Phase.FORWARD
            )
        return max(storage.alloc, min(end, storage.free))

    def save_pending(self, i: int) -> bool:
        save = self.g.saves[i]
        if save.unpack < 0:
            return self.now < save.release
        return i not in self.unpacked or (i in self.kept_on and self.now < save.release)

    def records(self) -> set[int]:
        """Ops whose re-run something still waits for."""
        found: set[int] = set()
        for o in range(len(self.g.ops) - 1, -1, -1):
            op = self.g.ops[o]
            if o in self.executed:
                continue
            for w in op.writes:
                available = (w in self.rebuilt or w in self.adopted) and w not in self.passing
                if w in self.dropped and not available and self.pending(w, found):
                    found.add(o)
        return found

    def pending(self, w: int, records: set[int]) -> int:
        saves = sum(self.save_pending(i) for i, save in enumerate(self.g.saves) if save.value == w)
        return saves + sum(w in self.g.ops[o].reads for o in records)

    def needed_until(self, v: int) -> int:
        """Latest release of a save of v that has been unpacked (outside passes that keep the graph)."""
        done = self.unpacked - self.kept_on
        return max((self.g.saves[i].release for i in done if self.g.saves[i].value == v), default=-1)

    def in_use(self, v: int) -> bool:
        return v in self.passing or self.pending(v, self.records()) > 0 or self.now < self.needed_until(v)

    def original_alive(self, s: int) -> bool:
        storage = self.g.storages[s]
        if self.now < storage.alloc:
            return False
        last = self.last_version(s) if self.has_values(s) else -1
        end = self.script_end(s) if last in self.dropped else storage.free
        if self.now < end or end >= self.g.ticks:
            return True
        pinned = {r for o in self.records() for r in self.g.ops[o].reads} - self.dropped
        return any(self.storage(v) == s for v in pinned | self.adopted)

    def written(self, s: int) -> bool:
        """Is the original block there at all? Not if it is fused away, and kept for nothing."""
        if not self.g.storages[s].fused & Fused.FORWARD:
            return True
        saved = {x.value for x in self.g.saves} | {r for o in self.noted for r in self.g.ops[o].reads}
        return any(self.storage(v) == s for v in saved - self.dropped)

    def rebuilt_bytes(self, s: int) -> int:
        storage = self.g.storages[s]
        return 0 if storage.fused & Fused.BACKWARD else storage.nbytes

    def sample(self) -> None:
        """Note the bytes alive now."""
        self.rebuilt = {v for v in self.rebuilt if self.in_use(v)}
        self.adopted = {v for v in self.adopted if self.in_use(v)}
        total = self.g.base_bytes + self.scratch
        total += sum(x.nbytes for s, x in enumerate(self.g.storages) if self.original_alive(s) and self.written(s))
        total += sum(self.rebuilt_bytes(self.storage(v)) for v in self.rebuilt)
        for o in self.records():
            if self.g.ops[o].traits & Trait.RANDOM and self.g.ops[o].start <= self.now:
                total += self.g.rng_state_bytes
        self.peak = max(self.peak, total)

    # -- events ------------------------------------------------------------------------------------------------------

    def unpack(self, i: int) -> None:
        v = self.g.saves[i].value
        self.make(v)
        self.unpacked.add(i)
        if self.keeping():
            self.kept_on.add(i)
        self.sample()

    def available(self, v: int) -> bool:
        return v in self.rebuilt or v in self.adopted

    def adopt(self, v: int) -> bool:
        """Use the original block, if the script still holds it with this content."""
        s = self.storage(v)
        if self.last_version(s) != v or self.now > self.script_end(s):
            return False
        self.adopted.add(v)
        if self.keeping():
            self.passing.add(v)
        self.sample()
        return True

    def make(self, v: int) -> None:
        if self.available(v) or self.adopt(v):
            return
        todo: set[int] = set()

        def collect(w: int) -> None:
            o = self.g.values[w].producer
            if o in todo:
                return
            todo.add(o)
            for r in self.g.ops[o].reads:
                if r in self.dropped and not self.available(r) and not self.adopt(r):
                    collect(r)

        collect(v)
        for o in sorted(todo):
            self.execute(o)

    def execute(self, o: int) -> None:
        op = self.g.ops[o]
        self.rerun.append(o)
        records = self.records()
        outputs = {self.storage(w): w for w in op.writes}
        taken = set()
        for s in outputs:
            for r in op.reads:
                if self.storage(r) == s and r in self.rebuilt and not self.keeping():
                    others = self.pending(r, records - {o})
                    if not others and self.now >= self.needed_until(r):
                        taken.add(s)
                        self.rebuilt.discard(r)
        if op.traits & Trait.REUSES and len(outputs) == 1 and op.reads and not taken and not self.keeping():
            (s,), r = outputs, op.reads[0]
            fits = self.storage(r) != s and r in self.rebuilt and self.g.nbytes(r) == self.g.storages[s].nbytes
            if fits and not self.pending(r, records - {o}) and self.now >= self.needed_until(r):
                self.rebuilt.discard(r)
                self.reused.append(o)
        self.scratch = op.workspace + sum(self.rebuilt_bytes(s) for s in outputs)
        self.sample()
        self.scratch = 0
        for w in outputs.values():
            if w in self.dropped and self.pending(w, records) and not self.available(w):
                self.rebuilt.add(w)
                if self.keeping():
                    self.passing.add(w)
        if not self.keeping():
            self.executed.add(o)
        self.sample()
