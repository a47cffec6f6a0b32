"""What ``gpu.sh`` found: a short table, and one JSON file of everything."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from benchmarks.figures import label
from benchmarks.output.sections import why_not

__all__ = ["main"]

FORMAT = 1
Record = dict[str, Any]


def _json(path: Path) -> Record:
    """What a part wrote; {} if it did not come so far."""
    try:
        found: Record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _tests(path: Path) -> Record:
    """Counts, and the failures with their messages."""
    try:
        suite = ET.parse(path).getroot().find("testsuite")
    except (OSError, ET.ParseError):
        return {}
    if suite is None:
        return {}
    counts: Record = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = []
    for case in suite.iter("testcase"):
        for kind in ("failure", "error"):
            part = case.find(kind)
            if part is not None:
                failed.append({"test": case.get("name"), "message": (part.get("message") or "")[:500]})
    return counts | {"failed": failed}


def _table(bench: Record, predicted: Record) -> list[list[str]]:
    """One row for each case."""
    told = {(r["workload"], label(r)): r for r in predicted.get("records", ()) if "error" not in r}
    eager = {r["workload"]: r for r in bench.get("records", ()) if r.get("system") == "eager" and "peak_bytes" in r}
    rows = []
    for r in bench.get("records", ()):
        name = label(r)
        if "peak_bytes" not in r:
            rows.append([r["workload"], name, why_not(r)[:60]])
            continue
        base = eager.get(r["workload"])
        row = [r["workload"], name, f"{r['peak_bytes'] / 2**20:.0f}"]
        row += [f"{base['peak_bytes'] / r['peak_bytes']:.2f}" if base else ""]
        row += [f"{r['seconds_ratio']:.3f}" if "seconds_ratio" in r else "", str(r.get("gradients_equal", ""))]
        there = told.get((r["workload"], name))
        row += [f"{100 * (there['peak_bytes'] / r['peak_bytes'] - 1):+.1f}%" if there else ""]
        rows.append(row)
    return rows


def main() -> None:
    """Command line: the folder that ``gpu.sh`` wrote to, and how its parts ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for part in ("tests", "bench", "predicted"):
        parser.add_argument(f"--{part}", type=int, default=0, help="exit code")
    parser.add_argument("--seconds", type=int, default=0)
    args = parser.parse_args()
    import torch

    codes = {"tests": args.tests, "bench": args.bench, "predicted": args.predicted}
    tests, bench, predicted = (
        _tests(args.folder / "tests.xml"),
        _json(args.folder / "bench.json"),
        _json(args.folder / "predicted.json"),
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    whole = {"format": FORMAT, "torch": torch.__version__, "cuda": torch.version.cuda, "gpu": gpu}
    whole |= {"seconds": args.seconds, "exit_codes": codes, "tests": tests, "bench": bench, "predicted": predicted}
    (args.folder / "gpu.json").write_text(json.dumps(whole, indent=1) + "\n")

    head = ["workload", "system", "peak, MiB", "eager / it", "time", "equal", "prediction off"]
    rows = [head, *_table(bench, predicted)]
    widths = [
        max(len(row[i]) for row in rows if i < len(row) and (len(row) == len(head) or i < 2)) for i in range(len(head))
    ]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=False)).rstrip())
    found = [float(row[3]) for row in rows[1:] if len(row) == len(head) and row[1] == "tape:0.15" and row[3]]
    if found:
        print(
            f"eager's peak / torch-echo's at max_overhead 0.15: mean {statistics.mean(found):.2f}, maximum {max(found):.2f}"
        )
    for failure in tests.get("failed", ()):
        print(f"FAILED {failure['test']}: {failure['message'].splitlines()[0][:120] if failure['message'] else ''}")
    ended = "did not end"
    if tests:
        passed = tests["tests"] - tests["skipped"] - tests["failures"] - tests["errors"]
        ended = f"{passed} passed, {len(tests['failed'])} failed, {tests['skipped']} skipped"
    print(f"tests: {ended}; exit codes {codes}; {args.seconds} s; {args.folder / 'gpu.json'}")
    complete = bool(tests) and not tests["failed"] and bool(bench.get("records")) and not any(codes.values())
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
