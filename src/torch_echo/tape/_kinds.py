"""Kinds of iteration: what is known of each, and of which kind an iteration is going to be.

A script's iterations need not be alike. A GAN trains its judge and its generator in turn, a reinforcement learner its actor and
its critic; an auxiliary loss is computed now and then, a trunk is frozen for a while. Each kind of iteration is recorded, planned
and checked by itself.

Two iterations are of one kind if they call the same root modules with the same facts that decide what autograd saves: do the
inputs need gradients, which parameters are trained. How often each is called does not matter, so that a decoder called from a loop
is of one kind whatever the length; nor do shapes.

What an iteration is going to be is not known at its first call. It is guessed from the script's past: of those that began in the
same way, it will be like those before which the most was as it is now. A wrong guess costs memory, never correctness.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from torch_echo import compat
from torch_echo.graph import TrainingGraph
from torch_echo.planning import Plan
from torch_echo.tape._entry import Entry
from torch_echo.tape._install import Installed

__all__ = ["MOST_CALLS", "MOST_KINDS", "Kinds", "Phase", "RootCall", "RootKey", "StepKind"]

PAST = 64
"""Iterations that guesses are made from."""

LONGEST = 8
"""Iterations before one that are compared with those before another."""

MOST_KINDS = 8
"""Kinds that get a plan: each takes a slow step and planning time. What else comes runs under the plan most like it."""

UNLIKE = 3
"""Iterations of a kind in a row that make other calls than the recorded one, or far larger ones, before it is recorded again."""

MOST_CALLS = 4096
"""Calls of an iteration that are noted: forward passes that no backward follows may be many."""


class Phase(Enum):
    """Where a session stands, or the plan of one kind of iteration."""

    WAIT = "wait"
    RECORD = "record"
    CHECK = "check"
    STEADY = "steady"
    OFF = "off"


class RootKey(NamedTuple):
    """A root module, and what decides what autograd saves in its call."""

    path: str
    inputs_trained: bool
    """Do its inputs need gradients?"""
    parameters_trained: int
    """A hash of which of its parameters do."""


class RootCall(NamedTuple):
    """A call of a root module."""

    key: RootKey
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, entry: Entry, module: torch.nn.Module, args: Any, kwargs: Any) -> RootCall:
        """The call of a module that is about to run. Tensors are looked for one level of containers deep."""
        tensors = list(_tensors(args, kwargs))
        if entry.parts is None:
            entry.parts = [weakref.ref(m) for m in module.modules() if compat.own_parameters(m)]
        trained = [
            p.requires_grad
            for ref in entry.parts
            if (part := ref()) is not None
            for p in compat.own_parameters(part)
            if p is not None
        ]
        key = RootKey(entry.path, any(t.requires_grad for t in tensors), hash(tuple(trained)))
        return cls(key, tuple(compat.sizes(t) for t in tensors))

    @property
    def elements(self) -> int:
        """Elements of its inputs."""
        return sum(math.prod(shape) for shape in self.shapes)


def _tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, torch.Tensor):
            yield a
        elif isinstance(a, (list, tuple, dict)):
            yield from (b for b in (a.values() if isinstance(a, dict) else a) if isinstance(b, torch.Tensor))


class StepKind:
    """One kind of iteration: what was seen of it, its graph and its plan."""

    def __init__(self, key: tuple[RootKey, ...]) -> None:
        self.key = key
        """Its roots in the order of their first calls."""
        self.phase = Phase.WAIT
        self.seen = 0
        """Iterations so far."""
        self.passes = 1
        """Backward passes from one beginning to the next: a later one may go through what an earlier one left."""
        self.alone = False
        """Must it have one? It was tried: what it leaves is not read by those that follow."""
        self.records = 0
        self.failures = 0
        """Recordings that came to nothing."""
        self.due = False
        """Is it to be recorded again?"""
        self.remade = False
        """Has it been recorded again because the measured peak was not the plan's?"""
        self.excess = 0
        """Bytes by which it was above the plan's then: a budget is to hold all the same."""
        self.replaced = 0
        """How often it was recorded again because its modules are others than before."""
        self.checks = 0
        """Iterations in which a check waits for one with the recorded shapes."""
        self.recorded: list[RootCall] = []
        """The calls of the recorded iteration."""
        self.graph: TrainingGraph | None = None
        self.plan: Plan | None = None
        self.installed: Installed | None = None
        self.measured_peak: int | None = None
        self.nesting: set[tuple[str, str]] = set()
        """Of the recorded iteration: see `install_plan`."""
        self.codes: dict[int, Any] = {}
        """Code objects by identity, as long as the plan knows places in them by it."""
        self._unlike: list[str] = []
        self._unlikes = self._larger = 0

    @property
    def paths(self) -> set[str]:
        """Its roots."""
        return {key.path for key in self.key}

    @property
    def name(self) -> str:
        """Its roots, in words."""
        return " + ".join(dict.fromkeys(key.path for key in self.key))

    def outgrown(self, first: RootCall, growth: float) -> bool:
        """Are the inputs of an iteration's first call larger, by a factor, than all that were recorded?"""
        known = [c.elements for c in self.recorded if c.key == first.key]
        return bool(known) and first.elements > growth * max(known)

    def compare(self, calls: Sequence[RootCall], growth: float) -> None:
        """An iteration is over: has the recorded one turned out an exception? (A step that failed, for one, has a forward pass
        too many.) Then it is due again."""
        paths = [c.key.path for c in calls]
        if paths == [c.key.path for c in self.recorded]:
            self._unlikes = self._larger = 0
        else:
            self._unlikes = self._unlikes + 1 if paths == self._unlike else 1
            larger = sum(c.elements for c in calls) > growth * sum(c.elements for c in self.recorded)
            self._larger = self._larger + 1 if larger else 0
        self._unlike = paths
        if max(self._unlikes, self._larger) >= UNLIKE:
            self.due = True
            self._unlikes = self._larger = 0


