"""The benchmarks themselves: what they measure, and how they judge it."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.__main__ import _cases, _parser, main
from benchmarks.figures import at, better, changes, ratios
from benchmarks.harness import Budget, Harness, summary
from benchmarks.measure import MIB, Meter, Seeded, distance, peak, total_peak
from benchmarks.output.files import read
from benchmarks.output.sections import composition_section
from benchmarks.scale import fits
from benchmarks.systems import SYSTEMS, Case, cases, parse, settle, start
from benchmarks.workloads import PAPER, WORKLOADS, Trainer, build, presets
from benchmarks.workloads.base import directly

from torch_echo import BudgetInfeasible

TINY: dict[str, dict[str, Any]] = {
    "nmt": {"batch": 2, "length": 4},
    "nmt1000": {"batch": 2, "length": 4, "width": 32},
    "nmt4": {"batch": 2, "length": 4, "width": 32},
    "deepspeech": {"batch": 2, "frames": 48, "width": 16},
    "transformer_base": {"batch": 2, "length": 4},
    "transformer_big": {"batch": 2, "length": 4},
    "resnet50": {"batch": 2, "image": 32, "width": 4},
    "resnet152": {"batch": 2, "image": 32, "width": 4},
    "lstm_lm": {"batch": 2, "length": 4},
    "gpt2": {"batch": 2, "length": 8, "layers": 2},
    "bert": {"batch": 2, "length": 8, "layers": 2},
    "unet": {"batch": 2, "image": 16},
    "vit": {"batch": 2, "image": 16, "layers": 2},
    "mamba2": {"batch": 2, "length": 16, "layers": 2, "chunk": 8},
    "gnn": {"batch": 20, "degree": 3},
    "decoder": {"batch": 2, "length": 4},
    "gpt": {"batch": 2, "length": 8},
    "lstm_cells": {"batch": 2, "length": 4},
    "byte_lm": {"batch": 2, "length": 8, "width": 16},
    "long_lstm": {"batch": 2, "length": 8},
    "example_nmt": {"batch": 4, "length": 12, "width": 16},
}
"""Sizes in which a step takes milliseconds."""


def step_of(name: str, **tiny: Any) -> tuple[Seeded, torch.Tensor]:
    step = Seeded(Trainer(build(name, **tiny)))
    return step, step()


class TestWorkloads:
    @pytest.mark.parametrize("name", list(WORKLOADS))
    def test_a_step_with_each_way_to_checkpoint(self, name: str) -> None:
        """Built twice it is the same model with the same data; checkpointing is placed somewhere, and changes no gradient."""
        plain, loss = step_of(name, **TINY[name])
        assert torch.isfinite(loss)
        assert all(p.grad is not None for p in plain.trainer.parameters)
        for place in build(name, **TINY[name]).places:
            workload = build(name, **TINY[name])
            calls: list[Any] = []

            def noted(function: Any, *args: Any, calls: list[Any] = calls) -> Any:
                calls.append(function)
                return directly(function, *args)

            workload.places[place](noted)
            step = Seeded(Trainer(workload))
            assert torch.equal(step(), loss)
            assert calls
            grads = [p.grad for p in step.trainer.parameters]
            assert distance(grads, [p.grad for p in plain.trainer.parameters]) == (True, 0.0)

    @pytest.mark.parametrize("name", [name for name, about in WORKLOADS.items() if about.listed])
    def test_presets(self, name: str) -> None:
        assert presets(name) == ("small", "paper")
        fields = {f for f in TINY[name] if f in ("batch", "layers")}
        assert fields  # by which `scale` varies it

    def test_on_any_device(self) -> None:
        workload = build("gnn", "paper", "meta")
        assert {t.device.type for t in (*workload.inputs, *workload.module.parameters())} == {"meta"}


class TestSystems:
    @pytest.mark.parametrize("text", ["hand:per layer", "library", "tape:0.5", "paper", "echo_eager:0.5"])
    def test_gradients_are_eagers(self, text: str) -> None:
        name = "gpt2" if text == "library" else "gnn"
        plain, _ = step_of(name, **TINY[name])
        while plain.done < 8:
            plain()
        workload = build(name, **TINY[name])
        running = start(parse(text), workload)
        step = Seeded(Trainer(workload, running.call))
        settle(running, step)
        while step.done < 8:
            step()
        if running.session is not None:
            running.session.close()
        theirs = [p.grad for p in plain.trainer.parameters]
        assert distance([p.grad for p in step.trainer.parameters], theirs)[1] < 1e-6

    def test_a_budget_that_can_not_be_met_is_told_as_such(self) -> None:
        workload = build("gnn", **TINY["gnn"])
        running = start(parse("tape:memory_budget=1000"), workload)
        with pytest.raises(BudgetInfeasible, match="least reachable peak"):
            settle(running, Seeded(Trainer(workload, running.call)))
        assert running.session is not None
        running.session.close()

    @pytest.mark.long
    @pytest.mark.parametrize("text", ["compile", "budget:0.5", "echo:0.1"])
    def test_inductor(self, text: str) -> None:
        workload = build("gnn", **TINY["gnn"])
        running = start(parse(text), workload)
        step = Seeded(Trainer(workload, running.call))
        assert settle(running, step) == 3
        assert torch._functorch.config.activation_memory_budget == (0.5 if "budget" in text else 1)
        torch._functorch.config.activation_memory_budget = 1
        torch._dynamo.reset()

    def test_cases_of_a_workload(self) -> None:
        found = [str(case) for case in cases(build("nmt", **TINY["nmt"]))]
        assert found[0] == "eager"
        assert {"hand:attention", "hand:per layer and step", "tape:0.05", "compile", "budget:0.5", "paper"} <= set(
            found
        )
        assert "library" not in found
        assert "library" in map(str, cases(build("gpt2", **TINY["gpt2"])))
        assert len(found) == len(set(found))
        quick = [str(case) for case in cases(build("nmt", **TINY["nmt"]), quick=True)]
        assert quick == ["eager", "tape:0.05", "tape:0.15", "hand:attention"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("nothing", "no system is called 'nothing'"),
            ("eager:0.1", "eager has no settings"),
            ("budget:2", "a fraction from 0 to 1"),
            ("tape:-1", "max_overhead"),
            ("tape:much", "much"),
            ("echo:cost=guessed", "cost"),
            ("tape:speed=1", "speed"),
        ],
    )
    def test_what_there_is_not(self, text: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            parse(text)


class TestMeasures:
    def test_peak_is_what_was_alive_at_once(self) -> None:
        def step() -> None:
            a = torch.empty(MIB // 4)
            b = torch.empty(MIB // 2)
            del a
            c = torch.empty(MIB // 4)
            del b, c

        assert peak(step) == 3 * MIB

    def test_all_that_a_step_holds(self) -> None:
        """Parameters, Adam's two states and the gradients are held at once; the first three of them are the state."""
        model = torch.nn.Linear(512, 512, bias=False)
        workload = build("gnn", **TINY["gnn"])
        workload.module, workload.inputs = torch.nn.Sequential(model, Sum()), (torch.ones(1, 512),)
        step = Seeded(Trainer(workload))
        step()
        found = total_peak(step, torch.device("cpu"))
        assert found.state == pytest.approx(3 * MIB, rel=0.01)
        assert found.peak >= 4 * MIB

    def test_distance(self) -> None:
        one, other = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 2.0])
        assert distance([one, None], [one.clone(), None]) == (True, 0.0)
        equal, apart = distance([other], [one])
        assert not equal
        assert apart == pytest.approx(0.5)
        assert distance([None], [one])[0] is False

    def test_the_meter_counts_steps(self) -> None:
        calls: list[int] = []
        found = Meter(torch.device("cpu"))(lambda: calls.append(1), 5)
        assert len(calls) == 5
        assert found["seconds"] >= 0

    def test_ratios_are_taken_within_a_round(self) -> None:
        """A machine that slows down in the second round slows both."""
        found = summary(
            [{"seconds": 2.0}, {"seconds": 20.0}, {"seconds": 2.2}], [{"seconds": s} for s in (1.0, 10.0, 1.0)]
        )
        assert found["seconds"] == 2.2
        assert found["seconds_ratio"] == 2.0
        assert found["rounds"] == 3

    def test_what_fits(self) -> None:
        assert fits(100, (10, 30.0), (20, 50.0)) == 45


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    said: list[str] = []
    folder = tmp_path_factory.mktemp("harness")
    harness = Harness("small", "cpu", folder, 2, 2)
    harness.say = lambda workload, case, what: said.append(f"{case} {what}")
    wanted = [Case("eager"), Case("tape", "0.5"), Case("hand", "nowhere")]
    records = harness.run("gnn", wanted, time.monotonic() + 60, TINY["gnn"])
    late = harness.run("gnn", wanted[:2], time.monotonic(), TINY["gnn"])
    harness.deadline = time.monotonic()
    late += harness.run("gnn", wanted[:2], time.monotonic() + 60, TINY["gnn"])
    yield records, said, late
    assert not multiprocessing.active_children()


