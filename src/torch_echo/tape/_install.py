"""From a plan over values to decisions that the tape can look up while ops run.

A decision belongs to a class of ops (module and call site), and says for each instance in order which outputs to drop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch_echo.footprint import Replayer
from torch_echo.graph import Op, Phase, Save, TrainingGraph, Trait
from torch_echo.tape._entry import Entry, entries
from torch_echo.tape._gate import CLOSED, HOOKS, LAYERS, MODE, WRITE, Door, Place
from torch_echo.tape._mode import OFF, Decision, Table
from torch_echo.tape._stack import Site

__all__ = ["Installed", "decide", "install_plan", "masked_values"]


# Fitted to 40 measured steps of five models under plans of all depths. They are several times what a loop over one small op
# shows: between large kernels the interpreter's code and data are not in the processor's caches.

RERUN_SECONDS = 50e-6
"""Seconds that noting and re-running one op costs beyond its kernel."""

REBUILT_BYTE_SECONDS = 0.04e-3 / 2**20
"""Seconds that a rebuilt byte costs beyond that on a CPU, whose caches it fills."""

GATE_SECONDS = 10e-6
"""Seconds that the gate costs for a call of torch's API."""

OPEN_SECONDS = 40e-6
"""Seconds more for a call that mode or hooks are on for."""

MODE_SECONDS = 4e-6
"""Seconds that the dispatch mode costs for an op that the plan leaves alone."""

HOOK_SECONDS = 7e-6
"""Seconds that the hooks cost for a saved tensor that is kept, in forward and backward together."""

_Call = tuple[str, int]
_Turn = tuple[int, int]
"""One call of torch's API: site of the graph, and how many calls were there before."""


@dataclass
class _Needs:
    """What one call of a module needs under a plan: in which calls of torch's API, or (`whole`) throughout."""

    whole: bool
    mode: set[_Turn] = field(default_factory=set)
    hooks: set[_Turn] = field(default_factory=set)
    layers: set[_Turn] = field(default_factory=set)
    writes: set[_Turn] = field(default_factory=set)


