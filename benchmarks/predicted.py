"""Figures of sizes and devices that are not here, predicted: ``torch-echo bench --predict``, ``python -m benchmarks.predicted``.

Each workload is predicted in a process of its own. Nothing here is measured, and all that is printed or written says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.figures import EXTRA, label
from torch_echo.errors import TorchEchoError
from torch_echo.units import format_bytes, parse_bytes

__all__ = ["main", "predicted", "ratios"]

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 1
OVERHEADS = (0.05, 0.15)

Record = dict[str, Any]
Case = tuple[str, str]
"""Workload; system and setting."""


def predicted(
    workload: str,
    preset: str,
    device: str,
    memory: int | None = None,
    overheads: Sequence[float] = OVERHEADS,
    changes: dict[str, int] | None = None,
    fill: bool = False,
    reorder: bool = False,
) -> list[Record]:
    """Records of a workload: eager PyTorch, then torch-echo with each max_overhead.

    `memory`: bytes of the device. `fill`: with the largest batch that eager PyTorch fits into it, and torch-echo's largest batch
    there with each overhead. `reorder`: torch-echo with that option.
    """
    from benchmarks.workloads import Trainer, build, size_of
    from torch_echo.prediction import Prediction, largest, predict

    changes = changes or {}

    def make(batch: int | None = None) -> Any:
        return Trainer(build(workload, preset, **(changes if batch is None else {**changes, "batch": batch}))).step

    def peak(overhead: float | None, prediction: Prediction) -> int:
        return prediction.eager_peak if overhead is None else prediction.plan(max_overhead=overhead).peak

    size = asdict(size_of(workload, preset, **changes))
    on: Any = {"device": device, "reorder": reorder}
    if fill:
        assert memory is not None
        batch, found = largest(make, lambda p: p.eager_peak, memory, start=size["batch"], **on)
        size["batch"] = batch or size["batch"]
    else:
        found = None
    found = found or predict(make, **on)
    about = {"workload": workload, "preset": preset, "device": device, "size": size, "predicted": True}
    records = [
        about | {"system": "eager", "setting": "", "peak_bytes": found.eager_peak, "seconds": found.step_seconds}
    ]
    for overhead in overheads:
        plan = found.plan(max_overhead=overhead)
        record = about | {
            "system": "tape",
            "setting": _setting(overhead, reorder),
            "peak_bytes": plan.peak,
            "floor_bytes": plan.floor,
        }
        records.append(record | {"overhead": plan.overhead, "ratio": plan.base_peak / plan.peak})
        if fill:
            assert memory is not None
            most, _ = largest(make, lambda p, o=overhead: peak(o, p), memory, start=size["batch"], **on)  # type: ignore[misc]
            records[-1]["largest_batch"] = most
    if memory is not None:
        for record in records:
            record |= {"device_memory": memory, "fits": record["peak_bytes"] <= memory}
    return records


def _setting(overhead: float, reorder: bool) -> str:
    """Of the system, as `--system` takes it."""
    return f"max_overhead={overhead:g},reorder=true" if reorder else f"{overhead:g}"


def ratios(records: Sequence[Record], names: Sequence[str]) -> tuple[float, float, int]:
    """Mean and maximum of eager's peak over torch-echo's within EXTRA extra time, over these workloads; how many were there."""
    settings = {_setting(EXTRA, reorder) for reorder in (False, True)}
    found = [r["ratio"] for r in records if r["workload"] in names and r.get("setting") in settings]
    return (statistics.mean(found), max(found), len(found)) if found else (0.0, 0.0, 0)


def _one(name: str, args: argparse.Namespace) -> list[Record]:
    """A workload's records, from a process of its own."""
    given = [f"--size={k}={v}" for k, v in args.changes.items()] + [f"--max-overhead={o:g}" for o in args.overheads]
    given += [f"--device-memory={args.memory}"] if args.memory is not None else []
    given += ["--fill"] if args.fill else []
    given += ["--reorder"] if args.reorder else []
    command = [sys.executable, "-m", "benchmarks.predicted", "--one", "--workload", name, "--preset", args.preset]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_ECHO": "", "KINETO_LOG_LEVEL": "99"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    ran = subprocess.run(
        [*command, "--device", args.device, *given],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        return [{"workload": name, "preset": args.preset, "device": args.device, "predicted": True, "error": why[:300]}]
    found: list[Record] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def _rows(records: Sequence[Record], measured: dict[Case, int]) -> list[list[str]]:
    rows = []
    for r in records:
        if "error" in r:
            rows.append([r["workload"], "", r["error"], *[""] * 6])
            continue
        size = ", ".join(f"{k} {v}" for k, v in r["size"].items() if k in ("batch", "length", "frames", "layers"))
        there = measured.get((r["workload"], label(r)))
        row = [r["workload"], size, label(r)]
        row += [format_bytes(r["peak_bytes"]), f"{r['ratio']:.2f}" if "ratio" in r else ""]
        row += [
            f"{100 * r['overhead']:.1f}%" if "overhead" in r else "",
            {True: "yes", False: "no"}.get(r.get("fits", ""), ""),
        ]
        row += [str(r.get("largest_batch", "")), f"{100 * (r['peak_bytes'] / there - 1):+.2f}%" if there else ""]
        rows.append(row)
    return rows


