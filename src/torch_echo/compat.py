"""Every private name of torch that torch-echo uses, in one place.

Written against torch 2.11 to 2.14. A name that moves is mended here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._C._profiler import _EventType
from torch.autograd import forward_ad as fwAD
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from torch_echo.errors import CaptureError

__all__ = [
    "MemoryEvent",
    "MemoryProfile",
    "NodeEvent",
    "RECURRENT",
    "StorageWeakRef",
    "ModeStack",
    "TensorMode",
    "alias",
    "below_autograd",
    "current_node",
    "dispatch_modes",
    "function_modes",
    "functorch_active",
    "hooks_enabled",
    "mark",
    "mutated_arguments",
    "no_dispatch",
    "node_sequence",
    "pop_hooks",
    "no_profile",
    "profiler_running",
    "push_hooks",
    "sequence_number",
    "storage_key",
    "version_token",
    "top_hooks",
]

CPU = torch.device("cpu")


class ModeStack:
    """This thread's stack of modes of one sort."""

    def __init__(
        self, push: Callable[[Any], None], pop: Callable[[], Any], length: Callable[[], int], at: Callable[[int], Any]
    ) -> None:
        self.push = push
        self.pop = pop
        self._length = length
        self._at = at

    def top(self) -> Any:
        """The innermost mode, or None."""
        n = self._length()
        return self._at(n - 1) if n else None

    def holds(self, mode: Any) -> bool:
        """Is `mode` on the stack? C++ takes a mode off while it runs."""
        return any(self._at(i) is mode for i in range(self._length()))

    def take(self, mode: Any) -> int:
        """Take `mode` off, out from under modes that were entered after it; returns how many those are."""
        above = []
        while (top := self.pop()) is not mode:
            above.append(top)
        for other in reversed(above):
            self.push(other)
        return len(above)

    def put(self, mode: Any, under: int) -> None:
        """Put `mode` below the innermost `under` modes."""
        above = [self.pop() for _ in range(under)]
        self.push(mode)
        for other in reversed(above):
            self.push(other)


dispatch_modes = ModeStack(
    torch._C._push_on_torch_dispatch_stack,
    lambda: torch._C._pop_torch_dispatch_stack(None),
    torch._C._len_torch_dispatch_stack,
    torch._C._get_dispatch_stack_at,
)
function_modes = ModeStack(
    torch._C._push_on_torch_function_stack,
    torch._C._pop_torch_function_stack,
    torch._C._len_torch_function_stack,
    torch._C._get_function_stack_at,
)

PASS_ON = torch.overrides.handle_torch_function.__code__
"""The frame between a function of torch that is written in Python and a function mode."""

OP_CALL = torch._ops.OpOverload.__call__.__code__
"""The frame of an op that is called from Python."""


push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def take_hooks(pack: Any) -> int:
    """Take the pair of hooks whose first is `pack` off this thread's stack, out from under pairs that were added after it;
    returns how many those are."""
    above = []
    while (top := top_hooks()) is not None and top[0] != pack:
        above.append(top)
        pop_hooks()
    pop_hooks()
    for other in reversed(above):
        push_hooks(*other)
    return len(above)


def put_hooks(pack: Any, unpack: Any, under: int) -> None:
    """Put a pair of hooks on this thread's stack below the innermost `under` pairs."""
    above: list[tuple[Any, Any]] = []
    while len(above) < under and (top := top_hooks()) is not None:
        above.append(top)
        pop_hooks()
    push_hooks(pack, unpack)
    for other in reversed(above):
        push_hooks(*other)


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost pair of saved-tensor hooks of this thread, or None."""
    top: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top


no_dispatch = torch._C._DisableTorchDispatch
"""While an instance lives, no dispatch mode of this thread is called."""

sequence_number = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node of this thread gets."""

current_node = torch._C._current_autograd_node
"""The autograd node that the engine is running on this thread, or None."""


def node_sequence(node: Any) -> int:
    """Sequence number of an autograd node."""
    number: int = node._sequence_nr()
    return number


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; unique as long as the storage or a StorageWeakRef to it lives. -1: it has none, or is a
    wrapper around others (see :func:`parts_of`)."""
    if type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__"):
        return -1
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse layouts, functorch wrappers
        return -1
    return -1 if tensor.is_nested else key


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a dense tensor's storage is, and its content: the two identify it among those that live. Unlike :func:`storage_key`, it
    makes no Python object of the storage, which would count as an owner: autograd adds gradients in place where there is one."""
    content: int = tensor.data_ptr() - int(tensor.storage_offset()) * tensor.itemsize
    return torch._C._storage_address(tensor), content  # type: ignore[attr-defined]


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape; of a ragged tensor, that of all its rows together, and () of one that does not tell."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    rows: Any = tensor
    return tuple(rows._values.shape) if tensor.layout is torch.jagged else ()


def extent(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Address and bytes of a storage; zeros for that of a tensor subclass which has its content elsewhere."""
    try:
        pointer, nbytes = storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return 0, 0
    return (pointer, nbytes) if type(nbytes) is int else (0, 0)


_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a tensor's memory is in: itself, or those that it wraps (a DTensor: the part of this rank)."""
    if type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):
                yield from parts_of(part)
    elif storage_key(tensor) != -1:
        yield tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Is there memory of its own behind the tensor? Not with subclasses that wrap other tensors (nested ones, DTensor)."""
    if type(tensor) in _PLAIN:
        return storage_key(tensor) != -1
    try:
        tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version counter; -1 for inference tensors, which have none and can't be written outside of inference."""
    return -1 if tensor.is_inference() else tensor._version


def _storage_uses(tensor: torch.Tensor) -> int:
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


_USES_OF_ONE = _storage_uses(torch.empty(1))
"""What the count is for a storage with one tensor: Python's own wrapper of the storage counts too."""


def sole_owner(tensor: torch.Tensor) -> bool:
    """Is `tensor` the only tensor on its storage?"""
    return _storage_uses(tensor) == _USES_OF_ONE


def owned(tensor: torch.Tensor, owners: int) -> bool:
    """Are there no more than so many tensors on the storage of `tensor`?"""
    return _storage_uses(tensor) <= _USES_OF_ONE - 1 + owners


def guard_storage(storage: torch.UntypedStorage) -> int:
    """The storage's key, which no other storage gets until it is given to `release_storage`. Its bytes are not kept."""
    key: Any = storage._weak_ref()
    assert isinstance(key, int)
    return key


release_storage: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
storage_expired: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]


