"""Train the translation model twice, plain and under `torch-echo run`, and show both side by side.

Both runs get the same script, seed and data. Compared are each step's loss (as an exact hexadecimal float), the hash of
all parameters at the end, the seconds of each step, and the peak memory of a step, which `measure.py` reads from the
allocator in both processes in a second, shorter pair of runs. Exit code 1 if a single bit differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).resolve().parent
NAMES = ("plain", "echo")
EPOCH = 11
"""Steps of an epoch of the default text."""

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Run:
    """What one process of train.py wrote."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    stderr: str = ""

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """From the files of a finished run."""
        lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        run = cls(steps=lines[:-1], last=lines[-1], stderr=(folder / "stderr").read_text())
        if (folder / "peaks.json").exists():
            run.peaks = {int(k): v for k, v in json.loads((folder / "peaks.json").read_text()).items()}
        return run


def commands(folder: Path, args: argparse.Namespace, train: list[str], measured: range | None) -> dict[str, list[str]]:
    """The two command lines: the second is the first one, but for `torch-echo run` in front."""
    starts = {
        "plain": [sys.executable],
        "echo": [sys.executable, "-m", "torch_echo", "run", "--max-overhead", str(args.max_overhead)],
    }
    out = {}
    for name, start in starts.items():
        (folder / name).mkdir(parents=True)
        if measured is not None:
            first, last = str(measured[0]), str(measured[-1])
            start = [*start, str(HERE / "measure.py"), str(folder / name / "peaks.json"), first, last]
        out[name] = [*start, str(HERE / "train.py"), *train, "--log-json", str(folder / name / "steps.jsonl")]
    return out


def run_both(lines: dict[str, list[str]], folder: Path, together: bool, progress: Callable[[Path], None]) -> list[Run]:
    """Run the two commands, at the same time or one after the other."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    environment = {**os.environ, "TORCH_ECHO": ""}
    try:
        for name in NAMES:
            with (folder / name / "stdout").open("wb") as out, (folder / name / "stderr").open("wb") as err:
                processes[name] = subprocess.Popen(lines[name], stdout=out, stderr=err, env=environment)
            while any(p.poll() is None for p in processes.values()) and not (together and name != NAMES[-1]):
                time.sleep(0.2)
                progress(folder)
                if any(p.poll() for p in processes.values()):
                    break
        progress(folder)
        for name, process in processes.items():
            if process.poll():
                error = (folder / name / "stderr").read_text()
                console.print(f"[red]{name} failed with exit code {process.returncode}:[/]\n{escape(error)}")
                raise SystemExit(2)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    return [Run.read(folder / name) for name in NAMES]


def losses(folder: Path) -> list[dict[str, Any]]:
    """The steps logged so far by a run under way."""
    try:
        lines = (folder / "steps.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [record for line in lines if "loss" in (record := json.loads(line))]


class Progress:
    """A line for every so many steps that both runs have done."""

    def __init__(self, every: int, total: int) -> None:
        self.every = self.next = every
        self.total = total

    def __call__(self, folder: Path) -> None:
        both = [losses(folder / name) for name in NAMES]
        while all(len(steps) >= self.next for steps in both):
            parts = []
            for steps in both:
                chunk = steps[self.next - self.every : self.next]
                loss = float.fromhex(chunk[-1]["loss"])
                seconds = sum(step["seconds"] for step in chunk) / len(chunk)
                parts.append(f"{loss:7.4f} {seconds:6.3f} s")
            same = all(a["loss"] == b["loss"] for a, b in zip(*both, strict=False))
            sign = "[green]=[/]" if same else "[red]differs[/]"
            console.print(
                f"  step {self.next:3}/{self.total}  plain: loss {parts[0]}  torch-echo: loss {parts[1]}  {sign}"
            )
            self.next += self.every


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**20:,.1f} MiB"


def sizes(step: dict[str, Any]) -> tuple[int, int]:
    """Lengths of a step's batch, target first."""
    return step["tgt_len"], step["src_len"]


