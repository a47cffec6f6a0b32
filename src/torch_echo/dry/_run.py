"""A dry run: a training step in which no kernel is called.

Everything else happens as ever: the script's Python, autograd in C++ with its in-place accumulation, hooks, optimizers, PyTorch's
allocator. Tensors are real ones, of full size, but nothing is written to their memory, so that the system has no pages to give
(it does at the first write). So whoever counts allocations sees what a real step would show, to the byte, but for what kernels
allocate for themselves, which is modelled (``_workspace``).

How: below autograd and modes, and above the choice of a kernel, the dispatcher has a key that PyTorch leaves to others. A fallback
there sees every op of this thread and of the backward passes that it starts. PyTorch's FakeTensorMode will not do: it is a
dispatch mode, and under one autograd takes other formulas, with other peaks.

What is not modelled: memory that does not come from PyTorch's allocator; fragmentation; code that looks at content
(``.item()``) that was not computed, which raises CaptureError.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from torch_echo import compat
from torch_echo._script import script_line
from torch_echo.cost import CostCache, OpSpec, device_key, spec_of, written
from torch_echo.dry._calls import LENGTHS, MASKED, Call, Way, describe, name_of, tensors_in, way_of, without_numbers
from torch_echo.dry._cpu import CPUKernels
from torch_echo.dry._cuda import GPUKernels, as_on_gpu
from torch_echo.errors import CaptureError

__all__ = ["DryRun"]


class DryRun:
    """Context in which no kernel is called. What is built and trained in it must be built in it."""

    def __init__(self, device_type: str = "cpu") -> None:
        """`device_type`: "cuda" has PyTorch's functions choose their ops as on a GPU. Tensors are the CPU's all the same."""
        self.calls: list[tuple[int, Call]] = []
        """Every call that would have run a kernel, in order: the autograd node that made it (by sequence number; -1 outside of
        backward), and what it was."""
        self._ways: dict[Any, Way] = {}
        self._known: dict[tuple[OpSpec, bool], Call] = {}
        self._fakes = compat.Fakes()
        self._cache = CostCache(device_key(torch.device("cpu")))
        gpu = device_type == "cuda"
        self._kernels = GPUKernels() if gpu else CPUKernels(self._cache)
        self._gpu = gpu
        self._made: dict[int, int] = {}
        """Storages allocated in here, and where their content is. Those that are gone stay until another comes to their place."""
        self._hollow: set[int] = set()
        """Those of them whose content was not computed."""

    def __enter__(self) -> DryRun:
        global _running
        if _running is not None:
            raise CaptureError("a dry run is under way already")
        compat.on_kernel(_kernel)
        self._random = torch.get_rng_state().numpy().copy()  # no tensor, which would count
        self._stack = ExitStack()
        if self._gpu:
            self._stack.enter_context(compat.foreach_everywhere())
            self._stack.enter_context(as_on_gpu())
        self._stack.enter_context(compat.truncation_left_out())
        self._stack.enter_context(compat.without_kernels())
        _running = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _running
        _running = None
        self._stack.close()
        compat.off_kernel()
        self._cache.save()
        torch.set_rng_state(torch.from_numpy(self._random))

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What takes the place of a kernel."""
        args = compat.with_tensors(func, args)
        if func is torch.ops.aten.lift_fresh.default:  # made of numbers by no op; perhaps where a hollow one was
            self._hollow.discard(compat.place_of(args[0])[0])
        way = self._ways.get(func)
        if way is None:
            way = self._ways[func] = way_of(func)
        if way is Way.RUN:
            return self._run(func, args, kwargs)
        spec = without_numbers(func, spec_of(func, args, kwargs))
        name = name_of(func)
        if name in LENGTHS:
            self._need([args[i] for i in LENGTHS[name]], spec)
            self._known.pop((spec, torch.is_grad_enabled()), None)
        elif name in MASKED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            self._need([t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)], spec)
            with compat.with_kernels():
                indices = [part for t in args[1] for part in _numbers(t)]
            return self.kernel(func, (args[0], indices, *args[2:]), kwargs)
        key = spec, torch.is_grad_enabled()
        call = self._known.get(key)
        if call is None:
            call = self._known[key] = describe(func, spec, way, args, kwargs, self._fakes, self._kernels)
        if call.way is Way.RUN:
            with compat.with_kernels():
                return func(*args, **kwargs)
        if call.way is Way.INSIDE:
            return compat.call_kernel(func, args, kwargs)
        if call.way is Way.READ:
            self._need([args, kwargs], spec)
        node = compat.current_node()
        self.calls.append((-1 if node is None else compat.node_sequence(node), call))
        tensors = list(tensors_in((args, kwargs)))
        for t in tensors:
            if isinstance(t, torch.nn.Parameter) and compat.place_of(t)[0] not in self._made:
                raise CaptureError(
                    f"{script_line()}: a parameter of size {list(t.shape)} was made before the prediction began: make the model "
                    "in the function that is given"
                )
        hollow = any(self._is_hollow(t) for t in tensors)
        if not hollow and (call.small or call.way is Way.READ):
            return self._run(func, args, kwargs)
        with compat.with_kernels():
            result = call.result(tensors)
            if call.workspace:
                torch.UntypedStorage(call.workspace)
        for t in (*tensors_in(result), *tensors_in(written(func, args, kwargs))):
            storage, content = compat.place_of(t)
            self._made[storage] = content
            self._hollow.add(storage)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = {compat.place_of(t)[0] for t in tensors_in((args, kwargs)) if _plain(t)}
        with compat.with_kernels():
            result = func(*args, **kwargs)
        for t in tensors_in(result):
            if compat.sparse_passes_by and t.layout is not torch.strided:
                raise CaptureError(f"{script_line()}: {func}: only dense tensors are run without content")
            if _plain(t):
                storage, content = compat.place_of(t)
                if storage not in given or self._made.get(storage) != content:  # a new one may be where another was
                    self._made[storage] = content
                    self._hollow.discard(storage)
        return result

    def _need(self, what: Any, spec: OpSpec) -> None:
        """Content of these arguments is going to be looked at."""
        if any(self._is_hollow(t) for t in tensors_in(what)):
            raise CaptureError(
                f"{script_line()}: {spec.op} reads what a tensor contains, but in a prediction nothing is computed: what the "
                "step does may not depend on it"
            )

    def _is_hollow(self, tensor: torch.Tensor) -> bool:
        storage, content = compat.place_of(tensor)
        return storage in self._hollow and self._made[storage] == content


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _numbers(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Of an index, the same in numbers: of a mask, those along each of its dimensions."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return list(index.nonzero().unbind(1))


_running: DryRun | None = None


def _kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
    if _running is None:  # the context's thread state outlives it on another thread
        with compat.with_kernels():
            return func(*args, **kwargs)
    return _running.kernel(func, args, kwargs)
