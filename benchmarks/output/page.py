"""The results page of the documentation, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.figures import EXTRA, MEMORY, NOISE, above, exceptions, label, measured, of, ratios
from benchmarks.output.tables import scale_rows, told
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS

__all__ = ["page"]

MIB = 2**20
PICTURE = "results/bench.png"
"""Where the page looks for the picture."""
CAUSES: dict[tuple[str, str], str] = {}
"""Why a peer is better: by workload and system."""
Record = dict[str, Any]


def page(results: dict[str, Any]) -> str:
    """The whole page."""
    records = results["records"]
    lines = ["# Results", "", *_how(results), "", f"![Peak memory against step time]({PICTURE})", ""]
    lines += [
        "## Of the paper's kind",
        "",
        *_ratios(records),
        "",
        "## Where a peer is better",
        "",
        *_exceptions(records),
        "",
    ]
    if results["scale"]:
        lines += ["## What fits under a limit", "", *_scale(results), ""]
    lines += ["## All cases", ""]
    for name, about in results["workloads"].items():
        size = ", ".join(f"{k} {v}" for k, v in about["size"].items())
        mine = of(records, name)
        lines += [f"### {name}: {WORKLOADS[name].title}", "", size, "", *_cases(mine), "", *_composition(mine), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = "| " + " | ".join(head) + " |"
    return [line, "| " + " | ".join("---" for _ in head) + " |", *("| " + " | ".join(r) + " |" for r in rows)]


HOW = """
Peaks are the allocator's, of a whole step with Adam, everything counted; *above* is without parameters, buffers and optimizer
state. Every case has a process of its own; the processes take turns, and a time is the median over the rounds of its ratio to eager
PyTorch's in the same round (quartiles in brackets). *Set up* is the time until a case runs as it will: recording, planning,
compiling; settings of one compiler share its caches, so that only the first of them starts from nothing. Gradients and three
losses are compared with eager's from the same state: *equal* to the bit, or their relative distance. (Inductor draws other random
numbers: with dropout, other gradients.)
"""


def _how(results: dict[str, Any]) -> Iterator[str]:
    said = results["environment"]
    preset, minutes = results["preset"], results["seconds"] / 60
    yield f"Made by `make results` from the file that `torch-echo bench --preset {preset}` wrote; nothing here is typed."
    yield f"torch-echo {results['torch_echo']}, torch {said['torch']}, {results['device']} ({said.get('cuda:0', said['cpu'])}),"
    yield f"{minutes:.0f} minutes."
    yield HOW
    yield from (f"- `{name}`: {what}" for name, what in SYSTEMS.items())


def _ratios(records: Sequence[Record]) -> Iterator[str]:
    found = ratios(records)
    if found is None:
        yield "Not measured: none of the paper's workloads is among the results."
        return
    yield f"Eager PyTorch's peak over torch-echo's, at most {EXTRA:.0%} extra time. Mean {found.mean:.2f}, maximum {found.most:.2f}."
    yield ""
    rows = []
    for name, (ratio, record) in found.by_workload.items():
        eager = measured(of(records, name), "eager")[0]
        rows.append(
            [name, f"{eager['peak_bytes'] / MIB:.1f}", f"{record['peak_bytes'] / MIB:.1f}", f"{ratio:.2f}"]
            + [f"{above(eager) / above(record):.2f}", f"{record['seconds_ratio']:.2f}x", f"`{label(record)}`"]
        )
    head = ("workload", "eager, MiB", "torch-echo, MiB", "ratio", "ratio above state", "time", "by")
    yield from _table(head, rows)


def _exceptions(records: Sequence[Record]) -> Iterator[str]:
    found = exceptions(records)
    yield (
        f"Cases in which torch-echo's curve lies more than {MEMORY:.0%} above a peer's at the same time (times within {NOISE:.0%} count as the same;"
        " between two settings the curve is the line between them)."
    )
    yield ""
    if not found:
        yield "None."
    for case in found:
        yield f"- {told(case)}. {CAUSES.get((case.workload, case.peer['system']), 'The cause has not been looked for.')}"


def _scale(results: dict[str, Any]) -> Iterator[str]:
    head = ("workload", "limit, MiB", "varied", "system", "largest", "peak, MiB", "examples a second", "")
    yield from _table(head, scale_rows(results["scale"]))
    if results["throughput"]:
        yield ""
        yield "Examples a second at several batches, as far as they fit; torch-echo with the limit as its memory budget:"
        yield ""
        rows = [
            [r["workload"], r["system"], str(r["batch"]), f"{r['examples_per_second']:.1f}"]
            for r in results["throughput"]
        ]
        yield from _table(("workload", "system", "batch", "examples a second"), rows)


def _cases(records: Sequence[Record]) -> Iterator[str]:
    eager = next(iter(measured(records, "eager")), None)
    energy = any("joules_ratio" in r for r in records)
    rows = []
    for r in records:
        if eager is None or "seconds_ratio" not in r:
            why = next((r[k] for k in ("error", "infeasible", "skipped") if k in r), "not timed")
            rows.append([f"`{label(r)}`", str(why).replace("|", "/")] + [""] * (6 + energy))
            continue
        low, high = r["seconds_ratio_spread"]
        rows.append(
            [
                f"`{label(r)}`",
                f"{r['peak_bytes'] / MIB:.1f} ({r['peak_bytes'] / eager['peak_bytes']:.2f}x)",
                f"{above(r) / MIB:.1f}",
            ]
            + [f"{r['seconds']:.3f} s", f"{r['seconds_ratio']:.2f}x ({low:.2f} to {high:.2f})"]
            + ([f"{r['joules_ratio']:.2f}x"] if energy else [])
            + [f"{r['setup_seconds']:.0f} s", "equal" if r["losses_equal"] else f"{r['loss_distance']:.0e}"]
            + ["equal" if r["gradients_equal"] else f"{r['gradient_distance']:.0e}"]
        )
    head = [
        "system",
        "peak, MiB",
        "above, MiB",
        "step",
        "time",
        *(["energy"] if energy else []),
        "set up",
        "losses",
        "gradients",
    ]
    yield from _table(head, rows)


def _composition(records: Sequence[Record]) -> Iterator[str]:
    """What the peak holds without and with the plan that takes the most memory away within the time."""
    with_plan = [r for r in measured(records, "tape") if "before" in r and r["seconds_ratio"] <= 1 + EXTRA]
    if not with_plan:
        return
    chosen = min(with_plan, key=lambda r: r["peak_bytes"])
    then, now = ({(layer, kind): n for layer, kind, n in chosen[side]} for side in ("before", "after"))
    yield f"Alive at the peak, without torch-echo and with `{label(chosen)}`, MiB:"
    yield ""
    rows = [
        [
            layer or ("" if kind == "others" else "outside of modules"),
            kind.replace("_", " "),
            *(f"{side.get((layer, kind), 0) / MIB:.1f}" for side in (then, now)),
        ]
        for layer, kind in sorted({*then, *now}, key=lambda k: -max(then.get(k, 0), now.get(k, 0)))[:10]
    ]
    yield from _table(("layer", "kind", "without", "with"), rows)
