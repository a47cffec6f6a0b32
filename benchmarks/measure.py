"""Bytes at the allocator, kernels run, seconds of steps."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from benchmarks.workloads.base import Trainer

__all__ = ["Seeded", "Times", "count_kernels", "interleave", "peak", "same"]

MIB = 2**20


def peak(step: Callable[[], None]) -> int:
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


def count_kernels(step: Callable[[], None], names: Sequence[str]) -> int:
    """How often `step` runs kernels of these names.

    The profiler sees an op twice where a dispatch mode passes it on: the inner event is not counted.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = (e for e in profile.events() if e.name in names)
    return sum(e.cpu_parent is None or e.cpu_parent.name != "PythonDispatchMode" for e in events)


class Seeded:
    """Steps of a trainer, each with the random numbers that belong to its number."""

    def __init__(self, trainer: Trainer, done: int = 0) -> None:
        self.trainer = trainer
        self.done = done

    def __call__(self) -> None:
        torch.manual_seed(1000 + self.done)
        self.done += 1
        self.trainer.step()


def same(a: Trainer, b: Trainer) -> bool:
    """Are gradients, parameters and buffers bit-equal?"""
    pairs = [(p.grad, q.grad) for p, q in zip(a.parameters, b.parameters, strict=True)]
    pairs += list(zip(a.module.state_dict().values(), b.module.state_dict().values(), strict=True))
    return all((x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


@dataclass
class Times:
    """Seconds of two kinds of steps that took turns: of this process's CPU, and of the clock on the wall."""

    cpu: list[tuple[float, float]] = field(default_factory=list)
    wall: list[tuple[float, float]] = field(default_factory=list)
    equal: bool = True
    """Were gradients, parameters and buffers bit-equal after each turn?"""

    def as_json(self) -> dict[str, Any]:
        """Medians; the ratio is the median over the turns of second / first."""
        out: dict[str, Any] = {"rounds": len(self.cpu)}
        for clock, pairs in (("cpu", self.cpu), ("wall", self.wall)):
            out[f"{clock}_base"] = statistics.median(a for a, _ in pairs)
            out[f"{clock}_seconds"] = statistics.median(b for _, b in pairs)
            out[f"{clock}_ratio"] = statistics.median(b / a for a, b in pairs)
        return out


def interleave(
    base: Callable[[], None], other: Callable[[], None], rounds: int, check: Callable[[], bool] | None = None
) -> Times:
    """Run the two in turns, each first in every second round."""
    times = Times()
    for i in range(rounds):
        seconds: dict[int, tuple[float, float]] = {}
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            step = (base, other)[which]
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            seconds[which] = time.process_time() - cpu, time.perf_counter() - wall
        times.cpu.append((seconds[0][0], seconds[1][0]))
        times.wall.append((seconds[0][1], seconds[1][1]))
        if check is not None:
            times.equal &= check()
    return times
