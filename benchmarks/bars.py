"""What the figures are to be, as one list of checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["LIMITS", "Bar", "Limit", "bars", "find", "geometric_mean"]

MIB = 2**20


@dataclass(frozen=True)
class Limit:
    """A peak to reach with at most so many GEMMs or convolutions run again."""

    workload: str
    mib: float
    most: int


LIMITS = (
    Limit("decoder", 28.0, 0),
    Limit("gpt", 76.0, 31),
    Limit("gpt", 190.0, 6),
    Limit("unet", 68.0, 0),
    Limit("unet", 60.6, 9),
    Limit("lstm_lm", 98.7, 139),
)


@dataclass(frozen=True)
class Bar:
    """One check."""

    what: str
    wanted: str
    got: str
    met: bool


def find(figures: dict[str, Any], workload: str, system: str) -> dict[str, Any] | None:
    """The case, if it was measured without an error."""
    for case in figures["cases"]:
        if case["workload"] == workload and case["system"] == system and "peak" in case:
            found: dict[str, Any] = case
            return found
    return None


def geometric_mean(numbers: list[float]) -> float:
    """1 for none."""
    return math.exp(sum(math.log(x) for x in numbers) / len(numbers)) if numbers else 1.0


def workloads(figures: dict[str, Any]) -> list[str]:
    """Those measured, in order."""
    return list(dict.fromkeys(case["workload"] for case in figures["cases"]))


def bars(figures: dict[str, Any]) -> list[Bar]:
    """All checks for which there are figures."""
    return [
        *_limits(figures),
        *_nmt(figures),
        *_hand(figures),
        *_means(figures),
        *_estimates(figures),
        *_engine(figures),
    ]


def _limits(figures: dict[str, Any]) -> Iterator[Bar]:
    for limit in LIMITS:
        eager = find(figures, limit.workload, "eager")
        case = find(figures, limit.workload, f"limit:{limit.most}:{round(limit.mib * MIB)}")
        if eager is None or case is None:
            continue
        again = case["heavy"] - eager["heavy"]
        kind = "convolutions" if limit.workload == "unet" else "GEMMs"
        yield Bar(
            f"{limit.workload}: peak with at most {limit.most} {kind} run again",
            f"<= {limit.mib} MiB",
            f"{case['peak'] / MIB:.1f} MiB with {again}",
            case["peak"] <= limit.mib * MIB and again <= limit.most,
        )


def _nmt(figures: dict[str, Any]) -> Iterator[Bar]:
    for length, share, ratio in ((30, 0.60, 1.15), (60, 0.43, 1.18)):
        eager = find(figures, f"nmt{length}", "eager")
        echo = find(figures, f"nmt{length}", "echo:max_overhead=0.2")
        if eager is not None and echo is not None:
            got = echo["peak"] / eager["peak"]
            again = echo["heavy"] - eager["heavy"]
            yield Bar(
                f"nmt{length}, max_overhead 0.2: peak", f"<= {share}x", f"{got:.3f}x, {again} GEMMs again", got <= share
            )
            yield Bar(
                f"nmt{length}, max_overhead 0.2: step time",
                f"<= {ratio}x",
                f"{echo['cpu_ratio']:.3f}x",
                echo["cpu_ratio"] <= ratio,
            )
        script = figures.get("script", {}).get(str(length))
        if script is not None:
            got = script["echo"] / script["plain"]
            yield Bar(
                f"train.py --length {length} under torch-echo run: peak", f"<= {share}x", f"{got:.3f}x", got <= share
            )


def _hand(figures: dict[str, Any]) -> Iterator[Bar]:
    for name in workloads(figures):
        hands = [
            c for c in figures["cases"] if c["workload"] == name and c["system"].startswith("hand") and "cpu_ratio" in c
        ]
        echo = next((c for c in figures["cases"] if c["workload"] == name and c.get("hand")), None)
        if not hands or echo is None:
            continue
        by_hand = hands[-1]
        wanted = f"<= {by_hand['cpu_ratio']:.3f}x"
        if "peak" not in echo:
            got = echo.get("infeasible", echo.get("error", "?"))[:60]
            yield Bar(f"{name}: step time at the peak of checkpointing by hand", wanted, got, False)
            continue
        yield Bar(
            f"{name}: step time at the peak of checkpointing by hand ({by_hand['peak'] / MIB:.1f} MiB)",
            wanted,
            f"{echo['cpu_ratio']:.3f}x at {echo['peak'] / MIB:.1f} MiB",
            echo["cpu_ratio"] <= by_hand["cpu_ratio"] and echo["peak"] <= by_hand["peak"],
        )


def _means(figures: dict[str, Any]) -> Iterator[Bar]:
    for system, name, ratio, time in (("echo", "default", 1.3, 1.06), ("echo:max_overhead=0.15", "0.15", 1.7, 1.18)):
        peaks, times = [], []
        for workload in workloads(figures):
            eager, echo = find(figures, workload, "eager"), find(figures, workload, system)
            if eager is not None and echo is not None:
                peaks.append(eager["peak"] / echo["peak"])
                times.append(echo.get("cpu_ratio", math.nan))
        if not peaks:
            continue
        mean, slow = geometric_mean(peaks), sum(times) / len(times)
        yield Bar(f"{name}: geometric mean of eager / echo peak", f">= {ratio}x", f"{mean:.3f}x", mean >= ratio)
        yield Bar(f"{name}: mean step time", f"<= {time}x", f"{slow:.3f}x", slow <= time)
        yield Bar(f"{name}: least eager / echo peak", ">= 1.0x", f"{min(peaks):.3f}x", min(peaks) >= 1.0)


def _estimates(figures: dict[str, Any]) -> Iterator[Bar]:
    echo = [c for c in figures["cases"] if c["system"].startswith("echo") and "peak" in c]
    timed = [c for c in echo if "cpu_ratio" in c]
    if timed:
        worst = max(timed, key=lambda c: abs(c["estimate"] - c["cpu_ratio"]))
        off = worst["estimate"] - worst["cpu_ratio"]
        close = sum(abs(c["estimate"] - c["cpu_ratio"]) <= 0.05 for c in timed)
        yield Bar(
            "estimated against measured extra time",
            "within 5 points",
            f"{close} of {len(timed)}; worst {100 * off:+.1f} ({worst['workload']} {worst['system']})",
            close == len(timed),
        )
        equal = sum(c["equal"] for c in timed)
        yield Bar(
            "gradients, parameters, buffers after each step",
            "bit-equal",
            f"{equal} of {len(timed)}",
            equal == len(timed),
        )
    budgets = [c for c in echo if "budget" in c]
    if budgets:
        met = sum(c["peak"] <= c["budget"] for c in budgets)
        yield Bar("feasible budgets met at the allocator", "all", f"{met} of {len(budgets)}", met == len(budgets))
    off = max((abs(c["peak"] / c["predicted"] - 1) for c in echo), default=0.0)
    if echo:
        yield Bar("predicted against measured peak", "within 0.5%", f"worst {100 * off:.2f}%", off <= 0.005)


def _engine(figures: dict[str, Any]) -> Iterator[Bar]:
    for name, got in figures.get("engine", {}).items():
        if name.startswith("planned"):
            most = 1.10 if "70" in name else 1.05
            what = f"{name}: forward / whole step"
            text = f"{got['forward_ratio']:.3f}x / {got['step_ratio']:.3f}x, {got['forward_us_per_op']:.1f} us an op"
            yield Bar(what, f"<= {most}x", text, got["forward_ratio"] <= most)
        elif "forward_ratio" in got:
            text = f"{got['forward_ratio']:.3f}x, {got['forward_us_per_op']:.2f} us an op"
            yield Bar(f"{name}: forward", "<= 1.01x", text, got["forward_ratio"] <= 1.01)
