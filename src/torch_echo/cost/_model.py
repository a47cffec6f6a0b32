"""Cost models by name."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from torch_echo.cost._analytic import AnalyticCost
from torch_echo.cost._cache import CostCache, device_key
from torch_echo.cost._measured import MeasuredCost
from torch_echo.cost._spec import OpSpec
from torch_echo.errors import OptionError, UnsupportedDevice

__all__ = ["COST_MODELS", "CostModel", "get_cost_model"]

COST_MODELS = ("measured", "analytic")
"""Names that :func:`get_cost_model` knows."""


class CostModel(Protocol):
    """Knows how long an op call takes on one device."""

    def seconds(self, func: Any, spec: OpSpec) -> float:
        """Duration of one call of `func` (an ``OpOverload``) that fits `spec`."""
        ...

    def save(self) -> None:
        """Write what was learned to the cache file, for later processes."""
        ...


def get_cost_model(name: str, device: torch.device | str, cache: CostCache | None = None) -> CostModel:
    """The cost model `name` for `device`, with what earlier processes have learned about it: in `cache`, or in the device's
    own file."""
    if name not in COST_MODELS:
        raise OptionError(f"cost={name!r}: must be one of {', '.join(map(repr, COST_MODELS))}")
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedDevice(f"device={str(device)!r}: torch-echo knows CPU and CUDA devices")
    cache = cache or CostCache(device_key(device))
    analytic = AnalyticCost(cache, device)
    return analytic if name == "analytic" else MeasuredCost(cache, analytic)