def may_be_result(tensor: torch.Tensor, version: int) -> bool:
    """Within a pack hook: may the tensor be a result of the node that saves it, rather than an input? `version`: its own."""
    if tensor.is_leaf:
        return False
    if version:  # in place, on a view perhaps, where asking for the node may make another one
        return True
    node: Any = tensor.grad_fn
    return node._sequence_nr() >= sequence_number() - 1 or isinstance(node, torch.autograd.function.BackwardCFunction)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in a fixed order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested containers with `function` of each of their leaves."""
    return torch.utils._pytree.tree_map(function, value)


def is_foreign(tensor: torch.Tensor) -> bool:
    """Is the tensor's memory another library's (NumPy's, say), which may write it at any time? Memory shared with the
    workers of a DataLoader is not."""
    storage = tensor.untyped_storage()
    return not storage.resizable() and not storage.is_shared()


def is_emptied(tensor: torch.Tensor) -> bool:
    """Has the storage been resized, so that the tensor does not fit into it?"""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object on the same storage and version counter, without autograd history."""
    guard = no_dispatch()
    try:
        return tensor.detach()
    finally:
        del guard


_VIEW_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _passing(keys: Any, *, whoever: bool = False) -> Any:
    """Context: on this thread these dispatch keys are not skipped any more; with `whoever`, ops pass them whatever they are called
    with."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(include | keys if whoever else include, exclude - keys)


def alias_below(tensor: torch.Tensor) -> torch.Tensor:
    """Like :func:`alias`, for use inside a dispatch mode, where a plain alias gets a version counter of its own."""
    guard = no_dispatch()
    try:
        with _passing(_VIEW_KEYS):
            return tensor.detach()
    finally:
        del guard


def version_token(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of `tensor`."""
    guard = no_dispatch()
    try:
        token = tensor.detach()
        empty = _EMPTY.get((token.dtype, token.device))
        token.data = _empty(token) if empty is None else empty
        return token
    finally:
        del guard


def strip(tensor: torch.Tensor) -> None:
    """Have `tensor` let go of its memory; its version counter stays that of the tensors that it was an alias of."""
    guard = no_dispatch()
    try:
        empty = _EMPTY.get((tensor.dtype, tensor.device))
        tensor.data = _empty(tensor) if empty is None else empty
    finally:
        del guard


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _empty(like: torch.Tensor) -> torch.Tensor:
    empty = _EMPTY[like.dtype, like.device] = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty


def functorch_active() -> bool:
    """Is this thread inside a functorch transform (vmap, grad, …)?"""
    return torch._C._functorch.peek_interpreter_stack() is not None


class TensorMode(torch.utils._python_dispatch.TorchDispatchMode):
    """Base of torch-echo's dispatch modes.

    PyTorch wraps the ``__torch_dispatch__`` of a mode in two more Python frames so that Dynamo skips it (4 µs an op);
    ours are never on the stack where Dynamo compiles.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@contextlib.contextmanager
def alone(mode: TensorMode) -> Iterator[None]:
    """Under one dispatch mode, and none of those that are on."""
    with torch.utils._python_dispatch._disable_current_modes(), mode:
        yield


class FunctionMode(torch.overrides.TorchFunctionMode):
    """Base of torch-echo's function modes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def _keys_above_kernels() -> Any:
    """The dispatch keys of autograd, views, autocast and dispatch modes: what the ops that a tape sees have passed."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in ("FrontMode", "BackMode"):  # functorch: backward may be vectorised (is_grads_batched)
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"FuncTorchDynamicLayer{name}"))
    for name in ("Batched", "VmapMode", "GradWrapper"):
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"FuncTorch{name}"))
    with torch._C._AutoDispatchBelowAutograd():
        guard = no_dispatch()
        keys = keys | torch._C._dispatch_tls_local_exclude_set()
        del guard
    return keys


_ABOVE_KERNELS = _keys_above_kernels()


@contextlib.contextmanager
def without_tracing() -> Iterator[None]:
    """No dispatch modes on this thread's stack (autograd asks whether there are any, though they are not called), and no ops in
    Python instead of those in C++."""
    with torch.utils._python_dispatch._disable_current_modes(), torch._C._DisablePythonDispatcher(), with_kernels():
        yield


class below_autograd:
    """Context: run ops as they ran when the tape saw them, below autograd, autocast, dispatch modes and hooks.

    Gradients are on, as in a training forward: kernels ask (oneDNN's LSTM makes no workspace otherwise), and nothing is
    recorded down here.
    """

    __slots__ = ("_grad", "_guard")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        self._guard = torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        torch._C._set_grad_enabled(self._grad)


def _autograd_keys() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for name in ("Other", "CPU", "CUDA", "Functionality"):
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{name}"))
    return keys


_AUTOGRAD = _autograd_keys()


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Within a kernel, or :class:`below_autograd`: autograd records what runs, as outside of it. Autocast and dispatch modes stay
    off."""
    with _passing(_AUTOGRAD), torch.enable_grad():
        yield


def views_as_usual() -> Any:
    """Within a kernel: views know whether their bases need gradients, by which kernels choose. In the first call after compiling,
    PyTorch runs ops without."""
    return _passing(_VIEW_KEYS, whoever=True)


neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
"""A view with the negative bit set."""


RECURRENT = frozenset([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu])
"""What nn.LSTM, nn.GRU and nn.RNN call for all their layers and steps at once."""


def is_op(func: Any) -> bool:
    """Is it an overload of an op, and not a higher-order op?"""
    return isinstance(func, torch._ops.OpOverload)


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def function_around(frame: types.FrameType | None, depth: int = 1000) -> tuple[Any, ...] | None:
    """The arguments of the script's ``torch.autograd.Function`` whose forward runs in a Python frame or at most so many frames
    around it; None if none does. PyTorch's own functions consist of ops."""
    while frame is not None and depth:
        if frame.f_code is _APPLY and not frame.f_locals["cls"].__module__.startswith(("torch.", "torch_echo.")):
            found: tuple[Any, ...] = frame.f_locals["args"]
            return found
        frame = frame.f_back
        depth -= 1
    return None


def op_name(func: Any) -> tuple[str, str]:
    """("aten::add", "Tensor")"""
    return func._schema.name, func._overloadname


def mutated_arguments(func: Any) -> tuple[int | str, ...]:
    """Positions (or names, for keyword-only arguments) of the arguments that `func`'s schema says it writes."""
    found: list[int | str] = []
    for i, arg in enumerate(func._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            found.append(arg.name if arg.kwarg_only else i)
    return tuple(found)


def is_nondeterministic(func: Any) -> bool:
    """Does the op draw random numbers (from a generator)?"""
    return torch.Tag.nondeterministic_seeded in func.tags


# --- entries -----------------------------------------------------------------------------------------------------------


def module_call() -> Callable[..., Any]:
    """What ``module(...)`` runs at present."""
    call: Callable[..., Any] = torch.nn.Module.__call__
    return call


def set_module_call(call: Callable[..., Any]) -> None:
    """Make ``module(...)`` run `call`, for every module of the process."""
    torch.nn.Module.__call__ = call  # type: ignore[method-assign]


def wrap_backward(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wrap the function through which ``backward`` and ``grad`` enter the autograd engine; returns the undo.

    The wrapped function takes (outputs, grad_outputs, retain_graph, create_graph, inputs, …).
    """
    original = torch.autograd.graph._engine_run_backward
    wrapped = wrapper(original)
    torch.autograd.graph._engine_run_backward = wrapped
    torch.autograd._engine_run_backward = wrapped  # type: ignore[attr-defined]

    def undo() -> None:
        torch.autograd.graph._engine_run_backward = original
        torch.autograd._engine_run_backward = original  # type: ignore[attr-defined]

    return undo


def wrap_hooks_disabled(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wrap the context manager by which functorch transforms refuse saved-tensor hooks; returns the undo."""
    original = torch.autograd.graph.disable_saved_tensors_hooks
    torch.autograd.graph.disable_saved_tensors_hooks = wrapper(original)

    def undo() -> None:
        torch.autograd.graph.disable_saved_tensors_hooks = original

    return undo


def wrap_compiled_calls(enter: Callable[[], Any], leave: Callable[[Any], None]) -> Callable[[], None]:
    """Have `enter` called when a thread begins to run what ``torch.compile`` made, and `leave` with its result when it ends.

    Returns a function that undoes it. Dynamo has to be imported.
    """
    from torch._dynamo import eval_frame

    original = eval_frame._maybe_set_eval_frame
    local = threading.local()

    @functools.wraps(original)
    def set_callback(callback: Any) -> Any:
        state = getattr(local, "state", None)
        if state is None and callable(callback):
            local.state = (enter(),)
        previous = original(callback)
        if state is not None and not callable(callback):
            local.state = None
            leave(*state)
        return previous

    def undo() -> None:
        eval_frame._maybe_set_eval_frame = original

    eval_frame._maybe_set_eval_frame = set_callback
    return undo


def dynamo_imported() -> bool:
    """Can there be compiled code?"""
    return "torch._dynamo.eval_frame" in sys.modules


def is_compiled(module: torch.nn.Module) -> bool:
    """Is a call of this module a call of ``torch.compile``'s result?"""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


# --- processes -----------------------------------------------------------------------------------------------------------


def process_group_store() -> Any:
    """The key-value store of the default process group, or None without one."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def prefixed_store(prefix: str, store: Any) -> Any:
    """The part of a store whose keys begin so."""
    return torch._C._distributed_c10d.PrefixStore(prefix, store)


# --- sharded parameters --------------------------------------------------------------------------------------------------


def is_sharded(module: torch.nn.Module) -> bool:
    """Has ``fully_shard`` been applied to this module: are parameters gathered when its call begins, and let go at its end?"""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_flat_sharded(module: torch.nn.Module) -> bool:
    """Is it wrapped by the older ``FullyShardedDataParallel``?"""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def gathered(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors into which the parameters of a module that :func:`is_sharded` are gathered. They are made when it is first
    called; from then on, their storages are emptied and filled."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        if group.fsdp_params and group.fsdp_params[0].all_gather_outputs:  # which are made for all at once
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs
                yield from parameter._unsharded_inner_tensors


# --- out of memory ---------------------------------------------------------------------------------------------------------

_FAILED_ALLOCATION = re.compile(
    r"DefaultCPUAllocator: (?:not enough|can't allocate) memory|DefaultMobileCPUAllocator|bad allocation|std::bad_alloc"
    r"|CUDA out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED"
)
_WANTED = re.compile(r"allocate ([0-9.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Is it what PyTorch raises when an allocation on a device fails?"""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _FAILED_ALLOCATION.search(str(error)) is not None


def bytes_wanted(error: BaseException) -> int:
    """What the allocation that failed was to be, if the message says so; else 1."""
    match = _WANTED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match is not None else 1


def out_of_memory(nbytes: int, why: str) -> Exception:
    """What PyTorch raises when the allocation of so many bytes fails."""
    return torch.OutOfMemoryError(
        f"DefaultCPUAllocator: not enough memory: you tried to allocate {nbytes} bytes. {why}"
    )


# --- memory events -----------------------------------------------------------------------------------------------------


class MemoryEvent:
    """An allocation (positive) or free (negative) of `nbytes` at address `ptr`."""

    __slots__ = ("nbytes", "ptr", "time")

    def __init__(self, time: int, ptr: int, nbytes: int) -> None:
        self.time, self.ptr, self.nbytes = time, ptr, nbytes


class NodeEvent:
    """One autograd node as the engine ran it."""

    __slots__ = ("end", "name", "sequence", "start")

    def __init__(self, start: int, end: int, name: str, sequence: int) -> None:
        self.start, self.end, self.name, self.sequence = start, end, name, sequence


class MemoryProfile:
    """Records the allocations of this process, and the autograd nodes that run, between ``start`` and ``stop``."""

    MARK = 1031
    """Bytes of the block that :func:`mark` allocates: a size that nothing else is likely to have."""

    lost = False
    """Can none be started in this process any more? So it is with PyTorch 2.11 when a thread has ended on which one ran."""

    def __init__(self) -> None:
        _quiet_profiler()
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)

    def start(self) -> None:
        """Begin. Raises RuntimeError if a profiler is running already."""
        self._profile.start()

    def stop(self) -> bool:
        """End; the events can be read afterwards. False if they are lost: the thread on which it was started has ended, or another
        profiler has ended this one (PyTorch 2.11)."""
        try:
            self._profile.stop()
        except RuntimeError:
            self._profile.profiler = None
            try:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                    pass
            except RuntimeError:
                MemoryProfile.lost = True
        return self._profile.profiler is not None

    def events(self, device: torch.device) -> tuple[list[MemoryEvent], list[MemoryEvent], list[NodeEvent]]:
        """(events of `device`, events of the CPU, nodes), each in order of time."""
        profiler: Any = self._profile.profiler
        if profiler is None:
            raise CaptureError(
                "the allocations of the step were not seen: another profiler has ended the one that recorded them"
            )
        stack = list(profiler.kineto_results.experimental_event_tree())[::-1]
        memory: list[MemoryEvent] = []
        host: list[MemoryEvent] = []
        nodes: list[NodeEvent] = []
        prefix = "autograd::engine::evaluate_function: "
        while stack:
            event = stack.pop()
            if event.tag == _EventType.Allocation:
                extra = event.extra_fields
                item = MemoryEvent(event.start_time_ns, extra.ptr, extra.alloc_size)
                if extra.device.type == "cpu":
                    host.append(item)
                if extra.device.type == device.type:
                    memory.append(item)
            elif event.tag == _EventType.TorchOp:
                name = event.name
                if name.startswith(prefix):
                    number = event.extra_fields.sequence_number
                    nodes.append(NodeEvent(event.start_time_ns, event.end_time_ns, name[len(prefix) :], number))
            stack.extend(reversed(event.children))
        memory.sort(key=lambda e: e.time)
        host.sort(key=lambda e: e.time)
        nodes.sort(key=lambda e: e.start)
        return memory, host, nodes

    def rise(self, device: torch.device) -> tuple[int, int]:
        """Most bytes alive on `device` between start and stop, and those alive at the end, beyond those from before."""
        live = most = 0
        for event in self.events(device)[0]:
            live += event.nbytes
            most = max(most, live)
        return most, live


@functools.cache
def _quiet_profiler() -> None:
    """Have the profiler's own lines out of the way, once per process.

    kineto logs each start and stop; the CPU allocator warns, once, of the first free of a block older than the profile.
    Both go straight to file descriptor 2, so the warning is drawn while that is closed off.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    old = torch.UntypedStorage(MemoryProfile.MARK)
    sys.stderr.flush()
    keep = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
            del old
    finally:
        os.dup2(keep, 2)
        os.close(keep)
        os.close(null)


def mark() -> None:
    """Leave a mark in the stream of memory events: an allocation of MemoryProfile.MARK bytes, freed at once."""
    torch.UntypedStorage(MemoryProfile.MARK)


def profiler_running() -> bool:
    """Is a profiler active on this thread, so that it sees what the thread allocates, and a second one cannot start?"""
    running: bool = torch._C._autograd._profiler_enabled()
    return running


def no_profile() -> str | None:
    """Why no profiler can be started now, if that is so."""
    if MemoryProfile.lost:
        return "the thread on which a step was recorded ended within it, and this PyTorch starts no profiler after that"
    return "a profiler of the script's is running" if profiler_running() else None


# --- running without kernels ---------------------------------------------------------------------------------------------

_FAKE: Any = torch._C._dispatch_key_parse("Fake")
_PYTHON: Any = torch._C._dispatch_key_parse("Python")
_BEFORE = "Fake" if int(_FAKE) < int(_PYTHON) else "CustomRNGKeyId"
"""A dispatch key below autograd, views and modes, and above the choice of a kernel, that PyTorch keeps for other libraries and has
nothing on. Before 2.13 the first is above modes, where a fallback written in Python can't be called while there is one, and the
second is below the place where a device is chosen for what is made from nothing: see :func:`_put_on_makers`."""

_BEFORE_KERNELS = torch._C._dispatch_key_parse(_BEFORE)

sparse_passes_by = _BEFORE != "Fake"
"""Do ops on sparse tensors pass by what :func:`on_kernel` was given?"""

_VIEWS = (
    "alias", "as_strided", "detach", "expand", "permute", "select.int", "slice.Tensor", "split.Tensor", "split_with_sizes",
    "squeeze", "squeeze.dim", "t", "transpose.int", "unbind.int", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
)  # fmt: skip


_handler: list[torch.library.Library] = []
_other_kernels: list[torch.library.Library] = []


def on_kernel(handler: Callable[..., Any]) -> None:
    """Have `handler` called in place of each kernel, with the op's overload and its arguments, wherever :class:`without_kernels` is
    on. Until :func:`off_kernel`.

    Not for views: what C++ makes parameters from must not have been seen by Python.
    """
    _destroy(_other_kernels)
    library = torch.library.Library("_", "IMPL")
    library.fallback(handler, _BEFORE)
    views = torch.library.Library("aten", "IMPL", _BEFORE)
    for name in _VIEWS:
        views.impl(name, torch.library.fallthrough_kernel)
    _handler.extend((library, views))
    if sparse_passes_by:  # the second of the two keys, which PyTorch takes for one of a device
        _handler.extend((_put_on_composites(handler), _put_on_makers(handler)))


def _put_on_composites(handler: Callable[..., Any]) -> torch.library.Library:
    """Have `handler` called for the ops that are made of others, which for PyTorch are kernels of the second key in ``_BEFORE``."""
    library = torch.library.Library("aten", "IMPL", _BEFORE)
    for func in _aten_ops("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"):
        if str(func).removeprefix("aten.").removesuffix(".default") not in _VIEWS:
            library.impl(func, functools.partial(handler, func))
    return library


def _aten_ops(*keys: str) -> Iterator[Any]:
    """PyTorch's own ops that have a kernel for one of these dispatch keys."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def _put_on_makers(handler: Callable[..., Any]) -> torch.library.Library:
    """Have `handler` called for the ops that make tensors from none where :class:`without_kernels` is on; else the device is
    chosen, as in the kernels that these are put before."""
    library = torch.library.Library("aten", "IMPL", "BackendSelect")

    def choosing(func: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            on = torch._C._dispatch_tls_is_dispatch_key_included(_BEFORE_KERNELS)
            if on and not torch._C._dispatch_tls_is_dispatch_key_excluded(_BEFORE_KERNELS):
                return handler(func, *args, **kwargs)
            kind = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}[torch.device(kwargs.get("device") or "cpu").type]
            layout = kwargs.get("layout") or torch.strided
            name = kind if layout is torch.strided else f"Sparse{'' if layout is torch.sparse_coo else 'Csr'}{kind}"
            return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)), *args, **kwargs)

        return call

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was another one, as there is to be again
        for func in _aten_ops("BackendSelect"):
            if func not in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype_layout):  # they are given tensors
                library.impl(func, choosing(func), allow_override=True)
    return library


