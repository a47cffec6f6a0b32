"""One plan for all ranks of a distributed run.

Each rank measures the durations of its own ops, so each would choose a plan of its own, and all would wait for the slowest. So
rank 0 plans, and the others take its plan over: which values of which classes of ops are dropped, by names that are the same in
every process (module path, place in the code). It is laid over the graph that a rank has recorded itself, whose shapes may be
others. A rank that runs other code (the stages of a pipeline) plans for itself.

Ranks talk through the store of the default process group, never by collectives: those that the script has under way on some rank
would have to wait for ours on another. Nothing waits for longer than its patience: a rank that raises, or takes another path,
holds nobody up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from torch_echo import compat
from torch_echo.footprint import replay
from torch_echo.graph import Phase, TrainingGraph, Trait
from torch_echo.planning import Front, Plan, Point, plan
from torch_echo.tape._install import engine_seconds, masked_values
from torch_echo.tape._mode import Decision

__all__ = ["Ranks", "class_names", "given_plan", "plan_as_text", "plan_from_text"]

PATIENCE = 120.0
"""Seconds that a rank waits for rank 0's plan when rank 0 has begun to record."""

START_PATIENCE = 10.0
"""Seconds that it waits for rank 0 to begin, the first time."""

POLL = 10
"""Iterations between looks for a newer plan."""

ATTEMPTS = 50
"""Iterations in which rank 0 looks for the other ranks' peaks."""

_NAP = 0.02
"""Seconds between two looks for what another rank is about to tell."""

Names = list[str]
"""For each class of ops, what it is called in all processes; "" for those of the backward pass."""


# --- plans as text -------------------------------------------------------------------------------------------------------


def class_names(graph: TrainingGraph, codes: Mapping[int, Any]) -> Names:
    """See :data:`Names`. `codes`: code objects by identity. Classes that only the overload tells apart are numbered."""
    forward = {op.cls for op in graph.ops if op.phase is Phase.FORWARD}
    names: Names = []
    seen: Counter[str] = Counter()
    for i, cls in enumerate(graph.classes):
        if i not in forward:
            names.append("")
            continue
        _, *site = cls.site
        places = {0} if len(site) < 5 else {0, 3}
        name = "|".join(
            [cls.layer, cls.name, *(_code(codes.get(p)) if j in places else str(p) for j, p in enumerate(site))]
        )
        names.append(f"{name}#{seen[name]}")
        seen[name] += 1
    return names


def _code(code: Any) -> str:
    return "" if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}:{code.co_name}"


def _code_key(names: Names) -> str:
    """The same in all processes that ran the same code in the recorded step, however often."""
    return "code/" + hashlib.sha256("\n".join(sorted(n for n in names if n)).encode()).hexdigest()


def plan_as_text(graph: TrainingGraph, dropped: frozenset[int], names: Names) -> str:
    """A plan by names, as JSON: for each class of which something is dropped, the mask of each instance in each call."""
    masks: dict[int, dict[int, list[int]]] = {}
    calls: Counter[str] = Counter()
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            mask = sum(1 << j for j, v in enumerate(masked_values(graph, op)) if v in dropped)
            masks.setdefault(op.cls, {}).setdefault(op.call, []).append(mask)
            calls[op.layer] = max(calls[op.layer], op.call + 1)
    taken = {
        names[cls]: {"calls": calls[graph.classes[cls].layer], "masks": by_call}
        for cls, by_call in masks.items()
        if any(map(any, by_call.values()))
    }
    return json.dumps(taken)


