"""Durations of ops by running them, once each, on made-up data.

What is timed is what re-running an op in a training step costs: the call from Python, the kernel, the allocation of
what it makes and its release. Inputs come from beyond the fast caches, as they do in a step that ran other ops since
they were made: a block of memory is written before each run. (They may still come from a large shared cache.)

A measurement leaves no trace in the user's program: random generators stand where they stood, autograd and autocast do
not see it, nor do dispatch modes. On CUDA it raises the allocator's peak statistics and leaves its blocks in the
allocator's cache.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch

from torch_echo.compat import below_autograd, without_tracing
from torch_echo.cost._cache import CostCache
from torch_echo.cost._flops import is_view, work_of, written
from torch_echo.cost._spec import OpSpec, materialize

__all__ = ["MeasuredCost", "Remembered", "clock", "measure", "scrubber", "undisturbed"]

logger = logging.getLogger("torch_echo.cost")

BUDGET = 0.03
"""Seconds for one op, unless three runs take longer."""

LONG = 0.05
"""An op that takes longer than this is run twice in all."""

MAX_RUNS = 15
MIN_RUNS = 3

_SCRUB_BYTES = {"cpu": 32 << 20, "cuda": 64 << 20}
"""Written before each run: evicts a CPU core's own caches and a part of the shared one, or a GPU's L2 cache."""

_SLACK = 1 << 18
_MMAP_THRESHOLD_MAX = 31 << 20
"""Largest block that glibc's allocator may come to serve from its heap instead of from fresh pages."""

_SAFE_NAMESPACES = frozenset(["aten", "prims", "torchvision", "mkldnn", "mkl", "quantized", "torch_echo"])
"""Ops that may be run on made-up data. A collective would wait for other processes; a user's op may do anything."""


class Estimate(Protocol):
    """What takes over where an op cannot be measured."""

    def seconds(self, func: Any, spec: OpSpec) -> float:
        """Estimated duration."""
        ...

    def save(self) -> None:
        """Write its calibration to the cache file."""
        ...


class Remembered:
    """A number about op calls that is found by running each once, and remembered in a cache file between processes.

    ``fallbacks`` tells which ops could not be run on made-up data, and why.
    """

    section: ClassVar[str]
    """Of the cache file."""

    def __init__(self, cache: CostCache) -> None:
        self._cache = cache
        self._known: dict[OpSpec, float] = {}
        self.fallbacks: dict[str, str] = {}
        """By the op's key: the reason why it was not run."""

    def _of(self, func: Any, spec: OpSpec) -> float:
        known = self._known.get(spec)
        if known is None:
            known = self._known[spec] = self._find(func, spec)
        return known

    def _find(self, func: Any, spec: OpSpec) -> float:
        # A view costs the same whatever it shows; in a loop over time each of its indices would be another description.
        key = f"{spec.op}(view)" if is_view(func) else spec.key()
        found = self._cache.get(self.section, key)
        if found is not None:
            return found
        reason = self._refusal(func, spec)
        if reason is None:
            try:
                found = self._run(func, spec)
                self._cache.set(self.section, key, found)
                return found
            except Exception as error:
                # Made-up data need not suit an op, and an op may fail in any way; the training step must go on.
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.fallbacks[key] = reason
        logger.info("%s: %s is not known from a run: %s", self.section, key, reason)
        return self._instead(func, spec)

    def _refusal(self, func: Any, spec: OpSpec) -> str | None:
        return _refusal(func, spec)

    def _run(self, func: Any, spec: OpSpec) -> float:
        raise NotImplementedError

    def _instead(self, func: Any, spec: OpSpec) -> float:
        raise NotImplementedError


class MeasuredCost(Remembered):
    """Measures each op once. Ops that cannot be run on made-up data have the estimate's duration."""

    section = "ops"

    def __init__(self, cache: CostCache, estimate: Estimate) -> None:
        super().__init__(cache)
        self._estimate = estimate
        self._scrub: torch.Tensor | None = None

    def seconds(self, func: Any, spec: OpSpec) -> float:
        """Duration of one call. The first of its kind takes up to some 50 ms, later ones a few microseconds."""
        return self._of(func, spec)

    def save(self) -> None:
        """Write what was measured to the cache file, and let go of the memory used for measuring."""
        self._cache.save()
        self._estimate.save()
        self._scrub = None

    def _run(self, func: Any, spec: OpSpec) -> float:
        if self._scrub is None or self._scrub.device != spec.device():
            self._scrub = scrubber(spec.device())
        return measure(func, spec, scrub=self._scrub)

    def _instead(self, func: Any, spec: OpSpec) -> float:
        return self._estimate.seconds(func, spec)


