"""The graphs of one training step, planned together.

When the first graph of a step is compiled, nothing is known of those to come: each takes the fastest plan within what is left of a
budget, or spends its own share of time. After the first step all are known, each with its front, and so is their order.
:meth:`Shared.settle` then divides the budget where it pays most (:mod:`torch_echo.planning._share`); if that is worth it, whoever
owns the compiled code compiles once more, and each graph, known again by its structure, gets the plan that was chosen for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch_echo.errors import BudgetInfeasible
from torch_echo.footprint import Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.planning import (
    DEFAULT_MAX_OVERHEAD,
    Choice,
    Front,
    Member,
    Plan,
    Point,
    choice_of,
    footprint_of,
    share,
    shared_peak,
)
from torch_echo.units import format_bytes

__all__ = ["Settled", "Shared"]

WORTH = 0.01
"""Fraction of the peak, or of the step's time, that is worth compiling once more."""


@dataclass(frozen=True)
class Settled:
    """What planning together found, for a whole step."""

    base_peak: int
    """Bytes with all kept."""
    peak: int
    """Bytes as planned."""
    extra_seconds: float
    step_seconds: float
    note: str = ""
    """In words, if other plans were chosen than those that the graphs had."""


@dataclass
class _Known:
    graph: TrainingGraph
    front: Front
    gradients: tuple[int, int]
    """Bytes of those of parameters, and of those of other inputs."""
    plan: Plan | None = None


class Shared:
    """What is known of the graphs of a step, and what was chosen for them."""

    def __init__(self) -> None:
        self.chosen: dict[str, Point] = {}
        """By structure; empty until settled."""
        self.settled = False
        self.result: Settled | None = None
        """None where there was nothing to share."""
        self._known: dict[str, _Known] = {}
        self._order: list[str] = []
        self._latest: str | None = None
        self._ended = False

    # --- while compiling ---------------------------------------------------------------------------------------------------

    def meet(self, graph: TrainingGraph, front: Front, gradients: tuple[int, int]) -> Point | None:
        """A graph is being compiled: the plan that was chosen for it, if one was."""
        key = _structure(graph)
        self._latest = key
        if not self.settled:
            self._known[key] = _Known(graph, front, gradients)
        return self.chosen.get(key)

    def took(self, made: Plan) -> None:
        """The graph that was met last has this plan."""
        if not self.settled and self._latest is not None:
            self._known[self._latest].plan = made

    def leave(self) -> None:
        """The graph that was met last is not as it was: its loss head is in parts. Graphs are not planned together then."""
        self.settled = True
        self._known.clear()

    @property
    def among_others(self) -> bool:
        """Is it known of more than one graph? A budget that one of them can't meet by itself may be met by all."""
        return not self.settled and len(self._known) > 1

    def noting(self, compile_graph: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """What `compile_graph` makes, with its runs noted until the step has ended."""
        self._latest = None
        run = compile_graph()
        key = self._latest
        if self.settled or key is None:
            return run

        def noted(*args: Any) -> Any:
            if not self._ended:
                self._order.append(key)
            return run(*args)

        return noted

    # --- between steps -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Backward has begun: what has run by now is the step's forward."""
        self._ended = self._ended or bool(self._order)

    @property
    def ready(self) -> bool:
        """Has a step been seen whose graphs are not settled yet?"""
        return self._ended and not self.settled

    def settle(self, alive: int, budget: int | None, max_overhead: float | None, least: bool) -> bool:
        """Choose for all graphs; true if they are to be compiled once more. `alive`: bytes on the device before a step. `least`:
        take the least peak where the budget can't be met. Raises BudgetInfeasible.
        """
        self.settled = True
        keys = list(dict.fromkeys(self._order))
        known = [self._known[k] for k in keys]
        self._known.clear()
        order = [keys.index(k) for k in self._order]
        if budget is None and len(order) == 1:
            return False
        members, now = [], []
        for m, each in enumerate(known):
            replayer = Replayer(each.graph)
            parameters, others = each.gradients
            left = parameters + (
                others if order.count(m) > 1 else 0
            )  # what its runs share is summed up until its own maker's turn
            assert each.plan is not None
            beyond = each.plan.peak - footprint_of(replayer, each.plan).peak  # by Inductor's code; of all plans alike
            members.append(Member([_beyond(choice_of(replayer, p), beyond) for p in each.front.points], left))
            now.append(_index(each.front, each.plan))
        before = shared_peak(members, order, now)
        fits = budget is None or alive + before <= budget
        if len(order) == 1 and fits:
            return False
        step = sum(known[m].graph.step_seconds for m in order)
        if budget is None:
            limit = DEFAULT_MAX_OVERHEAD if max_overhead is None else max_overhead
            found = share(members, order, seconds=limit * step)
        else:
            found = share(members, order, budget=budget - alive)
        if found is None:
            found = share(members, order)
            assert found is not None
            if budget is not None and not least:
                raise BudgetInfeasible(budget, alive + shared_peak(members, order, found))
        after = shared_peak(members, order, found)
        faster = _seconds(members, order, now) - _seconds(members, order, found) > WORTH * step
        smaller = after < (1 - WORTH) * before
        again = (not fits and smaller) or (faster if budget is not None else smaller)
        note = ""
        if again:
            self.chosen = {key: each.front.points[c] for key, each, c in zip(keys, known, found, strict=True)}
            runs = f" in {len(order)} runs" if len(order) > len(keys) else ""
            note = (
                f"the {len(keys)} graphs of a step{runs} were planned together after the first step: "
                f"{format_bytes(alive + after)} instead of {format_bytes(alive + before)} each by itself"
            )
        taken = found if again else now
        self.result = Settled(
            alive + shared_peak(members, order, [len(m.choices) - 1 for m in members]),
            alive + shared_peak(members, order, taken),
            _seconds(members, order, taken),
            step,
            note,
        )
        return again


def _beyond(choice: Choice, nbytes: int) -> Choice:
    """A choice that takes so many bytes more."""
    kept = choice.kept
    return replace(choice, forward=max(kept, choice.forward + nbytes), backward=max(kept, choice.backward + nbytes))


def _index(front: Front, plan: Plan) -> int:
    """Which point of the front a plan is."""
    return next(i for i, p in enumerate(front.points) if (p.dropped, p.groups) == (plan.dropped, plan.groups))


def _seconds(members: list[Member], order: list[int], chosen: list[int]) -> float:
    taken: list[Choice] = [members[m].choices[chosen[m]] for m in order]
    return sum(choice.seconds for choice in taken)


def _structure(graph: TrainingGraph) -> str:
    """What a graph is known again by: its ops, values and storages, without seconds and what else is alive."""
    ops = [(op.name, op.layer, op.reads, op.writes, op.start) for op in graph.ops]
    storages = [(s.nbytes, s.alloc, s.free) for s in graph.storages]
    return hashlib.sha256(repr((ops, storages)).encode()).hexdigest()
