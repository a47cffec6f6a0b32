"""Printed tables against golden files, from made-up records; ``GOLDEN=write pytest tests/report`` writes them anew."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from torch_echo.graph import Kind, Op, Phase, TrainingGraph
from torch_echo.report.summary import KindSummary, Summary
from torch_echo.report.tables import WIDTH, format_seconds, print_summary, render_explanation, render_summary

GOLDEN = Path(__file__).parent / "golden"
MIB = 1 << 20

FULL = Summary(
    steps=1234,
    measured_peak=366 * MIB,
    eager_peak=532 * MIB,
    predicted_peak=352 * MIB,
    base_bytes=85 * MIB,
    extra_seconds=0.0123,
    step_seconds=0.3,
    rebuilt=[
        ("encoder", 3 * MIB, 2),
        ("decoder.attention", 101 * MIB, 600),
        ("decoder.out", 40 * MIB, 60),
        ("encoder.dropout", 2 * MIB, 2),
        ("", MIB, 1),
        ("heads.0[x]", MIB // 2, 7),
        ("heads.1", MIB // 2, 7),
    ],
    unhandled=[
        ("aten::_cudnn_rnn", "not run again: it changes its arguments without saying so", "train.py:41"),
        ("a compiled part", "runs as it is; " + "a reason with many words " * 5, "/home/me/project/train.py:88"),
        ("[a sparse tensor]", "kept", ""),
    ],
    plan_notes=["step 3 was 1.4% above the plan, which was made again"],
)

SUMMARIES = {
    "full": FULL,
    "no_steps": Summary(),
    "no_steps_because": Summary(unhandled=[("Net", "it is on the device 'mps'", "train.py:7")]),
    "not_planned": Summary(steps=1),
    "not_measured": Summary(
        steps=2, eager_peak=532 * MIB, predicted_peak=366 * MIB, extra_seconds=0.01, rebuilt=[("a", 5, 1)]
    ),
    "nothing_rebuilt": Summary(
        steps=5, measured_peak=5 * MIB, eager_peak=5 * MIB, predicted_peak=5 * MIB, extra_seconds=0.0, step_seconds=0.1
    ),
    "loss": Summary(
        steps=5,
        measured_peak=5 * MIB,
        eager_peak=8 * MIB,
        predicted_peak=5 * MIB,
        extra_seconds=0.0,
        step_seconds=0.1,
        loss_bytes=3 * MIB,
    ),
    "ranks": Summary(
        steps=5,
        measured_peak=366 * MIB,
        eager_peak=532 * MIB,
        predicted_peak=366 * MIB,
        ranks=4,
        rank_peaks={0: 366 * MIB, 2: 380 * MIB, 1: 366 * MIB},
        unhandled=[("rank 2: training step", "it was recorded in vain", "train.py:9")],
    ),
    "ranks_unmeasured": Summary(steps=5, ranks=2),
    "several_kinds": Summary(
        steps=1200,
        measured_peak=366 * MIB,
        eager_peak=532 * MIB,
        predicted_peak=366 * MIB,
        extra_seconds=0.007,
        step_seconds=0.15,
        rebuilt=[("Generator.0", 101 * MIB, 600)],
        kinds=[
            KindSummary(
                name="Judge",
                steps=1000,
                measured_peak=None,
                eager_peak=200 * MIB,
                predicted_peak=150 * MIB,
                extra_seconds=0.006,
                step_seconds=0.12,
            ),
            KindSummary(
                name="Generator + Judge",
                steps=200,
                measured_peak=366 * MIB,
                eager_peak=532 * MIB,
                predicted_peak=360 * MIB,
                extra_seconds=0.012,
                step_seconds=0.3,
            ),
        ],
    ),
    "many_unhandled": Summary(
        steps=5, measured_peak=MIB, unhandled=[(f"op {i}", "why", f"a.py:{i}") for i in range(14)]
    ),
}


def check(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


class TestSummary:
    @pytest.mark.parametrize("name", SUMMARIES)
    def test_golden(self, name: str) -> None:
        check(f"summary_{name}", render_summary(SUMMARIES[name]))

    @pytest.mark.parametrize("width", [60, WIDTH])
    def test_fits_its_width(self, width: int) -> None:
        assert max(map(len, render_summary(FULL, width=width).splitlines())) <= width

    def test_plain_where_there_is_no_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "40")
        file = io.StringIO()
        print_summary(FULL, file=file)
        assert file.getvalue() == render_summary(FULL)

    def test_colours_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        file = Terminal()
        print_summary(FULL, file=file)
        assert "\x1b[" in file.getvalue()
        assert "heads.0[x]" in render_summary(FULL, width=200) or "other layers" in render_summary(FULL)


@dataclass
class Footprint:
    peak: int
    op: int
    parts: dict[tuple[str, Kind], int]
    graph: TrainingGraph
    rerun: list[int] = field(default_factory=list)

    def composition(self) -> dict[tuple[str, Kind], int]:
        return self.parts


@dataclass
class Decision:
    name: str
    layer: str
    instances: int
    n_dropped: int
    bytes_dropped: int
    bytes_less_at_peak: int
    bytes_kept: int
    seconds_more: float
    action: str
    reason: str
    rebuilt_from: tuple[str, ...] = ()


@dataclass
class Plan:
    floor: int
    extra_seconds: float
    step_seconds: float
    decisions: list[Decision]
    peak: int
    notes: list[str] = field(default_factory=list)


@pytest.fixture
def explained() -> dict[str, Any]:
    before = {("decoder.attention", Kind.FEATURE_MAP): 300 * MIB, ("", Kind.INPUT): 50 * MIB}
    for i in range(6):
        before[f"encoder.layers.{i}", Kind.PARAMETER] = (9 - i) * MIB
        before[f"encoder.layers.{i}", Kind.RNG_STATE] = 5056
        before[f"encoder.layers.{i}", Kind.GRADIENT] = (9 - i) * MIB // 2
    after = {**before, ("decoder.attention", Kind.FEATURE_MAP): 3 * MIB, ("decoder", Kind.OUTPUT): 7 * MIB}
    graph = TrainingGraph(ops=[Op("aten::tanh", "decoder.attention", Phase.BACKWARD, 0, 0, 0, 1)])
    decisions = [
        Decision(
            "aten::tanh", "decoder.attention", 600, 540, 220 * MIB, 200 * MIB, 4 * MIB, 0.011, "rebuild",
            "backward reads it", ("decoder.attention:aten::add", "decoder.attention:aten::expand", "parameters"),
        ),
        Decision("aten::addmm", "decoder.out", 60, 0, 0, 0, 3 * MIB, 0.0, "keep", "kept: re-running takes 25 ms"),
        Decision("aten::add", "", 1, 1, MIB, MIB, 0, 2e-6, "rebuild", "[cheap]"),
        *(
            Decision("aten::tanh", f"heads.{i}.act", 2, 1, MIB, MIB, MIB, 0.001, "rebuild", "backward reads it",
                     (f"heads.{i}.act:aten::add", f"heads.{i}.lin:aten::addmm"))
            for i in range(3)
        ),
        *(Decision("aten::mm", f"heads{i}", 1, 0, 0, 0, MIB, 0.0, "keep", "must not be re-run") for i in range(30)),
    ]  # fmt: skip
    return {
        "plan": Plan(
            100 * MIB, 0.0123, 0.3, decisions, sum(after.values()), ["exact: each candidate", "searched: the prices"]
        ),
        "before": Footprint(sum(before.values()), 0, before, graph),
        "after": Footprint(sum(after.values()), -1, after, graph, list(range(1200))),
    }


class TestExplanation:
    def test_golden(self, explained: dict[str, Any]) -> None:
        check("explanation", render_explanation(**explained))

    def test_nothing_rebuilt(self, explained: dict[str, Any]) -> None:
        explained["plan"] = Plan(100 * MIB, 0.0, 0.0, [], explained["before"].peak)
        explained["after"] = explained["before"]
        check("explanation_nothing_rebuilt", render_explanation(**explained))

    def test_the_peak_of_compiled_code(self, explained: dict[str, Any]) -> None:
        explained["plan"].peak += 7 * MIB
        lines = [line.split() for line in render_explanation(**explained).splitlines()[:2]]
        promised, replayed = float(lines[0][2]), float(lines[1][2])
        assert (lines[0][0], lines[1][:2]) == ("peak", ["as", "replayed"])
        assert promised == replayed + 7

    def test_rows_add_up_to_the_peak(self, explained: dict[str, Any]) -> None:
        text = render_explanation(**explained)
        rows = [line.split() for line in text.partition("alive at")[2].partition("total")[0].splitlines()[1:]]
        sizes = [float(row[-4]) for row in rows if row[-4].replace(".", "").isdigit()]
        total = float(text.partition("\ntotal")[2].split()[0])
        assert sum(sizes) == pytest.approx(total, abs=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (2e-6, "2.00 us"),
        (9.996e-4, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.3, "300 ms"),
        (1, "1.00 s"),
        (75, "75.0 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
