"""Figures of sizes and devices that are not here, predicted: ``torch-echo bench --predict``, ``python -m benchmarks.predicted``.

Each workload is predicted in a process of its own. Nothing here is measured, and all that is printed or written says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.figures import setting
from torch_echo.errors import TorchEchoError
from torch_echo.units import parse_bytes

__all__ = ["main", "predicted"]

ROOT = Path(__file__).resolve().parents[1]
OVERHEADS = (0.05, 0.15)

Record = dict[str, Any]


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
            "setting": setting(overhead, reorder),
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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from benchmarks.arguments import check_sizes, sizes
    from benchmarks.output import files
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
        "--measured", type=Path, action="append", default=[], metavar="bench.json",
        help="say how far predictions are off what was measured; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="source", type=Path, action="append", metavar="FILE.json",
        help="predict nothing: the figures are in this file (if repeated, in all of them)",
    )  # fmt: skip
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="also write them as a page")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.workload = args.workload or list(PAPER)
    args.overheads = args.max_overhead or list(OVERHEADS)
    args.changes = sizes(parser, args.size)
    try:
        args.memory = None if args.device_memory is None else parse_bytes(args.device_memory, "--device-memory")
        args.measured = [files.read(path) for path in args.measured]
        if args.source:
            args.source = files.predictions([files.read(path, predicted=True) for path in args.source])
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
    for name in ("out", "page"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name} {path}: there is no folder {path.parent}")
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
    from rich.console import Console

    from benchmarks.figures import peaks
    from benchmarks.output import page, tables

    measured = peaks(args.measured)
    results = args.source or _all(args)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    tables.show_predictions(results, measured, console)
    if args.page is not None:
        args.page.write_text(page.predicted_page(results, measured))


def _all(args: argparse.Namespace) -> Record:
    """Predict all that was asked for."""
    from benchmarks.output import files

    results: Record = files.head() | {"predicted": True, "records": []}
    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(lambda name: _one(name, args), args.workload):
            results["records"] += found
            if args.out is not None:  # now: whoever is short of time has what is there
                files.write(results, args.out)
    return results


if __name__ == "__main__":
    main()
