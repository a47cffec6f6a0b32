"""glibc's heap, kept from shrinking while values are dropped and rebuilt.

glibc gives the top of its heap back to the system when more than a threshold of it is free, and serves large blocks with pages
of their own. A training step that frees feature maps early and makes them again would take a page fault for every 4 KiB each
time: some percent of a step. Blocks of up to 32 MiB come from the heap from now on, and its top stays.
"""

from __future__ import annotations

import ctypes
import functools

__all__ = ["keep_heap"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 32 << 20
"""Larger thresholds are refused."""


@functools.cache
def keep_heap() -> bool:
    """Returns whether the C library took it: there are others than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    )
