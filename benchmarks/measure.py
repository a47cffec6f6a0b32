"""Bytes at the allocator, seconds and joules of steps, distances between gradients."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import Tensor

from benchmarks.workloads.base import Trainer
from torch_echo.memory import live_bytes

__all__ = ["MIB", "Bytes", "Meter", "Seeded", "distance", "held_bytes", "optimizer_bytes", "peak", "same", "total_peak"]

MIB = 2**20


class Seeded:
    """Steps of a trainer, each with the random numbers that belong to its number."""

    def __init__(self, trainer: Trainer, done: int = 0) -> None:
        self.trainer = trainer
        self.done = done

    def __call__(self) -> Tensor:
        """One step; its loss."""
        torch.manual_seed(1000 + self.done)
        self.done += 1
        return self.trainer.step()


def peak(step: Callable[[], Any]) -> int:
    """Most bytes alive on the CPU during `step` that were not alive before it, from the profiler's allocation events.

    Blocks older than the step and freed in it are not counted: clear the gradients before.
    """
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    results: Any = profile.profiler
    live = most = 0
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@dataclass(frozen=True)
class Bytes:
    """A step at the allocator."""

    peak: int
    """Everything that is alive at once."""
    state: int
    """Parameters, buffers and optimizer state: what no system changes."""
    reserved: int | None = None
    """What the allocator holds of the device; on CUDA only."""


def held_bytes(trainer: Trainer) -> int:
    """Bytes of parameters, buffers and optimizer state, each storage once."""
    return _nbytes([*trainer.module.parameters(), *trainer.module.buffers(), *_optimizer_state(trainer)])


def optimizer_bytes(trainer: Trainer) -> int:
    """Bytes of optimizer state."""
    return _nbytes(_optimizer_state(trainer))


def _optimizer_state(trainer: Trainer) -> list[Tensor]:
    return [t for state in trainer.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def total_peak(step: Seeded, device: torch.device) -> Bytes:
    """The peak of a step, from cleared gradients on, and what of it is state."""
    step.trainer.clear()
    gc.collect()
    state = held_bytes(step.trainer)
    if device.type != "cuda":
        before = live_bytes(device)
        return Bytes(before + peak(step), state)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return Bytes(torch.cuda.max_memory_allocated(device), state, torch.cuda.max_memory_reserved(device))


def same(a: Trainer, b: Trainer) -> bool:
    """Are gradients, parameters and buffers bit-equal?"""
    pairs = [(p.grad, q.grad) for p, q in zip(a.parameters, b.parameters, strict=True)]
    pairs += list(zip(a.module.state_dict().values(), b.module.state_dict().values(), strict=True))
    return all((x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def distance(mine: Iterable[Tensor | None], theirs: Sequence[Tensor | None]) -> tuple[bool, float]:
    """Are they equal to the bit, and how far are they apart: the norm of the difference over the norm of `theirs`."""
    equal, apart, norm = True, 0.0, 0.0
    for a, b in zip(mine, theirs, strict=True):
        if a is None or b is None:
            equal &= a is None and b is None
            apart, norm = (apart, norm) if a is b else (apart + 1.0, norm + 1.0)
            continue
        a = a.to(b.device)
        equal &= torch.equal(a, b)
        apart += float((a.double() - b.double()).square().sum())
        norm += float(b.double().square().sum())
    return equal, (apart / norm) ** 0.5 if norm else float(apart > 0)


class Meter:
    """Seconds of steps: of this process's CPU where that is the device, else of the clock on the wall; on CUDA also joules, where
    nvidia-ml-py is there to tell."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._energy = _energy(device) if device.type == "cuda" else None

    def __call__(self, step: Callable[[], Any], count: int = 1) -> dict[str, float]:
        """Of `count` steps: for one of them, in seconds and joules."""
        gc.collect()
        self.wait()
        energy = self._energy() if self._energy else 0.0
        began = self._clock()
        for _ in range(count):
            step()
        self.wait()
        found = {"seconds": (self._clock() - began) / count}
        if self._energy:
            found["joules"] = (self._energy() - energy) / count
        return found

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _clock(self) -> float:
        return time.perf_counter() if self.device.type == "cuda" else time.process_time()


def _energy(device: torch.device) -> Callable[[], float] | None:
    """Reads the joules that the GPU has used so far, if NVML can be asked."""
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
