"""The roofline of a GPU that is not there: rates of data sheets, at the share of them that large kernels reach."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_echo.cost._analytic import AnalyticCost

__all__ = ["GPU", "TYPICAL_GPU", "gpu_cost"]


class GPU(NamedTuple):
    """What durations are estimated from."""

    single: float
    """FLOPs per second in float32."""
    half: float
    """In float16 and bfloat16."""
    bandwidth: float
    """Bytes per second."""
    launch: float = 3e-6
    """Seconds that the smallest kernel takes."""
    host: float = 8e-6
    """Seconds that the host takes to launch one in eager PyTorch, autograd included, while the device runs those before."""


TYPICAL_GPU = GPU(single=2e13, half=6e13, bandwidth=7e11)
"""Of the class of an RTX 3090 with 24 GiB: 36 TFLOPs, 71 in half precision, 936 GB/s."""


class _Rates:
    """Stands for the cache file of a device that was calibrated."""

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu

    def get(self, section: str, key: str) -> float | None:
        what, _, detail = key.partition(" ")
        if what == "launch":
            return self._gpu.launch
        if what == "peak":
            return self._gpu.half if detail in ("float16", "bfloat16") else self._gpu.single
        if what == "copy":
            return int(detail) / self._gpu.bandwidth
        return 0.0  # per element: on a GPU such ops are bound by memory too

    def set(self, section: str, key: str, value: float) -> None:
        raise AssertionError(f"nothing is measured on a GPU that is not there: {key}")

    def save(self) -> None:
        """Nothing was learned."""


def gpu_cost(gpu: GPU = TYPICAL_GPU) -> AnalyticCost:
    """Durations on such a GPU."""
    return AnalyticCost(_Rates(gpu), torch.device("cuda"))
