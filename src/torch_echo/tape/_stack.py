"""Going on and off a thread's stacks of dispatch modes and saved-tensor hooks, among others who use them.

Contexts that a script enters nest: what is on top of ours when ours is to change belongs to a block that is still open, and
that pops the top when it ends. So nothing is put on or taken off under an open block for good: ours stays where it is (only
the innermost hooks are called anyway), or comes back to the same place.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_echo import compat

__all__ = ["Stackable", "overwritten", "unpack"]


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


def overwritten(size: Any, token: torch.Tensor, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{token.type()} {list(size)}] is at version {token._version}; expected version {expected} instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


class Stackable(compat.TensorMode):
    """A dispatch mode with a pair of saved-tensor hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.mode_on = False
        self.hooks_on = False

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook that autograd calls for each tensor it saves."""
        raise NotImplementedError

    def switch(self, mode: bool, hooks: bool) -> None:
        """Put the mode and the hooks on or off for this thread, where no other is on top.

        Under a block of other hooks (a user's checkpoint) ours do not go on: what is saved there is that block's.
        """
        if mode is not self.mode_on:
            if mode:
                compat.push_mode(self)
                self.mode_on = True
            elif compat.top_mode() is self:
                compat.pop_mode()
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

    def lift(self) -> tuple[int, int]:
        """Take both off, from under others too. The result goes to `lower`; without it, they are off for good."""
        places = (-1, -1)
        if self.mode_on:
            places = (compat.take_mode(self), -1)
            self.mode_on = False
        if self.hooks_on:
            places = (places[0], compat.take_hooks(self.pack))
            self.hooks_on = False
        return places

    def lower(self, places: tuple[int, int]) -> None:
        """Back to where they were."""
        if places[0] >= 0:
            compat.put_mode(self, places[0])
            self.mode_on = True
        if places[1] >= 0:
            compat.put_hooks(self.pack, unpack, places[1])
            self.hooks_on = True
