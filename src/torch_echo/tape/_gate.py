"""The gate: turns the dispatch mode and the saved-tensor hooks on for those calls only that need them.

A dispatch mode costs every op of a module some 5 to 12 µs, a pair of hooks every saved tensor as much; a *function mode* costs
a third of that for each call of torch's Python API, of which one may run many ops (an LSTM cell: fourteen). So a planned
module runs under a function mode alone. It knows each call by its place in the code, as the recorded step had it: where
nothing is dropped or overwritten and no dropped value is saved, the call goes straight on.
"""

from __future__ import annotations

from sys import _getframe
from typing import Any

from torch_echo import compat

__all__ = ["CLOSED", "HOOKS", "MODE", "OPEN", "Gate", "Place"]

Place = tuple[int, int, int]
"""A call's place in the code: code object of the calling function (by identity), instruction there, instruction in its caller."""

CLOSED, MODE, HOOKS = 0, 1, 2
OPEN = MODE | HOOKS
"""What a call needs; OPEN where nothing is known of it."""


class Gate(compat.FunctionMode):
    """A function mode for one thread. `inside` of its owner runs the calls that are not closed."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner
        self.places: dict[Place, int] = {}
        self.unknown = OPEN

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = _getframe(1)
        if frame.f_code is compat.PASS_ON:  # a function written in Python, which asks for the mode itself
            frame = frame.f_back  # type: ignore[assignment]
        back = frame.f_back
        place = (id(frame.f_code), frame.f_lasti, -1 if back is None else back.f_lasti)
        needs = self.places.get(place, self.unknown)
        if not needs:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.owner.inside(place, frame.f_code, needs, func, args, kwargs or {})