def _refusal(func: Any, spec: OpSpec) -> str | None:
    """Why an op must not be run on made-up data; None if it may."""
    namespace = spec.op.partition(".")[0]
    if namespace not in _SAFE_NAMESPACES:
        return f"ops of {namespace} may do more than compute, so they are not run on made-up data"
    work = work_of(func, spec)
    needed, free = sum(t.unique_bytes() for t in spec.tensors()) + work.bytes_written, _free_bytes(spec.device())
    if needed > free // 2:
        return f"{needed} bytes needed, {free} free"
    return None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as file:
        return 1024 * int(next(line for line in file if line.startswith("MemAvailable")).split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def clock(device: torch.device) -> Callable[[], float]:
    """What ops and steps on `device` are timed by, in seconds. Where a CPU runs them on one thread, it is that thread's own time:
    what other programs do on the machine meanwhile does not count."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def scrubber(device: torch.device) -> torch.Tensor:
    """Memory to write before each run. Making it takes longer than many a measurement: hand it from one to the next."""
    with below_autograd():
        return torch.zeros(_SCRUB_BYTES[device.type] // 4, device=device)


def measure(
    func: Any,
    spec: OpSpec,
    *,
    budget: float = BUDGET,
    pick: Callable[[list[float]], float] = statistics.median,
    scrub: torch.Tensor | None = None,
) -> float:
    """Duration in seconds of one call that fits `spec`: the median (`pick`) of a few runs after a first one.

    It takes `budget` seconds, or three runs if they take longer, or fifteen if they take less. Raises what the op
    raises on made-up data.
    """
    device = spec.device()
    with undisturbed(device):
        generator = torch.Generator(device=device).manual_seed(0)
        args, kwargs = materialize(spec, generator)
        restore = _restorer(func, args, kwargs)
        scrub = scrubber(device) if scrub is None else scrub
        timed = _timed_cuda if device.type == "cuda" else _timed_cpu

        began, now = time.perf_counter(), clock(device)
        start = now()
        result = func(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        first = now() - start
        made = _nbytes(result)
        del result
        if device.type == "cpu":
            _make_room(made)
        times: list[float] = []
        if first > LONG:  # or was it something that is done once?
            restore()
            times = [timed(func, args, kwargs, device)]
            if times[0] > LONG / 2:
                return min(first, times[0])
        while len(times) < MIN_RUNS or (len(times) < MAX_RUNS and time.perf_counter() - began < budget):
            restore()
            scrub.add_(1)
            times.append(timed(func, args, kwargs, device))
        return pick(times)


@functools.cache
def _settle_allocator() -> None:
    """Bring glibc's allocator into the state of a process that has freed large tensors.

    Before, it takes each large block afresh from the system and gives it back at once, and ops seem to take several
    times as long as they do in a training step, most of it in page faults.
    """
    torch.empty(_MMAP_THRESHOLD_MAX, dtype=torch.uint8)


def _make_room(sizes: list[int]) -> None:
    """Leave free blocks for what the op makes, as a training step has them where earlier tensors were.

    They are a little larger: glibc does not put an aligned block into a hole of just its size, and in a loop of equal
    allocations it would go on to fresh pages each time.
    """
    _settle_allocator()
    blocks = [torch.zeros(n + _SLACK, dtype=torch.uint8) for n in [*sizes, max(sizes, default=0)]]
    blocks.clear()


def _nbytes(result: Any) -> list[int]:
    """Bytes of the tensors that an op returned."""
    found = result if isinstance(result, (list, tuple)) else [result]
    return [t.untyped_storage().nbytes() for t in found if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def _timed_cpu(func: Any, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> float:
    now = clock(device)
    start = now()
    func(*args, **kwargs)  # what it returns is released here, within the time
    return now() - start


def _timed_cuda(func: Any, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        func(*args, **kwargs)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _restorer(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], None]:
    """A function that gives the arguments that an op writes the contents that they had."""
    changed = [t for a in written(func, args, kwargs) for t in (a if isinstance(a, list) else [a])]
    tensors = [t for t in changed if isinstance(t, torch.Tensor)]
    originals = [t.clone() for t in tensors]

    def restore() -> None:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.copy_(original)

    return restore


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Below autograd, autocast and dispatch modes; afterwards random generators stand where they stood."""
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with warnings.catch_warnings(), without_tracing(), below_autograd():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
