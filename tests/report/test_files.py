"""The JSON report: its layout, and that it is written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from torch_echo.options import Options
from torch_echo.report.files import FORMAT, summary_as_json, write_summary
from torch_echo.report.summary import KindSummary, Summary

KIND = KindSummary(
    name="a + b", steps=2, measured_peak=5, eager_peak=9, predicted_peak=5, extra_seconds=0.1, step_seconds=1.0
)
SUMMARY = Summary(steps=3, measured_peak=5, rebuilt=[("a.b", 7, 2)], unhandled=[("op", "why", "x.py:3")], kinds=[KIND])


def test_layout() -> None:
    record = summary_as_json(SUMMARY, Options(max_overhead=0.1))
    assert record["format"] == FORMAT
    assert record["options"]["max_overhead"] == 0.1
    assert record["summary"]["rebuilt"] == [{"layer": "a.b", "bytes": 7, "values": 2}]
    assert record["summary"]["unhandled"] == [{"what": "op", "why": "why", "where": "x.py:3"}]
    assert record["summary"]["kinds"][0]["name"] == "a + b"
    assert summary_as_json(SUMMARY, None)["options"] is None
    assert json.loads(json.dumps(record)) == record


def test_written_as_an_ordinary_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_summary(path, SUMMARY, None)
    assert json.loads(path.read_text())["summary"]["steps"] == 3
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_summary(path, SUMMARY, None)
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "old"
