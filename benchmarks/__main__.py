"""Measure all workloads and print the tables: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import process, tables
from benchmarks.bars import LIMITS
from benchmarks.process import ROOT
from benchmarks.workloads import NAMES, QUICK

PLACES = {
    "decoder": ("per step", "attention"),
    "gpt": ("per block",),
    "unet": ("per stage",),
    "lstm_lm": ("per step",),
    "nmt30": ("per step", "attention"),
    "nmt60": ("per step", "attention"),
}


class Runner:
    """Runs cases, each in a process of its own, and collects what they print."""

    def __init__(self, cache: Path) -> None:
        self.environment = process.environment(TORCH_ECHO="", TORCH_ECHO_CACHE=str(cache))
        self.began = time.monotonic()

    def case(self, workload: str, system: str, rounds: int) -> dict[str, Any]:
        """One case."""
        result = self._run("benchmarks.case", workload, system, "--rounds", str(rounds))
        result = {"workload": workload, "system": system, **result}
        self._say(f"{workload:8} {system:28} {tables.brief(result)}")
        return result

    def engine(self, rounds: int) -> dict[str, Any]:
        """The microbenchmarks."""
        result = self._run("benchmarks.engine", str(rounds))
        self._say("what the tape costs")
        return result

    def script(self, length: int, echo: Sequence[str] | None) -> int:
        """Peak of the sixth to eighth step of ``examples/nmt/train.py`` itself, plain or under ``torch-echo run``."""
        example = ROOT / "examples" / "nmt"
        start = [sys.executable] if echo is None else [sys.executable, "-m", "torch_echo", "run", *echo]
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "peaks.json")
            given = ["--lang", "ja", "--length", str(length), "--max-steps", "8", "--eval-lines", "0", "--threads", "1"]
            command = [*start, str(example / "measure.py"), out, "6", "8", str(example / "train.py"), *given]
            subprocess.run(command, env=self.environment, cwd=ROOT, check=True, capture_output=True)
            peak: int = max(json.loads(Path(out).read_text()).values())
        self._say(
            f"train.py --length {length}, {'plain' if echo is None else 'run ' + ' '.join(echo)}: {peak / 2**20:.1f} MiB"
        )
        return peak

    def _run(self, module: str, *args: str) -> dict[str, Any]:
        try:
            result: dict[str, Any] = process.run(module, *args, environment=self.environment)
        except subprocess.CalledProcessError as error:
            return {"error": (error.stderr.strip().splitlines() or ["?"])[-1]}
        return result

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", file=sys.stderr, flush=True)


def untimed(runner: Runner, workloads: Sequence[str], quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Cases of which only bytes and kernels are wanted, by workload, as many at a time as there are cores."""
    cases = [(name, "eager") for name in workloads]
    cases += [(name, f"hand:{place}") for name in workloads for place in PLACES[name]]
    if not quick:
        limits = [limit for limit in LIMITS if limit.workload in workloads]
        cases += [(limit.workload, f"limit:{limit.most}:{round(limit.mib * 2**20)}") for limit in limits]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(lambda case: runner.case(case[0], case[1], 0), cases))
    return {name: [r for r in results if r["workload"] == name] for name in workloads}


def scripts(runner: Runner, workloads: Iterable[str]) -> dict[str, dict[str, int]]:
    """Peaks of the training script itself, by length."""
    lengths = [int(name[3:]) for name in workloads if name.startswith("nmt")]
    ways = {"plain": None, "echo": ("--max-overhead", "0.2")}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = {(n, way): pool.submit(runner.script, n, options) for n in lengths for way, options in ways.items()}
        return {str(n): {way: made[n, way].result() for way in ways} for n in lengths}


def timed(
    runner: Runner, name: str, known: list[dict[str, Any]], rounds: int, budgets: Sequence[float]
) -> list[dict[str, Any]]:
    """All cases of a workload, one at a time; `known` are those of which no times are wanted. No budgets: few cases."""
    quick = not budgets
    few = max(3, rounds // 3)
    eager = known[0]
    hands = [case for case in known if case["system"].startswith("hand")]
    best = min(hands, key=lambda case: case.get("peak", sys.maxsize))
    results = [eager, best if quick else runner.case(name, best["system"], few)]
    wide = not quick and name.startswith("nmt")
    for option in ("echo", "echo:max_overhead=0.15", *(("echo:max_overhead=0.2",) if wide else ())):
        results.append(runner.case(name, option, rounds))
    if not quick and "peak" in eager and "peak" in best:
        for above in (*(round(share * eager["peak"]) for share in budgets), best["peak"]):
            case = runner.case(name, f"echo:above={above}", few)
            case |= {"budget": above, "share": above / eager["peak"], "hand": above == best["peak"]}
            results.append(case)
    return results + [case for case in known if case["system"].startswith("limit")]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workload", action="append", choices=list(NAMES), help="only this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="fewer workloads, systems and rounds")
    parser.add_argument("--rounds", type=int, help="steps of each kind for the times (15; 3 with --quick)")
    parser.add_argument(
        "--budgets",
        type=lambda text: tuple(float(x) for x in text.split(",")),
        default=(0.7,),
        metavar="SHARES",
        help="memory budgets to try, as fractions of eager's peak, beside the peak of checkpointing by hand (0.7)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--markdown", action="store_true", help="print the README's table instead of the others")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="measure nothing: print the tables of this file")
    args = parser.parse_args()
    if args.from_json:
        figures = json.loads(args.from_json.read_text())
    else:
        workloads = args.workload or list(QUICK if args.quick else NAMES)
        rounds = args.rounds or (3 if args.quick else 15)
        with tempfile.TemporaryDirectory() as folder:
            load = os.getloadavg()[0]
            # Costs measured while two cases run at a time are no use to the timed ones.
            runner, side = Runner(Path(folder) / "costs"), Runner(Path(folder) / "side")
            budgets = () if args.quick else args.budgets
            known = untimed(side, workloads, args.quick)
            figures = {
                "machine": tables.machine(),
                "cases": [c for name in workloads for c in timed(runner, name, known[name], rounds, budgets)],
            }
            if not args.workload:
                figures["engine"] = runner.engine(11 if args.quick else 25)
            if not args.quick:
                figures["script"] = scripts(side, workloads)
            figures["load"] = [load, os.getloadavg()[2]]
            figures["seconds"] = time.monotonic() - runner.began
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.markdown:
        print(tables.markdown(figures))
    else:
        tables.show(figures)


if __name__ == "__main__":
    main()
