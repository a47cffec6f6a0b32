"""What is told of a run, piece by piece, as text; the terminal and the results page show the same pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.figures import (
    EXTRA,
    MEMORY,
    NOISE,
    Better,
    Change,
    Measured,
    above,
    better,
    label,
    measured,
    of,
    off,
    predicted_ratios,
    ratios,
    setting,
)
from benchmarks.workloads import PAPER, WORKLOADS

__all__ = [
    "Section",
    "case_section",
    "change_section",
    "composition_section",
    "predicted_sections",
    "scale_sections",
    "summary_sections",
]

MIB = 2**20
Record = dict[str, Any]


@dataclass
class Section:
    """A heading, sentences, a table."""

    title: str
    lines: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def _mib(n: float) -> str:
    return f"{n / MIB:.1f}"


def _same(equal: bool | None, apart: float) -> str:
    """A comparison with eager's."""
    return "equal" if equal else f"{apart:.0e}"


def why_not(record: Record) -> str:
    """Why there are no figures."""
    return str(next((record[k] for k in ("error", "infeasible", "skipped") if k in record), "not timed"))


def case_section(name: str, about: Record, records: Sequence[Record]) -> Section:
    """One workload's cases. Columns that have nothing in them are left out."""
    size = ", ".join(f"{k} {v}" for k, v in about["size"].items())
    head = ["system", "peak, MiB", "of eager's", "above state", "reserved", "step, s", "time", "quartiles", "energy"]
    head += ["set up", "losses", "gradients"]
    eager = next(iter(measured(records, "eager")), None)
    rows = []
    for r in records:
        if eager is None or "seconds_ratio" not in r:
            rows.append([label(r), why_not(r), *[""] * (len(head) - 2)])
            continue
        low, high = r["seconds_ratio_spread"]
        row = [label(r), _mib(r["peak_bytes"]), f"{r['peak_bytes'] / eager['peak_bytes']:.2f}x", _mib(above(r))]
        row += [_mib(r["reserved_bytes"]) if "reserved_bytes" in r else "", f"{r['seconds']:.3f}"]
        row += [f"{r['seconds_ratio']:.2f}x", f"{low:.2f} to {high:.2f}"]
        row += [f"{r['joules_ratio']:.2f}x" if "joules_ratio" in r else "", f"{r['setup_seconds']:.0f} s"]
        row += [_same(r["losses_equal"], r["loss_distance"]), _same(r["gradients_equal"], r["gradient_distance"])]
        rows.append(row)
    used = [i for i in range(len(head)) if i < 2 or any(row[i] for row in rows)]
    return Section(
        f"{name}: {WORKLOADS[name].title}", [size], [head[i] for i in used], [[row[i] for i in used] for row in rows]
    )


def composition_section(records: Sequence[Record]) -> Section | None:
    """What the peak holds without and with the plan that leaves the least, within the time. None where there is none."""
    plans = [r for r in measured(records, "tape") if "before" in r and r["seconds_ratio"] <= 1 + EXTRA]
    if not plans:
        return None
    chosen = min(plans, key=lambda r: r["peak_bytes"])
    then, now = ({(layer, kind): n for layer, kind, n in chosen[side]} for side in ("before", "after"))
    rows = []
    for layer, kind in sorted({*then, *now}, key=lambda k: (-max(then.get(k, 0), now.get(k, 0)), k))[:10]:
        place = layer or ("" if kind == "others" else "outside of modules")
        rows.append([place, kind.replace("_", " "), _mib(then.get((layer, kind), 0)), _mib(now.get((layer, kind), 0))])
    told = f"Alive at the peak, without torch-echo and with `{label(chosen)}`, MiB:"
    return Section("", [told], ["layer", "kind", "without", "with"], rows)


def summary_sections(records: Sequence[Record]) -> Iterator[Section]:
    """Ratios of the paper's kind, and where a peer is better."""
    found = ratios(records)
    if found is not None:
        rows = []
        for name, (ratio, r) in found.by_workload.items():
            eager = measured(of(records, name), "eager")[0]
            row = [name, _mib(eager["peak_bytes"]), _mib(r["peak_bytes"]), f"{ratio:.2f}"]
            rows.append([*row, f"{above(eager) / above(r):.2f}", f"{r['seconds_ratio']:.2f}x", label(r)])
        yield Section(
            "Memory ratios over the paper's workloads",
            [
                f"Eager PyTorch's peak over torch-echo's, everything counted, at most {EXTRA:.0%} extra time.",
                f"Mean {found.mean:.2f}, maximum {found.most:.2f}.",
            ],
            ["workload", "eager, MiB", "torch-echo, MiB", "ratio", "ratio above state", "time", "by"],
            rows,
        )
    if rows := list(_errors(records)):
        told = "What torch-echo said that the step's peak would be, against what it was, everything counted."
        yield Section("Predicted peaks", [told], ["system", "cases", "off on average", "at most", "in"], rows)
    yield Section(
        "Where a peer is better",
        [
            f"Peers that need less memory than torch-echo in the same time, by more than {MEMORY:.0%}. Times within {NOISE:.0%}",
            "are taken to be the same; between two settings torch-echo's curve is the line between them.",
        ],
        ["workload", "peer", "its peak, MiB", "its time", "torch-echo's, MiB", "more by", "cause"],
        [_row(case) for case in better(records)],
    )


