"""The figures as tables."""

from __future__ import annotations

import os
import platform
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import MIB, bars, find, workloads
from benchmarks.workloads import NAMES

__all__ = ["brief", "machine", "markdown", "show"]

SYSTEMS = {
    "eager": "eager",
    "echo": "default",
    "echo:max_overhead=0.15": "max_overhead=0.15",
    "echo:max_overhead=0.2": "max_overhead=0.2",
}


def machine() -> str:
    """What the figures were measured on."""
    import torch

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"torch {torch.__version__}, one thread, {model} ({len(os.sched_getaffinity(0))} cores)"


def brief(case: dict[str, Any]) -> str:
    """One case in one line."""
    if "error" in case:
        return f"error: {case['error']}"
    if "infeasible" in case:
        return f"infeasible: at least {case['floor'] / MIB:.1f} MiB"
    if "peak" not in case:
        return "?"
    text = f"{case['peak'] / MIB:7.1f} MiB, {case['heavy']} heavy kernels"
    if "cpu_ratio" in case:
        text += f", time {case['cpu_ratio']:.3f}x"
        text += "" if case["equal"] else ", NOT BIT-EQUAL"
    if "estimate" in case:
        text += f" (estimated {case['estimate']:.3f}x)"
    return text


def label(case: dict[str, Any]) -> str:
    """What the case's system is called in tables."""
    system: str = case["system"]
    if system in SYSTEMS:
        return SYSTEMS[system]
    kind, _, text = system.partition(":")
    if kind == "hand":
        return f"checkpoint, {text}"
    if kind == "limit":
        most, above = text.split(":")
        return f"at most {most} again, {int(above) / MIB:.1f} MiB"
    return "budget: by hand's peak" if case.get("hand") else f"budget: {case['share']:.0%} of eager"


def rows(figures: dict[str, Any], workload: str) -> list[list[str]]:
    """Cells of the main table."""
    eager = find(figures, workload, "eager")
    out = []
    for case in figures["cases"]:
        if case["workload"] != workload:
            continue
        if "peak" not in case or eager is None:
            out.append([label(case), brief(case), "", "", "", "", ""])
            continue
        out.append(
            [
                label(case),
                f"{case['peak'] / MIB:.1f}",
                f"{eager['peak'] / case['peak']:.2f}x",
                f"{case['heavy'] - eager['heavy']:+d}" if case is not eager else str(case["heavy"]),
                f"{case['cpu_ratio']:.3f}x" if "cpu_ratio" in case else "",
                f"{case['estimate']:.3f}x" if "estimate" in case else "",
                f"{100 * (case['predicted'] / case['peak'] - 1):+.2f}%" if "predicted" in case else "",
                {True: "yes", False: "NO"}.get(case.get("equal"), ""),  # type: ignore[arg-type]
            ]
        )
    return out


def show(figures: dict[str, Any], console: Console | None = None) -> None:
    """Print everything."""
    console = console or Console(highlight=False, width=120)
    console.print(f"{figures['machine']}; load {', '.join(f'{x:.1f}' for x in figures.get('load', []))}")
    for workload in workloads(figures):
        table = Table(title=NAMES[workload])
        table.add_column("system")
        for name in ("peak, MiB", "eager / peak", "heavy", "time", "estimated", "predicted peak", "bit-equal"):
            table.add_column(name, justify="right")
        for cells in rows(figures, workload):
            table.add_row(*cells)
        console.print(table)
    for case in figures["cases"]:
        if "held" in case:
            held = ", ".join(f"{n / MIB:.1f} {kind} {layer}" for layer, kind, n in case["held"])
            console.print(f"{case['workload']}, {label(case)}: its peak holds {held} (MiB)", soft_wrap=True)
    if "engine" in figures and "error" not in figures["engine"]:
        table = Table(title="what the tape costs where it rebuilds nothing")
        for name in ("", "op, us", "forward", "step", "us an op, forward", "us an op, step"):
            table.add_column(name, justify="right" if name else "left")
        for name, e in figures["engine"].items():
            numbers = [f"{e['op_us']:.0f}", f"{e['forward_ratio']:.3f}x", f"{e['step_ratio']:.3f}x"]
            table.add_row(name, *numbers, f"{e['forward_us_per_op']:.2f}", f"{e['step_us_per_op']:.2f}")
        console.print(table)
    table = Table(title="bars")
    for name in ("what", "wanted", "measured", ""):
        table.add_column(name)
    for bar in bars(figures):
        table.add_row(bar.what, bar.wanted, bar.got, "[green]met[/]" if bar.met else "[red]not met[/]")
    console.print(table)
    if "seconds" in figures:
        console.print(f"measured in {figures['seconds']:.0f} s")


def markdown(figures: dict[str, Any]) -> str:
    """The README's table: peak and step time, absolute and against eager."""
    lines = [
        "| model | eager | checkpoint by hand | torch-echo, default | `max_overhead=0.15` | `max_overhead=0.2` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for workload in workloads(figures):
        eager = find(figures, workload, "eager")
        if eager is None:
            continue
        hands = [c for c in figures["cases"] if c["workload"] == workload and c["system"].startswith("hand")]
        best = min((c for c in hands if "peak" in c), key=lambda c: c["peak"], default=None)
        cells = [NAMES[workload], f"{eager['peak'] / MIB:.1f}"]
        for case in (best, *(find(figures, workload, system) for system in list(SYSTEMS)[1:])):
            if case is None:
                cells.append("")
                continue
            time = f", {case['cpu_ratio']:.2f}x" if "cpu_ratio" in case else ""
            cells.append(f"{case['peak'] / MIB:.1f} ({case['peak'] / eager['peak']:.2f}x{time})")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Peak in MiB above parameters, optimizer state and data, at the allocator (against eager's; step time against "
        f"eager's). {figures['machine']}. Made by `make bench`.",
    ]
    return "\n".join(lines)
