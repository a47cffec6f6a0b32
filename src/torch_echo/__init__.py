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

__all__ = [
    "BudgetInfeasible",
    "CaptureError",
    "DifferenceFound",
    "GraphFileError",
    "Handle",
    "OptionError",
    "TorchEchoError",
    "UnsupportedDevice",
    "__version__",
    "apply",
    "check",
    "explain",
]

_IN_API = ("Handle", "apply", "check", "explain")


def __getattr__(name: str) -> Any:
    # Lazy: the launcher must not import torch before the script does (environment, number of threads).
    if name not in __all__:
        raise AttributeError(f"module 'torch_echo' has no attribute {name!r}")
    return getattr(import_module("torch_echo.api" if name in _IN_API else "torch_echo.errors"), name)


def __dir__() -> list[str]:
    return __all__
