"""Text for people: the block at the end of a run, and the table of an explanation.

On a terminal the text has colours and the terminal's width; anywhere else it is plain and `WIDTH` columns wide.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torch_echo.graph import Kind
from torch_echo.units import format_bytes

if TYPE_CHECKING:
    from torch_echo.footprint import Footprint
    from torch_echo.planning import Decision, Plan
    from torch_echo.report.summary import Summary

__all__ = ["WIDTH", "print_summary", "render_explanation", "render_summary"]

WIDTH = 110
"""Columns of a text that is not for a terminal."""
OUTSIDE = "(outside modules)"
TOP_LAYERS = 5
TOP_UNHANDLED = 10
TOP_COMPOSITION = 12
TOP_KEPT = 20


def print_summary(summary: Summary, *, file: TextIO) -> None:
    """Print the block at the end of a run to `file`."""
    if bool(getattr(file, "isatty", lambda: False)()):
        console = Console(file=file, force_jupyter=False, highlight=False, markup=False, emoji=False)
        console.print(_summary(summary))
    else:
        file.write(render_summary(summary))


def render_summary(summary: Summary, *, width: int = WIDTH) -> str:
    """The block at the end of a run as plain text."""
    return _plain(_summary(summary), width)


def render_explanation(plan: Plan, before: Footprint, after: Footprint, *, width: int = WIDTH) -> str:
    """A plan as plain text: the peak before and after, by layer and kind, then each decision with its reason."""
    parts: list[RenderableType] = [_headline(plan, before, after), Text("")]
    parts += [_composition(before, after), Text("")]
    parts.append(_decisions(plan) if plan.decisions else Text("There is nothing to decide: no feature map is kept."))
    parts += [Text(""), *(Text(note) for note in plan.notes)] if plan.notes else []
    return _plain(Group(*parts), width)


def _plain(renderable: RenderableType, width: int) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False,
        markup=False, highlight=False, emoji=False,
    )  # fmt: skip
    console.print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _grid(*justify: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for each in justify:
        table.add_column(justify=each, overflow="fold")  # type: ignore[arg-type]
    return table


# The block at the end of a run.


def _summary(summary: Summary) -> RenderableType:
    if not summary.steps:
        lines = [_title("no training step was seen, so nothing was changed")]
        return Group(*lines, *_rows([*_unhandled_rows(summary), *_note_rows(summary)]))
    rows: list[tuple[str, RenderableType]] = []
    rows += _peak_rows(summary)
    rows += _rank_rows(summary)
    rows += _time_rows(summary)
    rows += _kind_rows(summary)
    if summary.loss_bytes > 0:
        rows.append(("loss", Text(f"{format_bytes(summary.loss_bytes)} less at the peak: cross-entropy in one block")))
    rows += _rebuilt_rows(summary)
    rows += _comparison_rows(summary)
    rows += _unhandled_rows(summary)
    rows += _note_rows(summary)
    steps = "1 training step" if summary.steps == 1 else f"{summary.steps:,} training steps"
    return Group(_title(steps), *_rows(rows))


def _title(text: str) -> Text:
    return Text.assemble(("torch-echo", "bold"), f": {text}")


def _rows(rows: Iterable[tuple[str, RenderableType]]) -> list[RenderableType]:
    grid = _grid("left", "left")
    for label, content in rows:
        grid.add_row(Text(label, "dim", no_wrap=True), content)
    return [Padding(grid, (0, 0, 0, 2))] if grid.row_count else []


def _peak_rows(s: Summary) -> list[tuple[str, RenderableType]]:
    if s.compiled_graphs and s.eager_peak and s.predicted_peak is not None:
        text = Text.assemble((format_bytes(s.predicted_peak), "bold green"), " planned")
        text.append(f", instead of {format_bytes(s.eager_peak)}: {s.predicted_peak / s.eager_peak:.2f}x")
        graphs = _count(s.compiled_graphs, "compiled graph")
        whose = f"of a step of {graphs}" if s.planned_together else f"of the largest of {graphs}"
        return [("peak memory", text), ("", Text(f"{whose}; replayed, not measured", "dim"))]
    if s.measured_peak is None:
        text = Text("not measured: no later step had the recorded shapes")
        if s.eager_peak is not None and s.predicted_peak is not None:
            text.append(f" ({format_bytes(s.predicted_peak)} planned, {format_bytes(s.eager_peak)} without)")
        return [("peak memory", text)]
    text = Text.assemble((format_bytes(s.measured_peak), "bold green"), " measured")
    if s.eager_peak:
        text.append(f", instead of {format_bytes(s.eager_peak)}: {s.measured_peak / s.eager_peak:.2f}x")
    if s.predicted_peak and abs(s.measured_peak / s.predicted_peak - 1) > 0.01:
        text.append(f" (planned: {format_bytes(s.predicted_peak)})")
    rows: list[tuple[str, RenderableType]] = [("peak memory", text)]
    if s.base_bytes and s.eager_peak and s.eager_peak > s.base_bytes:
        now, then = s.measured_peak - s.base_bytes, s.eager_peak - s.base_bytes
        above = f"above the {format_bytes(s.base_bytes)} of parameters and optimizer state: "
        rows.append(("", Text(f"{above}{format_bytes(now)} instead of {format_bytes(then)}, {now / then:.2f}x")))
    return rows


def _rank_rows(s: Summary) -> list[tuple[str, RenderableType]]:
    if s.ranks == 1:
        return []
    text = f"{s.ranks} processes; this is rank {s.rank}"
    if len(s.rank_peaks) > 1:
        rank, peak = max(s.rank_peaks.items(), key=lambda item: item[1])
        whose = "all" if len(s.rank_peaks) == s.ranks else f"{len(s.rank_peaks)}"
        text += f". The highest peak of {whose} is {format_bytes(peak)}, of rank {rank}"
    return [("ranks", Text(text))]


def _time_rows(s: Summary) -> list[tuple[str, RenderableType]]:
    if not s.extra_seconds:
        return [("extra time", Text("none"))] if s.extra_seconds is not None else []
    text = f"{format_seconds(s.extra_seconds)} a step (estimated)"
    if s.step_seconds:
        text += f", {s.extra_seconds / s.step_seconds:.1%} of {format_seconds(s.step_seconds)}"
    return [("extra time", Text(text))]


def _comparison_rows(s: Summary) -> list[tuple[str, RenderableType]]:
    if s.comparison is None:
        return []
    style = "green" if s.comparison.equal else "bold red"
    return [("compared", Text(str(s.comparison), style))]


def _kind_rows(s: Summary) -> list[tuple[str, RenderableType]]:
    if not s.kinds:
        return []
    rows: list[tuple[str, RenderableType]] = [
        ("steps", Text(f"of {len(s.kinds)} kinds, each with its own plan; above, the highest peak and the mean time"))
    ]
    grid = _grid("right", "left", "right", "left")
    for kind in sorted(s.kinds, key=lambda k: -k.eager_peak):
        peak = kind.predicted_peak if kind.measured_peak is None else kind.measured_peak
        grid.add_row(
            Text(f"{kind.steps:,}"),
            Text(f"{format_bytes(peak)} instead of {format_bytes(kind.eager_peak)}"),
            Text(f"{format_seconds(kind.extra_seconds)} of {format_seconds(kind.step_seconds)}"),
            Text(kind.name),
        )
    rows.append(("", grid))
    return rows


def _rebuilt_rows(s: Summary) -> list[tuple[str, RenderableType]]:
    layers = sorted((r for r in s.rebuilt if r[1] or r[2]), key=lambda r: (-r[1], r[0]))
    if not layers:
        return [("rebuilt", Text("nothing: every feature map was kept"))] if s.measured_peak is not None else []
    values = sum(r[2] for r in layers)
    each = "in one step of each kind" if s.kinds else "a step"
    rows: list[tuple[str, RenderableType]] = [
        ("rebuilt", Text(f"{format_bytes(sum(r[1] for r in layers))} in {_count(values, 'value')} {each}"))
    ]
    top, rest = layers[:TOP_LAYERS], layers[TOP_LAYERS:]
    if rest:
        top.append((f"({_count(len(rest), 'other layer')})", sum(r[1] for r in rest), sum(r[2] for r in rest)))
    grid = _grid("right", "right", "left")
    for layer, size, n in top:
        grid.add_row(Text(format_bytes(size)), Text(_count(n, "value")), Text(layer or OUTSIDE))
    rows.append(("", grid))
    return rows


def _unhandled_rows(s: Summary) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    for what, why, where in s.unhandled[:TOP_UNHANDLED]:
        place = (f"{where}: ", "cyan") if where else ""
        rows.append(("" if rows else "not handled", Text.assemble(place, f"{what}: {why}" if why else what)))
    if len(s.unhandled) > TOP_UNHANDLED:
        rows.append(("", Text(f"and {len(s.unhandled) - TOP_UNHANDLED} more")))
    return rows


def _note_rows(s: Summary) -> list[tuple[str, RenderableType]]:
    return [("note", Text(note)) for note in s.plan_notes]


# An explanation.


def _headline(plan: Plan, before: Footprint, after: Footprint) -> RenderableType:
    grid = _grid("left", "left")
    ratio = f": {plan.peak / before.peak:.2f}x" if before.peak else ""
    grid.add_row("peak memory", f"{format_bytes(plan.peak)} instead of {format_bytes(before.peak)}{ratio}")
    if plan.peak != after.peak:  # what a compiler makes of the plan
        grid.add_row("as replayed", format_bytes(after.peak))
    now, then = _place(after), _place(before)
    grid.add_row("reached in", now if now == then else f"{now}; before: {then}")
    grid.add_row("least reachable", format_bytes(plan.floor))
    time = f"{format_seconds(plan.extra_seconds)} a step" if plan.extra_seconds else "none"
    if plan.extra_seconds and plan.step_seconds:
        time += f", {plan.extra_seconds / plan.step_seconds:.1%} of {format_seconds(plan.step_seconds)}"
    grid.add_row("extra time", f"{time}, {_count(len(after.rerun), 'op')} run again")
    return grid


def _composition(before: Footprint, after: Footprint) -> RenderableType:
    then, now = before.composition(), after.composition()
    table = _table("left", "left", "right", "right")
    table.columns[0].header, table.columns[1].header = "alive at the peak", "kind"
    table.columns[2].header, table.columns[3].header = "before", "after"
    keys = sorted({*then, *now}, key=lambda k: (-max(then.get(k, 0), now.get(k, 0)), k))
    for layer, kind in keys[:TOP_COMPOSITION]:
        key = (layer, kind)
        table.add_row(layer or OUTSIDE, _kind_name(kind), _bytes(then.get(key, 0)), _bytes(now.get(key, 0)))
    rest = keys[TOP_COMPOSITION:]
    if rest:
        table.add_row(f"({len(rest)} others)", "", _bytes(_total(then, rest)), _bytes(_total(now, rest)))
    table.add_row("total", "", _bytes(before.peak), _bytes(after.peak))
    return table


def _decisions(plan: Plan) -> RenderableType:
    table = _table("left", "left", "right", "right", "right", "right", "left")
    headers = ("layer", "value of", "rebuilt", "bytes", "less at the peak", "time", "why")
    for column, header in zip(table.columns, headers, strict=True):
        column.header = header
    groups = _alike(plan.decisions)
    rebuilt = [g for g in groups if g[0].n_dropped]
    kept = [g for g in groups if not g[0].n_dropped]
    for group in rebuilt + kept[:TOP_KEPT]:
        first = group[0]
        dropped, instances = sum(d.n_dropped for d in group), sum(d.instances for d in group)
        size = sum(d.bytes_dropped if first.n_dropped else d.bytes_kept for d in group)
        table.add_row(
            (first.layer if len(group) == 1 else _stack(first.layer)) or OUTSIDE,
            _op(first.name),
            f"{dropped:,}/{instances:,}",
            _bytes(size),
            _bytes(sum(d.bytes_less_at_peak for d in group)),
            _time(sum(d.seconds_more for d in group)),
            _why(group),
        )
    rest = [d for group in kept[TOP_KEPT:] for d in group]
    if rest:
        table.add_row(f"({_count(len(rest), 'other')}, kept)", "", "", _bytes(sum(d.bytes_kept for d in rest)))
    return table


def _alike(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Decisions that are the same in each layer of a stack ("layers.0", "layers.1"), together; largest first."""
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for d in decisions:
        groups.setdefault((_stack(d.layer), d.name, d.action, d.reason), []).append(d)
    return sorted(groups.values(), key=lambda group: -sum(d.bytes_dropped or d.bytes_kept for d in group))


