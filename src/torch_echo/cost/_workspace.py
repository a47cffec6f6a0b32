"""Bytes that ops allocate for themselves while they run, found by running them once each on made-up data.

Fake tensors and shape functions know nothing of them (they even declare the workspace of oneDNN's LSTM as empty), yet that of a
convolution may be larger than its output.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_echo.compat import MemoryProfile, no_profile
from torch_echo.cost._flops import is_view
from torch_echo.cost._measured import Remembered, undisturbed
from torch_echo.cost._spec import OpSpec, materialize

__all__ = ["Workspaces"]


class Workspaces(Remembered):
    """Knows the workspace of op calls on one device; 0 for those that cannot be run on made-up data."""

    section = "workspaces"

    def nbytes(self, func: Any, spec: OpSpec) -> int:
        """Bytes above (live before + what the op makes) at the worst moment of a call that fits `spec`.

        The first call of its kind takes some milliseconds.
        """
        return 0 if is_view(func) else int(self._of(func, spec))

    def _refusal(self, func: Any, spec: OpSpec) -> str | None:
        return no_profile() or super()._refusal(func, spec)

    def _run(self, func: Any, spec: OpSpec) -> float:
        return float(_measure(func, spec))

    def _instead(self, func: Any, spec: OpSpec) -> float:
        return 0.0


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
    most, left = profile.rise(device)
    return most - left
