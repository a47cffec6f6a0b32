"""From a plan over values to decisions that the tape can look up while ops run.

A decision belongs to a class of ops (module and call site), and says for each instance in order which outputs to drop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch_echo.footprint import Replayer
from torch_echo.graph import Phase, TrainingGraph
from torch_echo.tape._entry import Entry, entries
from torch_echo.tape._mode import OFF, Decision, Site, Table

__all__ = ["Installed", "decide", "install_plan"]


RERUN_SECONDS = 30e-6
"""Seconds that noting and re-running one op costs beyond its kernel."""

MODE_SECONDS = 12e-6
"""Seconds that the dispatch mode costs for an op that the plan leaves alone: twice what a loop over one small op shows,
since between large kernels the interpreter's code and data are not in the processor's caches."""

HOOK_SECONDS = 10e-6
"""Seconds that the hooks cost for a saved tensor that is kept, in forward and backward together."""


def engine_seconds(graph: TrainingGraph) -> Callable[[frozenset[int]], float]:
    """What the tape costs under a plan, re-run ops aside: a function of the values dropped, in seconds a step."""
    ops: Counter[tuple[str, int]] = Counter((o.layer, o.call) for o in graph.ops if o.phase is Phase.FORWARD)
    saves: Counter[tuple[str, int]] = Counter((s.layer, s.call) for s in graph.saves)
    packed: dict[int, set[tuple[str, int]]] = {}
    for save in graph.saves:
        packed.setdefault(save.value, set()).add((save.layer, save.call))
    makers = [graph.ops[v.producer] if v.producer >= 0 else None for v in graph.values]

    def seconds(dropped: frozenset[int]) -> float:
        modes = {(op.layer, op.call) for v in dropped if (op := makers[v]) is not None}
        hooks: set[tuple[str, int]] = set().union(*(packed.get(v, ()) for v in dropped))
        return MODE_SECONDS * sum(ops[m] for m in modes) + HOOK_SECONDS * sum(saves[h] for h in hooks)

    return seconds


@dataclass
class Installed:
    """A plan in force."""

    tables: dict[str, list[Table]]
    """By module path, for each of its calls in the recorded iteration."""
    beyond: dict[str, Table]
    """By module path, for calls after those."""

    entries: list[Entry] = field(default_factory=list)
    """The modules that have tables."""

    @property
    def script(self) -> Table:
        """For the script's own code between the model's call and backward."""
        return self.tables[""][0] if "" in self.tables else OFF

    def reset(self) -> None:
        """A new iteration begins: instances are counted anew."""
        for entry in self.entries:
            entry.calls = 0
        for tables in (*self.tables.values(), self.beyond.values()):
            for table in tables:
                for decision in table.sites.values():
                    decision.count = 0


def decide(graph: TrainingGraph, dropped: Collection[int]) -> Installed:
    """Decisions that drop these values, those that backward needs: a recipe that nothing waits for would only pin what
    it reads until the end of the forward pass. Cost: linear in ops."""
    replayer = Replayer(graph)
    needed = set(replayer.records(replayer.mask(dropped))[0].tolist())
    dropped = frozenset(v for v in dropped if graph.values[v].producer in needed)
    masks: dict[int, dict[int, list[int]]] = {}  # class -> call -> mask of each instance
    calls: dict[str, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            mask = sum(1 << j for j, v in enumerate(op.writes) if v in dropped)
            masks.setdefault(op.cls, {}).setdefault(op.call, []).append(mask)
            calls[op.layer] = max(calls.get(op.layer, 0), op.call + 1)
    hooks: dict[str, set[int]] = {}
    for save in graph.saves:
        if save.value in dropped:
            hooks.setdefault(save.layer, set()).add(save.call)
    sites: dict[str, dict[int, dict[Site, Decision]]] = {}
    beyond: dict[str, dict[Site, Decision]] = {}
    for cls, by_call in masks.items():
        made = graph.classes[cls]
        site: Any = made.site
        every = [m for mask in by_call.values() for m in mask]
        taken = [m for m in every if m]
        if not taken:
            continue
        common = max(set(taken), key=taken.count)
        beyond.setdefault(made.layer, {})[site] = Decision([], common, len(taken), len(every))
        for call, of_call in by_call.items():
            if any(of_call):
                decision = Decision(of_call, common, len(taken), len(every))
                sites.setdefault(made.layer, {}).setdefault(call, {})[site] = decision
    tables: dict[str, list[Table]] = {}
    after: dict[str, Table] = {}
    for layer in sites.keys() | hooks.keys():
        by_call_sites, with_hooks = sites.get(layer, {}), hooks.get(layer, set())
        after[layer] = Table(beyond.get(layer, {}), layer in sites, bool(with_hooks))
        tables[layer] = [
            Table(by_call_sites.get(i, {}), i in by_call_sites, i in with_hooks)
            for i in range(max(calls.get(layer, 0), max(with_hooks, default=-1) + 1))
        ]
    return Installed(tables, after)


def install_plan(
    owner: object, graph: TrainingGraph, dropped: Collection[int], nesting: set[tuple[str, str]]
) -> Installed:
    """Put a plan in force for the modules of `owner`.

    `nesting`: (caller, callee) pairs of module paths seen in the recorded step. A module in which nothing is dropped gets
    tables only if its caller is taped, so that it runs with the mode off.
    """
    installed = decide(graph, dropped)
    inner = {callee for caller, callee in nesting if caller in installed.tables}
    for entry in entries.values():
        if entry is None or entry.owner is not owner:
            continue
        entry.calls = 0
        entry.tables = installed.tables.get(entry.path, [] if entry.path in inner else None)
        entry.beyond = installed.beyond.get(entry.path, OFF)
        if entry.tables:
            installed.entries.append(entry)
    return installed
