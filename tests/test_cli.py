"""The command line: what reaches the script, and what is refused in one line with status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_echo.launch
from torch_echo.report.environment import environment

SOURCE = Path(torch_echo.launch.__file__).parents[1]
NOT_SEEN = "torch-echo: no training step was seen, so nothing was changed\n"


class Cli:
    """Runs ``python -m torch_echo`` in a folder with a script that prints its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "script.py").write_text("import sys; print(sys.argv)")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_ECHO")}
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))

    def __call__(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "torch_echo", *args],
            cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


class TestRun:
    @pytest.mark.parametrize(
        "args",
        [
            [],
            ["--help"],
            ["--version"],
            ["--memory-budget", "lots"],
            ["-m", "x"],
            ["--", "a"],
            ["--report"],
            ["a b", ""],
        ],
        ids=str,
    )
    def test_all_after_the_script_is_the_scripts(self, cli: Cli, args: list[str]) -> None:
        done = cli("run", "--max-overhead", "0.1", "script.py", *args)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{['script.py', *args]}\n", NOT_SEEN)
        done = cli("run", "-m", "script", *args)
        assert (done.returncode, done.stdout) == (0, f"{[str(cli.folder / 'script.py'), *args]}\n")

    def test_two_dashes_before_the_script(self, cli: Cli) -> None:
        assert cli("run", "--strict", "--", "script.py", "--strict").stdout == "['script.py', '--strict']\n"

    def test_status_of_the_script(self, cli: Cli) -> None:
        (cli.folder / "fails.py").write_text("raise SystemExit(7)")
        assert cli("run", "fails.py").returncode == 7

    def test_traceback_has_none_of_our_frames(self, cli: Cli) -> None:
        path = cli.folder / "fails.py"
        path.write_text("1 / 0")
        done = cli("run", "fails.py")
        assert done.returncode == 1
        assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{path}", line 1, in <module>\n')
        assert "torch_echo" not in done.stderr and "click" not in done.stderr

    def test_interrupt(self, cli: Cli) -> None:
        (cli.folder / "fails.py").write_text("raise KeyboardInterrupt")
        done = cli("run", "fails.py")
        assert done.returncode == -2
        assert "torch_echo" not in done.stderr and "runpy" not in done.stderr and "Aborted" not in done.stderr

    def test_report_file(self, cli: Cli) -> None:
        (cli.folder / "moves.py").write_text("import os; os.chdir('/'); raise SystemExit(3)")
        assert cli("run", "--report", "out.json", "moves.py").returncode == 3
        assert json.loads((cli.folder / "out.json").read_text())["summary"]["steps"] == 0

    def test_torch_is_not_imported_for_a_script_that_does_not(self, cli: Cli) -> None:
        (cli.folder / "modules.py").write_text(
            "import sys; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
        )
        assert cli("run", "modules.py").stdout == "[]\n"

    def test_switched_off(self, cli: Cli) -> None:
        (cli.folder / "modules.py").write_text(
            "import sys; print(len(sys.meta_path) - len([0 for f in sys.meta_path if 'AfterImport' not in repr(f)]))"
        )
        done = cli("run", "--report", "out.json", "modules.py", TORCH_ECHO="0")
        assert (done.returncode, done.stdout) == (0, "0\n")
        assert done.stderr == "torch-echo: off, because TORCH_ECHO=0 is set: the script runs as plain PyTorch\n"
        assert not (cli.folder / "out.json").exists()

    def test_options_from_the_environment(self, cli: Cli) -> None:
        assert cli("run", "script.py", TORCH_ECHO_POLICY="best").returncode == 2
        assert cli("run", "--policy", "paper", "script.py", TORCH_ECHO_POLICY="best").returncode == 0
        assert cli("run", "--max-overhead", "0.1", "script.py", TORCH_ECHO_MEMORY_BUDGET="8GiB").returncode == 0


class TestRefused:
    @pytest.mark.parametrize(
        ("args", "named"),
        [
            ([], ["Missing command"]),
            (["train.py"], ["No such command 'train.py'"]),
            (["run"], ["no script given"]),
            (["run", "-m"], ["no module given"]),
            (["run", "nope.py"], ["'nope.py'", "no such file"]),
            (["run", "-m", "nope"], ["'nope'", "No module named"]),
            (["run", "--bogus", "script.py"], ["'--bogus'"]),
            (["run", "--memory-budget"], ["--memory-budget"]),
            (["run", "--memory-budget", "lots", "script.py"], ["memory_budget", "'lots'"]),
            (["run", "--memory-budget", "-5GiB", "script.py"], ["memory_budget", "-5GiB"]),
            (["run", "--max-overhead", "much", "script.py"], ["max_overhead", "'much'", "a number"]),
            (["run", "--max-overhead", "-0.1", "script.py"], ["max_overhead", "-0.1", "0 or more"]),
            (["run", "--max-overhead", "nan", "script.py"], ["max_overhead", "nan"]),
            (["run", "--max-overhead", "0.1", "--memory-budget", "8GiB", "script.py"], ["contradict"]),
            (["run", "--policy", "best", "script.py"], ["'best'", "'echo' or 'paper'"]),
            (["run", "--cost", "free", "script.py"], ["'free'", "'measured' or 'analytic'"]),
            (["run", "--on-infeasible", "cry", "script.py"], ["'cry'", "'raise' or 'least'"]),
            (["run", "--engine", "steam", "script.py"], ["'steam'", "'tape' or 'compile'"]),
            (["run", "--report", "nope/x.json", "script.py"], ["--report", "nope", "does not exist"]),
            (["run", "--report", ".", "script.py"], ["--report", "is a folder"]),
            (["explain"], ["GRAPHFILE"]),
            (["explain", "nope.graph"], ["nope.graph"]),
            (["explain", "--policy", "best", "nope.graph"], ["'best'"]),
            (["explain", "script.py"], ["script.py"]),
        ],
        ids=lambda x: " ".join(x),
    )
    def test_in_one_line(self, cli: Cli, args: list[str], named: list[str]) -> None:
        done = cli(*args)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("torch-echo: error: ")
        assert all(each in done.stderr for each in named), done.stderr


class TestHelp:
    def test_version(self, cli: Cli) -> None:
        done = cli("--version")
        assert done.returncode == 0
        assert done.stdout.startswith("torch-echo ")

    @pytest.mark.parametrize("args", [["--help"], ["-h"], ["run", "--help"], ["explain", "-h"]], ids=str)
    def test_help(self, cli: Cli, args: list[str]) -> None:
        done = cli(*args)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage: torch-echo" in done.stdout


class TestEnv:
    def test_what_a_bug_report_needs(self, cli: Cli) -> None:
        done = cli("env", TORCH_ECHO_MAX_OVERHEAD="0.3")
        assert (done.returncode, done.stderr) == (0, "")
        found = dict(line.split(":", 1) for line in done.stdout.splitlines() if not line.startswith("cuda:"))
        assert {"torch-echo", "python", "torch", "platform", "cpu", "memory", "ortools", "cost cache"} <= found.keys()
        assert found["TORCH_ECHO_MAX_OVERHEAD"].strip() == "0.3"

    def test_without_what_names_folders(self) -> None:
        found = environment({"TORCH_ECHO_CACHE": os.sep + "somewhere"}, paths=False)
        assert found["torch"]
        assert not any(value.startswith(os.sep) for value in found.values())