def off_kernel() -> None:
    """The end of :func:`on_kernel`."""
    _destroy(_handler)


def _put_on(key: str, functions: Mapping[str, Callable[..., Any]]) -> tuple[torch.library.Library, ...]:
    """Have these functions called for the ops of these names where the dispatch key is included, but not within them; other ops
    pass it by. For as long as the libraries live."""
    without = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def usual(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(without):
                return function(*args, **kwargs)

        return call

    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, key)
    library = torch.library.Library("aten", "IMPL", key)
    for name, function in functions.items():
        library.impl(name, usual(function))
    return others, library


def _destroy(libraries: list[torch.library.Library]) -> None:
    for library in libraries:
        library._destroy()
    libraries.clear()


def plain_cross_entropy(*args: Any) -> torch.Tensor:
    """PyTorch's own, whatever :func:`on_cross_entropy` was given."""
    loss: torch.Tensor = torch.ops.aten.cross_entropy_loss.default.decompose(*args)
    return loss


def on_cross_entropy(function: Callable[..., torch.Tensor]) -> Callable[[], None]:
    """Have `function` called for each cross-entropy, above autograd and below autocast. The result undoes it."""
    libraries = [torch.library.Library("aten", "IMPL", key) for key in ("AutogradCPU", "AutogradCUDA")]
    for library in libraries:
        library.impl("cross_entropy_loss", function)
    return functools.partial(_destroy, libraries)


