"""What must be known about an op before it may be re-run.

Schemas do not tell the whole truth: batch norms change their running statistics and declare nothing, creation ops read only
the shape of their argument. The tables here say so, op by op; everything outside ``aten`` and our own recurrent layers is never
re-run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_echo import compat

__all__ = ["Rule", "rule_of"]

aten = torch.ops.aten

_UNDECLARED_WRITES: dict[str, tuple[int, ...]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
"""Arguments that an op changes although its schema does not say so: running mean and variance."""

_SILENT = {"aten::rrelu_with_noise"}
"""Ops that write an argument without a new version of it: what autograd saved of it before is read as written."""

_SHAPE_ONLY = {
    "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::randn_like",
    "aten::randint_like", "aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full",
    "aten::new_empty_strided",
}  # fmt: skip
"""Ops that read only the metadata of their first argument."""

_UNFILLED = {
    "aten::empty", "aten::empty_strided", "aten::empty_permuted", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
}  # fmt: skip
"""Ops that make memory without content."""

_BLANK = _UNFILLED | {
    "aten::zeros", "aten::ones", "aten::full", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros",
    "aten::new_ones", "aten::new_full",
}  # fmt: skip
"""Ops that make memory for kernels to write in that may be no ops: of Triton, of an extension, of NumPy, or within PyTorch itself
(``at::tensor`` of a list). No version tells of it."""

_FILLS = {
    f"aten::{name}_"
    for name in (
        "copy", "fill", "zero", "normal", "uniform", "bernoulli", "exponential", "random", "geometric", "cauchy", "log_normal",
        "index_put", "_index_put_impl", "index_copy", "index_fill", "scatter", "slice_scatter", "masked_scatter",
    )
}  # fmt: skip
"""Ops that write over what is there and do not read it."""

_NEVER = {
    "aten::_cudnn_init_dropout_state", "aten::miopen_rnn", "aten::_local_scalar_dense",
    "aten::_fused_moving_avg_obs_fq_helper", "aten::_pin_memory", "aten::record_stream", "aten::set_", "aten::resize_",
    "aten::resize_as_", "aten::_resize_output_", "aten::copy_sparse_to_sparse_", "aten::_batch_norm_with_update",
}  # fmt: skip

_OPAQUE = {"aten::mkldnn_rnn_layer": 3, "aten::_cudnn_rnn": 3, "aten::cudnn_batch_norm": 3}
"""Outputs that only the op's own backward kernel reads. Not all of their bytes are ever written."""

_CUDA_SUMS = {
    "aten::index_add", "aten::scatter_add", "aten::histc", "aten::bincount", "aten::cumsum", "aten::upsample_bilinear2d",
    "aten::grid_sampler_2d", "aten::convolution", "aten::cudnn_convolution", "aten::_cudnn_rnn",
}  # fmt: skip
"""Ops whose CUDA kernels may add in another order the second time, unless deterministic algorithms are on."""

_CUDA_CHOICES = {
    "aten::index_put", "aten::_index_put_impl", "aten::scatter_reduce", "aten::index_reduce", "aten::put", "aten::kthvalue",
    "aten::median",
}  # fmt: skip
"""Ops whose CUDA kernels may take another of several elements the second time, unless deterministic algorithms are on."""


def _draws_between_layers(args: tuple[Any, ...]) -> bool:
    """cuDNN's dropout draws from a state of its own, which a re-run would find changed."""
    layers, dropout, train = args[9], args[11], args[12]
    return bool(train and dropout and layers > 1)


_KEEP_IF = {"aten::_cudnn_rnn": _draws_between_layers}


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tape treats one op overload."""

    name: str
    mutates: tuple[int | str, ...] = ()
    """Positions or keyword names of the arguments that it writes, declared or not."""
    random: bool = False
    keep: bool = False
    """Never re-run."""
    keep_if: Callable[[tuple[Any, ...]], bool] | None = None
    """Is a call with these arguments never re-run?"""
    shape_only: bool = False
    """Reads only the metadata of its first argument."""
    blank: bool = False
    """Its output is memory that something else may write in unseen."""
    unfilled: bool = False
    """Its output has no content before that."""
    fills: bool = False
    """Writes, and does not read what was there."""
    opaque: int = -1
    """The output that only the op's own backward kernel reads, and that has no content to be compared; -1 without one."""
    silent: bool = False
    """What it writes gets no new version."""
    in_place: Any = None
    """The overload that writes the same result over its first argument."""
    rerun: Callable[[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]] | None = None
    """Turns (function, arguments) of a call into those of its re-run, which must not write what the call wrote."""

    def keeps(self, args: tuple[Any, ...]) -> bool:
        """Is this call never re-run?"""
        return self.keep or (self.keep_if is not None and self.keep_if(args))

    def writes(self, args: tuple[Any, ...]) -> tuple[int | str, ...]:
        """The arguments that this call writes: a batch norm in evaluation mode leaves its statistics alone."""
        if self.rerun is not None and not args[5]:
            return ()
        return self.mutates


