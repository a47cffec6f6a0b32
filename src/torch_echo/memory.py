"""Bytes on a device."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch

from torch_echo import compat

__all__ = ["Counter", "live_bytes", "live_tensors"]


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@functools.cache
def _mallinfo() -> Any:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
    if found is not None:
        found.restype = _Mallinfo
    return found


class Counter:
    """Bytes that tensors hold on a device, without a look at each of them.

    On CUDA it is the allocator's own count. On a CPU it is what the C library has given out, less what of that were no tensors
    at the last :meth:`settle`: other data of the program's count from then on. Cost: a microsecond; more where the heap is in
    many pieces. Where the C library does not tell, all objects are looked at each time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._others = 0
        self.settle()

    def settle(self) -> None:
        """Look at all tensors. To be called where none is in C++'s hands alone, as in backward."""
        if self.device.type == "cpu" and _mallinfo() is not None:
            self._others += self.live() - live_bytes(self.device)

    def live(self) -> int:
        """Now."""
        mallinfo = _mallinfo() if self.device.type == "cpu" else None
        if mallinfo is None:
            return live_bytes(self.device)
        info = mallinfo()
        return int(info.uordblks + info.hblkhd) - self._others


def live_bytes(device: torch.device) -> int:
    """Bytes of `device`'s memory that live tensors hold. Exact at the allocator on CUDA; on CPU all storages that Python's
    collector can reach, gradients included. Cost: one pass over all objects."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    seen: dict[int, int] = {}
    # What is asked of a tensor may be an op, which modes and fake tensors of others refuse.
    guard = compat.no_dispatch()
    for tensor in live_tensors():
        for t in (tensor, _grad(tensor)):
            if t is not None and t.device.type == device.type:
                key = compat.storage_key(t)
                if key != -1 and t.untyped_storage().device.type == device.type:  # fake tensors have theirs elsewhere
                    seen[key] = compat.extent(t.untyped_storage())[1]
    del guard
    return sum(seen.values())


def live_tensors() -> Iterator[torch.Tensor]:
    """All tensors that Python's collector can reach. Cost: one pass over all objects."""
    # isinstance() would ask obj.__class__, which proxies answer with arbitrary code
    return (obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor))


def _grad(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # a view whose base has been overwritten in a way that autograd forbids
        return None
