"""What an op call looks like without its data: the key under which its duration is known.

:func:`spec_of` describes a call, :func:`materialize` makes a call of the same description with made-up data. A
tensor's place in its storage is reduced to "aligned or not", so that the slices ``x[0]``, ``x[1]``, ... of a loop over
time are one description; that two arguments share memory is not described.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_echo.compat import size_hint

__all__ = ["Literal", "OpSpec", "SpecError", "TensorSpec", "materialize", "spec_of"]

ALIGNMENT = 16
"""Bytes. Kernels take their vector path, if they have one, for data aligned to this."""

_PATTERN = 1 << 16
"""Made-up data repeats after this many elements: drawing as many as a feature map has would take long."""


class SpecError(Exception):
    """A call of this description cannot be made up."""


class TensorSpec(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    offset: int = 0
    """0 when the data is aligned to 16 bytes, 1 (element) when it is not."""
    layout: str = "strided"
    """Another layout, or the name of a tensor subclass: such a tensor can be described but not made up."""

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def itemsize(self) -> int:
        """Bytes of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    def extent(self) -> int:
        """Elements from the first to the last in memory."""
        if not self.numel():
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=False))

    def unique_bytes(self) -> int:
        """Bytes of memory behind it; an expanded dimension counts once."""
        if self.layout != "strided":
            return self.numel() * self.itemsize()
        distinct = math.prod(n if s else min(n, 1) for n, s in zip(self.shape, self.stride, strict=True))
        return min(distinct, self.extent()) * self.itemsize()

    def key(self) -> str:
        """Text form, the same in every process. The index of the device is left out."""
        text = f"{self.dtype}{_join(self.shape)}/{_join(self.stride)}@{self.device.partition(':')[0]}"
        if self.offset:
            text += "+1"
        return text if self.layout == "strided" else f"{text}!{self.layout}"


class Literal(NamedTuple):
    """An argument that is no tensor, int, str, None or list. In Python ``1 == 1.0 == True``; here they differ."""

    kind: str
    text: str


Node = Any
"""TensorSpec | Literal | int | str | None | tuple of nodes."""


class OpSpec(NamedTuple):
    """An op call without its data."""

    op: str
    args: tuple[Node, ...]
    kwargs: tuple[tuple[str, Node], ...] = ()

    def tensors(self) -> Iterator[TensorSpec]:
        """Its tensor arguments, in order, those in lists included."""
        for node in self.args:
            yield from _tensors(node)
        for _, node in self.kwargs:
            yield from _tensors(node)

    def device(self) -> torch.device:
        """Where it runs: the first device of its tensors and device arguments that is not the CPU, else the CPU."""
        nodes = [*self.args, *(node for _, node in self.kwargs)]
        named = [t.device for t in self.tensors()]
        named += [node.text for node in nodes if type(node) is Literal and node.kind == "device"]
        return torch.device(next((d for d in named if not d.startswith("cpu")), "cpu"))

    def key(self) -> str:
        """Text form, the same in every process: the name under which a cache file holds its duration."""
        parts = [_key(node) for node in self.args] + [f"{name}={_key(node)}" for name, node in self.kwargs]
        return f"{self.op}({', '.join(parts)})"


def _join(sizes: Sequence[int]) -> str:
    return "[" + ",".join(map(str, sizes)) + "]"


def _tensors(node: Node) -> Iterator[TensorSpec]:
    if type(node) is TensorSpec:
        yield node
    elif type(node) is tuple:
        for item in node:
            yield from _tensors(item)


def _key(node: Node) -> str:
    if type(node) is TensorSpec:
        return node.key()
    if type(node) is Literal:
        return f"{node.kind}:{node.text}"
    if type(node) is tuple:
        return "(" + ", ".join(map(_key, node)) + ")"
    return repr(node)


# -- describing -------------------------------------------------------------------------------------------------------

_op_names: dict[Any, str] = {}
_dtype_names: dict[torch.dtype, tuple[str, int]] = {}
_device_names: dict[torch.device, str] = {}


def spec_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> OpSpec:
    """Describe the call ``func(*args, **kwargs)``. Cost: a few microseconds; it runs for each op of a recorded step."""
    name = _op_names.get(func)
    if name is None:
        name = _op_names[func] = str(func)
    encode = _encode
    nodes = tuple([encode(a) for a in args])
    if not kwargs:
        return OpSpec(name, nodes)
    return OpSpec(name, nodes, tuple([(k, encode(kwargs[k])) for k in sorted(kwargs)]))