def plan_from_text(text: str | bytes, graph: TrainingGraph, names: Names) -> frozenset[int] | None:
    """The values of `graph` that a plan by names drops. None if some of them can't be rebuilt here. Raises ValueError for a text
    that is none of :func:`plan_as_text`'s."""
    taken = json.loads(text)
    decisions: dict[tuple[int, int], Decision | None] = {}
    dropped: set[int] = set()
    for op in graph.ops:
        if op.phase is not Phase.FORWARD or names[op.cls] not in taken:
            continue
        key = op.cls, op.call
        if key not in decisions:
            decisions[key] = _decision(taken[names[op.cls]], op.call)
        decision = decisions[key]
        mask = decision.next() if decision is not None else 0
        if mask and op.traits & Trait.KEEP:
            return None
        dropped.update(v for j, v in enumerate(masked_values(graph, op)) if mask >> j & 1 and v >= 0)
        if mask & 1:
            dropped.update(graph.inside(op))
    return frozenset(dropped)


def given_plan(graph: TrainingGraph, dropped: frozenset[int]) -> Plan:
    """The plan that drops these values, replayed on `graph`."""
    replayed = replay(graph, dropped)
    extra = replayed.extra_seconds + (engine_seconds(graph)(dropped) if dropped else 0.0)
    point = Point(dropped, replayed.peak, extra, "rank 0")
    front = Front(Point(frozenset(), replay(graph).peak, 0.0, "baseline"))
    front.add(point)
    return dataclasses.replace(plan(graph, front=front, chosen=point), notes=["rank 0's plan"])


def _decision(taken: Any, call: int) -> Decision | None:
    masks = taken["masks"]
    if str(call) not in masks and call < taken["calls"]:
        return None
    every = [m for of_call in masks.values() for m in of_call]
    some = [m for m in every if m]
    return Decision(masks.get(str(call), []), max(set(some), key=some.count), len(some), len(every))


# --- the ranks -----------------------------------------------------------------------------------------------------------


