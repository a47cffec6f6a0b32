"""Command line: see the package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import check_sizes, sizes
from benchmarks.run import Asked, run
from benchmarks.systems import SYSTEMS, Case, cases, parse
from benchmarks.workloads import PRESETS, WORKLOADS
from benchmarks.workloads import QUICK as QUICK_WORKLOADS
from torch_echo.errors import TorchEchoError
from torch_echo.units import parse_bytes

MINUTES = {"small": 24.0, "paper": 60.0}
QUICK_MINUTES = 2.7

DESCRIPTION = """Measure torch-echo beside what people use instead: peak memory, step time, set-up time, and whether losses and
gradients are eager PyTorch's. Every case runs in a process of its own; they take turns.
Prints tables; writes bench.json, bench.html and bench.png."""
EPILOG = "workloads: " + "; ".join(f"{name} ({about.title})" for name, about in WORKLOADS.items())
EPILOG += ". systems: " + "; ".join(f"{name} ({what})" for name, what in SYSTEMS.items())
EPILOG += ". torch-echo bench planner compares plans alone."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torch-echo bench", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes: for two CPU cores, or for a GPU")
    parser.add_argument(
        "--workload", action="append", choices=list(WORKLOADS), metavar="NAME", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--system", action="append", metavar="NAME[:SETTING]",
        help="only this one (and eager PyTorch), with all its settings or with this one: tape, echo:0.1, tape:memory_budget=2GiB, "
        "hand:attention; may be repeated",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few workloads and systems, in less than three minutes")
    parser.add_argument(
        "--minutes", type=float, help="end within so many; what does not fit is left out (small: 24, paper: 60)"
    )
    parser.add_argument("--rounds", type=int, help="rounds of steps, whatever time is left (3 to 11, as time allows)")
    parser.add_argument("--jobs", type=int, help="cases that are set up at a time (all cores; one on a GPU)")
    parser.add_argument("--device", help="cpu or cuda (small: cpu, paper: cuda)")
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="FIELD=N",
        help="another batch, layers, length, … than the preset's",
    )
    parser.add_argument(
        "--scale", action="store_true", help="also the largest batch and the most layers under a memory limit"
    )
    parser.add_argument(
        "--memory-limit", metavar="SIZE", help="of --scale: 8GiB (eager PyTorch's peak at the preset's size)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER", help="for the files that are written (this one)"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="OLD.json",
        help="also a table of what changed; exit code 1 if something is worse",
    )
    parser.add_argument(
        "--from",
        dest="source",
        action="append",
        type=Path,
        metavar="FILE.json",
        help="measure nothing: the results are in this file (if repeated, later ones replace what they have too)",
    )
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="also write the results page")
    return parser


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What argparse does not check."""
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    for name in ("rounds", "jobs", "minutes"):
        given = getattr(args, name)
        if given is not None and given <= 0:
            parser.error(f"--{name} {given:g}: must be more than 0")
    if args.page is not None and not args.page.parent.is_dir():
        parser.error(f"--page {args.page}: there is no folder {args.page.parent}")
    if args.memory_limit is not None and not args.scale:
        parser.error("--memory-limit is for --scale")
    if args.source is None and args.device not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: must be cpu or cuda")


def _cases(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, list[Case]]:
    """By workload, those that were asked for, eager first."""
    from benchmarks.workloads import build, presets

    listed = QUICK_WORKLOADS if args.quick else tuple(n for n, about in WORKLOADS.items() if about.listed)
    out: dict[str, list[Case]] = {}
    try:
        given = [parse(text) for text in args.system or ()]
    except (ValueError, TorchEchoError) as error:
        parser.error(f"--system {error}")
    for name in args.workload or listed:
        if args.preset not in presets(name):
            parser.error(f"--workload {name}: has sizes for {', '.join(presets(name))} only, not for {args.preset}")
        try:
            workload = build(name, presets(name)[0])
        except ImportError:  # of a package that the model comes from: the worker says which
            out[name] = [Case("eager"), *(case for case in given if case.setting)]
            continue
        if not given:
            out[name] = list(cases(workload, quick=args.quick))
            continue
        whole = [case.system for case in given if not case.setting]
        out[name] = [c for c in cases(workload, every=True) if c.system in ("eager", *whole) or c in given]
        own = [c for c in given if c.setting and c.system != "hand" and c not in out[name]]
        out[name] += dict.fromkeys(own)
    for case in given:
        if not any(c == case if case.setting else c.system == case.system for each in out.values() for c in each):
            parser.error(f"--system {case}: there is no such case for {', '.join(out)}")
    return out


def _ask(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Asked:
    """What was asked for."""
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no GPU; --device cpu runs the preset on the CPU")
    changes = sizes(parser, args.size)
    found = _cases(parser, args)
    check_sizes(parser, found, args.preset, changes)
    return Asked(
        args.preset, args.device, found, changes,
        minutes=args.minutes or (QUICK_MINUTES if args.quick else MINUTES[args.preset]),
        jobs=args.jobs or (len(os.sched_getaffinity(0)) if args.device == "cpu" else 1),
        rounds=args.rounds, scale=args.scale,
        limit=parse_bytes(args.memory_limit, "--memory-limit") if args.memory_limit else None,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure or read, print, write."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.device = args.device or {"small": "cpu", "paper": "cuda"}[args.preset]
    _refuse(parser, args)
    from rich.console import Console

    from benchmarks.figures import changes, of
    from benchmarks.output import files, page, plots, tables
    from benchmarks.output.sections import case_section, change_section

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    try:
        old = files.read(args.compare) if args.compare else None
        if args.source:
            results = files.joined([files.read(path) for path in args.source])
        else:
            asked = _ask(parser, args)
    except TorchEchoError as error:
        parser.error(str(error))
    if args.source:
        tables.show(results, console)
        if len(args.source) > 1:
            files.write(results, args.out / "bench.json")
    else:

        def done(results: dict[str, Any], name: str) -> None:
            tables.show_section(case_section(name, results["workloads"][name], of(results["records"], name)), console)
            files.write(results, args.out / "bench.json")  # each time: a run may be stopped

        with tables.Progress(console, len(asked.cases)) as progress:
            results = run(asked, progress, done)
        tables.show_summary(results, console)
    for name, draw in (("bench.html", plots.write_html), ("bench.png", plots.write_png)):
        try:
            draw(results, args.out / name)
        except ImportError as error:
            console.print(f"no {name}: {error.name} is not installed")
    if args.page:
        args.page.write_text(page.page(results, os.path.relpath(args.out / "bench.png", args.page.parent)))
    if old is not None:
        found = changes(old["records"], results["records"])
        tables.show_section(change_section(found), console)
        if any(change.worse for change in found):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