def _show(records: Sequence[Record], measured: dict[Case, int]) -> None:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.workloads import PAPER

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    head = ["workload", "size", "system", "peak", "eager / it", "extra time", "fits", "largest batch", "off"]
    rows = _rows(records, measured)
    shown = [i for i in range(len(head)) if any(row[i] for row in rows)]
    table = Table(title="Predicted, not measured", title_justify="left", box=None)
    for i in shown:
        table.add_column(head[i])
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    console.print(table)
    mean, most, count = ratios(records, PAPER)
    if count:
        console.print(
            f"predicted peaks, eager PyTorch's over torch-echo's within {EXTRA:.0%} extra time, over {count} of the paper's "
            f"{len(PAPER)} workloads: mean {mean:.2f}, maximum {most:.2f}"
        )


def _measured(path: Path | None) -> dict[Case, int]:
    """Measured peaks in a results file of ``torch-echo bench``, by workload, system and setting."""
    if path is None:
        return {}
    try:
        records = json.loads(path.read_text())["records"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TorchEchoError(f"--measured {path}: holds no results of torch-echo bench ({error})") from error
    return {(r["workload"], label(r)): r["peak_bytes"] for r in records if "peak_bytes" in r}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from benchmarks.arguments import check_sizes, sizes
    from benchmarks.workloads import PAPER, PRESETS, WORKLOADS, presets

    parser = argparse.ArgumentParser(prog="torch-echo bench --predict", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="paper")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), metavar="NAME", help="may be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cuda: a GPU, there need be none")
    parser.add_argument("--device-memory", metavar="SIZE", help="24GiB: what fits, and the memory of --fill")
    parser.add_argument("--max-overhead", action="append", type=float, metavar="FRACTION", help="0.05 and 0.15")
    parser.add_argument("--size", action="append", default=[], metavar="FIELD=N", help="another than the preset's")
    parser.add_argument("--fill", action="store_true", help="with the largest batches that fit (slow)")
    parser.add_argument("--reorder", action="store_true", help="torch-echo with that option")
    parser.add_argument("--jobs", type=int, default=1, help="workloads at a time")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the figures here")
    parser.add_argument(
        "--measured", type=Path, metavar="bench.json", help="say how far predictions are off what was measured"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.workload = args.workload or list(PAPER)
    args.overheads = args.max_overhead or list(OVERHEADS)
    args.changes = sizes(parser, args.size)
    try:
        args.memory = None if args.device_memory is None else parse_bytes(args.device_memory, "--device-memory")
    except TorchEchoError as error:
        parser.error(str(error))
    for name in args.workload:
        if args.preset not in presets(name):
            parser.error(f"--workload {name}: has no sizes for {args.preset}")
    check_sizes(parser, args.workload, args.preset, args.changes)
    if args.fill and args.memory is None:
        parser.error("--fill needs --device-memory")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be 1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    args = _parse(argv)
    if args.one:
        import torch

        torch.set_num_threads(1)
        (name,) = args.workload
        json.dump(
            predicted(
                name, args.preset, args.device, args.memory, args.overheads, args.changes, args.fill, args.reorder
            ),
            sys.stdout,
        )
        print()
        return
    measured = _measured(args.measured)
    records: list[Record] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(lambda name: _one(name, args), args.workload):
            records += found
            if args.out is not None:  # now: whoever is short of time has what is there
                args.out.write_text(
                    json.dumps({"format": FORMAT, "predicted": True, "records": records}, indent=1) + "\n"
                )
    _show(records, measured)


if __name__ == "__main__":
    main()
