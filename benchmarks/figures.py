"""What follows from the records of a run: pure functions of what its JSON file holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.systems import ECHO, PEERS
from benchmarks.workloads import PAPER

__all__ = [
    "Change",
    "Better",
    "Ratios",
    "above",
    "best",
    "changes",
    "front",
    "label",
    "measured",
    "of",
    "off",
    "peaks",
    "predicted_ratios",
    "ratios",
    "setting",
]

Record = dict[str, Any]

EXTRA = 0.15
"""Extra time within which memory ratios are told."""
MEMORY = 0.02
"""How far torch-echo's curve may lie above a peer's before it is an exception; how far a peak may rise before it is worse than
an old one."""
NOISE = 0.03
"""Times that differ by less are taken to be equal."""


def of(records: Iterable[Record], workload: str) -> list[Record]:
    """Those of a workload."""
    return [r for r in records if r["workload"] == workload]


def measured(records: Iterable[Record], *systems: str) -> list[Record]:
    """Those that have a peak and a time, of these systems (of none: of all)."""
    return [r for r in records if "seconds_ratio" in r and (not systems or r["system"] in systems)]


def label(record: Record) -> str:
    """System and setting."""
    return f"{record['system']}:{record['setting']}" if record.get("setting") else str(record["system"])


def above(record: Record) -> int:
    """Bytes of the peak above parameters, buffers and optimizer state."""
    return int(record["peak_bytes"] - record["state_bytes"])


def best(records: Iterable[Record], extra: float = EXTRA) -> Record | None:
    """Of torch-echo's records of one workload the one with the least peak among those that take so much more time at most."""
    fits = [r for r in measured(records, *ECHO) if r["seconds_ratio"] <= 1 + extra]
    return min(fits, key=lambda r: r["peak_bytes"], default=None)


@dataclass(frozen=True)
class Ratios:
    """Eager PyTorch's peak over torch-echo's, everything counted."""

    by_workload: dict[str, tuple[float, Record]]
    """And the record that it was reached with."""

    @property
    def mean(self) -> float:
        """Over the workloads."""
        return statistics.fmean(r for r, _ in self.by_workload.values())

    @property
    def most(self) -> float:
        """The largest."""
        return max(r for r, _ in self.by_workload.values())


def ratios(records: Sequence[Record], workloads: Iterable[str] = PAPER, extra: float = EXTRA) -> Ratios | None:
    """Of these workloads; of those of the paper. None if none of them was measured."""
    found = {}
    for name in workloads:
        mine = of(records, name)
        eager, chosen = measured(mine, "eager"), best(mine, extra)
        if eager and chosen is not None:
            found[name] = (eager[0]["peak_bytes"] / chosen["peak_bytes"], chosen)
    return Ratios(found) if found else None


def setting(overhead: float, reorder: bool) -> str:
    """Of torch-echo on eager PyTorch, as `--system` takes it."""
    return f"max_overhead={overhead:g},reorder=true" if reorder else f"{overhead:g}"


def predicted_ratios(records: Iterable[Record], given: str) -> dict[str, float]:
    """Eager PyTorch's predicted peak over that of torch-echo with a setting, by workload; of those of the paper."""
    return {r["workload"]: r["ratio"] for r in records if r["workload"] in PAPER and r.get("setting") == given}


Measured = dict[tuple[str, str, str, str], int]
"""Measured peaks, by device, workload, its size, and system with setting."""


def peaks(results: Iterable[dict[str, Any]]) -> Measured:
    """What runs have measured."""
    return {
        (part["device"], r["workload"], str(part["workloads"][r["workload"]]["size"]), label(r)): r["peak_bytes"]
        for part in results
        for r in part["records"]
        if "peak_bytes" in r
    }


def off(record: Record, there: Measured) -> float | None:
    """How far a predicted peak is off the one that was measured, as a fraction of it. None if none was."""
    if "error" in record:
        return None
    peak = there.get((record["device"], record["workload"], str(record["size"]), label(record)))
    return None if peak is None else record["peak_bytes"] / peak - 1


def front(records: Iterable[Record]) -> list[Record]:
    """By time, those that take less memory than all faster ones."""
    out: list[Record] = []
    for record in sorted(measured(records), key=lambda r: (r["seconds_ratio"], r["peak_bytes"])):
        if not out or record["peak_bytes"] < out[-1]["peak_bytes"]:
            out.append(record)
    return out


def at(records: Iterable[Record], time: float) -> float | None:
    """The peak that a curve has at a time (a ratio to eager's): between two settings, on the line between them. None if it is
    slower."""
    curve = front(records)
    if not curve or curve[0]["seconds_ratio"] > time:
        return None
    for a, b in pairwise(curve):
        if a["seconds_ratio"] <= time < b["seconds_ratio"]:
            part = (time - a["seconds_ratio"]) / (b["seconds_ratio"] - a["seconds_ratio"])
            return float(a["peak_bytes"] + part * (b["peak_bytes"] - a["peak_bytes"]))
    return float(curve[-1]["peak_bytes"])


@dataclass(frozen=True)
class Better:
    """A peer that takes less memory than torch-echo in the same time."""

    workload: str
    peer: Record
    mine: float | None
    """Peak of torch-echo's curve at that time; None where it is not as fast at all."""
    cut: bool
    """Were settings of torch-echo left out, so that the curve may end too early?"""

    @property
    def by(self) -> float:
        """How much more torch-echo takes."""
        return self.mine / self.peer["peak_bytes"] - 1 if self.mine else float("inf")


def better(records: Sequence[Record]) -> list[Better]:
    """All peers that are better by more than MEMORY; for each workload and system the worst case.

    torch-echo with nothing dropped is plain PyTorch, so the curve of `tape` begins at eager PyTorch's point.
    """
    found: dict[tuple[str, str], Better] = {}
    for peer in measured(records, *PEERS):
        mine = of(records, peer["workload"])
        if not measured(mine, *ECHO):
            continue
        time = peer["seconds_ratio"] * (1 + NOISE)
        peaks = [at(measured(mine, *curve), time) for curve in (("eager", "tape"), ("echo",))]
        cut = any("skipped" in r for r in mine if r["system"] in ECHO)
        case = Better(peer["workload"], peer, min((p for p in peaks if p is not None), default=None), cut)
        key = (case.workload, peer["system"])
        if case.by > MEMORY and (key not in found or case.by > found[key].by):
            found[key] = case
    return list(found.values())


@dataclass(frozen=True)
class Change:
    """The same case in an older run and in a newer one."""

    old: Record
    new: Record

    @property
    def peak(self) -> float:
        """Of the peak, as a fraction."""
        return float(self.new["peak_bytes"] / self.old["peak_bytes"] - 1)

    @property
    def time(self) -> float:
        """Of the time against eager's."""
        return float(self.new["seconds_ratio"] / self.old["seconds_ratio"] - 1)

    @property
    def worse(self) -> bool:
        """Does it take more memory, or compute something else?"""
        return self.peak > MEMORY or (self.old["gradients_equal"] and not self.new["gradients_equal"])


def changes(old: Iterable[Record], new: Iterable[Record]) -> list[Change]:
    """Cases that both have measured."""
    before = {(r["workload"], label(r)): r for r in measured(old)}
    return [Change(before[key], r) for r in measured(new) if (key := (r["workload"], label(r))) in before]