def _why(group: list[Decision]) -> str:
    sources: dict[str, None] = {}
    for d in group:
        for source in d.rebuilt_from:
            layer, colon, name = source.partition(":")
            place = "" if layer == d.layer else f" of {layer if len(group) == 1 else _stack(layer)}"
            sources[f"{_op(name)}{place}" if colon else source] = None
    return f"{group[0].reason}; from {', '.join(sources)}" if sources else group[0].reason


def _stack(layer: str) -> str:
    return re.sub(r"\b\d+\b", "*", layer)


def _op(name: str) -> str:
    return name.removeprefix("aten::")


def _table(*justify: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for each in justify:
        table.add_column(justify=each, overflow="fold")  # type: ignore[arg-type]
    return table


def _place(footprint: Footprint) -> str:
    """Where a peak stands: the op, its layer and phase."""
    if footprint.op < 0:
        return "between ops"
    op = footprint.graph.ops[footprint.op]
    where = f" of {op.layer}" if op.layer else ""
    return f"{_op(op.name)}{where} ({op.phase.name.lower()})"


def _kind_name(kind: Kind) -> str:
    """A kind in words."""
    return "RNG state" if kind == Kind.RNG_STATE else Kind(kind).name.lower().replace("_", " ")


def format_seconds(seconds: float) -> str:
    """A duration with three digits: "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale * 0.9995 or unit == "us":
            amount = seconds / scale
            digits = 0 if abs(amount) >= 99.95 else 1 if abs(amount) >= 9.995 else 2
            return f"{amount:.{digits}f} {unit}"
    raise AssertionError


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _bytes(n: int) -> str:
    return format_bytes(n) if n else "-"


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"


def _total(composition: Mapping[Any, int], keys: Iterable[Any]) -> int:
    return sum(composition.get(key, 0) for key in keys)