def unusual_autograd() -> bool:
    """Is a functorch transform, forward-mode differentiation or a tracer at work?"""
    return functorch_active() or fwAD._current_level >= 0 or torch._C._get_tracing_state() is not None


def without_kernels() -> Any:
    """Context: this thread, and backward passes that it starts, call what :func:`on_kernel` was given instead of kernels."""
    return torch._C._IncludeDispatchKeyGuard(_BEFORE_KERNELS)


def kernels_replaceable() -> bool:
    """May :func:`other_kernels` be called? Not while :func:`on_kernel` has the key."""
    return not _handler


def other_kernels(functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Context: on this thread the kernels of the ops of these names (``mm``) are these functions. Autograd has seen the op by then,
    and sees nothing of what they call; within them, the ops are as ever. Other ops go straight to their kernels. They are
    the same in all calls."""
    if not _other_kernels:
        _other_kernels.extend(_put_on(_BEFORE, functions))
    return _passing(torch._C.DispatchKeySet(_BEFORE_KERNELS), whoever=True)


_BEFORE_AUTOGRAD = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")
"""A dispatch key above autograd, for modes in C++. PyTorch has nothing on it but a few ops of its own tests."""

_instead: list[torch.library.Library] = []


def instead(functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Context: on this thread the ops of these names (``lstm.input``) are these functions, and autograd records what those call.
    Within them, the ops are as ever."""
    if not _instead:
        _instead.extend(_put_on("TESTING_ONLY_GenericMode", functions))
    return torch._C._IncludeDispatchKeyGuard(_BEFORE_AUTOGRAD)


class with_kernels:
    """Context: within :class:`without_kernels`, as usual."""

    def __enter__(self) -> None:
        self._guard = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_BEFORE_KERNELS))
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)


