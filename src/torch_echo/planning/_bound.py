"""How far a plan is from the best: a lower bound by integer programming.

Problem. The least time that a plan within a budget can take, over all plans that rebuild each value at most once.

Method. A mixed-integer program, solved by HiGHS. Integer: which values are dropped. From these follows, for each moment at which
backward reads something that may be dropped, which ops have been re-run by then: those whose outputs are dropped and have been
read, by backward or by an op re-run before. A dropped value takes memory from its rebuild to its own reader; a kept one that
backward does not read, until all ops are re-run that read it. It is a relaxation: what is in the making within one moment does not
count. So every plan that the replay finds within the budget satisfies the program, and no plan is faster than its optimum.

Cost. Variables: ops times moments. Seconds for graphs of some tens of values, minutes for a hundred; beyond the time limit the
linear relaxation's optimum is returned, which is lower.

What it does not do. It says nothing about plans with groups (see :mod:`torch_echo.nested`), and leaves out what an engine costs.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from torch_echo._rerun import UNPACK
from torch_echo.footprint import Replayer
from torch_echo.graph import Fused, TrainingGraph, Trait
from torch_echo.planning._cut import MinCut

__all__ = ["Bound", "bound", "silence"]

TIME_LIMIT = 60.0


@dataclass(frozen=True)
class Bound:
    """What no plan can beat."""

    seconds: float
    """Least extra time of a step; infinite if no plan fits."""
    optimal: bool
    """Was the program solved to its optimum? Else `seconds` is that of its linear relaxation."""


def bound(graph: TrainingGraph, budget: int, *, time_limit: float = TIME_LIMIT) -> Bound:
    """A lower bound on the extra seconds of plans whose replayed peak is at most `budget` bytes.

    `time_limit`: seconds for the solver. Raises ValueError for an iteration with several backward passes over one graph.
    """
    if any(p.keeps_graph for p in graph.passes):
        raise ValueError("a bound is found for iterations with one backward pass only")
    found = _Program(graph, budget).solve(time_limit)
    return found if found is not None else _Program(graph, budget, relaxed=True).relaxation()


@contextmanager
def silence() -> Iterator[None]:
    """HiGHS prints its name, whatever it is told: it goes nowhere instead of into a program's output."""
    sys.stdout.flush()
    before = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)


