"""One workload under one system, in a process of its own: ``python -m benchmarks.case WORKLOAD SYSTEM``.

Prints one line of JSON. Systems: ``eager``; ``hand:PLACE`` (torch.utils.checkpoint); ``echo`` with torch_echo.apply's
options (``echo:max_overhead=0.15``); ``echo:above=BYTES``, a budget so many bytes above parameters, optimizer state and
data; ``limit:HEAVY:BYTES``, the fastest plan found under that peak which re-runs at most so many GEMMs or convolutions.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import Seeded, count_kernels, interleave, peak, same
from benchmarks.workloads import Workload, load
from benchmarks.workloads.base import Trainer
from torch_echo import BudgetInfeasible
from torch_echo.footprint import replay
from torch_echo.graph import Phase, TrainingGraph, Trait
from torch_echo.memory import live_bytes
from torch_echo.options import Options
from torch_echo.planning import Front, Point, front, plan
from torch_echo.tape._install import engine_seconds, install_plan
from torch_echo.tape._record import Recorder
from torch_echo.tape.session import Phase as Stage
from torch_echo.tape.session import Session

CPU = torch.device("cpu")
SETTLE = 12
"""Steps within which a session must have planned and checked its plan."""


class Limited(Session):
    """A session that installs the best plan found which re-runs at most `most` heavy kernels."""

    def __init__(self, heavy: tuple[str, ...], most: int, above: int) -> None:
        super().__init__(Options(max_overhead=0.0), name="limit")
        self.heavy, self.most, self.above = heavy, most, above
        self.held: list[tuple[str, str, int]] = []

    def _make_plan(self, recorder: Recorder) -> None:
        assert self.graph is not None
        graph = self.graph
        budget = graph.base_bytes + above_zero(graph) + self.above
        points = limited(graph, self.heavy, self.most)
        fitting = [p for p in points if p.peak <= budget]
        chosen = min(fitting, key=lambda p: p.extra_seconds) if fitting else min(points, key=lambda p: p.peak)
        only = Front(Point(frozenset(), replay(graph).peak, 0.0, "baseline"))
        only.add(chosen)
        self.plan = replace(plan(graph, max_overhead=1e9, front=only), floor=min(p.peak for p in points))
        self.installed = install_plan(self, graph, self.plan.dropped, recorder.nesting)
        self.phase = Stage.CHECK
        composition = replay(graph, self.plan.dropped).composition()
        self.held = [(layer, kind.name.lower(), n) for (layer, kind), n in list(composition.items())[:6]]


def is_heavy(name: str, heavy: tuple[str, ...]) -> bool:
    """Is this op of a graph one of these kernels? Both are ``aten::name``, the first with an overload."""
    return name.split(".")[0] in heavy


def above_zero(graph: TrainingGraph) -> int:
    """Bytes of the graph's storages that are older than the step and outlive it."""
    return sum(s.nbytes for s in graph.storages if s.alloc < 0 and s.free >= graph.ticks)


def limited(graph: TrainingGraph, heavy: tuple[str, ...], most: int) -> list[Point]:
    """Plans that re-run at most `most` heavy kernels, with their replayed peaks and estimated seconds."""
    fixed = engine_seconds(graph)
    candidates: list[Point] = []
    for price in ("none", "count", "dear"):
        priced = copy.deepcopy(graph)
        for op in priced.ops:
            if op.phase is not Phase.FORWARD:
                continue
            if is_heavy(op.name, heavy):
                if price == "none":
                    op.traits |= Trait.KEEP
                else:
                    op.seconds = 1.0 if price == "count" else 10 * op.seconds
            elif price == "count":
                op.seconds = 1e-4 + 1e-3 * op.seconds
        if price != "none" and most == 0:
            continue
        candidates += front(priced, fixed if price != "count" else None).points
    out = []
    for candidate in candidates:
        footprint = replay(graph, candidate.dropped)
        if sum(is_heavy(graph.ops[o].name, heavy) for o in footprint.rerun) <= most:
            extra = footprint.extra_seconds + (fixed(candidate.dropped) if candidate.dropped else 0.0)
            out.append(replace(candidate, peak=footprint.peak, extra_seconds=extra))
    return out


def start(workload: Workload, system: str, base: int) -> Session:
    """The session that `system` asks for, on the workload's module."""
    kind, _, text = system.partition(":")
    session: Session
    if kind == "limit":
        most, above = text.split(":")
        session = Limited(workload.heavy, int(most), int(above))
    else:
        given: dict[str, Any] = {k: json.loads(v) for k, _, v in (x.partition("=") for x in text.split(",") if x)}
        if "above" in given:
            given["memory_budget"] = base + given.pop("above")
        session = Session(Options(**given), name="benchmark")
    session.watch(workload.module)
    return session


def run(name: str, system: str, rounds: int) -> dict[str, Any]:
    """Measure."""
    workload = load(name)
    kind = system.partition(":")[0]
    result: dict[str, Any] = {"workload": name, "system": system}
    session: Session | None = None
    if kind == "hand":
        workload.places[system.partition(":")[2]](functools.partial(checkpoint, use_reentrant=False))
    trainer = Trainer(workload, workload.module)
    step = Seeded(trainer)
    step()
    if kind in ("echo", "limit"):
        trainer.clear()
        session = start(workload, system, live_bytes(CPU))
        try:
            while session.phase not in (Stage.STEADY, Stage.OFF) and step.done < SETTLE:
                step()
        except BudgetInfeasible as error:
            return {**result, "infeasible": str(error), "floor": error.floor - live_bytes(CPU)}
        if session.phase is not Stage.STEADY:
            return {**result, "error": f"not settled: {session.phase}, {session.unhandled}"}
        assert session.plan is not None and session.graph is not None
        base = session.graph.base_bytes + above_zero(session.graph)
        result |= {
            "predicted": session.plan.peak - base,
            "predicted_eager": session.plan.base_peak - base,
            "floor": session.plan.floor - base,
            "estimate": 1 + session.plan.extra_seconds / session.plan.step_seconds,
            "extra_seconds": session.plan.extra_seconds,
            "step_seconds": session.plan.step_seconds,
            "rerun": len(session.plan.rerun),
            "dropped": len(session.plan.dropped),
            "ops": sum(op.phase is Phase.FORWARD for op in session.graph.ops),
        }
        if isinstance(session, Limited):
            result["held"] = session.held
    else:
        step()
    trainer.clear()
    result["peak"] = peak(step)
    result["heavy"] = count_kernels(step, workload.heavy)
    if rounds and kind != "eager":
        copied = load(name)
        other = Trainer(copied, copied.module)
        other.follow(trainer)
        eager = Seeded(other, step.done)
        times = interleave(eager, step, rounds, lambda: same(trainer, other))
        result |= times.as_json() | {"equal": times.equal}
    if session is not None:
        session.close()
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("system")
    parser.add_argument("--rounds", type=int, default=0, help="steps of each kind for the times")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    json.dump(run(args.workload, args.system, args.rounds), sys.stdout)
    print()


if __name__ == "__main__":
    main()
