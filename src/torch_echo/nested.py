"""Values that are rebuilt more than once: segments within segments.

Problem. What is rebuilt from a kept value lives until backward has passed. A deep model rebuilt once, layer by layer, keeps
the input of each layer: the peak grows with its depth. Keeping the input of every k-th layer only, and rebuilding those
between when backward comes to them, it grows with the number of segments and with their length: like the root of the depth.

Method. Dropped values may form *groups*. When backward first needs a value of a group, or something that is made from one, the
whole group is rebuilt ahead: the ops on the way are re-run, what they make is let go of at once, but for the group's values.
From these the rest is rebuilt as ever, so that the ops on the way run a third time.

:func:`schedule` says which ops are re-run and when; :func:`replay` its footprint, by the same replayer as a plan's without
groups. Cost: linear in ops and re-runs, a few microseconds each.

What it does not do. It is for functional graphs, those of the compile engine, with one backward pass: no version but the first,
nothing random, and nothing that the script still holds when backward begins.

Source. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), for chains; here over any graph's dropped values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_echo._rerun import UNPACK
from torch_echo.footprint import Footprint, Replayer, _Trace
from torch_echo.graph import Trait

__all__ = ["Groups", "Step", "possible", "replay", "schedule"]

Groups = Sequence[Sequence[int]]
"""Dropped values that are rebuilt together, ahead."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """One re-run of an op."""

    op: int
    tick: int
    """Of the backward op before which it runs."""
    group: int = -1
    """The group that it runs ahead for; -1 if its outputs stay for all their readers."""


def possible(replayer: Replayer, dropped: Collection[int]) -> bool:
    """Can values of this graph be rebuilt more than once?"""
    graph = replayer.graph
    if replayer.keep_spans or any(v.version for v in graph.values):
        return False
    return not any(
        graph.ops[graph.values[v].producer].traits & (Trait.RANDOM | Trait.REUSES)
        or replayer.begin <= replayer.adoptable_list[v]
        for v in dropped
    )


def schedule(replayer: Replayer, dropped: Collection[int], groups: Groups) -> list[Step]:
    """The re-runs under a plan, in order."""
    producer, reads, adoptable = replayer.producer_list, replayer.reads, replayer.adoptable_list
    mask = bytearray(replayer.n_values)
    for v in dropped:
        mask[v] = 1
    group_of = {v: g for g, group in enumerate(groups) for v in group}
    built = bytearray(replayer.n_values)
    ahead: set[int] = set()
    steps: list[Step] = []

    def closure(wanted: Sequence[int], t: int, mine: int) -> list[int]:
        """Ops to re-run for some values; groups on the way are rebuilt first."""
        todo: dict[int, None] = dict.fromkeys(producer[v] for v in wanted)
        stack = list(todo)
        while stack:
            for x in reads[stack.pop()]:
                if not mask[x] or built[x] or t <= adoptable[x]:
                    continue
                g = group_of.get(x, -1)
                if g >= 0 and g != mine and g not in ahead:
                    rebuild_ahead(g, t)
                elif producer[x] not in todo:
                    todo[producer[x]] = None
                    stack.append(producer[x])
        return sorted(todo)

    def rebuild_ahead(g: int, t: int) -> None:
        ahead.add(g)
        wanted = [v for v in groups[g] if not built[v]]
        steps.extend(Step(o, t, g) for o in closure(wanted, t, g))
        for v in wanted:
            built[v] = 1

    for t, code, v in zip(
        replayer.ev_tick.tolist(), replayer.ev_code.tolist(), replayer.ev_value.tolist(), strict=True
    ):
        if code != UNPACK or not mask[v] or built[v] or t <= adoptable[v]:
            continue
        g = group_of.get(v, -1)
        if g >= 0 and g not in ahead:
            rebuild_ahead(g, t)
            continue
        ops = closure([v], t, -1)
        steps.extend(Step(o, t) for o in ops)
        for o in ops:
            for w in replayer.graph.ops[o].writes:
                built[w] |= mask[w]
    return steps


def replay(replayer: Replayer, dropped: Collection[int], groups: Groups) -> Footprint:
    """The footprint of an iteration with these re-runs. Raises ValueError for a graph or a plan that this is not for."""
    if not possible(replayer, dropped):
        raise ValueError("values that are random or overwritten, or that several passes read, can't be rebuilt twice")
    mask = replayer.mask(dropped)
    steps = schedule(replayer, dropped, groups)
    events = _Events(replayer, mask, steps, groups)
    return events.footprint()


class _Events:
    """What is alloted and freed by the re-runs: (tick, 1 for during and 0 for before, number, owner, sign)."""

    def __init__(self, replayer: Replayer, mask: NDArray[np.bool_], steps: list[Step], groups: Groups) -> None:
        self.replayer, self.mask, self.steps = replayer, mask, steps
        self.found: list[tuple[int, int, int, int, int]] = []
        self.in_group = [set(group) for group in groups]
        read = replayer.ev_code == UNPACK
        self.last_save = np.full(replayer.n_values, -1, np.int64)
        """Tick at which the last node lets go of a value."""
        np.maximum.at(self.last_save, replayer.ev_value[read], replayer.ev_extra[read])
        self.last_step: dict[int, int] = {}
        """Number of the last step that reads a value's lasting block."""
        self.last_ahead: dict[tuple[int, int], int] = {}
        """The same for blocks of one rebuild ahead, by (group, value)."""

    def _blocks(self) -> None:
        """Which block each read of a step means."""
        r = self.replayer
        passing: set[int] = set()  # made in the rebuild ahead that is going on
        group = -1
        for i, step in enumerate(self.steps):
            if step.group != group:
                passing, group = set(), step.group
            for x in r.reads[step.op]:
                if x in passing:
                    self.last_ahead[group, x] = i
                else:
                    self.last_step[x] = i
            if group >= 0:
                passing.update(w for w in r.graph.ops[step.op].writes if w not in self.in_group[group])

    def footprint(self) -> Footprint:
        r = self.replayer
        ticks = r.graph.ticks
        self._blocks()
        made: set[int] = set()
        for i, step in enumerate(self.steps):
            self._run(i, step, made)
        read = np.array(sorted(v for v in self.last_step if not self.mask[v]), np.int64)
        end, changes = r.originals(self.mask, read)

        extended: dict[int, int] = {}
        for v in read.tolist():
            s, last = r.storage_list[v], self.last_step[v]
            if self.steps[last].tick > end[s] and last > extended.get(s, -1):
                extended[s] = last
        for s, last in extended.items():
            if end[s] < ticks:
                changes[end[s]] += r.s_bytes[s]
            end[s] = self.steps[last].tick
            self._free(s, last)
        found = np.array(sorted(self.found), np.int64).reshape(-1, 5)
        ev_ticks, owners = found[:, 0], found[:, 3]
        deltas = found[:, 4] * r.owner_bytes[owners]
        base = np.cumsum(changes[: ticks + 1])
        peak, tick, at = r._peak(base, ev_ticks, deltas)
        rerun = [step.op for step in self.steps]
        none = np.empty(0, np.int64)
        trace = _Trace(
            r, end, np.array(sorted(extended), np.int64), none, none, base, ev_ticks, deltas, owners, at, tick
        )  # fmt: skip
        extra = float(r.op_cost[rerun].sum()) if rerun else 0.0
        rerun_op = self.steps[int(found[at, 2]) >> 2].op if at >= 0 and ev_ticks[at] == tick and found[at, 1] else -1
        return Footprint(peak, tick, r._op_at(tick), rerun, extra, rerun_op, trace)

    def _run(self, i: int, step: Step, made: set[int]) -> None:
        r = self.replayer
        tick, numbered = step.tick, i << 2
        blocks = r.blocks[step.op]
        self.found += [(tick, 1, numbered, owner, 1) for owner, _, _ in blocks]
        if r.workspace[step.op]:
            workspace = r.n_storages + step.op
            self.found += [(tick, 1, numbered + 1, workspace, 1), (tick, 1, numbered + 2, workspace, -1)]
        for owner, w, _ in blocks:
            if step.group >= 0 and w not in self.in_group[step.group]:
                self._free(owner, self.last_ahead.get((step.group, w), i))
            elif not self.mask[w] or w in made:
                self._free(owner, i)
            else:
                made.add(w)
                last = max(i, self.last_step.get(w, i))
                until = int(self.last_save[w])
                if until > self.steps[last].tick:
                    self.found.append((until, 0, 0, owner, -1))
                else:
                    self._free(owner, last)

    def _free(self, owner: int, step: int) -> None:
        """A block goes when a step has run."""
        self.found.append((self.steps[step].tick, 1, (step << 2) + 3, owner, -1))
