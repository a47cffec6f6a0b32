"""Run a training script and measure, at the allocator, the peak of some of its steps. Knows nothing of torch-echo.

    python measure.py PEAKS.json FIRST LAST train.py [args]

A step counts from the model's call to the end of the optimizer's step. Its peak is the most bytes alive at any moment
of it that were not alive when it began: what it needs above parameters, optimizer state and data. The figures are the
running sum of the profiler's allocation events on the CPU, and the allocator's own counter on CUDA. Steps that another
profiler watches are left out.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler logs each start and stop

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook


class Meter:
    """Peak of one step."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self.profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self.profile.start()

    def stop(self) -> int:
        """The peak in bytes."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() - self.base
        self.profile.stop()
        results: Any = self.profile.profiler
        events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            if event.device_type().name == "CPU":
                live += event.nbytes()
                peak = max(peak, live)
        return peak


def profiled() -> bool:
    """Is another profiler at work?"""
    enabled: bool = torch._C._autograd._profiler_enabled()
    return enabled


def main() -> None:
    """Run the script as ``__main__``; write the peaks, by step, when it has ended."""
    file, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    peaks: dict[int, int] = {}
    step = 1
    meter: Meter | None = None

    def before_call(module: torch.nn.Module, args: Any) -> None:
        nonlocal meter
        if first <= step <= last and meter is None and torch.is_grad_enabled() and not profiled():
            meter = Meter()

    def after_step(*_: Any) -> None:
        nonlocal meter, step
        if meter is not None:
            peaks[step] = meter.stop()
            meter = None
        step += 1

    register_module_forward_pre_hook(before_call)
    register_optimizer_step_post_hook(after_step)
    sys.argv[:] = sys.argv[4:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        file.write_text(json.dumps(peaks))


if __name__ == "__main__":
    main()
