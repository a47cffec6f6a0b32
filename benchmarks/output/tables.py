"""The terminal: tables of results, and what goes on while they are measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchmarks.figures import Better, Change, above, exceptions, label, measured, of, ratios
from benchmarks.systems import Case
from benchmarks.workloads import WORKLOADS

__all__ = ["Progress", "scale_rows", "show", "show_scale", "show_summary", "show_changes", "show_workload", "told"]

MIB = 2**20


class Progress:
    """What goes on: on a terminal, a table of the workload that is measured; elsewhere, a line for each thing that happens."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.began = time.monotonic()
        self.workload, self.rows = "", dict[str, str]()
        self.names: list[str] = []
        self.live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def __call__(self, workload: str, case: Case, what: str) -> None:
        """Something happened."""
        if workload not in self.names:
            self.names.append(workload)
            self.rows = {}
        self.rows[str(case)] = what
        seconds = time.monotonic() - self.began
        if self.live is None:
            if what != "…":
                self.console.print(f"{seconds:5.0f} s  {workload:16} {case!s:24} {what}", soft_wrap=True, markup=False)
            return
        table = Table(title=f"{workload}, {len(self.names)} of {self.total}; {seconds:.0f} s", box=None)
        for column in ("", ""):
            table.add_column(column, no_wrap=True)
        for name, said in self.rows.items():
            table.add_row(name, Text(said))
        self.live.update(table, refresh=True)


def show(results: dict[str, Any], console: Console) -> None:
    """Everything."""
    records = results["records"]
    console.print(
        f"torch-echo {results['torch_echo']}, torch {results['environment']['torch']}, {results['device']}",
        markup=False,
    )
    for name in results["workloads"]:
        show_workload(name, results["workloads"][name], of(records, name), console)
    show_summary(records, console)
    show_scale(results, console)
    console.print(f"measured in {results['seconds']:.0f} s")


def show_workload(name: str, about: dict[str, Any], records: Sequence[dict[str, Any]], console: Console) -> None:
    """One workload's cases."""
    size = ", ".join(f"{k} {v}" for k, v in about["size"].items())
    table = Table(title=f"{name}: {WORKLOADS[name].title} ({size})", title_style="bold")
    energy = any("joules" in r for r in records)
    reserved = any("reserved_bytes" in r for r in records)
    columns = ["peak, MiB", "of eager's", "above state", *(["reserved"] if reserved else []), "step, s", "of eager's"]
    columns += ["quartiles", *(["energy"] if energy else []), "set up", "losses", "gradients"]
    table.add_column("system")
    for column in columns:
        table.add_column(column, justify="right")
    eager = next(iter(measured(records, "eager")), None)
    for r in records:
        if eager is None or "seconds_ratio" not in r:
            why = next((r[k] for k in ("error", "infeasible", "skipped") if k in r), "not timed")
            table.add_row(label(r), Text(str(why)[:60], "dim"))
            continue
        low, high = r["seconds_ratio_spread"]
        cells = [
            f"{r['peak_bytes'] / MIB:.1f}",
            f"{r['peak_bytes'] / eager['peak_bytes']:.2f}x",
            f"{above(r) / MIB:.1f}",
        ]
        cells += [f"{r['reserved_bytes'] / MIB:.1f}"] if reserved else []
        cells += [f"{r['seconds']:.3f}", f"{r['seconds_ratio']:.2f}x", f"{low:.2f}-{high:.2f}"]
        cells += [f"{r['joules_ratio']:.2f}x" if "joules_ratio" in r else ""] if energy else []
        cells += [f"{r['setup_seconds']:.0f} s", same(r["losses_equal"], r["loss_distance"])]
        table.add_row(label(r), *cells, same(r["gradients_equal"], r["gradient_distance"]))
    console.print(table)


def same(equal: bool, apart: float) -> str:
    """A comparison with eager's."""
    return "equal" if equal else f"{apart:.0e}"


def show_summary(records: Sequence[dict[str, Any]], console: Console) -> None:
    """Ratios of the paper's kind, and where a peer is better."""
    found = ratios(records)
    if found is not None:
        for name, (ratio, record) in found.by_workload.items():
            console.print(
                f"{name:18} eager / torch-echo {ratio:.2f} by {label(record)} at {record['seconds_ratio']:.2f}x the time"
            )
        console.print(
            f"mean {found.mean:.2f}, maximum {found.most:.2f}: peaks with everything counted, at most 15% extra time"
        )
    for case in exceptions(records):
        console.print(told(case))


def told(case: Better) -> str:
    """An exception in words."""
    peer = f"{case.workload}: {label(case.peer)} needs {case.peer['peak_bytes'] / MIB:.1f} MiB at {case.peer['seconds_ratio']:.2f}x the time"
    if case.mine is None:
        return f"{peer}, which torch-echo was not measured to reach"
    return f"{peer}, torch-echo {case.mine / MIB:.1f} MiB ({case.by:+.0%})"


def show_scale(results: dict[str, Any], console: Console) -> None:
    """What fits under a limit, and how fast."""
    if results["scale"]:
        table = Table(title="what fits", title_style="bold")
        for i, column in enumerate(
            ("workload", "limit, MiB", "varied", "system", "largest", "peak, MiB", "examples/s", "")
        ):
            table.add_column(column, justify="right" if i in (1, 4, 5, 6) else "left")
        for row in scale_rows(results["scale"]):
            table.add_row(*row)
        console.print(table)
    if results["throughput"]:
        table = Table(title="examples a second within the limit", title_style="bold")
        for i, column in enumerate(("workload", "system", "batch", "examples/s")):
            table.add_column(column, justify="right" if i > 1 else "left")
        for r in results["throughput"]:
            table.add_row(r["workload"], r["system"], str(r["batch"]), f"{r['examples_per_second']:.1f}")
        console.print(table)


def scale_rows(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Cells: workload, limit, what is varied, system, largest, peak, examples a second, how it is known."""
    out = []
    for r in rows:
        speed = f"{r['examples_per_second']:.1f}" if "examples_per_second" in r else ""
        cells = [r["workload"], f"{r['limit_bytes'] / MIB:.1f}", r["varied"], r["system"], str(r["value"])]
        out.append(
            [*cells, f"{r['peak_bytes'] / MIB:.1f}", speed, "measured" if r["measured"] else "predicted by replay"]
        )
    return out


def show_changes(changes: Sequence[Change], console: Console) -> None:
    """A newer run beside an older one."""
    table = Table(title="against the older run", title_style="bold")
    table.add_column("workload")
    table.add_column("system")
    for column in ("peak then, MiB", "now", "change", "time then", "now", ""):
        table.add_column(column, justify="right")
    for c in changes:
        cells = [f"{c.old['peak_bytes'] / MIB:.1f}", f"{c.new['peak_bytes'] / MIB:.1f}", f"{c.peak:+.1%}"]
        cells += [
            f"{c.old['seconds_ratio']:.2f}x",
            f"{c.new['seconds_ratio']:.2f}x",
            "[red]worse[/]" if c.worse else "",
        ]
        table.add_row(c.new["workload"], label(c.new), *cells)
    console.print(table)
