"""Command line: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """torch-echo's plans for the joint graphs of five models and a deep one, beside those of PyTorch's partitioner at
the points of activation_memory_budget: peak and extra time under the same measured costs. Writes planner.json and planner.html."""


def main(argv: Sequence[str] | None = None) -> None:
    """Sweep the models asked for, and write what was found."""
    from benchmarks.planner.models import MODELS

    parser = argparse.ArgumentParser(prog="torch-echo bench planner", description=DESCRIPTION)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only this one (may be repeated)")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="for planner.json and planner.html")
    args = parser.parse_args(argv)
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    os.environ.setdefault("TORCH_ECHO_CACHE", tempfile.mkdtemp())
    import torch

    from benchmarks.planner.output import show, write
    from benchmarks.planner.sweep import sweep

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    sweeps = []
    for name in args.model or MODELS:
        began = time.monotonic()
        print(f"{name} …", end=" ", file=sys.stderr, flush=True)
        sweeps.append(sweep(name))
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
        show(sweeps[-1])
    for path in write(sweeps, args.out):
        print(path)


if __name__ == "__main__":
    main()
