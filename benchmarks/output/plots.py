"""Pictures: peak memory against step time, a drawing for each workload, a curve for each system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import label, measured, of
from benchmarks.systems import DEFAULT, SYSTEMS

__all__ = ["write_html", "write_png"]

MIB = 2**20
COLOURS = {
    "eager": "#6b7280", "tape": "#0a7d5a", "echo": "#22c55e", "echo_eager": "#a3e635", "compile": "#c2410c",
    "budget": "#f59e0b", "hand": "#2563eb", "library": "#60a5fa", "paper": "#9333ea",
}  # fmt: skip
NAMES = {
    "eager": "eager", "tape": "torch-echo, tape", "echo": "torch-echo, compile", "echo_eager": "torch-echo, echo_eager",
    "compile": "torch.compile", "budget": "activation_memory_budget", "hand": "checkpoint by hand",
    "library": "gradient_checkpointing_enable", "paper": "the paper's rule",
}  # fmt: skip
CHOSEN = f"{DEFAULT:g}"
"""The setting that torch-echo has where nothing is set: its point is marked."""


def _curves(records: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each system's points, by time."""
    for system in SYSTEMS:
        points = sorted(measured(records, system), key=lambda r: r["seconds_ratio"])
        if points:
            yield system, points


def _drawn(results: dict[str, Any]) -> list[str]:
    return [name for name in results["workloads"] if measured(of(results["records"], name))]


def write_html(results: dict[str, Any], path: Path) -> None:
    """A page that needs nothing else. Raises ImportError where plotly is not installed."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    names = _drawn(results)
    columns = min(2, len(names))
    lines = -(-len(names) // columns)
    figure = make_subplots(rows=lines, cols=columns, subplot_titles=names)
    seen: set[str] = set()
    for i, name in enumerate(names):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        for system, points in _curves(of(results["records"], name)):
            chosen = ["star" if system == "tape" and p["setting"] == CHOSEN else "circle" for p in points]
            figure.add_trace(
                go.Scatter(
                    x=[p["seconds_ratio"] for p in points], y=[p["peak_bytes"] / MIB for p in points],
                    text=[label(p) for p in points], mode="lines+markers", name=NAMES[system], legendgroup=system,
                    line={"color": COLOURS[system]}, showlegend=system not in seen,
                    marker={"symbol": chosen, "size": [14 if c == "star" else 7 for c in chosen]},
                    hovertemplate="%{text}: %{y:.1f} MiB, %{x:.2f}x<extra></extra>",
                ), **place,
            )  # fmt: skip
            seen.add(system)
        figure.update_xaxes(title="step time, of eager's", **place)
        figure.update_yaxes(title="peak memory, MiB", rangemode="tozero", **place)
    figure.update_layout(
        height=100 + 380 * lines, template="plotly_white", legend={"orientation": "h", "y": 1.04},
        title="Peak memory against step time; the star is torch-echo's default",
    )  # fmt: skip
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True))


def write_png(results: dict[str, Any], path: Path) -> None:
    """The same as an image. Raises ImportError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = _drawn(results)
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.6 * columns, 3.4 * lines), squeeze=False)
    handles: dict[str, Any] = {}
    for i, drawing in enumerate(axes.flat):
        if i >= len(names):
            drawing.axis("off")
            continue
        for system, points in _curves(of(results["records"], names[i])):
            xs, ys = [p["seconds_ratio"] for p in points], [p["peak_bytes"] / MIB for p in points]
            (handles[NAMES[system]],) = drawing.plot(xs, ys, marker="o", markersize=4, color=COLOURS[system])
            for p, x, y in zip(points, xs, ys, strict=True):
                if system == "tape" and p["setting"] == CHOSEN:
                    drawing.plot([x], [y], marker="*", markersize=14, color=COLOURS[system])
        drawing.set_title(names[i])
        drawing.set_ylim(bottom=0)
        drawing.set_xlabel("step time, of eager's")
        drawing.set_ylabel("peak memory, MiB")
        drawing.grid(alpha=0.2)
    figure.legend(handles.values(), handles, loc="upper center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / lines / 3.4))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
