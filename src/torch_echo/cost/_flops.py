"""Work of an op call: FLOPs, bytes moved, elements made. Read off its description, without running it.

FLOPs are those of matrix products and convolutions, counted by PyTorch's own formulas (``torch.utils.flop_counter``)
and by a few for ops that it has none for. Bytes are the unique bytes of the inputs that an op reads plus the bytes
that it writes, each once: a lower bound that fits kernels which pass over their data once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from torch_echo.compat import below_autograd, mutated_arguments
from torch_echo.cost._spec import Literal, OpSpec, SpecError, TensorSpec, decode, spec_of

__all__ = ["Work", "is_view", "work_of", "written"]


class Work(NamedTuple):
    """What an op call does."""

    flops: float
    bytes_read: int
    bytes_written: int
    largest_write: int
    """Bytes of the largest tensor that it makes."""
    elements: int
    """Elements of the largest tensor it reads or makes: what a cost per element is multiplied by."""
    dtype: str
    """Of the arithmetic: that of its first floating-point input or output."""

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


_GATHERS = frozenset(
    ["embedding", "index", "_unsafe_index", "index_select", "gather", "take", "masked_select", "select_copy"]
)
"""Read of their first argument only as much as they write."""

_ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])
"""Write nothing."""

_UNREAD = frozenset(
    ["zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
     "new_full", "fill_", "zero_", "copy_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_",
     "log_normal_", "geometric_", "cauchy_"]
)  # fmt: skip
"""Do not read their first argument."""

_UNDECLARED_VIEWS = frozenset(["_unsafe_view", "lift_fresh", "_reshape_alias"])


def _name(spec: OpSpec) -> str:
    namespace, _, rest = spec.op.partition(".")
    return rest.partition(".")[0] if namespace == "aten" else spec.op


def is_view(func: Any) -> bool:
    """Does the op hand out its argument's memory without touching it?"""
    if getattr(func, "is_view", False):
        return True
    return str(func).removeprefix("aten.").partition(".")[0] in _UNDECLARED_VIEWS


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those arguments of a call (or nodes of its description) that the op's schema says it writes."""
    found: list[Any] = []
    for place in mutated_arguments(func):
        if isinstance(place, str):
            found += [kwargs[place]] if place in kwargs else []
        else:
            found += [args[place]] if place < len(args) else []
    return found


@functools.lru_cache(maxsize=1 << 16)
def work_of(func: Any, spec: OpSpec) -> Work:
    """FLOPs and bytes of a call.

    Cost, once for each description: 0.1 to 3 ms, since output sizes are found on the meta device; once per process some 0.5 s,
    in which PyTorch imports what it has for that.
    """
    inputs = list(spec.tensors())
    result = _result(func, spec)
    outputs = None if result is None else _flat(result)
    name = _name(spec)
    mutated = [t for node in written(func, spec.args, dict(spec.kwargs)) for t in _flat(node)]

    if outputs is None:  # sizes that depend on data: as large as the largest input
        outputs = [max(inputs, key=TensorSpec.numel)] if inputs else []
    made = mutated if mutated and _returns_written(func) else mutated + outputs

    read = [t.unique_bytes() for t in inputs]
    sizes = [t.unique_bytes() for t in made]
    if is_view(func) or name in _ALLOCATIONS:
        read, sizes = [], []
    elif name in _UNREAD:
        read = read[1:]
    elif name in _GATHERS and read:
        read[0] = min(read[0], sum(sizes))

    floats = [t.dtype for t in (*inputs, *outputs) if getattr(torch, t.dtype).is_floating_point]
    dtype = floats[0] if floats else "float32"
    elements = max((t.numel() for t in (*inputs, *made)), default=0) if read or sizes else 0
    flops = _flops(func, name, spec, result)
    return Work(flops, sum(read), sum(sizes), max(sizes, default=0), elements, dtype)


def _flat(node: Any) -> list[TensorSpec]:
    if type(node) is TensorSpec:
        return [node]
    return [t for item in node for t in _flat(item)] if type(node) is tuple else []


def _returns_written(func: Any) -> bool:
    """Does an op return the very arguments that it writes (as in-place and ``out=`` ops do)?"""
    returns = func._schema.returns
    return not returns or any(r.alias_info is not None and r.alias_info.is_write for r in returns)


