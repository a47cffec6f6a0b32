"""torch-echo: PyTorch training in less device memory, without a change to the training code."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_echo._version import __version__

if TYPE_CHECKING:
    from torch_echo.api import Handle, apply, check, explain
    from torch_echo.errors import (
        BudgetInfeasible,
        CaptureError,
        DifferenceFound,
        GraphFileError,
        OptionError,
        TorchEchoError,
        UnsupportedDevice,
    )
    from torch_echo.prediction import Prediction, largest, predict

__all__ = [
    "BudgetInfeasible",
    "CaptureError",
    "DifferenceFound",
    "GraphFileError",
    "Handle",
    "OptionError",
    "Prediction",
    "TorchEchoError",
    "UnsupportedDevice",
    "__version__",
    "apply",
    "check",
    "explain",
    "largest",
    "predict",
]

_MODULES = {
    **dict.fromkeys(("Handle", "apply", "check", "explain"), "api"),
    **dict.fromkeys(("Prediction", "largest", "predict"), "prediction"),
}
"""Where names are that are not errors."""


def __getattr__(name: str) -> Any:
    # Lazy: the launcher must not import torch before the script does (environment, number of threads).
    if name not in __all__:
        raise AttributeError(f"module 'torch_echo' has no attribute {name!r}")
    return getattr(import_module(f"torch_echo.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
