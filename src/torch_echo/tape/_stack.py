"""Going on and off a thread's stacks of modes and saved-tensor hooks, among others who use them.

Contexts that a script enters nest: what is on top of ours when ours is to change belongs to a block that is still open, and
that pops the top when it ends. So nothing is put on or taken off under an open block for good: ours stays where it is (only
the innermost hooks are called anyway), or comes back to the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_echo import compat
from torch_echo.tape._gate import Gate, Place
from torch_echo.tape._gates import Part
from torch_echo.tape._layer import Inside, in_layers
from torch_echo.tape._loss import CrossEntropy

__all__ = ["Site", "Stackable", "alone", "overwritten", "unpack"]

Site = tuple[int, ...]
"""An op's place in the code: the op (by identity), then as in `Place`; where the call that came through the gate is one of
torch's functions written in Python, also code object and instruction in there."""


def unpack(handle: Any) -> torch.Tensor:
    """The hook that autograd calls when a node reads what it saved. Runs on whatever thread runs the node."""
    if type(handle) is tuple:
        tensor: torch.Tensor
        tensor, version = handle
        if tensor._version != version:
            raise overwritten(tensor.shape, tensor, version)
        return tensor
    result: torch.Tensor = handle.unpack()
    return result


def alone() -> bool:
    """May mode and hooks go on for longer than a call: is nothing on this thread's stacks that an open block would take off?"""
    return compat.dispatch_modes.top() is None and compat.top_hooks() is None


def overwritten(size: Any, token: torch.Tensor, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{token.type()} {list(size)}] is at version {token._version}; expected version {expected} instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