def _without_running_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """In training mode the output depends on the batch's statistics alone; a re-run must not update the running ones."""
    if not args[5]:
        return func, args
    if func is aten._native_batch_norm_legit.default:
        func = aten.native_batch_norm.default
    return func, (*args[:3], None, None, *args[5:])


_RERUN = {
    "aten::native_batch_norm": _without_running_statistics,
    "aten::_native_batch_norm_legit": _without_running_statistics,
    "aten::cudnn_batch_norm": _without_running_statistics,
    "aten::miopen_batch_norm": _without_running_statistics,
}

_ELEMENTWISE = {
    "abs", "add", "clamp", "cos", "div", "elu", "erf", "exp", "gelu", "hardtanh", "leaky_relu", "log", "masked_fill", "mul",
    "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "sub", "tanh",
}  # fmt: skip
"""Ops with an in-place overload that runs the same kernel."""

_rules: dict[int, tuple[Any, Rule]] = {}
"""By identity of the overload, which is kept: an op of a library that is unloaded must not leave its number to another."""


def rule_of(func: Any) -> Rule:
    """The rule of an op overload."""
    known = _rules.get(id(func))
    if known is None:
        known = _rules[id(func)] = (func, _make(func))
    return known[1]


def _make(func: Any) -> Rule:
    if not compat.is_op(func):
        return Rule(name=str(func), keep=True)
    name, overload = compat.op_name(func)
    mutates = compat.mutated_arguments(func)
    undeclared = _UNDECLARED_WRITES.get(name, ())
    keep = not name.startswith(("aten::", "torch_echo::")) or name in _NEVER or name in _SILENT
    return Rule(
        name=name,
        mutates=tuple(dict.fromkeys((*mutates, *undeclared))),
        random=compat.is_nondeterministic(func),
        keep=keep,
        keep_if=_KEEP_IF.get(name),
        shape_only=name in _SHAPE_ONLY,
        blank=name in _BLANK,
        unfilled=name in _UNFILLED,
        fills=name in _FILLS or overload.endswith("out"),
        opaque=_OPAQUE.get(name, -1),
        silent=name in _SILENT,
        in_place=_in_place(func),
        rerun=_RERUN.get(name) if overload == "default" else None,
    )


def _in_place(func: Any) -> Any:
    full, overload = compat.op_name(func)
    name = full.removeprefix("aten::")
    if func is aten.mul.Scalar:  # in place, it rounds the scalar to the tensor's type first
        return None
    packet = getattr(aten, name + "_", None) if name in _ELEMENTWISE else None
    return getattr(packet, overload, None) if packet is not None else None


def may_reuse(rule: Rule, args: tuple[Any, ...], out: Any) -> bool:
    """May a re-run of this call write its output over its first argument? Only where the two have the same layout, fill their
    storages, and no other argument lies in the same storage."""
    if rule.in_place is None or type(out) is not torch.Tensor:
        return False
    first = args[0]
    if (
        type(first) is not torch.Tensor
        or first.is_nested
        or first.dtype != out.dtype
        or first.size() != out.size()
        or first.stride() != out.stride()
        or first.storage_offset() != 0
        or first.is_complex()  # other kernels in place: other last bits
        or first.is_neg()
        or first.untyped_storage().nbytes() != out.untyped_storage().nbytes()
    ):
        return False
    key = compat.storage_key(first)
    return not any(isinstance(a, torch.Tensor) and compat.storage_key(a) == key for a in args[1:])


def nondeterministic_on(rule: Rule, device_type: str, reorder: bool = False) -> bool:
    """May re-running the op on this device give other bits? With `reorder`, other ones than come from adding in another order?"""
    if device_type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    return rule.name in _CUDA_CHOICES or (not reorder and rule.name in _CUDA_SUMS)
