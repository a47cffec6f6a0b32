"""The workspace of oneDNN's LSTM: what its forward pass leaves to its backward pass, some 15 times the layer's output.

PyTorch's shape functions call it empty. Its size is that of oneDNN's own sections, each in whole pages; found by comparison with
the allocator over a few hundred sizes, for oneDNN 3. ``tests/compile/test_recurrent.py`` compares again.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["usable", "workspace_bytes"]

_PAGE = 4096
_LINE = 64
_F32 = 4


def workspace_bytes(steps: Any, batch: Any, inputs: int, hidden: int, itemsize: int) -> Any:
    """Bytes of the workspace of one layer and direction; `steps` and `batch` may be symbols."""
    cells = steps * batch
    states = 2 * (steps + 1) * batch  # of the layer and of what is below it, with the initial ones
    wide = max(inputs, hidden)
    return (
        _pages(cells * _row(4 * hidden, itemsize))
        + _pages(cells * _row(hidden, itemsize))
        + _pages(states * _row(wide, itemsize))
        + 2 * _pages(states * _row(wide, _F32))
        + _pages(states * hidden * itemsize)
        + _pages(states * hidden * _F32)
    )


def _pages(nbytes: Any) -> Any:
    return (nbytes + _PAGE - 1) // _PAGE * _PAGE


def _row(elements: int, itemsize: int) -> int:
    """Bytes of a row of a matrix: whole cache lines, and not a multiple of 256 elements, whose rows would share cache sets."""
    nbytes = -(-elements * itemsize // _LINE) * _LINE
    return nbytes + _LINE if nbytes // itemsize % 256 == 0 else nbytes


@torch.compiler.assume_constant_result
def usable(dtype: torch.dtype) -> bool:
    """Does PyTorch's ``lstm`` on a CPU go to oneDNN, for tensors of this type?"""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32