def _errors(records: Sequence[Record]) -> Iterator[list[str]]:
    """How far predicted peaks are off, for each system that predicts."""
    apart: dict[str, list[tuple[float, str]]] = {}
    for r in measured(records):
        if "predicted_bytes" in r:
            error = r["predicted_bytes"] / r["peak_bytes"] - 1
            apart.setdefault(r["system"], []).append((error, f"{r['workload']}, {label(r)}"))
    for system, found in apart.items():
        most, where = max(found, key=lambda case: abs(case[0]))
        mean = fmean(abs(error) for error, _ in found)
        yield [system, str(len(found)), f"{mean:.2%}", f"{most:+.2%}", where if most else ""]


def _row(case: Better) -> list[str]:
    peer = case.peer
    mine = [_mib(case.mine), f"{case.by:.0%}"] if case.mine else ["not as fast", ""]
    cause = "slower settings of torch-echo were left out for want of time" if case.cut else "not known"
    return [case.workload, label(peer), _mib(peer["peak_bytes"]), f"{peer['seconds_ratio']:.2f}x", *mine, cause]


def scale_sections(results: dict[str, Any]) -> Iterator[Section]:
    """What fits under a limit, and how fast."""
    if results["scale"]:
        rows = []
        for r in results["scale"]:
            row = [
                r["workload"],
                _mib(r["limit_bytes"]),
                r["varied"],
                r["system"],
                str(r["value"]),
                _mib(r["peak_bytes"]),
            ]
            speed = f"{r['examples_per_second']:.1f}" if "examples_per_second" in r else ""
            rows.append([*row, speed, "measured" if r["measured"] else "predicted by replay"])
        head = ["workload", "limit, MiB", "varied", "system", "largest", "peak, MiB", "examples a second", "how known"]
        yield Section("What fits under a memory limit", [], head, rows)
    if results["throughput"]:
        rows = [
            [r["workload"], r["system"], str(r["batch"]), f"{r['examples_per_second']:.1f}"]
            for r in results["throughput"]
        ]
        told = "As far as they fit; torch-echo with the limit as its memory budget."
        yield Section(
            "Throughput by batch under the limit", [told], ["workload", "system", "batch", "examples a second"], rows
        )


def predicted_sections(records: Sequence[Record], there: Measured) -> Iterator[Section]:
    """Predicted peaks, for each preset and device; and how far they are off those that were measured."""
    groups = dict.fromkeys((r["preset"], r["device"]) for r in records)
    for preset, device in groups:
        mine = [r for r in records if (r["preset"], r["device"]) == (preset, device)]
        section = Section(f"{preset}, {device}", head=[
            "workload", "size", "system", "peak, MiB", "eager / it", "extra time", "fits", "largest batch", "off"
        ])  # fmt: skip
        for given in (setting(EXTRA, reorder) for reorder in (False, True)):
            if found := predicted_ratios(mine, given):
                section.lines.append(
                    f"Eager PyTorch's peak over that of `tape:{given}`, over {len(found)} of the paper's {len(PAPER)} workloads: "
                    f"mean {fmean(found.values()):.2f}, maximum {max(found.values()):.2f}."
                )
        for system, of_what in (
            ("eager", "eager PyTorch"),
            ("tape", "torch-echo, which plans with measured times where it runs"),
        ):
            if apart := [abs(x) for r in mine if r.get("system") == system and (x := off(r, there)) is not None]:
                mean, most = fmean(apart), max(apart)
                section.lines.append(
                    f"Peaks were measured in {len(apart)} cases of {of_what}: off by {mean:.2%} on average, {most:.2%} at most."
                )
        rows = [_predicted_row(r, off(r, there)) for r in mine]
        used = [i for i in range(len(section.head)) if any(row[i] for row in rows)]
        section.head, section.rows = [section.head[i] for i in used], [[row[i] for i in used] for row in rows]
        yield section


def _predicted_row(r: Record, apart: float | None) -> list[str]:
    if "error" in r:
        return [r["workload"], "", r["error"], *[""] * 6]
    size = ", ".join(f"{k} {v}" for k, v in r["size"].items() if k in ("batch", "length", "frames", "layers"))
    row = [r["workload"], size, label(r), _mib(r["peak_bytes"]), f"{r['ratio']:.2f}" if "ratio" in r else ""]
    row += [f"{r['overhead']:.1%}" if "overhead" in r else "", {True: "yes", False: "no"}.get(r.get("fits", ""), "")]
    return [*row, str(r.get("largest_batch", "")), "" if apart is None else f"{apart:+.2%}"]


def change_section(changes: Sequence[Change]) -> Section:
    """A newer run beside an older one."""
    head = ["workload", "system", "peak then, MiB", "now", "change", "time then", "now", "worse"]
    rows = []
    for c in changes:
        row = [c.new["workload"], label(c.new), _mib(c.old["peak_bytes"]), _mib(c.new["peak_bytes"]), f"{c.peak:+.1%}"]
        times = [f"{c.old['seconds_ratio']:.2f}x", f"{c.new['seconds_ratio']:.2f}x"]
        rows.append([*row, *times, "worse" if c.worse else ""])
    return Section("Against the older run", [] if rows else ["The two have no case in common."], head, rows)