@contextlib.contextmanager
def foreach_everywhere() -> Iterator[None]:
    """Optimizers take all their parameters at once on a CPU too, as they do by default on a GPU."""
    optimizer: Any = sys.modules[torch.optim.Optimizer.__module__]  # which the package deletes from its names
    original = optimizer._get_foreach_kernels_supported_devices
    optimizer._get_foreach_kernels_supported_devices = lambda: [*original(), "cpu"]
    try:
        yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = original


@contextlib.contextmanager
def truncation_left_out() -> Iterator[None]:
    """``torch.nn.init.trunc_normal_`` draws once, and does not look whether it has to draw again."""
    init: Any = torch.nn.init
    original = init._no_grad_trunc_normal_

    def draw(tensor: torch.Tensor, mean: float, std: float, *bounds: float, **generator: Any) -> torch.Tensor:
        with torch.no_grad():
            return tensor.normal_(mean, std, **generator)

    init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


def is_made_of_others(func: Any) -> bool:
    """Has the op no kernel of its own on a CPU, but one that calls other ops?"""

    return not _has_kernel(func, "CPU") and _is_composite(func)


def runs_on_cpu(func: Any) -> bool:
    """Has the op a kernel on a CPU, its own or one that calls others?"""
    return _has_kernel(func, "CPU") or _is_composite(func)


def _is_composite(func: Any) -> bool:
    return any(_has_kernel(func, f"Composite{sort}Autograd") for sort in ("Explicit", "Implicit"))


def _has_kernel(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)  # type: ignore[arg-type]


def call_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """Call the CPU's kernel of an op, past all that stands before it; the ops that it calls are dispatched as usual."""
    return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


_TAKE_NUMBERS = frozenset(
    ["add", "copy", "div", "divide", "floor_divide", "mul", "multiply", "sub", "subtract", "true_divide"]
)
"""Ops that take a number of Python for a tensor."""


@functools.cache
def _tensor_places(func: Any) -> tuple[int, ...]:
    """Positions of the arguments of an op that must be tensors."""
    if func._schema.name.removeprefix("aten::").rstrip("_") in _TAKE_NUMBERS:
        return ()
    return tuple([i for i, a in enumerate(func._schema.arguments) if isinstance(a.type, torch.TensorType)])


def with_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with which an op can be called from Python as it was from C++: what wraps a number there comes as that number."""
    wrapped = [i for i in _tensor_places(func) if i < len(args) and type(args[i]) in (int, float, bool)]
    if not wrapped:
        return args
    like = next((a for a in args if isinstance(a, torch.Tensor)), None)
    out = list(args)
    for i in wrapped:
        fits = like is not None and (like.is_floating_point() or type(out[i]) is not float)
        with with_kernels():
            out[i] = torch.tensor(out[i], dtype=like.dtype if fits and like is not None else None)
    return tuple(out)


def needs_content(func: Any) -> bool:
    """Do sizes of its outputs, or what it returns to Python, depend on what is in its arguments?"""
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def is_view_in_place(func: Any) -> bool:
    """Does the op change sizes and strides of its argument (``transpose_``, ``set_``)?"""
    return torch.Tag.inplace_view in func.tags


def is_pointwise(func: Any) -> bool:
    """Is each element of the result made of the elements at its place?"""
    return torch.Tag.pointwise in func.tags


def returned_arguments(func: Any) -> tuple[int | str, ...] | None:
    """Of an op that returns nothing but arguments that it writes: which (see :func:`mutated_arguments`). None of others."""
    written = mutated_arguments(func)
    returns = func._schema.returns
    in_place = all(r.alias_info is not None and r.alias_info.is_write for r in returns)
    return written[: len(returns)] if written and in_place and len(returns) in (0, len(written)) else None


class Fakes:
    """Runs op calls on fake tensors: what would they return?"""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_fallback_kernels=False)  # which would run kernels on zeros

    def of(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], list[Any]]:
        """The result of ``func(*args, **kwargs)``, and the tensors in `args` and `kwargs` as they were given to it, with those
        that stood for them, in order."""
        given: list[Any] = []
        stand: list[Any] = []

        def fake(a: Any) -> Any:
            if not isinstance(a, torch.Tensor):
                return a
            if not any(a is g for g in given):
                given.append(a)
                stand.append(torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device))
            return next(s for g, s in zip(given, stand, strict=True) if g is a)

        alone = torch.utils._python_dispatch._disable_current_modes()
        modes = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
            torch._C.DispatchKey.PythonTLSSnapshot
        )
        # it may be called below_autograd
        with _passing(modes), alone, with_kernels(), torch._C._AutoDispatchBelowAutograd(), self._mode:
            fakes = map_leaves(fake, (list(args), dict(kwargs)))
            result = func(*fakes[0], **fakes[1])
        return result, given, stand


# --- joint graphs of AOTAutograd -----------------------------------------------------------------------------------------


def is_forward_node(node: fx.Node) -> bool:
    """Does the node belong to the forward part of a joint graph?"""
    if node.op == "placeholder":
        return not is_backward_input(node)
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def must_be_in_forward(node: fx.Node) -> bool:
    """Does the node run in forward wherever it stands? It copies what an input is to contain afterwards."""
    return bool(node.meta.get("partitioner_tag") == "must_be_in_forward")


def boundary(nodes: list[fx.Node]) -> int:
    """Position from which on the nodes of a joint graph are backward's."""
    return 1 + max((i for i, node in enumerate(nodes) if is_forward_node(node)), default=-1)