def _encode(a: Any) -> Node:
    t = type(a)
    if t is torch.Tensor or t is torch.nn.Parameter:
        return _encode_tensor(a)
    if t is int or t is str or a is None:
        return a
    encoder = _ENCODERS.get(t)
    if encoder is not None:
        return encoder(a)
    if isinstance(a, torch.Tensor):
        return _encode_odd_tensor(a)
    if isinstance(a, (list, tuple)):
        return tuple([_encode(x) for x in a])
    return Literal("opaque", f"{t.__module__}.{t.__qualname__}")


def _encode_tensor(a: torch.Tensor) -> TensorSpec:
    dtype = a.dtype
    known = _dtype_names.get(dtype)
    if known is None:
        known = _dtype_names[dtype] = (str(dtype).removeprefix("torch."), dtype.itemsize)
    device = _device_names.get(a.device)
    if device is None:
        device = _device_names[a.device] = str(a.device)
    if a.layout is not torch.strided:
        return TensorSpec(tuple(a.shape), (), known[0], device, 0, str(a.layout).removeprefix("torch."))
    if a.is_nested:
        sizes = (a.numel(),)
        return TensorSpec(sizes, (1,), known[0], device, 0, "nested")
    offset = a.storage_offset()
    misaligned = 1 if offset and offset * known[1] % ALIGNMENT else 0
    return TensorSpec(tuple(a.shape), a.stride(), known[0], device, misaligned)


def _encode_odd_tensor(a: torch.Tensor) -> TensorSpec:
    """A tensor subclass. Fake tensors stand for plain ones, with sizes that may be symbols; others are opaque."""
    name = type(a).__name__
    if name != "FakeTensor":
        shape = tuple(int(n) for n in a.shape)
        return TensorSpec(shape, (), str(a.dtype).removeprefix("torch."), str(a.device), 0, name)
    dtype = str(a.dtype).removeprefix("torch.")
    if a.layout is not torch.strided:
        return TensorSpec(
            tuple(map(size_hint, a.shape)), (), dtype, str(a.device), 0, str(a.layout).removeprefix("torch.")
        )
    misaligned = size_hint(a.storage_offset()) * a.dtype.itemsize % ALIGNMENT != 0
    return TensorSpec(
        tuple(map(size_hint, a.shape)), tuple(map(size_hint, a.stride())), dtype, str(a.device), int(misaligned)
    )


def _dtype_literal(a: torch.dtype) -> Literal:
    return Literal("dtype", str(a).removeprefix("torch."))


_ENCODERS: dict[type, Callable[[Any], Node]] = {
    bool: lambda a: Literal("bool", str(a)),
    float: lambda a: Literal("float", repr(a)),
    complex: lambda a: Literal("complex", repr(a)),
    list: lambda a: tuple([_encode(x) for x in a]),
    tuple: lambda a: tuple([_encode(x) for x in a]),
    torch.Size: tuple,
    torch.SymInt: size_hint,
    torch.dtype: _dtype_literal,
    torch.device: lambda a: Literal("device", str(a)),
    torch.layout: lambda a: Literal("layout", str(a).removeprefix("torch.")),
    torch.memory_format: lambda a: Literal("memory_format", str(a).removeprefix("torch.")),
    torch.Generator: lambda a: Literal("generator", str(a.device)),
}

# -- making up --------------------------------------------------------------------------------------------------------

_DECODERS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "True",
    "float": float,
    "complex": complex,
    "dtype": lambda text: getattr(torch, text),
    "device": torch.device,
    "layout": lambda text: getattr(torch, text),
    "memory_format": lambda text: getattr(torch, text),
    "generator": lambda text: torch.Generator(device=text),
}


def decode(node: Node) -> Any:
    """The value of a literal node."""
    if type(node) is not Literal:
        return node
    if node.kind not in _DECODERS:
        raise SpecError(f"an argument of type {node.text} cannot be made up")
    return _DECODERS[node.kind](node.text)