def show(full: list[Run], short: list[Run], identical: dict[str, bool], took: float) -> None:
    """Both side by side."""
    plain, echo = full
    table = Table(title="The same training script, seed and data")
    table.add_column("")
    for name in ("plain", "torch-echo run", ""):
        table.add_column(name, justify="right")

    def verdict(same: bool) -> str:
        return "[green]identical[/]" if same else "[red]DIFFERENT[/]"

    def cells(value: Callable[[Run], Any]) -> list[str]:
        return [str(value(run)) for run in full]

    n = len(plain.steps)
    table.add_row(
        f"last of {n} losses",
        *cells(lambda r: f"{float.fromhex(r.steps[-1]['loss']):.4f}"),
        verdict(identical["losses"]),
    )
    table.add_row(
        "SHA-256 of parameters",
        *cells(lambda r: r.last["params_sha256"][:8] + "…"),
        verdict(identical["parameters"]),
    )
    table.add_row("BLEU", *cells(lambda r: f"{r.last['bleu']:.2f}"), verdict(identical["BLEU"]), end_section=True)

    worst: dict[tuple[int, int], tuple[int, int]] = {}
    for step in short[0].steps:
        if step["step"] in short[0].peaks and step["step"] in short[1].peaks:
            pair = (short[0].peaks[step["step"]], short[1].peaks[step["step"]])
            worst[sizes(step)] = max(worst.get(sizes(step), (0, 0)), pair)
    shown = sorted(worst, reverse=True)
    for i, (tgt, src) in enumerate(shown):
        p, e = worst[tgt, src]
        table.add_row(
            f"peak, {src} to {tgt} tokens*",
            mib(p),
            mib(e),
            f"[bold]{e / p:.2f}x[/]" if i == 0 else f"{e / p:.2f}x",
            end_section=i == len(shown) - 1,
        )

    first = n // 3
    times = [[s["seconds"] for s in run.steps[first:]] for run in full]
    ratios = [e / p for p, e in zip(*times, strict=True)]
    table.add_row("step time, median", *(f"{median(t):.3f} s" for t in times), f"{median(ratios):.2f}x**")
    longest = max(map(sizes, plain.steps[first:]))
    long = [i for i, s in enumerate(plain.steps[first:]) if sizes(s) == longest]
    of = [[t[i] for i in long] for t in times]
    ratio = median(ratios[i] for i in long)
    table.add_row("  of the longest", *(f"{median(t):.3f} s" for t in of), f"{ratio:.2f}x**")
    early = (sum(s["seconds"] for s in run.steps[:first]) for run in full)
    table.add_row(f"first {first} steps***", *(f"{t:.1f} s" for t in early))
    console.print(table)
    console.print("*   above parameters, optimizer state and data; at the allocator, in each process, by measure.py")
    console.print("**  median of the ratios of the same step in both runs")
    console.print("*** left out of the step times: here torch-echo watches, plans and checks its plans")
    console.print("\n[bold]What torch-echo said at its end[/]")
    console.print(escape("\n".join(x for x in echo.stderr.splitlines() if not x.startswith("[W")).strip()))
    console.print(f"\ndone in {took:.0f} s")


def main() -> int:
    """Run and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-overhead", type=float, default=0.2, help="given to torch-echo run (0.2)")
    parser.add_argument("--steps", type=int, default=66, help="training steps (66: six epochs)")
    parser.add_argument("--lang", default="ja", help="language, as in train.py (ja)")
    parser.add_argument("--apart", action="store_true", help="one run after the other, not both at once")
    args, rest = parser.parse_known_args()
    if args.steps < 3 * EPOCH:
        parser.error(f"--steps must be at least {3 * EPOCH}")

    import torch

    cores = len(os.sched_getaffinity(0))
    together = not args.apart and cores > 1 and not torch.cuda.is_available()
    threads = max(1, cores // 2) if together else cores
    train = ["--lang", args.lang, "--threads", str(threads), *rest]
    began = time.monotonic()
    console.print(
        f"Training {'both at once' if together else 'one after the other'}, {threads} thread(s) each:\n"
        f"  python train.py {' '.join(train)} --max-steps {args.steps}\n"
        f"  torch-echo run --max-overhead {args.max_overhead} train.py {' '.join(train)} --max-steps {args.steps}"
    )
    with tempfile.TemporaryDirectory(prefix="torch-echo-demo-") as name:
        folder = Path(name)
        lines = commands(folder / "train", args, [*train, "--max-steps", str(args.steps)], None)
        full = run_both(lines, folder / "train", together, Progress(EPOCH, args.steps))
        console.print("Measuring steps at the allocator")
        last = 3 * EPOCH
        short_args = [*train, "--max-steps", str(last), "--eval-lines", "0"]
        lines = commands(folder / "measure", args, short_args, range(EPOCH + 1, last + 1))
        short = run_both(lines, folder / "measure", together, Progress(EPOCH, last))
    plain, echo = full
    identical = {
        "losses": [s["loss"] for s in plain.steps] == [s["loss"] for s in echo.steps],
        "parameters": plain.last["params_sha256"] == echo.last["params_sha256"],
        "BLEU": plain.last["bleu"] == echo.last["bleu"],
    }
    show(full, short, identical, time.monotonic() - began)
    return 0 if all(identical.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
