"""What is done in place of an op's kernel, by the description of the call.

Four things may be done (:class:`Way`). Which outputs a call has is asked of PyTorch's fake tensors, once for each description.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from torch_echo import compat
from torch_echo.cost import Literal, OpSpec, is_view
from torch_echo.dry._kernels import OUTPUTS, Kernels, Made
from torch_echo.errors import CaptureError

__all__ = ["LENGTHS", "MASKED", "Call", "Way", "describe", "name_of", "tensors_in", "way_of", "without_numbers"]

_SMALL = 1 << 16
_SMALL_NUMBERS = 1 << 24
"""Bytes that a call may read and make to be computed; the second where all of them are integers or truth values."""

_ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])

_COMPUTE = frozenset(["copy_", "stack", "convolution", "convolution_backward", "_foreach_copy_"])
"""Ops that are made of others by their registration, but compute by themselves; those of oneDNN do too."""

LENGTHS = {"_pack_padded_sequence": (1,), "_ctc_loss": (2, 3)}
"""Ops whose outputs' sizes depend on the content of the arguments at these positions only."""

MASKED = frozenset(["index", "index_put_", "_index_put_impl_", "_unsafe_index"])
"""Ops that take indices, or masks, on whose content the sizes of their outputs depend."""


class Way(Enum):
    """What becomes of the calls of an op."""

    RUN = "run"
    """It is run: views and allocations touch no content."""
    INSIDE = "inside"
    """Made of others, it calls those, so that what lives between them is there."""
    SKIP = "skip"
    """What it returns is allocated, and for a moment what its kernel allocates for itself. Where what it reads is real and small
    (lengths, masks, an optimizer's count of steps), it is run, so that code which looks at it goes its way."""
    READ = "read"
    """What it returns to the caller, or the size of it, depends on content: it is run where that is real, else refused."""


@dataclass(slots=True)
class Kept:
    """What a call returns that is no tensor."""

    value: Any


@dataclass(slots=True)
class Call:
    """What a call of one description does."""

    func: Any
    spec: OpSpec
    way: Way
    small: bool = False
    """Little enough to be computed, if what it reads is real."""
    outputs: Any = None
    """What it returns: tuples and lists of Made, of numbers of its tensor arguments, and of other things, as Kept."""
    workspace: int = 0
    """Bytes that its kernel allocates for itself, while all of its outputs are there."""

    def result(self, tensors: list[torch.Tensor]) -> Any:
        """What a call with these tensors among its arguments returns, without content."""
        return _filled(self.outputs, tensors)


def name_of(func: Any) -> str:
    """Without namespace and overload."""
    return compat.op_name(func)[0].partition("::")[2]


def way_of(func: Any) -> Way:
    """What becomes of the calls of an op."""
    name = name_of(func)
    if name in OUTPUTS or name in MASKED:
        return Way.SKIP
    if compat.needs_content(func):
        return Way.READ
    if compat.is_view_in_place(func):
        return Way.RUN
    returns_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
    if is_view(func) or name in _ALLOCATIONS or not (returns_tensors or compat.mutated_arguments(func)):
        return Way.RUN
    if compat.is_made_of_others(func) and name not in _COMPUTE and not name.startswith("mkldnn"):
        return Way.INSIDE
    return Way.SKIP


