"""What to drop before there is a plan.

The first steps of a job that does not fit must not be run with everything kept. Until a plan is made, this rule drops the
outputs of ops that cost about as much as reading their inputs (element-wise ops, normalisations, softmax, dropout,
concatenation), where what the recipe pins anew is not much more than what is dropped. It knows nothing of the rest of the
graph: the plan that follows is better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_echo import compat
from torch_echo.rules import rule_of
from torch_echo.tape._limit import Limit
from torch_echo.tape._mode import Dropped
from torch_echo.tape._recipe import NO_KWARGS, tensors_in
from torch_echo.tape._rescue import RescueTape
from torch_echo.tape._stack import Site, unpack

__all__ = ["OnlineTape"]

_CHEAP = {
    "abs", "add", "add_", "addcdiv", "addcmul", "avg_pool2d", "bernoulli_", "cat", "clamp", "clone", "cos", "div",
    "div_", "elu", "empty_like", "erf", "exp", "gelu", "hardswish", "hardtanh", "leaky_relu", "leaky_relu_", "log",
    "log1p", "logical_not", "masked_fill", "max_pool2d_with_indices", "mish", "mul", "mul_", "native_batch_norm",
    "native_dropout", "native_group_norm", "native_layer_norm", "neg", "pow", "reciprocal", "relu", "relu_", "rsqrt",
    "rsub", "sigmoid", "sigmoid_", "silu", "silu_", "sin", "softplus", "sqrt", "stack", "sub", "sub_", "tanh",
    "tanh_", "upsample_bilinear2d", "upsample_nearest2d", "where", "_log_softmax", "_softmax", "_to_copy",
}  # fmt: skip

_PINS = 1.5
"""Bytes newly pinned, at most, for each byte dropped."""


def _saving() -> bool:
    """Does what autograd saves now come to the tape? Not in a region of the script's own (a checkpoint of either kind)."""
    top = compat.top_hooks()
    return top is not None and top[1] is unpack and torch.is_grad_enabled()


class OnlineTape(RescueTape):
    """A tape without a plan. `old`: keys of the storages that exist anyway (parameters, buffers): pinning them is free."""

    def __init__(self, old: set[int], limit: Limit, failed: Callable[[BaseException, int], None]) -> None:
        super().__init__(limit, failed)
        self.trusted = old
        self._saved: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.execute(func, args, kwargs, (0, 0, 0, 0))

    def execute(self, func: Any, args: Any, kwargs: Any, site: Site) -> Any:
        """See :class:`Tape`."""
        cheap = rule_of(func).name.removeprefix("aten::") in _CHEAP
        drop = cheap and _saving() and self._worthwhile(args, kwargs or NO_KWARGS)
        return self.attempt(func, args, kwargs or NO_KWARGS, -1 if drop else 0)

    def pack(self, tensor: torch.Tensor) -> Any:
        """See :class:`Tape`."""
        handle = super().pack(tensor)
        if type(handle) is not Dropped:
            self._saved.add(compat.storage_key(tensor))
        return handle

    def forget(self) -> None:
        """See :class:`Tape`."""
        super().forget()
        self._saved.clear()

    def _worthwhile(self, args: Any, kwargs: Any) -> bool:
        pins: dict[int, int] = {}
        most = 0
        for _, t in tensors_in(args, kwargs):
            key = compat.storage_key(t)
            if key == -1:
                return False
            most = max(most, t.numel() * t.element_size())
            if not (self.touches(key) or key in self._saved or key in self.trusted):
                pins[key] = t.untyped_storage().nbytes()
        return sum(pins.values()) <= _PINS * most