class _Sites:
    """The calls of a graph's modules, and the calls of torch's API in them."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.ops: Counter[_Turn] = Counter()
        self.saves: Counter[_Turn] = Counter()
        self.ops_of: Counter[_Call] = Counter()
        self.saves_of: Counter[_Call] = Counter()
        self.calls_of: Counter[_Call] = Counter()
        self.sites_of: dict[_Call, list[int]] = {}
        self.unseen: set[_Call] = set()
        """Calls in which ops or saves belong to no site: the gate can't serve them."""
        self.writes: dict[_Call, set[_Turn]] = {}
        """Where something is overwritten that is older than the call."""
        self.packed: dict[int, list[Save]] = {}
        for i, site in enumerate(graph.sites):
            self.sites_of.setdefault((site.layer, site.call), []).append(i)
            self.calls_of[site.layer, site.call] += site.count
        made: dict[int, _Turn] = {}  # by storage

        def storages_of(op: Op) -> Iterator[int]:
            return (graph.values[v].storage for v in op.writes)

        for op in graph.ops:
            if op.phase is Phase.FORWARD:
                call = op.layer, op.call
                for s in storages_of(op):
                    if graph.storages[s].alloc >= op.start:
                        made.setdefault(s, (op.site, op.turn))
                self.ops[op.site, op.turn] += 1
                self.ops_of[call] += 1
                if op.site < 0:
                    self.unseen.add(call)
                elif op.traits & Trait.MUTATES and any(made.get(v, ()) != (op.site, op.turn) for v in storages_of(op)):
                    self.writes.setdefault(call, set()).add((op.site, op.turn))
        for save in graph.saves:
            call = save.layer, save.call
            self.saves[save.site, save.turn] += 1
            self.saves_of[call] += 1
            self.packed.setdefault(save.value, []).append(save)
            if save.site < 0:
                self.unseen.add(call)
        self.makers = [graph.ops[v.producer] if v.producer >= 0 else None for v in graph.values]
        self.inner = {v for op in graph.ops for v in graph.inside(op)}
        """Values that are saved while a layer runs, which has hooks of its own."""

    def needs(self, dropped: Collection[int]) -> dict[_Call, _Needs]:
        """What each call of a module needs, if anything."""
        found: dict[_Call, _Needs] = {}

        def of(call: _Call) -> _Needs:
            need = found.get(call)
            if need is None:
                need = found[call] = _Needs(call in self.unseen, writes=self.writes.get(call, set()))
            return need

        for v in dropped:
            op = self.makers[v]
            layer = op is not None and bool(op.traits & Trait.COMPOSITE)
            if op is not None:
                need = of((op.layer, op.call))
                (need.layers if layer else need.mode).add((op.site, op.turn))
            for save in self.packed.get(v, ()):
                if v not in self.inner and not (layer and op is not None and op.start <= save.pack <= op.end):
                    of((save.layer, save.call)).hooks.add((save.site, save.turn))
        return found

    def seconds(self, dropped: Collection[int]) -> float:
        """What the tape costs under a plan, re-run ops aside."""
        total = 0.0
        for call, need in self.needs(dropped).items():
            total += 2 * HOOK_SECONDS * sum(self.saves[t] for t in need.layers)  # in the re-run too
            if need.whole:
                total += MODE_SECONDS * self.ops_of[call] * bool(need.mode or need.layers)
                total += HOOK_SECONDS * self.saves_of[call] * bool(need.hooks)
                continue
            total += GATE_SECONDS * self.calls_of[call]
            total += OPEN_SECONDS * len(need.mode | need.hooks | need.layers)
            total += MODE_SECONDS * sum(self.ops[t] for t in need.mode)
            total += HOOK_SECONDS * sum(self.saves[t] for t in need.hooks)
        return total

    def doors(self, call: _Call, need: _Needs, decisions: dict[Site, Decision]) -> dict[Place, Door | None] | None:
        """For the gate: what each place of a call needs. None if the gate can't serve it."""
        if need.whole:
            return None
        there: dict[Place, list[Decision]] = {}
        for site, decision in decisions.items():
            there.setdefault(_place(site), []).append(decision)
        doors: dict[Place, Door | None] = {}
        for s in self.sites_of.get(call, ()):
            turns = [
                MODE * ((s, t) in need.mode)
                | HOOKS * ((s, t) in need.hooks)
                | WRITE * ((s, t) in need.writes)
                | LAYERS * ((s, t) in need.layers)
                for t in range(self.graph.sites[s].count)
            ]
            place: Any = self.graph.sites[s].place
            doors[place] = _door(turns, there.get(place, []))
        return doors


def _place(site: Site) -> Place:
    _, code, inner, outer, *_ = site
    return code, inner, outer


def _door(turns: list[int], decisions: list[Decision]) -> Door | None:
    beyond = 0
    for needs in turns:
        beyond |= needs
    return Door(turns, beyond, decisions) if beyond else CLOSED


def engine_seconds(graph: TrainingGraph) -> Callable[[frozenset[int]], float]:
    """What the tape costs under a plan, re-run ops aside: a function of the values dropped, in seconds a step."""
    return _Sites(graph).seconds


@dataclass
class Installed:
    """A plan in force."""

    tables: dict[str, list[Table]]
    """By module path, for each of its calls in the recorded iteration."""
    beyond: dict[str, Table]
    """By module path, for calls after those."""

    inner: set[str] = field(default_factory=set)
    """Paths of the modules in which nothing is dropped and whose callers are taped: they run with the mode off."""

    entries: list[Entry] = field(default_factory=list)
    """The modules that get tables."""

    @property
    def script(self) -> Table:
        """For the script's own code between the model's call and backward."""
        return self.tables[""][0] if "" in self.tables else OFF

    def bind(self, entry: Entry) -> None:
        """Take in a module, if the plan says anything of one at its path."""
        if entry.path in self.tables or entry.path in self.inner:
            self.entries.append(entry)

    def put_in(self) -> None:
        """From here on the modules' calls follow this plan."""
        self.entries = [entry for entry in self.entries if entry.module() is not None]
        for entry in self.entries:
            entry.tables = self.tables.get(entry.path, [])
            entry.beyond = self.beyond.get(entry.path, OFF)

    def take_out(self) -> None:
        """From here on they follow none."""
        for entry in self.entries:
            entry.tables = None

    def reset(self) -> None:
        """A new iteration begins: instances are counted anew."""
        for entry in self.entries:
            entry.calls = 0
        for tables in (*self.tables.values(), self.beyond.values()):
            for table in tables:
                table.reset()


