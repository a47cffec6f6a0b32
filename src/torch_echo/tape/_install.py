"""From a plan over values to decisions that the tape can look up while ops run.

A decision belongs to a class of ops (module and call site), and says for each instance in order which outputs to drop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch_echo.footprint import Replayer
from torch_echo.graph import Phase, TrainingGraph
from torch_echo.tape._entry import entries
from torch_echo.tape._mode import Decision, Site

__all__ = ["Installed", "decide", "install_plan"]


RERUN_SECONDS = 25e-6
"""Seconds that noting and re-running one op costs beyond its kernel."""

MODE_SECONDS = 7e-6
"""Seconds that the dispatch mode costs for an op that the plan leaves alone."""

HOOK_SECONDS = 2e-6
"""Seconds that the hooks cost for a saved tensor that is kept."""


def engine_seconds(graph: TrainingGraph) -> Callable[[frozenset[int]], float]:
    """What the tape costs under a plan, re-run ops aside: a function of the values dropped, in seconds a step."""
    ops: dict[str, int] = {}
    saves: dict[str, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            ops[op.layer] = ops.get(op.layer, 0) + 1
    packed: dict[int, set[str]] = {}
    for save in graph.saves:
        saves[save.layer] = saves.get(save.layer, 0) + 1
        packed.setdefault(save.value, set()).add(save.layer)

    def seconds(dropped: frozenset[int]) -> float:
        modes = {graph.ops[graph.values[v].producer].layer for v in dropped}
        hooks: set[str] = set().union(*(packed.get(v, ()) for v in dropped))
        return MODE_SECONDS * sum(ops[m] for m in modes) + HOOK_SECONDS * sum(saves[h] for h in hooks)

    return seconds


@dataclass
class Installed:
    """A plan in force."""

    tables: dict[str, dict[Site, Decision]]
    """Decisions by module path and call site."""
    hooks: set[str]
    """Modules in which dropped values are saved."""

    script: tuple[dict[Site, Decision], bool, bool] | None = None
    """(decisions, mode, hooks) for the script's own code between the model's call and backward; None: nothing to do."""

    def reset(self) -> None:
        """A new iteration begins: instances are counted anew."""
        for table in self.tables.values():
            for decision in table.values():
                decision.count = 0


def decide(graph: TrainingGraph, dropped: Collection[int]) -> Installed:
    """Decisions that drop these values, those that backward needs: a recipe that nothing waits for would only pin what
    it reads until the end of the forward pass. Cost: linear in ops."""
    replayer = Replayer(graph)
    needed = set(replayer.records(replayer.mask(dropped))[0].tolist())
    dropped = frozenset(v for v in dropped if graph.values[v].producer in needed)
    masks: dict[int, list[int]] = {}
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        mask = 0
        for j, v in enumerate(op.writes):
            if v in dropped:
                mask |= 1 << j
        masks.setdefault(op.cls, []).append(mask)
    tables: dict[str, dict[Site, Decision]] = {}
    for cls, bits in masks.items():
        if any(bits):
            c = graph.classes[cls]
            site: Any = c.site
            tables.setdefault(c.layer, {})[site] = Decision(c.name, bits)
    hooks = {s.layer for s in graph.saves if s.value in dropped}
    script = (tables.get("", {}), "" in tables, "" in hooks)
    return Installed(tables, hooks, script if script[1] or script[2] else None)


def install_plan(
    owner: object, graph: TrainingGraph, dropped: Collection[int], nesting: set[tuple[str, str]]
) -> Installed:
    """Put a plan in force for the modules of `owner`.

    `nesting`: (caller, callee) pairs of module paths seen in the recorded step. A module in which nothing is dropped gets
    an entry only if its caller is taped, so that it runs with the mode off.
    """
    installed = decide(graph, dropped)
    busy = set(installed.tables) | installed.hooks
    inner = {callee for caller, callee in nesting if caller in busy}
    for entry in entries.values():
        if entry is None or entry.owner is not owner:
            continue
        entry.mode = entry.path in installed.tables
        entry.hooks = entry.path in installed.hooks
        if entry.mode or entry.hooks:
            entry.table = installed.tables.get(entry.path, {})
        else:
            entry.table = {} if entry.path in inner else None
    return installed
