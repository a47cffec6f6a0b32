"""What a comparison of planners looks like: a table, a JSON file, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.planner.sweep import Sweep
from torch_echo.report.environment import environment

__all__ = ["show", "write"]

MIB = 2**20


def show(sweep: Sweep) -> None:
    """Print one model's table and figures."""
    title = f"{sweep.model}: {sweep.ops:,} ops, step {sweep.step_seconds:.2f} s, peak {sweep.eager_peak / MIB:.1f} MiB"
    table = Table(title=title)
    for column in (
        "budget",
        "PyTorch, MiB",
        "extra",
        "planned in",
        "torch-echo, MiB",
        "judged",
        "extra",
        "in",
        "less by",
    ):
        table.add_column(column, justify="right")
    front = sweep.on_their_front()
    for r in sweep.rows:
        table.add_row(
            f"{r.budget:g}{'' if r in front else ' (peak rises)'}", f"{r.torch_peak / MIB:.1f}",
            f"{r.torch_seconds / sweep.step_seconds:.2%}", f"{r.torch_planning:.1f} s", f"{r.echo_peak / MIB:.1f}",
            f"{r.echo_judged / MIB:.1f}", f"{r.echo_seconds / sweep.step_seconds:.2%}", f"{r.echo_planning:.3f} s", f"{r.gain:.1%}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    console.print(f"capture {sweep.capture_seconds:.2f} s")
    for name, value in sweep.summary().items():
        console.print(f"  {name}: {value:.3f}")


def write(sweeps: Sequence[Sweep], folder: Path) -> list[Path]:
    """``planner.json`` and ``planner.html`` in a folder."""
    data, picture = folder / "planner.json", folder / "planner.html"
    figures = {"version": 1, "environment": environment(paths=False), "models": [s.as_json() for s in sweeps]}
    data.write_text(json.dumps(figures, indent=1) + "\n")
    picture.write_text(_picture(sweeps))
    return [data, picture]


def _picture(sweeps: Sequence[Sweep]) -> str:
    """Peak against extra time, a curve per system, one drawing per model."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    columns = min(2, len(sweeps))
    lines = -(-len(sweeps) // columns)
    figure = make_subplots(rows=lines, cols=columns, subplot_titles=[s.model for s in sweeps])
    for i, s in enumerate(sweeps):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        ours = [(p / MIB, 100 * t / s.step_seconds) for p, t in s.front]
        theirs = [(r.torch_peak / MIB, 100 * r.torch_seconds / s.step_seconds, r.budget) for r in s.rows]
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in ours], y=[y for _, y in ours], mode="lines+markers", name="torch-echo",
                line={"color": "#0a7d5a", "shape": "hv"}, marker={"size": 4}, showlegend=not i,
            ), **place,
        )  # fmt: skip
        figure.add_trace(
            go.Scatter(
                x=[x for x, _, _ in theirs], y=[y for _, y, _ in theirs], text=[f"{b:g}" for _, _, b in theirs],
                mode="lines+markers+text", textposition="top center", name="PyTorch, activation_memory_budget",
                line={"color": "#c2410c", "dash": "dot"}, showlegend=not i,
            ), **place,
        )  # fmt: skip
        figure.update_xaxes(title="peak above parameters and inputs, MiB", rangemode="tozero", **place)
        figure.update_yaxes(title="extra time, % of a step", rangemode="tozero", **place)
    figure.update_layout(
        height=80 + 420 * lines, template="plotly_white", legend={"orientation": "h", "y": 1.08}, font={"size": 13}
    )
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page
