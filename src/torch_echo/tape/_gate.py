"""The gate: turns the dispatch mode and the saved-tensor hooks on for those calls only that need them.

A dispatch mode costs every op of a module some 5 to 12 µs, a pair of hooks every saved tensor as much; a *function mode* costs
a third of that for each call of torch's Python API, of which one may run many ops (an LSTM cell: fourteen). So a planned
module runs under a function mode alone. It knows each call by its place in the code and its turn there, as the recorded step
had it: where nothing is dropped, no dropped value is saved, and nothing is overwritten that a rebuild would miss, the call goes
straight on.
"""

from __future__ import annotations

from sys import _getframe
from typing import Any

from torch_echo import compat

__all__ = ["CLOSED", "HOOKS", "LAYERS", "MODE", "WRITE", "Door", "Gate", "Place", "unknown"]

Place = tuple[int, int, int]
"""A call's place in the code: code object of the calling function (by identity), instruction there, instruction in its caller."""

MODE, HOOKS, WRITE, LAYERS = 1, 2, 4, 8
"""What a call needs. ``WRITE``: it overwrites something, and needs the mode if a recipe or a dropped value lies there.
``LAYERS``: it is to be run layer by layer."""


class Door:
    """What the calls at one place need, in order; `beyond` for those after the ones that the recorded step had."""

    __slots__ = ("beyond", "count", "decisions", "needs")

    def __init__(self, needs: list[int], beyond: int, decisions: list[Any]) -> None:
        self.needs = needs
        self.beyond = beyond
        self.decisions = decisions
        """Of the classes of ops that these calls run."""
        self.count = 0


CLOSED = None
"""In place of a door where no call needs anything."""


def unknown() -> Door:
    """For places that the recorded step did not come to: all is on there."""
    return Door([], MODE | HOOKS, [])


class Gate(compat.FunctionMode):
    """A function mode for one thread. `inside` of its owner runs the calls that need something."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner
        self.doors: dict[Place, Door | None] = {}
        self.other: Door | None = unknown()
        """For places that are not among `doors`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = _getframe(1)
        if frame.f_code is compat.PASS_ON:  # a function written in Python, which asks for the mode itself
            frame = frame.f_back  # type: ignore[assignment]
        back = frame.f_back
        place = (id(frame.f_code), frame.f_lasti, -1 if back is None else back.f_lasti)
        door = self.doors.get(place, self.other)
        if door is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        turn = door.count
        door.count = turn + 1
        needs = door.needs[turn] if turn < len(door.needs) else door.beyond
        if needs & WRITE:
            needs = needs & ~WRITE | MODE * self.owner.minds(args, kwargs or {})
        if not needs:
            return func(*args, **kwargs) if kwargs else func(*args)
        for decision in door.decisions:
            decision.turn_to(turn)
        return self.owner.inside(place, frame.f_code, turn, needs, func, args, kwargs or {})
