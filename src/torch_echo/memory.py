"""Bytes on a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from torch_echo import compat

__all__ = ["live_bytes", "live_tensors"]


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
