"""Python's cyclic collector, held off while the tape works.

A step makes a dozen small objects for each dropped value and drops them all, by reference counting, when backward has run.
The collector sees only that many objects are made, and scans the whole heap every few steps (0.1 s with torch imported).
It is therefore off within a taped forward pass and within the backward pass, and as the script left it everywhere else.
"""

from __future__ import annotations

import gc
import threading

__all__ = ["CollectorPause"]


class CollectorPause:
    """Context, reentrant and shared by all threads: the collector is off until the last one leaves."""

    _lock = threading.Lock()
    _depth = 0
    _was_on = False

    def __enter__(self) -> None:
        with self._lock:
            cls = CollectorPause
            if cls._depth == 0:
                cls._was_on = gc.isenabled()
                gc.disable()
            cls._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            cls = CollectorPause
            cls._depth -= 1
            if cls._depth == 0 and cls._was_on:
                gc.enable()
