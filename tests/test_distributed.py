"""Real jobs of two processes (gloo, CPU), with torch-echo and without."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_echo

SOURCE = Path(torch_echo.__file__).parents[1]
HERE = Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
TIMEOUT = 300


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process group of its own, which is ended if it hangs."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_ECHO") or k == "TORCH_ECHO_CACHE"}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, *args], env={**clean, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end after {TIMEOUT} s:\n{err[-3000:]}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="module", autouse=True)
def cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_ECHO_CACHE", str(tmp_path_factory.mktemp("cost")))
        yield


# --- ways of distribution ------------------------------------------------------------------------------------------------

QUICK = [
    "ddp",
    "unused",
    "no_sync",
    "buffers",
    "recurrent",
    "uneven",
    "outgrown",
    "fsdp",
    "fsdp_half",
    "fsdp_post_norm",
]
SAME_SHAPES = ["ddp", "buffers", "recurrent", "fsdp", "fsdp_half", "fsdp_post_norm"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return cases(tmp_path_factory.mktemp("quick"), QUICK)


def cases(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """What `_distributed_job` found, by rank."""
    done = run(*TORCHRUN, str(HERE / "_distributed_job.py"), str(folder), *names)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def check(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        case = rank[name]
        assert case["equal"], "parameters, buffers or random state differ from plain PyTorch's"
        assert not case["unhandled"] or name == "unused"
        assert case["dropped"]
        assert case["measured"] < case["eager"]
        assert case["plain"] is None or case["measured"] < case["plain"]
        assert case["ranks"] == 2
    first, second = (rank[name] for rank in found)
    if name != "unused":  # there, ranks may have recorded steps of different modules
        assert first["dropped"] == second["dropped"]
        assert not second["own"]


def test_rank_0_knows_the_peaks_of_all(quick: list[dict[str, Any]]) -> None:
    assert quick[0]["ddp"]["rank_peaks"] == {str(rank): quick[rank]["ddp"]["measured"] for rank in (0, 1)}


def test_a_rank_that_outgrows_the_plan_records_again_alone(quick: list[dict[str, Any]]) -> None:
    first, second = (rank["outgrown"] for rank in quick)
    assert (first["records"], second["records"]) == (1, 2)
    assert second["eager"] > 1.3 * first["eager"]


@pytest.mark.parametrize("name", QUICK)
def test_case(quick: list[dict[str, Any]], name: str) -> None:
    check(quick, name)


@pytest.mark.parametrize("name", SAME_SHAPES)
def test_the_replay_is_the_allocators(quick: list[dict[str, Any]], name: str) -> None:
    for rank in quick:
        # The process group's own thread lets go of what is communicated, sooner or later.
        tolerance = 0.05 if "fsdp" in name else 0.01
        assert rank[name]["measured"] == pytest.approx(rank[name]["replayed"], rel=tolerance)


def test_with_gathered_parameters_blocks_are_rebuilt_from_their_own(quick: list[dict[str, Any]]) -> None:
    """Which of the ops that read parameters is for the planner to say, by measured times."""
    assert {"aten::addmm", "aten::native_layer_norm"} & set(quick[0]["fsdp_half"]["rebuilt"])


@pytest.mark.long
def test_other_cases(tmp_path: Path) -> None:
    names = ["static_graph", "bucket_view", "join", "fsdp_gathered", "fsdp_budget", "fsdp_accumulating"]
    found = cases(tmp_path, names)
    for name in names:
        check(found, name)


# --- whole scripts -------------------------------------------------------------------------------------------------------


def script(folder: Path, *args: str, before: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return run(*before, str(HERE / "_distributed_script.py"), str(folder), *args, **env)


def assert_same(a: Path, b: Path) -> None:
    for rank in (0, 1):
        pairs = zip(torch.load(a / f"{rank}.pt"), torch.load(b / f"{rank}.pt"), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def assert_reported(done: subprocess.CompletedProcess[str], report: Path) -> None:
    """One block, from rank 0, which tells of both; a file for each."""
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("training steps\n") == 1
    assert "2 processes; this is rank 0. The highest peak of all is" in done.stderr
    found = [json.loads(Path(str(report).replace("{rank}", str(rank))).read_text())["summary"] for rank in (0, 1)]
    assert [each["rank"] for each in found] == [0, 1]
    for each in found:
        assert each["measured_peak"] < each["eager_peak"]
    first, second = (sorted((layer["layer"], layer["values"]) for layer in each["rebuilt"]) for each in found)
    assert first == second


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    assert script(folder, before=TORCHRUN).returncode == 0
    return folder


ECHO = ("-m", "torch_echo", "run", "--max-overhead", "0.5")


def test_torchrun_runs_torch_echo(tmp_path: Path, plain: Path) -> None:
    report = tmp_path / "report-{rank}.json"
    done = script(tmp_path / "out", before=(*TORCHRUN, *ECHO, "--report", str(report)))
    assert_reported(done, report)
    assert_same(tmp_path / "out", plain)


def test_torch_echo_runs_the_launcher(tmp_path: Path, plain: Path) -> None:
    report = tmp_path / "report-{rank}.json"
    done = script(tmp_path / "out", before=(*ECHO, "--report", str(report), *TORCHRUN))
    assert_reported(done, report)
    assert_same(tmp_path / "out", plain)


def test_spawned_processes(tmp_path: Path, plain: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    report = tmp_path / "report-{rank}.json"
    done = script(tmp_path / "out", "--spawn", port, before=(*ECHO, "--report", str(report)))
    assert_reported(done, report)
    assert_same(tmp_path / "out", plain)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_fails_while_recording_holds_nobody_up(tmp_path: Path, rank: int) -> None:
    done = script(tmp_path, "--fail-at", "2", "--failing-rank", str(rank), before=(*TORCHRUN, *ECHO))
    assert done.returncode == 1
    assert "ValueError: this rank fails" in done.stderr
