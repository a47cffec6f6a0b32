"""Where the user's own code stands."""

from __future__ import annotations

import os
from sys import _getframe
from typing import Any

import torch

__all__ = ["script_line"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def script_line() -> str:
    """file:line of the innermost frame that is neither torch's nor ours; "" without one."""
    frame: Any = _getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, _TORCH)) and "<frozen" not in file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
