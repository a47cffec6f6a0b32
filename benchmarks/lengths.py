"""One plan for batches of many lengths: ``python -m benchmarks.lengths``.

The translation model is planned on batches of length 30; the plan then serves batches of other lengths, beside plans made for
each of these. ``--epoch N``: N batches of random lengths instead, and what planning again for longer ones holds up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import MIB, Meter, Seeded, peak, same
from benchmarks.workloads import Trainer, build
from torch_echo.options import Options
from torch_echo.tape.session import Phase, Session

PLANNED = 30
LENGTHS = (20, 30, 40, 50, 60)


class OnePlan(Session):
    """A session that does not plan again for larger inputs."""

    @property
    def _growth(self) -> float:
        return math.inf


def case(length: int, planned: int, overhead: float, rounds: int) -> dict[str, Any]:
    """Peaks in bytes and the ratio of step times, at `length`, with a plan made at `planned`."""
    workload = build("example_nmt", length=length)
    trainer, plain = Trainer(workload), Trainer(build("example_nmt", length=length))
    first = build("example_nmt", length=planned).inputs
    session = OnePlan(Options(max_overhead=overhead), name="lengths")
    session.watch(workload.module)
    here, trainer.inputs = trainer.inputs, first
    step = Seeded(trainer)
    while session.phase is not Phase.STEADY and step.done < 10:
        step()
    trainer.inputs = here
    step()
    plain.follow(trainer)
    eager = Seeded(plain, step.done)
    meter = Meter(torch.device("cpu"))
    found, equal = [], True
    for i in range(rounds):
        taken = {s: meter(s)["seconds"] for s in ((eager, step) if i % 2 == 0 else (step, eager))}
        found.append(taken[step] / taken[eager])
        equal &= same(trainer, plain)
    trainer.clear()
    plain.clear()
    return {"echo": peak(step), "eager": peak(eager), "equal": equal, "ratio": statistics.median(found)}


def epoch(batches: int, overhead: float) -> dict[str, Any]:
    """Seconds of so many steps on batches of random lengths after one of length 30, and seconds of these by which steps that were
    recorded or planned took longer than others of their length; `first`: those of the first plan, which any length needs."""
    workload = build("example_nmt", length=PLANNED)
    trainer = Trainer(workload)
    inputs = {length: build("example_nmt", length=length).inputs for length in range(LENGTHS[0], LENGTHS[-1] + 1, 4)}
    events: list[str] = []
    session = Session(Options(max_overhead=overhead), name="lengths", on_event=events.append)
    session.watch(workload.module)
    rng = random.Random(0)
    steps: list[tuple[int, float, bool]] = []
    while len(steps) < batches or session.phase is Phase.RECORD:
        length = PLANNED if not session.kinds.planned else rng.choice(list(inputs))
        trainer.inputs = inputs.get(length, workload.inputs)
        seen, began = len(events), time.perf_counter()
        trainer.step()
        steps.append((length, time.perf_counter() - began, len(events) > seen or session.phase is Phase.RECORD))
    usual = {n: statistics.median([t for m, t, slow in steps if m == n and not slow] or [0.0]) for n, _, _ in steps}
    late = [t - usual[n] for n, t, slow in steps if slow]
    plans = sum("planned" in event for event in events)
    return {
        "steps": len(steps), "seconds": sum(t for _, t, _ in steps), "plans": plans,
        "first": late[0] if late else 0.0, "again": sum(late[1:]), "longest": max(late[1:], default=0.0),
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--max-overhead", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epoch", type=int, metavar="N", help="N batches of random lengths instead")
    parser.add_argument("--case", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(*args.case, args.max_overhead, args.rounds)))
        return
    if args.epoch is not None:
        if args.epoch < 1:
            parser.error(f"--epoch {args.epoch}: must be 1 or more batches")
        torch.set_num_threads(1)
        found = epoch(args.epoch, args.max_overhead)
        share = found["again"] / found["seconds"]
        print(
            f"{found['steps']} steps in {found['seconds']:.0f} s, {found['plans']} plans; beside their steps, the first took "
            f"{found['first']:.1f} s, the others {found['again']:.1f} s ({share:.1%}), {found['longest']:.1f} s at most"
        )
        return
    table = Table("length", f"plan made at {PLANNED}", "plan made at this length", "step time", "step time")
    for length in LENGTHS:
        found = []
        for planned in (PLANNED, length):
            given = ["--max-overhead", str(args.max_overhead), "--rounds", str(args.rounds)]
            given += ["--case", str(length), str(planned)]
            command = [sys.executable, "-m", "benchmarks.lengths", *given]
            done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        ratios = [f"{f['echo'] / MIB:.1f} MiB, {f['echo'] / f['eager']:.3f}x" for f in found]
        table.add_row(str(length), *ratios, *(f"{f['ratio']:.3f}x" for f in found))
    Console().print(table)


if __name__ == "__main__":
    main()
