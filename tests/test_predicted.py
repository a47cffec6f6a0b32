"""The benchmarks' predicted figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import predicted
from benchmarks.figures import predicted_ratios
from benchmarks.gpu_report import _table, _tests
from benchmarks.output import files


def test_records_are_of_eager_and_of_each_overhead() -> None:
    eager, *taped = predicted.predicted("gpt", "small", "cuda", memory=1 << 40, overheads=(0.1, 0.4))
    assert eager["predicted"] and eager["system"] == "eager" and eager["fits"]
    assert [r["setting"] for r in taped] == ["0.1", "0.4"]
    assert eager["peak_bytes"] > taped[0]["peak_bytes"] > taped[1]["peak_bytes"]
    assert taped[0]["ratio"] == pytest.approx(eager["peak_bytes"] / taped[0]["peak_bytes"])


def _record(workload: str, setting: str, mib: int, ratio: float = 0.0, **others: Any) -> dict[str, Any]:
    about = {"preset": "small", "device": "cpu", "size": {"batch": 2}, "system": "tape" if setting else "eager"}
    return about | {"workload": workload, "setting": setting, "peak_bytes": mib << 20, "ratio": ratio} | others


def test_the_papers_figures_are_of_its_workloads_and_one_overhead() -> None:
    records = [
        _record(w, s, 1, x) for w, s, x in (("nmt", "0.15", 2.0), ("deepspeech", "0.15", 3.0), ("nmt", "0.05", 9.0))
    ]
    records += [_record("gpt2", "0.15", 1, 7.0), {"workload": "resnet152", "error": "no"}]
    assert predicted_ratios(records, "0.15") == {"nmt": 2.0, "deepspeech": 3.0}


def test_predictions_are_set_beside_what_was_measured_of_the_same_case(tmp_path: Path) -> None:
    size = {"batch": 2}
    run = {"format": 1, "device": "cpu", "workloads": {"nmt": {"size": size}, "gpt2": {"size": {"batch": 3}}}}
    run["records"] = [
        {"workload": "nmt", "system": "tape", "setting": "0.15", "peak_bytes": 100 << 20},
        {"workload": "nmt", "system": "tape", "setting": "0.05", "skipped": "no time was left"},
        {"workload": "gpt2", "system": "tape", "setting": "0.15", "peak_bytes": 100 << 20},
    ]
    (tmp_path / "bench.json").write_text(json.dumps(run))
    told = [_record("nmt", "0.15", 101, 2.0), _record("nmt", "0.05", 7, 3.0), _record("gpt2", "0.15", 9, 4.0)]
    told.append({"workload": "vit", "preset": "small", "device": "cpu", "error": "no such thing"})
    about = {"format": 1, "predicted": True, "torch_echo": "0", "environment": {"torch": "2"}}
    for i, part in enumerate((told[:2], told[2:])):
        (tmp_path / f"{i}.json").write_text(json.dumps(about | {"records": part}))
    given = [f"--measured={tmp_path / 'bench.json'}", f"--page={tmp_path / 'p.md'}"]
    predicted.main([*given, f"--from={tmp_path / '0.json'}", f"--from={tmp_path / '1.json'}"])
    lines = (tmp_path / "p.md").read_text().splitlines()
    assert "| nmt | batch 2 | tape:0.15 | 101.0 | 2.00 | +1.00% |" in lines
    assert "| nmt | batch 2 | tape:0.05 | 7.0 | 3.00 |  |" in lines  # not timed
    assert "| gpt2 | batch 2 | tape:0.15 | 9.0 | 4.00 |  |" in lines  # another size
    assert "| vit |  | no such thing |  |  |  |" in lines
    assert any("over 1 of the paper's 4 workloads: mean 2.00, maximum 2.00" in line for line in lines)
    assert any("in 1 cases of torch-echo, which" in line and "off by 1.00% on average" in line for line in lines)
    assert not any("cases of eager" in line for line in lines)


def test_predictions_of_two_versions_are_not_put_together() -> None:
    parts = [{"torch_echo": v, "records": []} for v in ("1", "2")]
    with pytest.raises(files.ResultsError, match="1 and 2 are not put together"):
        files.predictions(parts)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--device-memory", "much"], "not a size"),
        (["--size", "batch=0"], "from 1 on"),
        (["--size", "wings=2"], "nmt has"),
        (["--fill"], "needs --device-memory"),
        (["--jobs", "0"], "1 or more"),
        (["--page", "nowhere/page.md"], "there is no folder nowhere"),
        (["--out", "nowhere/p.json"], "there is no folder nowhere"),
    ],
)
def test_mistakes_end_with_status_2(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        predicted.main(["--workload", "nmt", *given])
    assert ended.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--measured", "--from"])
@pytest.mark.parametrize("held", [[], {"format": 1, "records": [], "predicted": None}])
def test_a_file_that_holds_other_results_is_an_error(
    option: str, held: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if held:
        held["predicted"] = option == "--measured"
    (tmp_path / "x.json").write_text(json.dumps(held))
    with pytest.raises(SystemExit) as ended:
        predicted.main([option, str(tmp_path / "x.json"), "--workload", "nmt"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert ("this version reads" if not held else "holds predicted" if held["predicted"] else "holds measured") in said


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