class Kinds:
    """All kinds of iteration of a session, and its past."""

    def __init__(self) -> None:
        self._all: dict[tuple[RootKey, ...], StepKind] = {}
        self._past: deque[StepKind] = deque(maxlen=PAST)

    def __iter__(self) -> Iterator[StepKind]:
        return iter(self._all.values())

    @property
    def planned(self) -> list[StepKind]:
        """Those that have a plan."""
        return [kind for kind in self if kind.plan is not None]

    @property
    def heaviest(self) -> StepKind | None:
        """Of those that have a plan, the one that takes the most memory without."""
        return max(self.planned, key=lambda kind: kind.plan.base_peak if kind.plan else 0, default=None)

    def note(self, calls: Iterable[RootCall]) -> StepKind:
        """An iteration that made these calls is over: its kind."""
        key = tuple(dict.fromkeys(call.key for call in calls))
        kind = self._all.get(key)
        if kind is None:
            recent = set(self._past)
            self._all = {k: v for k, v in self._all.items() if v in recent or v.plan is not None}
            kind = self._all[key] = StepKind(key)
        kind.seen += 1
        self._past.append(kind)
        return kind

    def guess(self, begun: tuple[RootKey, ...]) -> StepKind | None:
        """Of which kind is the iteration that has begun with these roots? None: of one that was not there lately."""
        past = list(self._past)
        candidates = {kind for kind in set(past) if kind.key[: len(begun)] == begun}
        if len(candidates) < 2:
            return next(iter(candidates), None)
        votes: dict[StepKind, int] = {}
        most = -1
        for i in range(len(past) - 1, -1, -1):
            if past[i] not in candidates:
                continue
            common = 0
            while common < min(i, LONGEST) and past[i - 1 - common] is past[-1 - common]:
                common += 1
            if common > most:
                most, votes = common, {}
            if common == most:
                votes[past[i]] = votes.get(past[i], 0) + 1
        return max(votes, key=lambda kind: votes[kind])  # of equals, the latest

    def like(self, begun: tuple[RootKey, ...], whole: bool = False) -> StepKind | None:
        """The planned kind that has the most roots in common with an iteration that has no plan; `whole`: all that it has begun
        with."""
        paths = {key.path for key in begun}
        best = max(self.planned, key=lambda kind: len(paths & kind.paths), default=None)
        common = paths & best.paths if best is not None else set()
        return best if common and (common == paths or not whole) else None