class Stackable(compat.TensorMode):
    """A dispatch mode with a pair of saved-tensor hooks, and a gate in front of both."""

    def __init__(self, reorder: bool = False) -> None:
        super().__init__()
        self.reorder = reorder
        """See :class:`torch_echo.options.Options`."""
        self.as_on_gpu = False
        """Is what runs taken to run on a GPU (a prediction)?"""
        self.mode_on = False
        self.hooks_on = False
        self.gate_on = False
        self.gate = Gate(self)
        self.place: Place | None = None
        """Where in the code the call stands that is going through the gate."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook that autograd calls for each tensor it saves."""
        raise NotImplementedError

    def opening(self, place: Place, code: Any, turn: int, needs: int) -> tuple[bool, bool] | None:
        """A call comes through the gate. What mode and hooks are to be switched to when it has run, if that is not as now."""
        raise NotImplementedError

    def minds(self, args: Any, kwargs: Any) -> bool:
        """Would it matter if a call with these arguments overwrote one of them?"""
        raise NotImplementedError

    def inside(self, place: Place, code: Any, turn: int, needs: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that comes through the gate."""
        outer = self.place
        before = self.opening(place, code, turn, needs)
        self.place = place
        try:
            if func in compat.RECURRENT and not kwargs and self.takes_apart(func, args):
                return in_layers(func, args, self, self.reorder)
            return func(*args, **kwargs)
        finally:
            self.place = outer
            if before is not None:
                self.switch(*before, True)

    def takes_apart(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Are the layers of this call ops of their own (see ``_layer``)?"""
        raise NotImplementedError

    def run_layer(self, number: int, func: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Run one of them."""
        raise NotImplementedError

    def layer_over(self, output: torch.Tensor, parts: Sequence[Part]) -> None:
        """See :class:`torch_echo.tape._layer.LayerRunner`."""
        raise NotImplementedError

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Within, what runs is an op as a whole: the mode is off."""
        mode = self.mode_on
        self.switch(False, self.hooks_on, self.gate_on)
        try:
            yield
        finally:
            self.switch(mode, self.hooks_on, self.gate_on)

    def takes_loss(self, logits: torch.Tensor) -> bool:
        """See :class:`torch_echo.tape._loss.LossRunner`."""
        return self.saves_here() and compat.dispatch_modes.top() in (None, self)

    def run_loss(self, call: CrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See :class:`torch_echo.tape._loss.LossRunner`."""
        with self.as_one():
            return call.run(logits, target)

    def sums_by_row(self, logits: torch.Tensor) -> bool:
        """See :class:`torch_echo.tape._loss.LossRunner`. A GPU has several blocks of threads for a row where there are few rows."""
        return self.reorder or not (logits.is_cuda or self.as_on_gpu)

    def loss_read(self, call: CrossEntropy, over: bool) -> None:
        """See :class:`torch_echo.tape._loss.LossRunner`."""

    def loss_done(self, call: CrossEntropy) -> None:
        """See :class:`torch_echo.tape._loss.LossRunner`."""

    def layer_site(self, number: int, func: Any, inside: Inside = Inside.LAYER) -> Site:
        """The place in the code of a layer that is an op, or of its inside where that is one."""
        assert self.place is not None
        return (id(func), *self.place, len(Inside) * number + inside)

    def saves_here(self) -> bool:
        """Do saved tensors come to nobody but us, now or when our hooks are on?"""
        top = compat.top_hooks()
        return (top is None or top[1] is unpack) and torch.is_grad_enabled() and not compat.functorch_active()

    def site(self, func: int, frame: Any) -> Site:
        """Where in the code an op is called: `frame` is that which called it."""
        if self.place is not None:
            if frame.f_code is _INSIDE or _passes_on(frame):
                return (func, *self.place)
            return (func, *self.place, id(frame.f_code), frame.f_lasti)
        back = frame.f_back
        return func, id(frame.f_code), frame.f_lasti, -1 if back is None else back.f_lasti

    def switch(self, mode: bool, hooks: bool, gate: bool = False) -> None:
        """Put the mode, the hooks and the gate on or off for this thread, where no other is on top.

        Under a block of other hooks (a user's checkpoint) ours do not go on: what is saved there is that block's.
        """
        if gate is not self.gate_on:
            if gate:
                compat.function_modes.push(self.gate)
                self.gate_on = True
            elif compat.function_modes.top() is self.gate:
                compat.function_modes.pop()
                self.gate_on = False
        if mode is not self.mode_on:
            if mode:
                compat.dispatch_modes.push(self)
                self.mode_on = True
            elif compat.dispatch_modes.top() is self:
                compat.dispatch_modes.pop()
                self.mode_on = False
        if hooks is not self.hooks_on:
            top = compat.top_hooks()
            if hooks:
                if top is None:
                    compat.push_hooks(self.pack, unpack)
                    self.hooks_on = True
            elif top is not None and top[0] == self.pack:
                compat.pop_hooks()
                self.hooks_on = False

    def lift(self) -> tuple[int, int, int]:
        """Take all off, from under others too. The result goes to `lower`; without it, they are off for good."""
        mode = hooks = gate = -1
        if self.mode_on:
            mode = compat.dispatch_modes.take(self)
            self.mode_on = False
        if self.hooks_on:
            hooks = compat.take_hooks(self.pack)
            self.hooks_on = False
        if self.gate_on and compat.function_modes.holds(self.gate):
            gate = compat.function_modes.take(self.gate)
            self.gate_on = False
        return mode, hooks, gate

    def lower(self, places: tuple[int, int, int]) -> None:
        """Back to where they were."""
        mode, hooks, gate = places
        if mode >= 0:
            compat.dispatch_modes.put(self, mode)
            self.mode_on = True
        if hooks >= 0:
            compat.put_hooks(self.pack, unpack, hooks)
            self.hooks_on = True
        if gate >= 0:
            compat.function_modes.put(self.gate, gate)
            self.gate_on = True


_INSIDE = Stackable.inside.__code__


def _passes_on(frame: Any) -> bool:
    """Does a mode of the script's call the op, which has been asked before us? When ours goes on later, it is the first one."""
    if frame.f_code is not compat.OP_CALL:
        return False
    asked = False
    for _ in range(5):  # the mode, and what PyTorch wraps it in
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code is _INSIDE:
            return asked
        asked |= frame.f_code.co_name == "__torch_dispatch__"
    return False