def realize(node: fx.Node) -> None:
    """Have Inductor write the value of a node to memory, whoever reads it."""
    node.meta["inductor_realize_to_strides"] = True


def is_convolution(node: fx.Node) -> bool:
    """Does a node call a convolution, or its backward?"""
    return node.target in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def keep_layouts(module: fx.GraphModule) -> None:
    """Have Inductor call the convolutions of a joint graph with tensors laid out as they come, not with channels last."""
    for node in filter(is_convolution, module.graph.nodes):
        node.meta[_AS_IT_COMES] = True


def keeps_layout(node: fx.Node) -> bool:
    """Does :func:`keep_layouts` say so of a convolution?"""
    return _AS_IT_COMES in node.meta


_AS_IT_COMES = "torch_echo_as_it_comes"


def is_backward_input(node: fx.Node) -> bool:
    """Is the placeholder one that only the backward part gets?"""
    return "tangents" in str(node.target) or "bwd_" in str(node.target)


def size_hint(size: Any) -> int:
    """A size; where it is a symbol, the one that it had when it was traced, without guarding on it."""
    if isinstance(size, torch.SymInt):
        from torch.fx.experimental import symbolic_shapes

        named: Any = symbolic_shapes  # of the two, the second is 2.11's, which did not tell uses of a hint apart yet
        hint = getattr(named, "optimization_hint", None) or named.size_hint
        return int(hint(size, fallback=1))
    return int(size)


def depends_on_data(value: Any) -> bool:
    """Has a fake value, or one in a list of such, a size that only data tells?"""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(value, (list, tuple)):
        return any(map(depends_on_data, value))
    return isinstance(value, (torch.Tensor, torch.SymInt)) and bool(free_unbacked_symbols(value))


def layer_of(node: fx.Node) -> str:
    """Module path of a node in a joint graph; a backward node has that of the forward op that it belongs to."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _PATH_NOISE.sub("", path).strip(".")


def bfloat16_by_onednn() -> bool:
    """Has this CPU what oneDNN needs for bfloat16?"""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def own_parameters(module: torch.nn.Module) -> Collection[torch.nn.Parameter | None]:
    """The parameters of the module itself, without those of the modules in it."""
    return module._parameters.values()


def flat_weights(module: torch.nn.RNNBase) -> Any:
    """The weights of a recurrent module in the order in which its kernels take them, up to date."""
    module._update_flat_weights()
    return module._flat_weights


def unknown_size(like: torch.Tensor, likely: Any) -> Any:
    """A new symbol for a size that depends on data; estimates take it to be as `likely`. `like`: any fake tensor."""
    from torch._library.fake_impl import allocate_size

    shapes: Any = like.fake_mode.shape_env  # type: ignore[attr-defined]
    size: Any = allocate_size(shapes)
    shapes.var_to_hint_override[size.node.expr] = size_hint(likely)
    return size


_PATH_NOISE = re.compile(r"^L\['\w+'\]|\._modules|\['|'\]|\[\"|\"\]|_orig_mod")


def node_count(module: fx.GraphModule) -> int:
    """Nodes of a graph, with those of the graphs that it calls."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    return sum(len(graph.nodes) for graph in graphs)


def node_name(node: fx.Node) -> str:
    """Name of the op that a node calls, as ``aten::name``."""
    target = node.target
    return op_name(target)[0] if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def is_region(joint: fx.Graph) -> bool:
    """Is it the joint graph of a ``torch.compiler.nested_compile_region``, which others call, instead of a graph's own?"""
    return "desc" not in list(joint.nodes)[-1].meta


def region_of(node: fx.Node) -> fx.Graph | None:
    """The graph of the nested region that a node calls; its arguments begin with the third."""
    if node.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    owner: Any = node.graph.owning_module
    name: Any = node.args[0]
    graph: fx.Graph = getattr(owner, name.target).graph
    return graph


def mutated_inputs(joint: fx.Graph) -> list[fx.Node | None]:
    """For each output of a joint graph: the primal that it is copied into when forward ends, or None."""
    nodes = list(joint.nodes)
    by_desc = {node.meta["desc"]: node for node in nodes if node.op == "placeholder" and "desc" in node.meta}
    found: list[fx.Node | None] = []
    for desc in nodes[-1].meta["desc"]:
        mutated = getattr(desc, "mutated_input", None)
        found.append(by_desc[mutated] if mutated is not None else None)
    return found


def fake_mode(value: Any) -> Any:
    """Context in which ops are not run, but give fake tensors such as the value of a node in a joint graph has."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(value)
    assert mode is not None, "a joint graph without fake tensors"
    return mode


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node's op overwrites."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [n for n in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(n, fx.Node)]
    return found


def is_checkpointed(node: fx.Node) -> bool:
    """Is the node to be recomputed by the user's own wish, in a region of ``torch.utils.checkpoint``?"""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def tag_recompute(node: fx.Node, recompute: bool) -> None:
    """Tell PyTorch's partitioner what to do with a node of the forward pass. All share one region: no borders to save at."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if recompute else CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = 0


def partition(joint: fx.GraphModule, inputs: Any, tagged: bool, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own extraction of forward and backward; by tags, or as it would without us."""
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    return (default_partition if tagged else min_cut_rematerialization_partition)(joint, inputs, **kwargs)


MANY_READERS = 4
"""A value with more than so many readers has a gradient of as many parts."""
FUSED_BUFFERS = 16
"""Buffers that a kernel reads and writes at most, where there are such values."""


def _has_gradient(node: fx.Node) -> bool:
    """Has the value of a node of a graph of Dynamo's a gradient, as indices have none? It has one where that is not known."""
    value = node.meta.get("example_value")
    return value.requires_grad if isinstance(value, torch.Tensor) else True