class Ranks:
    """The other processes of the default process group, as one session sees them; alone where there is none.

    `note`: told once why ranks plan apart.
    """

    _sessions: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        Ranks._sessions[name] += 1
        self._prefix = f"torch_echo/{name}/{Ranks._sessions[name]}"
        self._note = note
        self._lost = False
        self._start_patience, self._patience = START_PATIENCE, PATIENCE
        self._attempts = 0
        self._taken = 0
        """Number of the plan of rank 0's that was taken last."""
        self.rank = 0
        self.size = 1
        self.peaks: dict[int, int] = {}
        """Of the ranks that told theirs: bytes."""
        self.notes: dict[int, list[tuple[str, str, str]]] = {}
        """Of those ranks: what was left to plain PyTorch."""

    def _store(self) -> Any:
        store = None if self._lost else compat.process_group_store()
        if store is None:
            return None
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return compat.prefixed_store(self._prefix, store) if self.size > 1 else None

    def _lose(self, error: Exception) -> None:
        self._lost = True
        self._note(f"ranks plan apart: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    # --- plans ---------------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """This rank begins to record for its plan of this number."""
        store = self._store()
        if store is not None and self.rank == 0:
            self._set(store, f"{number}/begun", "1")

    def give_up(self, number: int) -> None:
        """The recording has come to nothing: nobody is to wait for the plan."""
        store = self._store()
        if store is not None and self.rank == 0:
            self._set(store, f"{number}/done", "")

    @property
    def alone(self) -> bool:
        """Is there no other?"""
        return self._store() is None

    def agree(
        self,
        number: int,
        graph: TrainingGraph,
        codes: Mapping[int, Any],
        budget: int | None,
        own: Callable[[], Plan],
    ) -> Plan:
        """The plan for a graph that this rank has recorded: on rank 0 its `own`, which the others are told; on them, rank 0's for
        the same code, unless there is none or it does not keep within the `budget` on this graph. Raises what `own` raises.
        """
        store = self._store()
        if store is None:
            return own()
        names = class_names(graph, codes)
        if self.rank == 0:
            made = own()
            self._set(store, _code_key(names), plan_as_text(graph, made.dropped, names))
            self._set(store, "latest", str(number))
            self._set(store, f"{number}/done", "1")
            return made
        self._await(store, number)
        given = self._given(store, graph, names)
        if given is None:
            if self._taken:
                self._note("this rank plans for itself: it ran other code than rank 0 in the recorded step")
            return own()
        if budget is not None and given.peak > budget and (made := own()).peak <= budget:
            self._note("this rank plans for itself: rank 0's plan would not keep within the memory budget here")
            return made
        return given

    def newer(self, iteration: int) -> bool:
        """Has rank 0 planned again since? Looked for now and then."""
        if self.size == 1 or self.rank == 0 or iteration % POLL or (store := self._store()) is None:
            return False
        try:
            latest = self._latest(store)
        except (RuntimeError, ValueError):
            self._lost = True  # rank 0 has come to its end, and the store with it
            return False
        newer = latest > self._taken
        self._taken = max(latest, self._taken)
        return newer

    def given(self, graph: TrainingGraph, codes: Mapping[int, Any]) -> Plan | None:
        """Rank 0's latest plan for the code that made this graph."""
        store = self._store()
        return self._given(store, graph, class_names(graph, codes)) if store is not None else None

    def _await(self, store: Any, number: int) -> None:
        """Wait until rank 0 has made its plan of this number, if it is about to make it."""
        patience, self._start_patience = self._start_patience, 0.0
        try:
            self._taken = self._latest(store)
            if self._taken < number and self._there(store, f"{number}/begun", patience):
                if not self._there(store, f"{number}/done", self._patience):
                    self._patience = 0.0
                    self._note(f"this rank plans for itself: no plan came from rank 0 within {PATIENCE:.0f} s")
                self._taken = self._latest(store)
        except (RuntimeError, ValueError) as error:
            self._lose(error)

    def _given(self, store: Any, graph: TrainingGraph, names: Names) -> Plan | None:
        if self._lost:
            return None
        try:
            key = _code_key(names)
            dropped = plan_from_text(store.get(key), graph, names) if store.check([key]) else None
        except (RuntimeError, ValueError) as error:
            self._lose(error)
            return None
        return None if dropped is None else given_plan(graph, dropped)

    def _latest(self, store: Any) -> int:
        return int(store.get("latest")) if store.check(["latest"]) else 0

    def _there(self, store: Any, key: str, patience: float) -> bool:
        """Is the key there, or will it be within `patience` seconds?"""
        end = time.monotonic() + patience
        while not store.check([key]):
            if time.monotonic() >= end:
                return False
            time.sleep(_NAP)  # the store's own waiting would log a warning, and keep signals from being handled
        return True

    def _set(self, store: Any, key: str, value: str) -> None:
        try:
            store.set(key, value)
        except (RuntimeError, ValueError) as error:
            self._lose(error)

    # --- peaks and notes -----------------------------------------------------------------------------------------------

    def tell(self, peak: int | None, unhandled: list[tuple[str, str, str]]) -> None:
        """This rank's measured peak, and what it left to plain PyTorch, for rank 0's summary."""
        store = self._store()
        if store is None:
            return
        if peak is not None:
            self.peaks[self.rank] = peak
        self._set(store, f"rank/{self.rank}", json.dumps({"peak": peak, "unhandled": unhandled}))

    def collect(self, last: bool = False) -> None:
        """On rank 0: what other ranks have told. To be called each iteration; it soon costs nothing."""
        if self.size == 1 or self.rank:
            return
        if not last and (len(self.peaks) == self.size or self._attempts >= ATTEMPTS or 0 not in self.peaks):
            return
        store = self._store()
        if store is None:
            return
        self._attempts += 1
        try:
            for rank in range(1, self.size):
                if (last or rank not in self.peaks) and store.check([f"rank/{rank}"]):
                    told = json.loads(store.get(f"rank/{rank}"))
                    if told["peak"] is not None:
                        self.peaks[rank] = told["peak"]
                    self.notes[rank] = [(what, why, where) for what, why, where in told["unhandled"]]
        except (RuntimeError, ValueError):
            self._lost = True  # the process group is coming to its end
