"""The backends of ``torch.compile`` beside PyTorch's own: ``python -m benchmarks.compiled``. Prints the README's table.

One process per workload; all systems are compiled first, then take turns. Peaks at the allocator, above parameters and inputs;
for the echo backends also as they were predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

from benchmarks import process
from benchmarks.measure import MIB, peak
from benchmarks.workloads import load

WORKLOADS = ("gpt", "unet", "decoder")
OVERHEADS = (0.0, 0.05, 0.15)
SYSTEMS = ("eager", "inductor", *(f"{backend}:{x}" for backend in ("echo", "echo_eager") for x in OVERHEADS))
STEPS = 8
"""Of the decoder: Inductor compiles an unrolled loop for minutes."""


def prepare(workload: str, system: str) -> tuple[Callable[[], None], dict[str, Any]]:
    """A compiled training step that has run twice, and what was found on the way."""
    from torch_echo.compile import plans

    if workload == "decoder":
        import benchmarks.workloads.decoder

        benchmarks.workloads.decoder.TARGET = STEPS
    made = load(workload)
    module: Any = made.module
    backend, _, overhead = system.partition(":")
    plans.clear()
    options = {"max_overhead": float(overhead)} if overhead else None
    run = module if system == "eager" else torch.compile(module, backend=backend, options=options)

    def step() -> None:
        torch.manual_seed(0)
        run(*made.inputs).backward()

    def clear() -> None:
        module.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step()
    found: dict[str, Any] = {"system": system, "compile": time.perf_counter() - began}
    clear()
    step()
    clear()
    found["peak"] = peak(step)
    clear()
    if plans:
        graph, plan = plans[-1].graph, plans[-1].plan
        own = graph.base_bytes + graph.older_bytes
        found |= {"predicted": plan.peak - own, "estimate": 1 + plan.overhead}

    def timed() -> None:
        step()
        clear()

    return timed, found


def measure(workload: str, rounds: int) -> list[dict[str, Any]]:
    """All systems on one workload."""
    torch._dynamo.config.recompile_limit = 4 * len(SYSTEMS)  # all are compilations of one and the same code
    made = [prepare(workload, system) for system in SYSTEMS]
    seconds: list[list[float]] = [[] for _ in made]
    for i in range(rounds):
        for which in range(len(made)) if i % 2 else reversed(range(len(made))):
            began = time.process_time()
            made[which][0]()
            seconds[which].append(time.process_time() - began)
    for times, (_, found) in zip(seconds, made, strict=True):
        found["seconds"] = statistics.median(times)
        found["ratio"] = statistics.median(a / b for a, b in zip(times, seconds[1], strict=True))
    return [found for _, found in made]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        print(json.dumps(measure(args.case, args.rounds)))
        return
    print("| model | " + " | ".join(SYSTEMS) + " |")
    print("| --- |" + " --- |" * len(SYSTEMS))
    for workload in WORKLOADS:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCH_ECHO_CACHE": folder}
            given = ("--case", workload, "--rounds", str(args.rounds))
            found = process.run("benchmarks.compiled", *given, environment=process.environment(**caches))
        cells = []
        for f in found:
            text = f"{f['peak'] / MIB:.1f} ({f['ratio']:.2f}x"
            cells.append(text + (f", {f['predicted'] / f['peak'] - 1:+.1%})" if "predicted" in f else ")"))
        print(f"| {workload} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
