"""Bytes that ops allocate for themselves while they run, found by running them once each on made-up data.

Fake tensors and shape functions know nothing of them (they even declare the workspace of oneDNN's LSTM as empty), yet that of a
convolution may be larger than its output.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from torch_echo.compat import MemoryProfile, profiler_running
from torch_echo.cost._cache import CostCache
from torch_echo.cost._flops import is_view
from torch_echo.cost._measured import refusal, undisturbed
from torch_echo.cost._spec import OpSpec, materialize

__all__ = ["Workspaces"]

logger = logging.getLogger("torch_echo.cost")


class Workspaces:
    """Knows the workspace of op calls on one device, and remembers it in the cache file between processes."""

    def __init__(self, cache: CostCache) -> None:
        self._cache = cache
        self._known: dict[OpSpec, int] = {}

    def nbytes(self, func: Any, spec: OpSpec) -> int:
        """Bytes above (live before + what the op makes) at the worst moment of a call that fits `spec`. 0 for what can't be run.

        The first call of its kind takes some milliseconds.
        """
        known = self._known.get(spec)
        if known is None:
            known = self._known[spec] = self._find(func, spec)
        return known

    def save(self) -> None:
        """Write what was learned to the cache file."""
        self._cache.save()

    def _find(self, func: Any, spec: OpSpec) -> int:
        if is_view(func):
            return 0
        found = self._cache.get("workspaces", spec.key())
        if found is None:
            reason = refusal(func, spec) or ("a profiler is running" if profiler_running() else None)
            if reason is None:
                try:
                    found = float(_measure(func, spec))
                    self._cache.set("workspaces", spec.key(), found)
                except Exception as error:  # made-up data need not suit an op, and it may fail in any way
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if found is None:
                logger.info("the workspace of %s is not known: %s", spec.key(), reason)
                return 0
        return int(found)


def _measure(func: Any, spec: OpSpec) -> int:
    device = spec.device()
    with undisturbed(device):
        generator = torch.Generator(device=device).manual_seed(0)
        args, kwargs = materialize(spec, generator)
        func(*args, **kwargs)  # what is made once (primitives, handles) is not workspace
        profile = MemoryProfile()
        profile.start()
        try:
            result = func(*args, **kwargs)
        finally:
            profile.stop()
        del result
    events, _, _ = profile.events(device)
    live = most = 0
    for event in events:
        live += event.nbytes
        most = max(most, live)
    return most - live