class TestHarness:
    """Processes: slow to begin with."""

    def test_records(self, found: Any) -> None:
        eager, tape, _ = found[0]
        assert [r["system"] for r in found[0]] == ["eager", "tape", "hand"]
        assert eager["seconds_ratio"] == 1.0
        assert tape["rounds"] == eager["rounds"] == 2
        assert tape["gradients_equal"] and tape["losses_equal"] and len(tape["losses"]) == 3
        assert tape["peak_bytes"] < eager["peak_bytes"]
        assert tape["state_bytes"] == eager["state_bytes"]
        assert tape["predicted_bytes"] == pytest.approx(tape["peak_bytes"], rel=0.02)
        assert sum(n for *_, n in tape["before"]) == tape["predicted_eager_bytes"]

    def test_what_fails_is_told(self, found: Any) -> None:
        assert "can checkpoint per layer" in found[0][2]["error"]
        assert any("tape:0.5" in line and "MiB" in line for line in found[1])

    def test_what_there_is_no_time_for_is_left_out(self, found: Any) -> None:
        eager, *others = found[2]
        assert "peak_bytes" in eager
        assert [r["skipped"] for r in others] == ["no time was left"] * 3

    def test_time_is_shared(self) -> None:
        budget = Budget(100.0, began=time.monotonic() - 40)
        assert budget.ends(3) - time.monotonic() == pytest.approx(20, abs=0.5)
        assert Budget(1.0, began=time.monotonic() - 2).ends(2) <= time.monotonic()


