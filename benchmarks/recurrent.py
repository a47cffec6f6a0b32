"""Recurrent layers, eager, kept and rebuilt: ``python -m benchmarks.recurrent`` (half an hour)."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import Runner
from benchmarks.measure import MIB

CASES = {
    "byte_lm512": ("hand:lstm", "echo:max_overhead=0.35", "echo:max_overhead=0.3,reorder=true"),
    "deepspeech": ("hand:per layer", "echo", "echo:max_overhead=0.15", "echo:max_overhead=0.4"),
    "long_lstm4000": ("hand:lstm", "echo:max_overhead=0.3,reorder=true"),
}
SHARES = {"long_lstm4000": 0.25}
"""Memory budgets, as fractions of eager's peak."""


def measure(runner: Runner, name: str, rounds: int) -> list[dict[str, Any]]:
    """All cases of a workload."""
    found = [runner.case(name, "eager", 0)]
    systems = list(CASES[name])
    if name in SHARES:
        systems.append(f"echo:above={round(SHARES[name] * found[0]['peak'])},reorder=true")
    return found + [runner.case(name, system, rounds) for system in systems]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrent", description=__doc__)
    parser.add_argument("--workload", action="append", choices=list(CASES), help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind for the times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        cases = [case for name in args.workload or CASES for case in measure(runner, name, args.rounds)]
    if args.json:
        args.json.write_text(json.dumps(cases, indent=1) + "\n")
    table = Table("workload", "system", "peak, MiB", "of eager's", "predicted", "step time", "estimated", "bits")
    for case in cases:
        eager = next(c for c in cases if c["workload"] == case["workload"])
        if "peak" not in case:
            table.add_row(case["workload"], case["system"], case.get("error", case.get("infeasible", "?"))[:60])
            continue
        table.add_row(
            case["workload"],
            case["system"],
            f"{case['peak'] / MIB:.1f}",
            f"{case['peak'] / eager['peak']:.3f}x",
            f"{case['predicted'] / MIB:.1f}" if "predicted" in case else "",
            f"{case['cpu_ratio']:.3f}x" if "cpu_ratio" in case else "",
            f"{case['estimate']:.3f}x" if "estimate" in case else "",
            {True: "equal", False: "differ"}.get(case.get("equal", "")),
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
