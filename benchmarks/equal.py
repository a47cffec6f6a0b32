"""Step times at equal measured peaks: ``python -m benchmarks.equal``.

PyTorch's ``activation_memory_budget`` beside the echo backends. For each budget PyTorch's step is compiled and its peak measured at
the allocator; torch-echo gets that peak as its memory budget (for Inductor, where the replay is off by some percent, the budget is
lowered until the measured peak fits). Then the two take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config

from benchmarks import process
from benchmarks.measure import MIB, interleave, peak
from benchmarks.workloads import load

CASES = (("gpt", "eager"), ("unet", "eager"), ("decoder", "eager"), ("gpt", "inductor"), ("unet", "inductor"))
BUDGETS = (0.8, 0.5, 0.3, 0.1)


def _theirs(kernels: str, budget: float) -> Callable[..., Any]:
    """A backend that is PyTorch's own with a budget."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from torch_echo import compat

    def backend(module: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            if kernels == "inductor":
                from torch._inductor.compile_fx import compile_fx

                return compile_fx(module, inputs)
            return compat.eager_kernels(min_cut_rematerialization_partition)(module, inputs)

    return backend


class _Step:
    """A compiled training step, and its measured peak."""

    def __init__(self, name: str, backend: Any, options: dict[str, Any] | None = None) -> None:
        made = load(name)
        self.module, self.inputs = made.module, made.inputs
        self.run = torch.compile(self.module, backend=backend, options=options)
        self()
        self()
        self.peak = peak(self._keep)
        self._clear()

    def _keep(self) -> None:
        torch.manual_seed(0)
        self.run(*self.inputs).backward()

    def _clear(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self._keep()
        self._clear()


def measure(name: str, kernels: str, rounds: int) -> list[dict[str, Any]]:
    """One row for each budget."""
    from torch_echo.compile import plans
    from torch_echo.memory import live_bytes

    torch._dynamo.config.recompile_limit = 64
    _Step(name, "echo_eager", {"max_overhead": 0.0, "cost": "analytic"})
    own = plans[-1].graph.older_bytes  # what the peaks are above
    rows = []
    for budget in BUDGETS:
        theirs = _Step(name, _theirs(kernels, budget))
        wanted = theirs.peak
        mine = None
        for _ in range(4):
            mine = None
            gc.collect()
            others = live_bytes(torch.device("cpu"))  # of this process, beside the model that is to be compiled
            options = {"memory_budget": own + others + wanted, "on_infeasible": "least"}
            mine = _Step(name, "echo" if kernels == "inductor" else "echo_eager", options)
            if mine.peak <= theirs.peak * 1.005:
                break
            wanted -= mine.peak - theirs.peak
        assert mine is not None
        times = interleave(theirs, mine, rounds).as_json()
        rows.append({"budget": budget, "theirs": theirs.peak, "mine": mine.peak, "ratio": times["cpu_ratio"]})
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        print(json.dumps(measure(*args.case, args.rounds)))
        return
    print("| model, kernels | " + " | ".join(f"budget {b:g}" for b in BUDGETS) + " |")
    print("| --- |" + " --- |" * len(BUDGETS))
    for name, kernels in CASES:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCH_ECHO_CACHE": folder}
            given = ("--case", name, kernels, "--rounds", str(args.rounds))
            rows = process.run("benchmarks.equal", *given, environment=process.environment(**caches))
        cells = [f"{r['theirs'] / MIB:.1f}, {r['mine'] / MIB:.1f} ({r['ratio']:.2f}x)" for r in rows]
        print(f"| {name}, {kernels} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