def tensors_in(node: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, in order."""
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from tensors_in(item)
    elif isinstance(node, dict):
        yield from tensors_in(list(node.values()))


def without_numbers(func: Any, spec: OpSpec) -> OpSpec:
    """The description without what makes no difference to :class:`Call`: an optimizer's factors are others in each step."""
    if not compat.is_pointwise(func):
        return spec
    args = tuple([_FACTOR if type(a) is Literal and a.kind == "float" else a for a in spec.args])
    kwargs = tuple([(k, _FACTOR if type(a) is Literal and a.kind == "float" else a) for k, a in spec.kwargs])
    return spec._replace(args=args, kwargs=kwargs)


_FACTOR = Literal("float", "0.5")


def describe(func: Any, spec: OpSpec, way: Way, args: Any, kwargs: Any, fakes: compat.Fakes, kernels: Kernels) -> Call:
    """See :class:`Call`. Cost: about a millisecond. Raises CaptureError for ops of which nobody knows what they return."""
    tensors = list(tensors_in((args, kwargs)))
    named = {torch.device(kwargs["device"]).type} if kwargs.get("device") is not None else set()
    if ({t.device.type for t in tensors} | named) - {"cpu"}:
        return Call(func, spec, Way.RUN)  # on the meta device: somebody asks for sizes
    if any(t.layout != "strided" for t in spec.tensors()):
        raise CaptureError(f"{spec.op}: only dense tensors are run without content")
    if way is not Way.SKIP:
        return Call(func, spec, way)
    outputs = _outputs_of(func, spec, tensors, args, kwargs, fakes)
    for i, nbytes in kernels.own_outputs(spec).items():
        outputs = (*outputs[:i], Made((nbytes,), (1,), torch.uint8), *outputs[i + 1 :])
    made = list(_made(outputs))
    sizes = sum(t.unique_bytes() for t in spec.tensors()) + sum(_nbytes(m) for m in made)
    dtypes = [t.dtype for t in tensors] + [m.dtype for m in made]
    numbers = not any(d.is_floating_point or d.is_complex for d in dtypes)
    small = sizes <= (_SMALL_NUMBERS if numbers else _SMALL) and compat.runs_on_cpu(func)
    return Call(func, spec, way, small, outputs, 0 if numbers else kernels.workspace(func, spec))


def _outputs_of(
    func: Any, spec: OpSpec, tensors: list[torch.Tensor], args: Any, kwargs: Any, fakes: compat.Fakes
) -> Any:
    """See :class:`Call`."""
    own = OUTPUTS.get(name_of(func))
    if own is not None:
        return own(*args, **kwargs)
    number = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    returned = compat.returned_arguments(func)
    if returned is not None:
        places = [number[id(kwargs[p] if isinstance(p, str) else args[p])] for p in returned]
        return Kept(None) if not places else places[0] if len(places) == 1 else tuple(places)
    try:
        result, given, fake = fakes.of(func, args, kwargs)
    except Exception as error:  # whatever it is that the op dislikes about tensors without content
        raise CaptureError(f"{spec.op}: what it returns is not known without running it ({error})") from error
    if any(t.layout is not torch.strided for t in tensors_in(result)):
        raise CaptureError(f"{spec.op}: only dense tensors are run without content")
    return _outputs(result, {id(f): number[id(g)] for f, g in zip(fake, given, strict=True)})


def _outputs(node: Any, known: dict[int, int]) -> Any:
    if isinstance(node, torch.Tensor):
        if id(node) in known:
            return known[id(node)]
        return Made(tuple(map(int, node.shape)), tuple(map(int, node.stride())), node.dtype)
    if isinstance(node, (list, tuple)):
        items = [_outputs(item, known) for item in node]
        return items if isinstance(node, list) else tuple(items)
    return Kept(compat.size_hint(node) if isinstance(node, torch.SymInt) else node)


def _made(node: Any) -> Iterator[Made]:
    if type(node) is Made:
        yield node
    elif type(node) in (list, tuple):
        for item in node:
            yield from _made(item)


def _nbytes(made: Made) -> int:
    if 0 in made.shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(made.shape, made.stride, strict=True))) * made.dtype.itemsize


def _filled(node: Any, tensors: list[torch.Tensor]) -> Any:
    if type(node) is Made:
        return node.make()
    if type(node) is int:
        return tensors[node]
    if type(node) in (list, tuple):
        items = [_filled(item, tensors) for item in node]
        return items if type(node) is list else tuple(items)
    return node.value
