"""The compile engine: plans for the joint graphs of ``torch.compile``."""

from torch_echo.compile._backends import echo, echo_eager
from torch_echo.compile._capture import Capture, capture
from torch_echo.compile._merge import merge
from torch_echo.compile._partition import Partitioner, plans, tag
from torch_echo.compile._promise import Promise, promised
from torch_echo.compile._session import CompileSession

__all__ = [
    "Capture",
    "CompileSession",
    "Partitioner",
    "Promise",
    "capture",
    "echo",
    "echo_eager",
    "merge",
    "plans",
    "promised",
    "tag",
]
