"""torch-echo: PyTorch training in less device memory, without a change to the training code."""

from torch_echo._version import __version__
from torch_echo.api import Handle, apply, explain
from torch_echo.errors import (
    BudgetInfeasible,
    CaptureError,
    GraphFileError,
    OptionError,
    TorchEchoError,
    UnsupportedDevice,
)

__all__ = [
    "BudgetInfeasible",
    "CaptureError",
    "GraphFileError",
    "Handle",
    "OptionError",
    "TorchEchoError",
    "UnsupportedDevice",
    "__version__",
    "apply",
    "explain",
]