def passing(error: Exception) -> Exception:
    """What a backend raises to have the caller of compiled code get `error`; Dynamo wraps others in a BackendCompilerFailed."""
    from torch._dynamo.exc import ShortenTraceback

    class Passing(ShortenTraceback):
        def remove_dynamo_frames(self) -> Any:  # what Dynamo raises in place of this
            return error

    return Passing(str(error), first_useful_frame=None)


def substitute(
    functions: Mapping[Any, Callable[..., Any]],
    handled: Callable[[torch.nn.Module], bool],
    for_backend: Callable[[Any], bool],
) -> None:
    """Where a backend compiles for which `for_backend` is true, have Dynamo trace other functions in place of those of PyTorch's
    that are the keys, and take in recurrent modules, which it refuses otherwise, if they are `handled`. For others nothing
    changes.
    """
    from torch._dynamo import config
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def ours(tx: Any) -> bool:
        backend: Any = innermost_backend(tx.output.compiler_fn)
        return for_backend(getattr(backend, "compiler_fn", backend))  # as torch.compile wraps it, or as it is

    known: dict[int, tuple[Any, Any]] = {id(f): (f, other) for f, other in functions.items()}  # not all can be hashed
    wrap_module = VariableBuilder.wrap_module

    @functools.wraps(wrap_module)
    def wrap(self: Any, value: Any) -> Any:
        if not handled(value) or not ours(self.tx):
            return wrap_module(self, value)
        with config.patch(allow_rnn=True):
            return wrap_module(self, value)

    def redirect(variable: Any, attribute: str) -> None:
        original = variable.call_function

        @functools.wraps(original)
        def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            _, other = known.get(id(getattr(self, attribute)), (None, None))
            if other is not None and ours(tx):
                given = [*self.self_args(), *args] if isinstance(self, UserFunctionVariable) else args
                return UserFunctionVariable(other).call_function(tx, given, kwargs)
            return original(self, tx, args, kwargs)

        variable.call_function = call

    VariableBuilder.wrap_module = wrap  # type: ignore[method-assign]
    redirect(TorchInGraphFunctionVariable, "value")
    redirect(SkipFunctionVariable, "value")
    redirect(UserFunctionVariable, "fn")


def inductor(
    module: fx.GraphModule,
    inputs: Any,
    partitioner: Callable[..., Any],
    key: str,
    patches: dict[str, Any],
    order: Order,
    cached: bool = True,
) -> Callable[..., Any]:
    """Inductor, with a partitioner in place of its own; its caches take `key` into account. `patches`: its options. `order`: of
    its kernels. `cached` False: the partitioner is called even if it was in an earlier run; kernels are still looked for.

    Unless they say otherwise, Inductor gives buffers back when they have been read: to hold on to one until another of its size
    is wanted costs memory, and spares next to nothing where PyTorch's allocators do the same. And where the gradients of many
    readers are summed up, kernels have few buffers: not all the parts of a sum are to be there at once.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    own: dict[str, Any] = {"allow_buffer_reuse": False}
    read_often = any(len(node.users) > MANY_READERS and _has_gradient(node) for node in module.graph.nodes)
    if read_often and hasattr(config, "max_fusion_unique_io_buffers"):
        own["max_fusion_unique_io_buffers"] = FUSED_BUFFERS
    patches = {**own, **patches}

    class Given(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            del kwargs["compiler"]
            return partitioner(gm, joint_inputs, **kwargs)

        def __reduce__(self) -> Any:  # as part of the keys of caches
            return str, (key,)

        def uuid(self) -> Any:
            return key, sources_key()

    patches["custom_partitioner_fn"] = Given()
    inner = _inner_compiler(order)
    with contextlib.nullcontext() if cached else functorch_config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
            module, inputs, inner_compile=inner, config_patches=patches
        )
    return compiled


@dataclass(frozen=True)
class Code:
    """What Inductor generates for a graph, in Python."""

    source: str
    constants: dict[str, Any]
    """Names that it reads."""

    def dry(self, fake: Any) -> Callable[[list[Any]], Any]:
        """Its function of a list of tensors, which it empties; to be called within the fake mode `fake`. Buffers are fake tensors,
        kernels do nothing. Raises CaptureError for code of another form than is known."""
        import torch._inductor.async_compile

        known: dict[str, Any] = {"__name__": "generated"}
        known |= {n: fake.from_tensor(c) if isinstance(c, torch.Tensor) else c for n, c in self.constants.items()}
        with mock.patch.object(torch._inductor.async_compile, "AsyncCompile", _NoKernels):
            exec(compile(self.source, "generated", "exec"), known)
        if not callable(known.get("call")) or "reinterpret_tensor" not in known:
            raise CaptureError("its code has another form than is known")
        for name in list(known):
            if name.startswith("empty_strided_"):
                device = torch.device(name.split("_")[2]) if name != "empty_strided_p2p" else CPU
                known[name] = functools.partial(_empty_strided, device)
        known["reinterpret_tensor"] = _reinterpreted
        known["assert_size_stride"] = known["assert_alignment"] = _nothing
        call: Callable[[list[Any]], Any] = known["call"]
        return call


def _empty_strided(device: torch.device, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, int(tensor.storage_offset()) + offset)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _NoKernel:
    """In place of a compiled kernel."""

    run = staticmethod(_nothing)
    __call__ = staticmethod(_nothing)


class _NoKernels:
    """In place of Inductor's AsyncCompile."""

    def wait(self, scope: dict[str, Any]) -> None:
        pass

    def __getattr__(self, language: str) -> Callable[..., _NoKernel]:
        return lambda *source, **settings: _NoKernel()


def fresh_fake_mode() -> Any:
    """A fake mode of its own, without symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


Order = Callable[
    [
        list[frozenset[int]],
        list[tuple[int, tuple[int, ...], tuple[int, ...], bool]],
        list[tuple[int, int]],
        list[list[int]],
    ],
    Any,
]
"""From kernels and buffers, as in :class:`torch_echo.compile._order.Kernels`, and the kernels' places in the graph, by their first
ops and by their last ones, to an order of the kernels, or None."""


def _inner_compiler(order: Order) -> Callable[..., Any]:
    """Inductor's compiler of a forward or a backward graph: `order` for its kernels, and layouts as :func:`keep_layouts` says."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def compile_inner(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        kept = any(map(keeps_layout, module.graph.nodes))
        layouts = (
            config.patch(layout_optimization=False) if kept else contextlib.nullcontext()
        )  # in keys of caches, too
        with kernel_order(order), layouts:
            return compile_fx_inner(module, *args, **kwargs)

    return compile_inner