def record(workload: str, case: str, mib: float, time: float, **more: Any) -> dict[str, Any]:
    system, _, setting = case.partition(":")
    return {
        "workload": workload, "system": system, "setting": setting, "peak_bytes": round(mib * MIB), "state_bytes": 10 * MIB,
        "setup_seconds": 1.0, "losses_equal": True, "loss_distance": 0.0, "gradients_equal": True, "gradient_distance": 0.0,
        "rounds": 3, "seconds": time, "seconds_spread": [time, time], "seconds_ratio": time, "seconds_ratio_spread": [time, time],
        **more,
    }  # fmt: skip


def results() -> dict[str, Any]:
    held = {"before": [["decoder", "feature_map", 80 * MIB]], "after": [["decoder", "feature_map", 20 * MIB]]}
    records = []
    for name in PAPER:
        records += [
            record(name, "eager", 100, 1.0),
            record(name, "tape:0.05", 80, 1.05, predicted_bytes=(84 if name == "nmt" else 80) * MIB, **held),
            record(name, "tape:0.15", 40 if name == "nmt" else 50, 1.14, **held),
            record(name, "tape:0.3", 30, 1.3, **held),
            record(name, "hand:per layer", 60, 1.3),
            {"workload": name, "system": "compile", "setting": "", "error": "no | compiler"},
        ]
    about = {name: {"title": name, "size": {"batch": 4}} for name in PAPER}
    fitting = {
        "workload": "nmt",
        "limit_bytes": 100 * MIB,
        "varied": "batch",
        "system": "eager",
        "value": 4,
        "peak_bytes": 99 * MIB,
    }
    return {
        "format": 1, "torch_echo": "0", "environment": {"torch": "2", "cpu": "one"}, "preset": "small", "device": "cpu",
        "workloads": about, "records": records, "scale": [{**fitting, "measured": False}],
        "throughput": [{"workload": "nmt", "system": "eager", "batch": 4, "examples_per_second": 2.0}],
        "seconds": 60.0, "load": [0.0],
    }  # fmt: skip


class TestFigures:
    def test_ratios(self) -> None:
        """The least peak within 15% extra time counts, not that at 30%."""
        found = ratios(results()["records"])
        assert found is not None
        assert found.most == 2.5
        assert found.mean == pytest.approx((2.5 + 3 * 2) / 4)
        assert ratios([]) is None

    def test_a_curve_between_two_settings(self) -> None:
        curve = [record("nmt", "tape:1", 100, 1.0), record("nmt", "tape:2", 50, 1.2), record("nmt", "tape:3", 70, 1.3)]
        assert at(curve, 1.1) == pytest.approx(75 * MIB)
        assert at(curve, 2.0) == 50 * MIB
        assert at(curve, 0.9) is None

    def test_peers_that_are_better(self) -> None:
        records = results()["records"]
        assert not better(records)
        records.append(record("nmt", "hand:attention", 35, 1.14))
        (case,) = better(records)
        assert case.peer["setting"] == "attention"
        assert case.by > 0.02
        assert not case.cut
        records.append({"workload": "nmt", "system": "tape", "setting": "0.5", "skipped": "no time was left"})
        assert better(records)[0].cut
        records.append(record("nmt", "budget:0.5", 90, 0.7))
        assert [c.mine for c in better(records) if c.peer["system"] == "budget"] == [None]

    def test_changes(self) -> None:
        old, new = results()["records"], results()["records"]
        assert not any(change.worse for change in changes(old, new))
        new[1]["peak_bytes"] *= 1.03
        new[2]["gradients_equal"] = False
        worse = [change for change in changes(old, new) if change.worse]
        assert [change.new["setting"] for change in worse] == ["0.05", "0.15"]


