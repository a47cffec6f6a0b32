"""What fits under a memory limit: the largest batch, the most layers; and the examples a second that come of it.

The peak grows linearly with batch and layers. Two sizes are recorded; the replay of each tells eager PyTorch's peak, that of
the plan within 15% extra time, and the least that any plan reaches; lines through them tell what fits. That size is then run,
smaller by a step where it does not fit after all. What could not be run (no time left, no memory) stays a prediction, and says so.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from benchmarks.harness import Harness, Record
from benchmarks.systems import Case
from benchmarks.workloads import size_of

__all__ = ["fits", "scale"]

VARIED = ("batch", "layers")
WITHIN = Case("tape", "0.15")
STEPS = 3
TRIES = 4
SHARES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Batches, against the preset's, for the throughput under the limit."""


def fits(limit: int, one: tuple[int, float], other: tuple[int, float]) -> int:
    """The largest size whose peak is within the limit, on the line through two (size, peak)."""
    (x, y), (u, v) = one, other
    slope = (v - y) / (u - x)
    return int(x + (limit - y) / slope) if slope > 0 else max(x, u)


def scale(harness: Harness, workload: str, limit: int | None, ends: float) -> list[Record]:
    """Rows for each field that is varied and each system. `limit`: bytes; None for eager PyTorch's peak at the preset's size."""
    size = asdict(size_of(workload, harness.preset))
    first = harness.alone(workload, WITHIN, STEPS)
    if "floor_bytes" not in first:
        return []
    limit = limit or first["predicted_eager_bytes"]
    systems = (
        ("eager", Case("eager"), "predicted_eager_bytes"),
        (str(WITHIN), WITHIN, "predicted_bytes"),
        ("tape, the limit as its budget", Case("tape", f"memory_budget={limit}"), "floor_bytes"),
    )
    rows = []
    for field in (f for f in VARIED if f in size):
        second = harness.alone(workload, WITHIN, STEPS, {field: 2 * size[field]})
        if "floor_bytes" not in second:
            continue
        for name, case, key in systems:
            line = (size[field], first[key]), (2 * size[field], second[key])
            row = {"workload": workload, "limit_bytes": limit, "varied": field, "system": name}
            rows.append(row | _largest(harness, workload, case, field, size, limit, line, ends))
    return rows


def throughput(harness: Harness, workload: str, limit: int, ends: float) -> list[Record]:
    """Examples a second at several batches, eager and with the limit as torch-echo's budget, as far as they fit."""
    batch = size_of(workload, harness.preset).batch
    rows = []
    for case in (Case("eager"), Case("tape", f"memory_budget={limit}")):
        for share in SHARES:
            if time.monotonic() > ends:
                break
            found = harness.alone(workload, case, STEPS, {"batch": round(share * batch)})
            if "peak_bytes" not in found or found["peak_bytes"] > limit:
                break
            speed = round(share * batch) / found["seconds"]
            rows.append(
                {
                    "workload": workload,
                    "system": case.system,
                    "batch": round(share * batch),
                    "examples_per_second": speed,
                }
            )
    return rows


def _largest(
    harness: Harness, workload: str, case: Case, field: str, size: dict[str, Any], limit: int, line: Any, ends: float
) -> Record:
    """The largest size that fits, measured if there is time."""
    (x, y), (u, v) = line
    value = max(1, fits(limit, *line))
    predicted = {"value": value, "peak_bytes": round(y + (value - x) * (v - y) / (u - x)), "measured": False}
    for _ in range(TRIES):
        if time.monotonic() > ends or value < 1:
            break
        found = harness.alone(workload, case, STEPS, {field: value})
        if "peak_bytes" in found and found["peak_bytes"] <= limit:
            speed = (value if field == "batch" else size["batch"]) / found["seconds"]
            return {"value": value, "peak_bytes": found["peak_bytes"], "measured": True, "examples_per_second": speed}
        value -= max(1, value // 50)
    return predicted
