"""The peak of the code that Inductor generates for a forward and a backward graph, before any of it is compiled or run.

The training graph says when PyTorch's ops would allocate and free. Inductor's own kernels come in another order, fused across it,
and write over buffers; what they allocate is known when its code is there. That code is a Python function which allocates buffers,
calls kernels, and lets go of what has been read, so it is run here as it is: on fake tensors, with kernels that do nothing, while
the bytes of the storages are counted that are alive. What library calls allocate for themselves is added. Without symbols in
sizes it is the allocator's peak to a few bytes.

Cost: generating the code is most of what Inductor does but for the C++ or Triton compiler; running it, half a millisecond a call.
Not seen: code in C++ (``cpp_wrapper``), and pools of memory that CUDA graphs hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_echo import compat
from torch_echo.compile._order import improved
from torch_echo.cost import SpecError, Workspaces, spec_of
from torch_echo.errors import CaptureError

__all__ = ["peak_of_code"]


def peak_of_code(
    forward: fx.GraphModule, backward: fx.GraphModule, held: Sequence[bool], workspaces: Workspaces
) -> int:
    """Most bytes alive while the code that Inductor makes of the two graphs runs, beyond what forward is given. `held`: for each of
    the first outputs of forward, is it there until backward has ended? (Those that are copied into inputs are not.) The graphs are
    used up.

    Raises whatever Inductor does, CaptureError where its code is not understood.
    """
    if any(compat.depends_on_data(node.meta.get("val")) for part in (forward, backward) for node in part.graph.nodes):
        raise CaptureError("its sizes depend on data")
    saved = list(_outputs(forward))
    donated = _donated(forward, backward, len(held))
    code = compat.generated_code(forward, _values(forward), donated, improved, backward=False, visible=len(held))
    meter = _Meter(workspaces)
    with compat.fresh_fake_mode() as fake:
        inputs = [_concrete(value) for value in _values(forward)]
        meter.known(inputs)
        made = meter.run(code, inputs, fake)
        named = {node.name: made[i] for i, node in enumerate(saved) if isinstance(node, fx.Node)}
        given = [named.get(node.name) for node in _placeholders(backward)]
        strides = [t.stride() if isinstance(t, torch.Tensor) else None for t in given]
        outputs = [t for t, keep in zip(made, held, strict=False) if keep]
    values = [_strided(value, stride) for value, stride in zip(_values(backward), strides, strict=True)]
    code = compat.generated_code(backward, values, donated, improved, backward=True, visible=0)
    with fake:
        arguments = [_concrete(v) if t is None else t for t, v in zip(given, values, strict=True)]
        meter.alive(t for t, known in zip(arguments, given, strict=True) if known is None)
        del made, named, given
        meter.run(code, arguments, fake)
        del outputs
    return meter.peak


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _values(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in _placeholders(module)]


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    outputs: Any = list(module.graph.nodes)[-1].args[0]
    return outputs  # type: ignore[no-any-return]


def _donated(forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int) -> list[int]:
    """Positions of what backward is given that it may write over: tensors that share memory with nothing but themselves."""

    def storages(nodes: Iterable[Any]) -> set[int]:
        values = [n.meta.get("val") for n in nodes if isinstance(n, fx.Node)]
        return {compat.storage_key(v) for v in values if isinstance(v, torch.Tensor)}

    saved = {node.name for node in _outputs(forward)[n_outputs:] if isinstance(node, fx.Node)}
    shared = storages(_placeholders(forward)) | storages(_outputs(forward)[:n_outputs]) | storages(_outputs(backward))
    return [
        i
        for i, node in enumerate(_placeholders(backward))
        if node.name in saved
        and isinstance(node.meta["val"], torch.Tensor)
        and compat.storage_key(node.meta["val"]) not in shared
    ]


def _concrete(value: Any) -> Any:
    """A fake tensor like another, or a number, with hints in place of symbols."""
    if not isinstance(value, torch.Tensor):
        return compat.size_hint(value) if isinstance(value, (int, torch.SymInt)) else value
    sizes, strides = ([compat.size_hint(n) for n in given] for given in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _strided(value: Any, stride: Any) -> Any:
    """What forward saves, laid out as its code does; as it was traced where sizes are symbols."""
    if stride is None or not isinstance(value, torch.Tensor):
        return value
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride(), *stride)):  # to compare symbols would guard
        return value
    return value if value.stride() == stride else value.as_strided(value.shape, stride)


@dataclass(slots=True)
class _Alive:
    reference: compat.StorageWeakRef
    nbytes: int


class _Meter(compat.TensorMode):
    """Counts the bytes of the storages that ops on fake tensors make, as long as anything holds them."""

    def __init__(self, workspaces: Workspaces) -> None:
        super().__init__()
        self.workspaces = workspaces
        self.peak = 0
        self._alive: dict[int, _Alive] = {}
        self._bytes = 0
        self._known: list[Any] = []
        self._not_ours: set[int] = set()

    def known(self, values: Iterable[Any]) -> None:
        """The storages of these tensors don't count."""
        self._known = [t for t in values if isinstance(t, torch.Tensor)]
        self._not_ours = {compat.storage_key(t) for t in self._known}

    def alive(self, tensors: Iterable[Any]) -> None:
        """These have been made."""
        for t in tensors:
            if isinstance(t, torch.Tensor):
                self._made(t)
        self.peak = max(self.peak, self._bytes)

    def run(self, code: compat.Code, arguments: list[Any], fake: Any) -> Sequence[Any]:
        """Run generated code; of `arguments` it lets go when it has read them."""
        call = code.dry(fake)
        with torch.no_grad(), self:
            results: Sequence[Any] = call(arguments)
        self._let_go()
        return results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._let_go()
        self.alive(compat.tensors_of(result))
        self.peak = max(self.peak, self._bytes + self._workspace(func, args, kwargs or {}))
        return result

    def _workspace(self, func: Any, args: Any, kwargs: Any) -> int:
        if compat.op_name(func)[0] in _NO_KERNELS:
            return 0
        try:
            return self.workspaces.nbytes(func, spec_of(func, args, kwargs))
        except SpecError:
            return 0

    def _made(self, tensor: torch.Tensor) -> None:
        key = compat.storage_key(tensor)
        if key in self._not_ours or key in self._alive:
            return
        nbytes = tensor.untyped_storage().nbytes()
        self._alive[key] = _Alive(compat.StorageWeakRef(tensor.untyped_storage()), nbytes)
        self._bytes += nbytes

    def _let_go(self) -> None:
        for key in [k for k, a in self._alive.items() if a.reference.expired()]:
            self._bytes -= self._alive.pop(key).nbytes


_NO_KERNELS = ("aten::empty_strided", "aten::as_strided")