class TestCommand:
    def test_from_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source, page = tmp_path / "old.json", tmp_path / "results.md"
        source.write_text(json.dumps(results()))
        main(["--from", str(source), "--out", str(tmp_path), "--page", str(page), "--compare", str(source)])
        shown = capsys.readouterr().out
        assert "Mean 2.12, maximum 2.50" in shown
        assert "predicted by replay" in shown
        text = page.read_text()
        assert "Mean 2.12, maximum 2.50" in text
        assert "no / compiler" in text
        assert "| tape | 4 | 1.25% | +5.00% | nmt, tape:0.05 |" in text
        assert "| decoder | feature map | 80.0 | 20.0 |" in text
        assert all(f"### {name}" in text for name in PAPER)
        picture = (tmp_path / "bench.html").read_text()
        assert "plotly" in picture and "torch-echo, tape" in picture and "star" in picture

    def test_rows_of_equal_size_stand_in_one_order(self) -> None:
        """Whatever hashes strings get: a page that is made again is the same."""
        names = [f"layer{i}" for i in range(20)]
        held = {"before": [[name, "feature_map", 8 * MIB] for name in names], "after": []}
        section = composition_section([record("nmt", "tape:0.05", 80, 1.05, **held)])
        assert section is not None
        assert [row[0] for row in section.rows] == sorted(names)[:10]

    def test_an_image(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        from benchmarks.output.plots import write_png

        write_png(results(), tmp_path / "bench.png")
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    def test_without_the_packages_for_pictures(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "plotly", None)
        monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
        source = tmp_path / "old.json"
        source.write_text(json.dumps(results()))
        main(["--from", str(source), "--out", str(tmp_path)])
        assert "no bench.html: plotly" in capsys.readouterr().out
        assert not (tmp_path / "bench.html").exists()

    def test_runs_are_put_together(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """What a later one measured takes the place of what an earlier one did."""
        first, second, out = results(), results(), tmp_path / "out"
        out.mkdir()
        second["workloads"] = {"nmt": {"title": "again", "size": {"batch": 4}}}
        second["records"] = [record("nmt", "eager", 100, 1.0), record("nmt", "tape:0.15", 25, 1.1)]
        second["scale"], second["throughput"] = [], [{**second["throughput"][0], "batch": 7}]
        for name, part in (("a", first), ("b", second), ("c", {**second, "preset": "paper"})):
            (tmp_path / f"{name}.json").write_text(json.dumps(part))
        main(["--from", str(tmp_path / "a.json"), "--from", str(tmp_path / "b.json"), "--out", str(out)])
        found = json.loads((out / "bench.json").read_text())
        assert [r["peak_bytes"] for r in found["records"] if r["workload"] == "nmt"] == [100 * MIB, 25 * MIB]
        assert found["workloads"]["nmt"]["title"] == "again" and len(found["workloads"]) == len(PAPER)
        assert len(found["records"]) == len(first["records"]) - 6 + 2
        assert found["scale"] == first["scale"], "the later run did not ask what fits"
        assert found["throughput"] == second["throughput"]
        with pytest.raises(SystemExit):
            main(["--from", str(tmp_path / "a.json"), "--from", str(tmp_path / "c.json"), "--out", str(out)])
        assert "preset 'small' and 'paper'" in capsys.readouterr().err

    def test_without_the_package_that_a_model_comes_from(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        parser = _parser()
        asked = _cases(parser, parser.parse_args(["--workload", "gpt2", "--workload", "gnn", "--system", "tape:0.1"]))
        assert [str(case) for case in asked["gpt2"]] == ["eager", "tape:0.1"]
        assert len(asked["gnn"]) == 2

    def test_worse_than_before(self, tmp_path: Path) -> None:
        old, new = tmp_path / "old.json", tmp_path / "new.json"
        made = results()
        old.write_text(json.dumps(made))
        made["records"][1]["peak_bytes"] *= 2
        new.write_text(json.dumps(made))
        with pytest.raises(SystemExit) as ended:
            main(["--from", str(new), "--out", str(tmp_path), "--compare", str(old)])
        assert ended.value.code == 1

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["--preset", "large"], "invalid choice"),
            (["--workload", "nothing"], "invalid choice"),
            (["--workload", "gnn", "--system", "nothing"], "no system is called 'nothing'"),
            (["--workload", "gnn", "--system", "hand:nowhere"], "no such case for gnn"),
            (["--workload", "gnn", "--system", "library"], "no such case for gnn"),
            (["--workload", "gnn", "--size", "batch=none"], "must be FIELD=N"),
            (["--workload", "gnn", "--size", "wings=2"], "gnn has batch, degree"),
            (["--workload", "decoder", "--preset", "paper", "--device", "cpu"], "has sizes for small only"),
            (["--minutes", "0"], "must be more than 0"),
            (["--device", "tpu"], "must be cpu or cuda"),
            (["--out", "/nowhere"], "no such folder"),
            (["--memory-limit", "1GiB"], "is for --scale"),
            (["--workload", "gnn", "--scale", "--memory-limit", "much"], "'much' is not a size"),
            (["--from", "/nowhere.json"], "can't read the results"),
        ],
    )
    def test_bad_values(self, args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err

    def test_files_of_another_format(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "new.json"
        for text, said in (
            ("{", "holds no results"),
            ('{"format": 99, "records": []}', "has format 99"),
            ("[]", "has format None"),
        ):
            path.write_text(text)
            with pytest.raises(SystemExit):
                main(["--from", str(path), "--out", str(tmp_path)])
            assert said in capsys.readouterr().err
        path.write_text(json.dumps(results()))
        assert read(path)["preset"] == "small"

    def test_help(self) -> None:
        done = subprocess.run([sys.executable, "-m", "torch_echo", "bench", "--help"], capture_output=True, text=True)
        assert done.returncode == 0
        assert all(name in done.stdout for name in (*WORKLOADS, *SYSTEMS))


class TestPlanner:
    """torch-echo bench planner."""

    @pytest.fixture(scope="class")
    def swept(self, tmp_path_factory: pytest.TempPathFactory) -> Any:
        from benchmarks.planner.models import MODELS, Block
        from benchmarks.planner.sweep import sweep

        class Small(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = torch.nn.ModuleList(Block(32, 4) for _ in range(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x)
                return x.square().mean()

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_ECHO_CACHE", str(tmp_path_factory.mktemp("cost")))
            patch.setitem(MODELS, "small", lambda: (Small(), (torch.randn(4, 32, 32),)))
            yield sweep("small")
        torch._dynamo.reset()

    def test_the_judge_agrees_with_the_replay(self, swept: Any) -> None:
        """It reads the two graphs, and knows nothing of the plan that they come from."""
        assert all(row.echo_judged == pytest.approx(row.echo_peak, rel=1e-3) for row in swept.rows)
        assert swept.rows[0].torch_seconds <= swept.rows[-1].torch_seconds
        assert all(row.echo_peak <= row.torch_peak for row in swept.rows if row.torch_peak >= swept.floor)

    def test_where_their_peak_has_risen_again(self, swept: Any) -> None:
        front = swept.on_their_front()
        peaks = [row.torch_peak for row in front]
        assert peaks == sorted(peaks, reverse=True)

    def test_what_is_written(self, swept: Any, tmp_path: Path) -> None:
        from benchmarks.planner.output import show, write

        show(swept)
        data, picture = write([swept], tmp_path)
        figures = json.loads(data.read_text())
        assert figures["models"][0]["model"] == "small"
        assert len(figures["models"][0]["rows"]) == len(swept.rows)
        assert "plotly" in picture.read_text()

    def test_from_the_command_line(self) -> None:
        def run(*args: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([sys.executable, "-m", "torch_echo", "bench", *args], capture_output=True, text=True)

        shown = run("planner", "--help")
        assert shown.returncode == 0
        assert "activation_memory_budget" in shown.stdout
        found = run("planner", "--out", "/nowhere")
        assert found.returncode == 2
        assert "no such folder" in found.stderr


def test_the_decoder_in_jax(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    from benchmarks import jax_decoder

    monkeypatch.setattr(sys, "argv", ["jax_decoder", "--rounds", "1"])
    jax_decoder.main()
    assert len(capsys.readouterr().out.splitlines()) == len(jax_decoder.VARIANTS)