def materialize(spec: OpSpec, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for a call of this description: same shapes, strides and dtypes, made-up contents.

    Floats are uniform in [0, 1): probabilities, variances and arguments of a logarithm are valid then (on CUDA an
    invalid one may end the process, so there is no second try). Booleans are random. Integers are zeros, which are
    valid indices; for well-known gathers they are spread over the rows, as they would be in use. Nothing is drawn but
    from `generator`.
    """
    bounds = _index_bounds(spec)
    fill = int(spec.op.removeprefix("aten.").partition(".")[0].rstrip("_") in _INTEGER_DIVISIONS)
    lengths = _lengths(spec)
    args = [_make(node, generator, bounds.get(i), lengths.get(i, fill)) for i, node in enumerate(spec.args)]
    return args, {name: _make(node, generator, None, fill) for name, node in spec.kwargs}


def _make(node: Node, generator: torch.Generator, bound: Any, fill: int) -> Any:
    if type(node) is TensorSpec:
        return _make_tensor(node, generator, bound if isinstance(bound, int) else 1, fill)
    if type(node) is tuple:
        bounds = bound if isinstance(bound, list) and len(bound) == len(node) else [None] * len(node)
        return [_make(item, generator, b, fill) for item, b in zip(node, bounds, strict=True)]
    return decode(node)


def _make_tensor(spec: TensorSpec, generator: torch.Generator, bound: int, fill: int) -> torch.Tensor:
    if spec.layout != "strided":
        raise SpecError(f"a tensor of layout or type {spec.layout} cannot be made up")
    dtype: torch.dtype = getattr(torch, spec.dtype)
    n = spec.offset + spec.extent()
    flat = torch.empty(n, dtype=dtype, device=spec.device)
    m = min(n, _PATTERN)
    if dtype is torch.bool:
        pattern = torch.rand(m, generator=generator, device=generator.device) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        pattern = torch.rand(m, generator=generator, device=generator.device, dtype=torch.float32)
    elif bound > 1:
        pattern = torch.randint(0, bound, (m,), generator=generator, device=generator.device)
    else:
        pattern = torch.full((m,), fill, device=generator.device, dtype=torch.int64)
    pattern = pattern.to(device=spec.device, dtype=dtype)
    if m:
        whole = n // m * m
        flat[:whole].view(-1, m).copy_(pattern)
        flat[whole:].copy_(pattern[: n - whole])
    return torch.as_strided(flat, spec.shape, spec.stride, spec.offset)


_INTEGER_DIVISIONS = frozenset(["div", "floor_divide", "fmod", "remainder", "true_divide"])
"""Zeros as integers would be divisors; ones are made up instead."""

_INDEX_ALONG_DIM = frozenset(
    ["gather", "index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
     "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"]
)  # fmt: skip


def _lengths(spec: OpSpec) -> dict[int, int]:
    """For argument positions that hold lengths of sequences, or how many there are of each time: sequences of equal length."""
    known = _LENGTHS.get(spec.op)
    if known is None or spec.args[known[0]] is None:
        return {}
    return {known[0]: known[1](*spec.args)}


_LENGTHS: dict[str, tuple[int, Callable[..., int]]] = {
    "torch_echo.pack.default": (1, lambda x, _: x.shape[0]),
    "torch_echo.pack_backward.default": (2, lambda grad, _, sizes: grad.shape[0] // sizes.shape[0]),
    "torch_echo.pad.default": (1, lambda data, sizes, *_: data.shape[0] // sizes.shape[0]),
    "torch_echo.pad_backward.default": (1, lambda _, sizes, rows: rows // sizes.shape[0]),
    "torch_echo.rnn_layer.default": (2, lambda _, x, sizes, *rest: x.shape[0] // sizes.shape[0]),
    "torch_echo.rnn_layer_backward.default": (3, lambda _, mode, x, sizes, *rest: x.shape[0] // sizes.shape[0]),
}


def _index_bounds(spec: OpSpec) -> dict[int, Any]:
    """For argument positions that hold indices: how many rows they choose from (for a list of tensors, a list)."""
    namespace, _, rest = spec.op.partition(".")
    name = rest.partition(".")[0]
    args = spec.args
    first = args[0] if args and type(args[0]) is TensorSpec else None
    if namespace != "aten" or first is None:
        return {}
    if name == "embedding" and first.shape:
        return {1: first.shape[0]}
    if name == "embedding_dense_backward":
        return {1: args[2]}
    if name in _INDEX_ALONG_DIM and len(args) > 2 and isinstance(args[1], int) and first.shape:
        return {2: first.shape[args[1]]}
    if name in ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"):
        masks = any(t.dtype in ("bool", "uint8") for t in _tensors(args[1]))
        return {} if masks else {1: list(first.shape[: len(args[1])])}
    if name in ("nll_loss_forward", "nll_loss2d_forward") and first.shape:
        return {1: first.shape[1 if len(first.shape) > 1 else 0]}
    if name in ("nll_loss_backward", "nll_loss2d_backward") and type(args[1]) is TensorSpec:
        shape = args[1].shape
        return {2: shape[1 if len(shape) > 1 else 0]}
    return {}