def _result(func: Any, spec: OpSpec) -> Any:
    """Description of what a call returns; None where its sizes depend on data or the op cannot say."""
    try:
        with below_autograd():  # and below the modes that trace
            args = [_meta(node) for node in spec.args]
            kwargs = {name: _meta(node) for name, node in spec.kwargs}
            if "device" in {a.name for a in func._schema.arguments} and "device" not in kwargs:
                kwargs["device"] = torch.device("meta")
            result = func(*args, **kwargs)
        return spec_of(func, [result]).args[0]
    except Exception:
        # Whatever it is that the op dislikes about tensors without data, the caller has an estimate instead.
        return None


def _meta(node: Any) -> Any:
    if type(node) is TensorSpec:
        if node.layout != "strided":
            raise SpecError(node.layout)
        return torch.empty_strided(node.shape, node.stride, dtype=getattr(torch, node.dtype), device="meta")
    if type(node) is tuple:
        return [_meta(item) for item in node]
    if type(node) is Literal and node.kind == "device":
        return torch.device("meta")
    if type(node) is Literal and node.kind == "generator":
        return None
    return decode(node)


def _shapes(node: Any) -> Any:
    if type(node) is TensorSpec:
        return torch.Size(node.shape)
    if type(node) is tuple:
        return [_shapes(item) for item in node]
    return decode(node)


def _flops(func: Any, name: str, spec: OpSpec, result: Any) -> float:
    own = _FORMULAS.get(name)
    formula = flop_registry.get(getattr(func, "overloadpacket", None))
    if own is None and formula is None:
        return 0.0
    try:
        args = [_shapes(node) for node in spec.args]
        if own is not None:
            return float(own(*args))
        kwargs = {key: _shapes(node) for key, node in spec.kwargs}
        assert formula is not None
        return float(formula(*args, **kwargs, out_val=_shapes(result)))
    except Exception:
        # A formula reads sizes only, but not each foresees every form of a call: then its bytes speak for the op.
        return 0.0


def _attention(query: Any, key: Any, value: Any, *_: Any) -> float:
    *batch, length, depth = query
    return float(2 * math.prod(batch) * length * key[-2] * (depth + value[-1]))


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *rest: Any) -> float:
    return 2.5 * _attention(query, key, value)


def _rnn_layer(x: Any, w_input: Any, w_hidden: Any, *_: Any) -> float:
    return float(2 * math.prod(x[:-1]) * (math.prod(w_input) + math.prod(w_hidden)))


def _rnn_layers(x: Any, weights: Any) -> float:
    return float(2 * math.prod(x[:-1]) * sum(math.prod(w) for w in weights if len(w) > 1))


_FORMULAS: dict[str, Callable[..., float]] = {
    "linear": lambda x, w, *_: 2.0 * math.prod(x) * w[0],
    "mkldnn_linear": lambda x, w, *_: 2.0 * math.prod(x) * w[0],
    "addmv": lambda _b, m, _v: 2.0 * math.prod(m),
    "mv": lambda m, _v: 2.0 * math.prod(m),
    "dot": lambda a, _b: 2.0 * math.prod(a),
    "_addmm_activation": lambda _b, a, w: 2.0 * math.prod(a) * w[-1],
    "addbmm": lambda _b, a, w: 2.0 * math.prod(a) * w[-1],
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    **dict.fromkeys(("gru", "lstm", "rnn_tanh", "rnn_relu"), lambda x, _s, weights, *_: _rnn_layers(x, weights)),
    "mkldnn_rnn_layer": _rnn_layer,
    "mkldnn_rnn_layer_backward": lambda x, w1, w2, *_: 2.0 * _rnn_layer(x, w1, w2),
    "torch_echo.lstm_layer.default": lambda x, _h, _c, w1, w2, *_: _rnn_layer(x, w1, w2),
    "torch_echo.lstm_layer_backward.default": lambda _y, _hy, _cy, x, _h, _c, w1, w2, *_: 2.0 * _rnn_layer(x, w1, w2),
    "torch_echo.gru_layer.default": lambda x, _h, w1, w2, *_: _rnn_layer(x, w1, w2),
    "torch_echo.gru_layer_backward.default": lambda _y, _hy, x, _h, w1, w2, *_: 2.0 * _rnn_layer(x, w1, w2),
    "torch_echo.rnn_layer.default": lambda _m, x, _b, _h, weights, *_: _rnn_layers(x, weights),
    "torch_echo.rnn_layer_backward.default": lambda _g, _m, x, _b, _h, weights, *_: 3.0 * _rnn_layers(x, weights),
}
