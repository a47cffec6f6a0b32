"""A whole run: what was asked for, and its results."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Budget, Harness
from benchmarks.output.files import head
from benchmarks.scale import scale, throughput
from benchmarks.systems import Case
from benchmarks.workloads import WORKLOADS, size_of

__all__ = ["Asked", "run"]


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    preset: str
    device: str
    cases: dict[str, list[Case]]
    """By workload, eager first."""
    changes: dict[str, int]
    """Fields of the workloads' sizes that are others than the preset's."""
    minutes: float
    jobs: int
    rounds: int | None
    scale: bool
    limit: int | None


def run(
    asked: Asked, say: Callable[[str, Case, str], None], done: Callable[[dict[str, Any], str], None]
) -> dict[str, Any]:
    """Measure. `say` is told what happens; `done`, after each workload, the results so far and the workload's name."""
    budget = Budget(60 * asked.minutes)
    results = head() | {
        "preset": asked.preset, "device": asked.device, "workloads": {}, "records": [], "scale": [], "throughput": [],
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="torch-echo-bench-"))
    try:
        harness = Harness(asked.preset, asked.device, folder, asked.jobs, asked.rounds, budget.deadline, say)
        parts = len(asked.cases) * (2 if asked.scale else 1)
        for name, cases in asked.cases.items():
            results["records"] += harness.run(name, cases, budget.ends(parts), asked.changes)
            size = asdict(size_of(name, asked.preset, **asked.changes))
            results["workloads"][name] = {"title": WORKLOADS[name].title, "size": size}
            parts -= 1
            if asked.scale:
                rows = scale(harness, name, asked.limit, budget.ends(parts))
                results["scale"] += rows
                if rows:
                    results["throughput"] += throughput(harness, name, rows[0]["limit_bytes"], budget.ends(parts))
                parts -= 1
            results |= {"seconds": time.monotonic() - budget.began, "load": os.getloadavg()}
            done(results, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results
