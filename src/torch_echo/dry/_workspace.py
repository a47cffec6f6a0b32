"""Bytes that kernels allocate for themselves, by the description of a call: fake tensors know nothing of them."""

from __future__ import annotations

from typing import Any

from torch_echo.cost import OpSpec

__all__ = ["own_outputs", "workspace"]


def own_outputs(spec: OpSpec, outputs: Any) -> Any:
    """The outputs of a call, with the sizes of those that PyTorch's fake tensors declare as empty."""
    return outputs


def workspace(spec: OpSpec, made: Any) -> int:
    """Most bytes that the kernel of a call holds beyond its outputs."""
    return 0
