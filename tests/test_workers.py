"""Which processes are watched that a watched one starts. Real ones are in ``test_distributed``; other ones in ``test_launch``."""

from __future__ import annotations

import pickle
import site
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torch_echo import _autostart, _workers, options
from torch_echo._workers import Job, is_launcher, launches, to_workers, wrap_spawn
from torch_echo.errors import TorchEchoError
from torch_echo.options import Options


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m torch.distributed.run train.py", True),
        ("python -u -m torch.distributed.run --nproc-per-node 2 train.py", True),
        ("python -m torch.distributed.launch train.py", True),
        ("python -m accelerate.commands.launch train.py", True),
        ("python /usr/bin/torchrun train.py", True),
        ("python /usr/bin/accelerate launch train.py", True),
        ("python train.py -m torch.distributed.run", False),
        ("python -m train torch.distributed.run", False),
        ("python -m", False),
        ("python", False),
        ("python -c pass", False),
    ],
)
def test_launchers_are_known_by_their_command_line(command: str, expected: bool) -> None:
    assert launches(command.split()) is expected


def test_launcher_as_a_program() -> None:
    assert is_launcher("torch.distributed.run", True) and not is_launcher("torch.distributed.run", False)
    assert is_launcher("/usr/bin/torchrun", False) and not is_launcher("train.py", False)


class TestToWorkers:
    @pytest.fixture
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "torch_echo_autostart.pth").write_text("")
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])

    def test_options_go_by_the_environment(self, installed: None) -> None:
        environ = {"TORCH_ECHO_MAX_OVERHEAD": "0.5", "TORCH_ECHO_CACHE": "here", "HOME": "/root"}
        to_workers(environ, Options(memory_budget="8GiB", strict=True), "compile", "/a.json", None)
        assert environ == {
            "TORCH_ECHO": "1", "TORCH_ECHO_MEMORY_BUDGET": "8GiB", "TORCH_ECHO_STRICT": "1", "TORCH_ECHO_ENGINE": "compile",
            "TORCH_ECHO_REPORT": "/a.json", "TORCH_ECHO_CACHE": "here", "HOME": "/root",
        }  # fmt: skip
        assert Options.from_env(environ) == Options(memory_budget="8GiB", strict=True)

    def test_not_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
        monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
        environ: dict[str, str] = {}
        with pytest.raises(TorchEchoError, match="torch_echo run train"):
            to_workers(environ, Options(), None, None, None)
        assert not environ


class TestSpawn:
    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        """Calls of what stands in for torch.multiprocessing.start_processes."""
        calls: list[tuple[Any, ...]] = []

        def start_processes(fn: Any, args: Any, nprocs: int, join: bool, daemon: bool, start_method: str) -> None:
            calls.append((fn, args, nprocs, join, daemon, start_method))

        for name in ("torch.multiprocessing", "torch.multiprocessing.spawn"):
            module = ModuleType(name)
            vars(module)["start_processes"] = start_processes
            monkeypatch.setitem(sys.modules, name, module)
        return calls

    def test_a_child_gets_the_bare_function_and_a_session(
        self, started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(options, "spawned_together", 1)
        job = Job(Options(max_overhead=0.3), report_file="/a-{rank}.json")
        undo = wrap_spawn(lambda: job)
        for name in ("torch.multiprocessing", "torch.multiprocessing.spawn"):
            sys.modules[name].start_processes(len, ("x",), 4)
        assert [call[1:] for call in started] == [(("x",), 4, True, False, "spawn")] * 2
        activated: list[tuple[Any, Any]] = []
        monkeypatch.setattr(_autostart, "activate", lambda given, **rest: activated.append((given(), rest)))
        assert pickle.loads(pickle.dumps(started[0][0])) is len
        assert activated == [
            (
                job.options,
                {"session_factory": None, "report_file": "/a-{rank}.json", "graph_file": None, "always_report": False},
            )
        ]
        assert options.local_ranks({}) == 4
        undo()
        sys.modules["torch.multiprocessing"].start_processes(len, (), 1, True, False, "spawn")
        assert started[-1][0] is len

    def test_others_are_left_alone(self, started: list[tuple[Any, ...]]) -> None:
        undo = wrap_spawn(lambda: Job(Options()))
        sys.modules["torch.multiprocessing"].start_processes(len, start_method="fork")
        assert started[-1][0] is len
        undo()
        undo = wrap_spawn(lambda: None)
        sys.modules["torch.multiprocessing"].start_processes(len)
        assert started[-1][0] is len
        undo()


def test_a_part_of_the_machine_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = options.device_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert options.device_memory(torch.device("cpu")) == whole // 4
    assert Options(memory_budget=0.5).budget_bytes(torch.device("cpu")) == whole // 4 // 2
    assert Options(memory_budget="1GiB").budget_bytes(torch.device("cpu")) == 1 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert options.device_memory(torch.device("cpu")) == whole


def test_engines_can_be_sent() -> None:
    assert pickle.loads(pickle.dumps(_autostart.engine("compile"))) == _autostart.engine("compile")
    assert _workers.Job(Options()).session_factory is None