class _Program:
    def __init__(self, graph: TrainingGraph, budget: int, relaxed: bool = False) -> None:
        self.replayer = replayer = Replayer(graph)
        self.cut = cut = MinCut(replayer)
        self.solver = pywraplp.Solver.CreateSolver("HIGHS")
        self.ops: list[int] = cut.ops.tolist()
        ops = set(self.ops)
        self.drop: dict[int, Any] = {
            v: self.solver.NumVar(0.0, 1.0, f"d{v}") if relaxed else self.solver.BoolVar(f"d{v}")
            for v in cut.values.tolist()
            if cut.rebuildable[v] and int(replayer.v_producer[v]) in ops
        }
        self.read: dict[int, int] = {}
        """First tick at which backward reads a value itself."""
        ticks, codes, values = (column.tolist() for column in (replayer.ev_tick, replayer.ev_code, replayer.ev_value))
        for t, code, v in zip(ticks, codes, values, strict=True):
            if code == UNPACK:
                self.read.setdefault(v, t)
        self.begin = min(self.read.values(), default=0)
        self.moments = sorted({t for v, t in self.read.items() if v in self.drop})
        self.done: dict[int, list[Any]] = {o: self._steps(f"r{o}") for o in self.ops}
        """For each op and moment: has it been re-run by then?"""
        self._dependences()
        self.feasible = self._memory(budget)
        # Re-runs that write over what they read may spare a little.
        reuses = np.array([bool(op.traits & Trait.REUSES) for op in graph.ops], bool)
        cost = replayer.op_cost - np.where(reuses, replayer.op_saved, 0.0)
        self.solver.Minimize(self.solver.Sum([float(cost[o]) * again[-1] for o, again in self.done.items() if again]))

    def _steps(self, name: str) -> list[Any]:
        return [self.solver.NumVar(0.0, 1.0, f"{name},{k}") for k in range(len(self.moments))]

    def _held(self, v: int) -> bool:
        """Does the script still hold a value when backward begins? It is used as it is, then."""
        return bool(self.replayer.adoptable_list[v] >= self.begin)

    def _dependences(self) -> None:
        """What is dropped and read has been rebuilt, by ops whose reads are kept or rebuilt."""
        replayer, add, last = self.replayer, self.solver.Add, len(self.moments) - 1
        number = {t: k for k, t in enumerate(self.moments)}
        for v, dropped in self.drop.items():
            t = self.read.get(v, -1)
            if t > replayer.adoptable_list[v]:
                again = self.done[int(replayer.v_producer[v])]
                add(again[number[t]] >= dropped)
        for again in self.done.values():
            for before, after in pairwise(again):
                add(after >= before)
        for o, again in self.done.items():
            for u in replayer.reads[o] if again else ():
                if self._held(u):
                    continue
                made = self.done.get(int(replayer.v_producer[u])) if replayer.v_producer[u] >= 0 else None
                if made is not None and u in self.drop:
                    for k in range(last + 1):
                        add(made[k] >= again[k] + self.drop[u] - 1)
                    if not self.cut.keepable[u]:
                        add(self.drop[u] >= again[last])
                elif not self.cut.keepable[u]:
                    add(again[last] <= 0)
        for child, parent in replayer._chain.tolist():
            if child in self.drop and parent in self.drop:
                add(self.drop[child] <= self.drop[parent])

    def _memory(self, budget: int) -> bool:
        """At each moment, what is spared outweighs what is rebuilt or kept longer by as much as the baseline exceeds the budget.
        False if that can't be."""
        replayer = self.replayer
        ticks = replayer.graph.ticks
        level = replayer.replay()._trace.base
        changes: list[tuple[Any, int, NDArray[np.bool_]]] = [*self._spared(ticks), *self._taken(ticks)]
        scale = max(1, int(level.max()))
        highest: dict[bytes, int] = {}
        for t in range(ticks + 1):  # of moments at which the same changes, the highest counts
            key = np.packbits(np.array([there[t] for _, _, there in changes], bool)).tobytes()
            highest[key] = max(highest.get(key, 0), int(level[t]))
        for key, most in highest.items():
            now = np.unpackbits(np.frombuffer(key, np.uint8), count=len(changes)).astype(bool).tolist()
            parts = [(x, n) for (x, n, _), here in zip(changes, now, strict=True) if here]
            if sum(n for _, n in parts if n > 0) < most - budget:
                return False
            if most > budget or any(n < 0 for _, n in parts):
                self.solver.Add(self.solver.Sum([(n / scale) * x for x, n in parts]) >= (most - budget) / scale)
        return True

    def _spared(self, ticks: int) -> Iterator[tuple[Any, int, NDArray[np.bool_]]]:
        """Where dropped values are not: from when the script lets go, but for when a node reads them."""
        replayer = self.replayer
        for v, variable in self.drop.items():
            s = replayer.storage_list[v]
            if replayer.s_last[s] != v or (replayer.s_passing[s] and not replayer.v_saved[v]):
                continue
            gone = np.zeros(ticks + 1, bool)
            gone[max(0, int(replayer.s_held[s])) : int(replayer.s_free[s]) if replayer.s_free[s] < ticks else None] = (
                True
            )
            if not replayer.graph.storages[s].fused & Fused.BACKWARD:
                saves = (replayer.ev_value == v) & (replayer.ev_code == UNPACK)
                for begin, end in zip(replayer.ev_tick[saves].tolist(), replayer.ev_extra[saves].tolist(), strict=True):
                    gone[begin:end] = False
            if gone.any():
                yield variable, int(replayer.s_bytes[s]), gone

    def _taken(self, ticks: int) -> Iterator[tuple[Any, int, NDArray[np.bool_]]]:
        """What is rebuilt ahead of its own reader, and what is kept for re-runs beyond its life in the baseline."""
        replayer, add = self.replayer, self.solver.Add
        spans = [*self.moments, ticks + 1]
        readers: dict[int, list[int]] = {}
        for o in self.ops:
            for u in replayer.reads[o]:
                readers.setdefault(u, []).append(o)
        for v in {*self.drop, *readers}:
            s = replayer.storage_list[v]
            if replayer.s_last[s] != v or self._held(v) or replayer.s_free[s] >= ticks or not self.moments:
                continue
            nbytes = -int(replayer.s_bytes[s])
            if v in self.drop and v in self.read and not replayer.graph.storages[s].fused & Fused.BACKWARD:
                for k, made in enumerate(self.done[int(replayer.v_producer[v])]):
                    there = np.zeros(ticks + 1, bool)
                    there[max(spans[k], int(replayer.s_held[s])) : min(spans[k + 1], self.read[v])] = True
                    if there.any():
                        ahead = self.solver.NumVar(0.0, 1.0, f"b{v},{k}")
                        add(ahead >= made + self.drop[v] - 1)
                        yield ahead, nbytes, there
            if v not in readers or not self.cut.keepable[v] or replayer.v_producer[v] < 0:
                continue
            free = int(replayer.s_alloc[s] if replayer.s_passing[s] and not replayer.v_saved[v] else replayer.s_free[s])
            for k in range(-1, len(self.moments)):
                there = np.zeros(ticks + 1, bool)
                there[max(free, spans[k] if k >= 0 else 0) : spans[k + 1]] = True
                if there.any():
                    longer = self.solver.NumVar(0.0, 1.0, f"e{v},{k}")
                    for o in readers[v]:
                        again = self.done[o]
                        waits = again[-1] - again[k] if k >= 0 else again[-1]
                        add(longer >= waits - self.drop[v] if v in self.drop else longer >= waits)
                    yield longer, nbytes, there

    def solve(self, time_limit: float) -> Bound | None:
        """The optimum; None if it is not found in time."""
        if not self.feasible:
            return Bound(math.inf, True)
        self.solver.SetTimeLimit(int(1000 * time_limit))
        with silence():
            status = self.solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return Bound(math.inf, True)
        return Bound(self.solver.Objective().Value(), True) if status == pywraplp.Solver.OPTIMAL else None

    def relaxation(self) -> Bound:
        """What the linear relaxation says."""
        with silence():
            status = self.solver.Solve()
        return Bound(self.solver.Objective().Value() if status == pywraplp.Solver.OPTIMAL else 0.0, False)
