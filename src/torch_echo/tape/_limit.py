"""How much the device can hold, and how much of that is left.

On CUDA that is the device's memory. On a CPU there is no such number as a rule: PyTorch's allocator goes on until the system
ends the process. It may be given (``Options.memory_limit``): then an op whose result goes beyond fails as if the allocator had
refused it. What failed once tells too: the device holds what was there at that moment, and not much more.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_echo import compat
from torch_echo.memory import Counter
from torch_echo.units import format_bytes

__all__ = ["Limit"]

_MARGIN = 0.97
"""So much of what was planned with before is planned with after an allocation has failed: memory is in pieces."""


class Limit:
    """What a device can hold."""

    def __init__(self, device: torch.device, enforced: int | None = None) -> None:
        self.nbytes: int | None = enforced
        """None: not known."""
        self._planned = 1.0
        self.enforced = enforced is not None
        """Is the limit ours, to be checked after each op?"""
        self.sufficient = False
        """Is it known that no more will be wanted than is there? A count on a CPU takes in some of what is no tensor: to act on it
        near the limit would drop what need not be dropped, and rebuild it at worse moments."""
        self.counter = Counter(device)
        self._bound = 0
        """At most so many bytes are there, if nobody else has taken any since the last look."""
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            self.nbytes = min(free + torch.cuda.memory_reserved(device), enforced or 2**63)

    def settle(self) -> None:
        """Much else has been allocated since the last look."""
        self.counter.settle()

    def live(self) -> int:
        """Bytes there now."""
        self._bound = self.counter.live()
        return self._bound

    def room(self) -> int | None:
        """Bytes left; None if that is not known."""
        return None if self.nbytes is None else self.nbytes - self.live()

    def short(self, nbytes: int) -> int:
        """So many bytes will be wanted soon: how many of them are not there, 0 if none. Looks only where what was wanted since the
        last look may have filled what was left."""
        if self.nbytes is None or self.sufficient:
            return 0
        self._bound += nbytes
        if self._bound <= self.nbytes:
            return 0
        missing = self.live() + nbytes - self.nbytes
        self._bound += nbytes
        return max(0, missing)

    def learn(self) -> int:
        """An allocation has failed. Returns how many bytes were there."""
        live = self.live()
        if not self.enforced:
            self.nbytes = min(live, self.nbytes or live)
        return live

    @property
    def plannable(self) -> int | None:
        """Bytes that a plan may count on."""
        return None if self.nbytes is None else int(self._planned * self.nbytes)

    def tighten(self) -> None:
        """The last plan was too much."""
        self._planned *= _MARGIN

    def check(self, made: Iterable[torch.Tensor]) -> None:
        """An op has made these tensors: raise PyTorch's error if they are too much for the limit."""
        assert self.nbytes is not None
        if self.sufficient:
            return
        nbytes = sum(t.untyped_storage().nbytes() for t in made if compat.storage_key(t) != -1)
        self._bound += nbytes
        if self._bound > self.nbytes and self.live() > self.nbytes:
            raise compat.out_of_memory(self._bound - self.nbytes, f"memory_limit is {format_bytes(self.nbytes)}.")