@contextlib.contextmanager
def kernel_order(order: Order) -> Iterator[None]:
    """Where Inductor orders its kernels for the least peak, have `order` look for a better one than it finds."""
    import torch._inductor.memory as memory

    theirs = memory.reorder_for_peak_memory

    @functools.wraps(theirs)
    def reorder(nodes: Any, name_to_buf: Any, fused: Any, inputs: Any, outputs: Any, *args: Any, **more: Any) -> Any:
        found = theirs(nodes, name_to_buf, fused, inputs, outputs, *args, **more)
        try:
            better = order(*_kernels(found, inputs, outputs))
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # what is read there is private
            warnings.warn(f"torch-echo leaves the order of kernels to Inductor: {error!r}", stacklevel=2)
            return found
        return found if better is None else [found[i] for i in better]

    with mock.patch.object(memory, "reorder_for_peak_memory", reorder):
        yield


def _kernels(nodes: list[Any], inputs: Any, outputs: Any) -> tuple[Any, Any, Any, Any]:
    """What Inductor's scheduler knows of its nodes and their buffers, once it has planned for the least peak."""
    from torch._inductor import ir
    from torch._inductor.memory import get_freeable_input_buf

    place = {node: i for i, node in enumerate(nodes)}
    blocks: dict[str, tuple[int, list[int], list[int], bool]] = {}
    parts: dict[str, str] = {}
    for name, buffer in get_freeable_input_buf(nodes, inputs).items():
        known = buffer.mpi_buffer
        blocks[name] = known.size_free, [], [place[n] for n in known.succ_nodes], name in outputs
    for node in nodes:
        for buffer in node.get_outputs():
            name, known = buffer.get_name(), buffer.mpi_buffer
            nbytes, writer = known.size_free, place[node]
            readers = [place[n] for n in known.succ_nodes if n in place]
            if nbytes and not known.size_alloc:  # one of several outputs of a call, made with the others
                calls = [
                    b for b in node.mpi_node.pred_buffers if b.mpi_buffer.size_alloc and not b.mpi_buffer.size_free
                ]
                writer = min(
                    (place[n] for n in node.mpi_node.pred_nodes if {*n.get_outputs()} & {*calls}), default=writer
                )
            if not node.is_extern() and name not in outputs and all(r == place[node] for r in readers):
                nbytes = 0  # never leaves its kernel
            blocks[name] = nbytes, [writer], readers, name in outputs
            if isinstance(buffer.node.layout, ir.NonOwningLayout):
                parts[name] = buffer.node.layout.view.get_name()
    for name, whole in parts.items():
        while whole in parts:
            whole = parts[whole]
        _, writers, readers, stays = blocks[name]
        blocks[name] = 0, writers, readers, stays
        if whole in blocks:
            blocks[whole][1].extend(writers)
            blocks[whole][2].extend(readers)
    number = {name: i for i, name in enumerate(blocks)}
    waits = [frozenset(place[n] for n in node.mpi_node.pred_nodes) for node in nodes]
    found = [(n, tuple(writers), tuple(readers), stays) for n, writers, readers, stays in blocks.values()]
    pairs = [
        (number[old], number[new])
        for node in nodes
        if not node.is_extern()
        for old, new in _overwrites(node)
        if old in number and new in number and found[number[old]][0] == found[number[new]][0] > 0
    ]
    return waits, found, pairs, [[node.min_order for node in nodes], [node.max_order for node in nodes]]


def _overwrites(node: Any) -> Iterator[tuple[str, str]]:
    """Pairs of buffers of which a kernel of Inductor's may write the second over the first, when it has read that."""
    from torch._inductor.scheduler import NopKernelSchedulerNode

    scheduler, parts = node.scheduler, node.get_nodes()
    for part in parts:
        for read in part.read_writes.reads:
            buffer = scheduler.name_to_buf.get(read.name) or scheduler.name_to_donated_buffer.get(read.name)
            if buffer is None or isinstance(buffer.defining_op, NopKernelSchedulerNode):
                continue
            if sum(any(r.name == read.name for r in other.read_writes.reads) for other in parts) > 1:
                continue
            if any(user.can_inplace and user.get_name() == part.get_name() for user in buffer.users):
                yield from ((read.name, written.get_name()) for written in part.get_outputs())


def generated_code(
    module: fx.GraphModule, inputs: list[Any], donated: list[int], order: Order, *, backward: bool, visible: int
) -> Code:
    """The code that Inductor, as it is configured, makes of the forward or the backward graph of a joint graph that is being
    compiled; no kernel is compiled. `donated`: positions of the inputs of backward that it may write over. `order`: of kernels.
    `visible`: so many outputs come first that are not for backward. The graph is used up.

    Raises CaptureError if Inductor generates no Python, and what Inductor raises.
    """
    import torch._inductor.graph
    from torch._inductor import config
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool

    if config.cpp_wrapper:
        raise CaptureError("its code is in C++")
    made: list[Code] = []

    def generate(lowering: Any) -> Any:
        code, _ = lowering.codegen()
        made.append(Code(code.value, {**lowering.constants, **lowering.torchbind_constants}))
        return types.SimpleNamespace(call=_nothing)

    outputs: Any = list(module.graph.nodes)[-1]
    last = len(outputs.args[0]) if backward else visible
    outputs.meta["user_visible_output_idxs"] = [i for i in range(last) if isinstance(outputs.args[0][i], fx.Node)]
    if not torch._functorch.config.donated_buffer:
        donated = []
    with (
        mock.patch.object(GraphLowering, "compile_to_module", generate),
        mock.patch.object(torch._inductor.graph, "get_donated_idxs", return_value=donated),
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        _inner_compiler(order)(
            module,
            inputs,
            cudagraphs=BoxedBool(False),
            is_backward=backward,
            boxed_forward_device_index=BoxedDeviceIndex(None),
        )
    if len(made) != 1:
        raise CaptureError("it made no code")
    return made[0]


def sources_key() -> Any:
    """Changes with the sources of this package."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(tuple(str(f) for f in sorted(Path(__file__).parent.rglob("*.py"))))


def inductor_cache() -> Path:
    """The folder of Inductor's caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def graphs_compiled() -> int:
    """How many graphs Dynamo has given to backends in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def inductor_options(mode: str | None, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the options given to ``torch.compile``, those that Inductor knows, with those of its `mode`, and the others."""
    from torch._inductor import config, list_mode_options

    known = config.get_config_copy()
    patches: dict[str, Any] = dict(list_mode_options(mode)) if mode else {}
    own = {}
    for name, value in given.items():
        theirs = name.replace("-", "_")
        if theirs in known:
            patches[theirs] = value
        else:
            own[name] = value
    return patches, own


def eager_kernels(partitioner: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of PyTorch's kernels, called in order, on the parts that `partitioner` makes of joint graphs; arguments are let go
    of as they are consumed."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True
    )
    return backend