def decide(graph: TrainingGraph, dropped: Collection[int]) -> Installed:
    """Decisions that drop these values, those that backward needs: a recipe that nothing waits for would only pin what
    it reads until the end of the forward pass. Cost: linear in ops."""
    replayer = Replayer(graph)
    needed = set(replayer.records(replayer.mask(dropped))[0].tolist())
    dropped = frozenset(v for v in dropped if graph.values[v].producer in needed)
    masks: dict[int, dict[int, list[int]]] = {}  # class -> call -> mask of each instance
    turns: dict[int, dict[int, list[int]]] = {}  # class -> call -> turn of each instance
    calls: dict[str, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            mask = _mask(graph, op, dropped)
            masks.setdefault(op.cls, {}).setdefault(op.call, []).append(mask)
            turns.setdefault(op.cls, {}).setdefault(op.call, []).append(op.turn)
            calls[op.layer] = max(calls.get(op.layer, 0), op.call + 1)
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
        share = common, len(taken), len(every)
        each = max(1, round(len(every) / sum(1 + turns[cls][call][-1] for call in by_call)))
        beyond.setdefault(made.layer, {})[site] = Decision([], *share, each=each)
        for call, of_call in by_call.items():
            if any(of_call):
                there = turns[cls][call]
                starts = [bisect_left(there, t) for t in range(there[-1] + 1)]
                decision = Decision(of_call, *share, starts, each)
                sites.setdefault(made.layer, {}).setdefault(call, {})[site] = decision
    index = _Sites(graph)
    needs = index.needs(dropped)
    tables: dict[str, list[Table]] = {}
    after: dict[str, Table] = {}
    for layer in {layer for layer, _ in needs}:
        tables[layer] = []
        everywhere: dict[Place, Door | None] | None = {}
        later = beyond.get(layer, {})
        for i in range(1 + max(i for name, i in needs if name == layer)):
            need = needs.get((layer, i))
            if need is None:
                tables[layer].append(OFF)
                continue
            decisions = sites.get(layer, {}).get(i, {})
            doors = index.doors((layer, i), need, decisions)
            tables[layer].append(Table(decisions, bool(decisions), bool(need.hooks), doors, bool(layer)))
            if doors is None or everywhere is None:
                everywhere = None
                continue
            for place, door in doors.items():
                known = everywhere.get(place)
                if known is not None and door is not None:
                    known.beyond |= door.beyond
                elif known is None:
                    there_too = [d for site, d in later.items() if _place(site) == place]
                    everywhere[place] = Door([], door.beyond, there_too) if door is not None else CLOSED
        tables[layer] += [OFF] * (calls.get(layer, 0) - len(tables[layer]))
        hooks = any(needs[call].hooks for call in needs if call[0] == layer)
        after[layer] = Table(later, layer in sites, hooks, everywhere, bool(layer))
    return Installed(tables, after)


def masked_values(graph: TrainingGraph, op: Op) -> list[int]:
    """The values that the bits of an op's masks stand for. Of a composite op, inside which are more values the more steps there
    are: bit 0 for what is inside (-1: nothing), then its outputs."""
    if not op.traits & Trait.COMPOSITE:
        return list(op.writes)
    inside = graph.inside(op)
    return [*(inside[:1] or [-1]), *(w for w in op.writes if w not in inside)]


def _mask(graph: TrainingGraph, op: Op, dropped: Collection[int]) -> int:
    """Which of its values an op drops, a bit each."""
    return sum(1 << j for j, v in enumerate(masked_values(graph, op)) if v in dropped)


def install_plan(
    owner: object, graph: TrainingGraph, dropped: Collection[int], nesting: set[tuple[str, str]]
) -> Installed:
    """A plan as decisions for the modules of `owner`, to be put in force.

    `nesting`: (caller, callee) pairs of module paths seen in the recorded step.
    """
    installed = decide(graph, dropped)
    installed.inner = {callee for caller, callee in nesting if caller in installed.tables}
    for entry in list(entries.values()):
        if entry is not None and entry.owner is owner:
            installed.bind(entry)
    return installed
