"""The benchmarks themselves: what they measure, and how they judge it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.bars import bars, geometric_mean
from benchmarks.measure import Times, count_kernels, peak
from benchmarks.tables import markdown, show
from benchmarks.workloads import NAMES, load
from benchmarks.workloads.base import GEMMS, Trainer, directly

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


def test_peak_is_what_was_alive_at_once() -> None:
    def step() -> None:
        a = torch.empty(MIB // 4)
        b = torch.empty(MIB // 2)
        del a
        c = torch.empty(MIB // 4)
        del b, c

    assert peak(step) == 3 * MIB


def test_kernels_are_counted_once_under_a_dispatch_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 4)

    def step() -> None:
        with Mode():  # type: ignore[no-untyped-call]
            torch.mm(x, x)
        torch.mm(x, x)

    assert count_kernels(step, GEMMS) == 2


@pytest.mark.parametrize("name", ["decoder", "unet"])
def test_places_for_checkpoints_change_no_gradient(name: str) -> None:
    workload = load(name)
    calls: list[Any] = []

    def noted(function: Any, *args: Any) -> Any:
        calls.append(function)
        return directly(function, *args)

    for place in workload.places.values():
        place(noted)
    trainer, plain = Trainer(workload, workload.module), load(name)
    other = Trainer(plain, plain.module)
    for t in (trainer, other):
        torch.manual_seed(1)
        t.step()
    assert calls
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(trainer.parameters, other.parameters, strict=True))  # type: ignore[arg-type]


def figures() -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    times = Times(cpu=[(1.0, 1.02)], wall=[(1.0, 1.02)]).as_json() | {"equal": True}
    for name in NAMES:
        echo = {"predicted": 50 * MIB, "estimate": 1.03, "heavy": 10, "peak": 50 * MIB, **times}
        cases += [
            {"workload": name, "system": "eager", "peak": 100 * MIB, "heavy": 10},
            {"workload": name, "system": "hand:x", "peak": 60 * MIB, "heavy": 12, **times},
            {"workload": name, "system": "echo", **echo},
            {"workload": name, "system": "echo:max_overhead=0.15", **echo},
            {"workload": name, "system": "echo:above=1", "budget": 55 * MIB, "share": 0.55, **echo},
            {"workload": name, "system": "echo:above=2", "share": 0.1, "infeasible": "no", "floor": 20 * MIB},
        ]
    return {"machine": "here", "cases": cases}


def test_bars_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    made = figures()
    assert all(bar.met for bar in bars(made))
    made["cases"][2]["peak"] = 110 * MIB
    missed = {bar.what for bar in bars(made) if not bar.met}
    assert missed == {"default: least eager / echo peak", "predicted against measured peak"}
    show(made)
    assert "infeasible" in capsys.readouterr().out
    assert markdown(made).count("| 50.0 (0.50x, 1.02x)") == 2 * len(NAMES) - 1


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([]) == 1.0


def test_a_case_in_its_own_process() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.case", "unet", "echo:max_overhead=0.1", "--rounds", "1"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["equal"]
    assert result["peak"] == pytest.approx(result["predicted"], rel=0.005)


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
        for args, said in ((("nothing",), "'nothing' is not"), (("planner", "--out", "/nowhere"), "no such folder")):
            found = run(*args)
            assert found.returncode == 2
            assert said in found.stderr
