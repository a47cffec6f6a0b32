"""Every legal plan of a small graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from torch_echo.graph import TrainingGraph

__all__ = ["legal_plans", "needed"]


def needed(graph: TrainingGraph, plan: set[int]) -> tuple[set[int], set[int]]:
    """Ops that must be re-run under `plan`, and all values that backward then needs."""
    ops: set[int] = set()
    values: set[int] = set()
    todo = [save.value for save in graph.saves]
    while todo:
        v = todo.pop()
        values.add(v)
        if v in plan and graph.values[v].producer not in ops:
            ops.add(graph.values[v].producer)
            todo.extend(graph.ops[graph.values[v].producer].reads)
    return ops, values


def legal_plans(graph: TrainingGraph, most: int = 12) -> Iterator[set[int]]:
    """All legal plans without needless values; none if more than `most` values may be dropped."""
    droppable = [v for v, ok in enumerate(graph.droppable()) if ok]
    if len(droppable) > most:
        return
    for size in range(len(droppable) + 1):
        for chosen in combinations(droppable, size):
            plan = set(chosen)
            ops, values = needed(graph, plan)
            if not plan <= values or not graph.chain(plan) <= plan:
                continue
            pinned = {r for o in ops for r in graph.ops[o].reads} - plan
            if all(graph.values[r].keepable for r in pinned):
                yield plan
