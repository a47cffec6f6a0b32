"""The benchmarks' predicted figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import predicted
from benchmarks.gpu_report import _table, _tests


def test_records_are_of_eager_and_of_each_overhead() -> None:
    eager, *taped = predicted.predicted("gpt", "small", "cuda", memory=1 << 40, overheads=(0.1, 0.4))
    assert eager["predicted"] and eager["system"] == "eager" and eager["fits"]
    assert [r["setting"] for r in taped] == ["0.1", "0.4"]
    assert eager["peak_bytes"] > taped[0]["peak_bytes"] > taped[1]["peak_bytes"]
    assert taped[0]["ratio"] == pytest.approx(eager["peak_bytes"] / taped[0]["peak_bytes"])


def test_the_papers_figures_are_of_one_overhead() -> None:
    records = [
        {"workload": w, "setting": s, "ratio": x}
        for w, s, x in (("a", "0.15", 2.0), ("b", "0.15", 3.0), ("b", "0.05", 9.0))
    ]
    assert predicted.ratios([*records, {"workload": "b", "error": "no"}], ["a", "b"]) == (2.5, 3.0, 2)
    assert predicted.ratios(records, ["c"]) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--device-memory", "much"], "not a size"),
        (["--size", "batch=0"], "from 1 on"),
        (["--size", "wings=2"], "nmt has"),
        (["--fill"], "needs --device-memory"),
        (["--jobs", "0"], "1 or more"),
    ],
)
def test_mistakes_end_with_status_2(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        predicted.main(["--workload", "nmt", *given])
    assert ended.value.code == 2 and why in capsys.readouterr().err


def test_a_file_that_holds_no_results_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(predicted.TorchEchoError, match="holds no results"):
        predicted._measured(tmp_path / "x.json")


def test_the_report_of_a_gpu_sets_predictions_beside_what_was_measured(tmp_path: Path) -> None:
    bench = {
        "records": [
            {
                "workload": "nmt",
                "system": "eager",
                "peak_bytes": 400 << 20,
                "seconds_ratio": 1.0,
                "gradients_equal": True,
            },
            {"workload": "nmt", "system": "tape", "setting": "0.15", "peak_bytes": 100 << 20, "seconds_ratio": 1.1},
            {"workload": "nmt", "system": "tape", "setting": "0.05", "skipped": "no time was left"},
        ]
    }
    told = {"records": [{"workload": "nmt", "system": "tape", "setting": "0.15", "peak_bytes": 101 << 20}]}
    eager, taped, skipped = _table(bench, json.loads(json.dumps(told)))
    assert eager == ["nmt", "eager", "400", "1.00", "1.000", "True", ""]
    assert taped == ["nmt", "tape:0.15", "100", "4.00", "1.100", "", "+1.0%"]
    assert skipped == ["nmt", "tape:0.05", "no time was left"]


def test_the_report_names_the_tests_that_failed(tmp_path: Path) -> None:
    (tmp_path / "t.xml").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase name="a"/><testcase name="b">'
        '<failure message="1 is not 2"/></testcase><testcase name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    found = _tests(tmp_path / "t.xml")
    assert found["tests"] == 3 and found["failed"] == [{"test": "b", "message": "1 is not 2"}]
    assert _tests(tmp_path / "none.xml") == {}
