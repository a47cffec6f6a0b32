"""``torch-echo run --engine compile``: scripts, unmodified, through ``torch.compile``."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.compile.test_eager import peak
from tests.compile.test_share import session
from tests.tape.harness import bits
from torch import Tensor, nn

from torch_echo.compile import _backends, plans
from torch_echo.compile._backends import Compiling
from torch_echo.errors import CaptureError

SCRIPT = """
import copy, pickle
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(16, 5)
        self.modes = []

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.modes.append(torch.is_grad_enabled())
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for i in range(4):
    x, y = torch.randn(4, 8, 16), torch.randint(0, 5, (4, 8))
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
    with torch.no_grad():
        print(net(x).sum().item())
print(type(net).__name__, list(net.state_dict())[-1], copy.deepcopy(net).out.weight.sum().item())
print(sum(p.double().sum().item() for p in net.parameters()), torch.rand(1).item())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def run(script: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch_echo", "run", *options] if options else []
    command = [sys.executable, *start, str(script)]
    # Without a C++ compiler: PyTorch's own kernels, to the bit.
    given = {**os.environ, "OMP_NUM_THREADS": "1", "CXX": "no-compiler-of-this-name", **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True)


def test_the_same_numbers_in_less_memory(script: Path) -> None:
    plain = run(script)
    found = run(script, "--engine", "compile", "--max-overhead", "0.3")
    assert found.returncode == plain.returncode == 0, found.stderr
    assert found.stdout == plain.stdout
    assert "4 training steps" in found.stderr
    assert "planned, instead of" in found.stderr
    assert "1 compiled graph" in found.stderr
    assert "no C++ compiler" in found.stderr


def test_without_an_optimizer(script: Path) -> None:
    """As in PyTorch's word language model: the script adds the gradients itself."""
    by_hand = "[p.data.add_(p.grad, alpha=-1e-3) for p in net.parameters()]"
    script.write_text(SCRIPT.replace("optimizer.step()", by_hand).replace("optimizer.zero_grad()", "net.zero_grad()"))
    found = run(script, "--engine", "compile", "--max-overhead", "0.3")
    assert found.stdout == run(script).stdout
    assert "4 training steps" in found.stderr
    assert "1 compiled graph" in found.stderr


def test_by_the_environment(script: Path) -> None:
    found = run(script, TORCH_ECHO="1", TORCH_ECHO_ENGINE="compile", TORCH_ECHO_MAX_OVERHEAD="0.3")
    assert found.returncode == 0, found.stderr
    assert "1 compiled graph" in found.stderr
    assert found.stdout == run(script).stdout


def test_an_infeasible_budget_in_one_line(script: Path) -> None:
    found = run(script, "--engine", "compile", "--memory-budget", "1KiB")
    assert found.returncode == 2
    assert "can't be met: the least reachable peak is" in found.stderr.splitlines()[0]
    assert "Traceback" not in found.stderr


def test_what_is_compiled_already_is_left_alone(script: Path) -> None:
    script.write_text(SCRIPT.replace("net = Net()", "net = Net()\nnet.compile(backend='aot_eager')"))
    found = run(script, "--engine", "compile")
    assert found.returncode == 0, found.stderr
    assert "it is compiled already" in found.stderr
    assert "compiled graph" not in found.stderr


def test_recurrent_layers_over_many_lengths(script: Path) -> None:
    text = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.first, self.last = nn.LSTM(24, 24, 2, dropout=0.2), nn.GRU(24, 24)
        self.out = nn.Linear(24, 50)

    def forward(self, x):
        return self.out(self.last(self.first(self.embedding(x))[0])[0])


net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for length in (9, 14, 5, 21, 12, 30):
    x = torch.randint(50, (length + 1, 4))
    loss = nn.functional.cross_entropy(net(x[:-1]).flatten(0, 1), x[1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
print(type(net.first).__name__, sum(p.double().sum().item() for p in net.parameters()), torch.rand(1).item())
"""
    script.write_text(text)
    found = run(script, "--engine", "compile", "--max-overhead", "0.3")
    assert found.returncode == 0, found.stderr
    assert found.stdout == run(script).stdout
    assert "6 training steps" in found.stderr
    assert "2 compiled graphs" in found.stderr


class Decoder(nn.Module):
    """Attention over time, a loop that Dynamo unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.query, self.out = nn.LSTMCell(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, memory: Tensor) -> Tensor:
        h = c = memory.new_zeros(memory.shape[0], 32)
        out = []
        for _ in range(12):
            scores = torch.tanh(self.query(h).unsqueeze(1) + memory).sum(-1)
            context = torch.bmm(scores.softmax(-1).unsqueeze(1), memory).squeeze(1)
            h, c = self.cell(torch.cat([nn.functional.dropout(h, 0.1), context], -1), (h, c))
            out.append(self.out(self.norm(h)))
        return torch.stack(out)


class Halves(nn.Module):
    """What runs before the loop is compiled, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(40), nn.Dropout(0.1)), Decoder()

    def forward(self, memory: Tensor) -> Tensor:
        memory = self.first(memory)
        torch._dynamo.graph_break()
        return self.second(memory)


class TestLargeGraphs:
    """A root whose graph is too large to compile is handed to the tape."""

    @pytest.fixture(autouse=True)
    def small_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-compiler-of-this-name")
        monkeypatch.setitem(_backends.COMPILING, "echo_eager", Compiling(0.02, 60))

    @staticmethod
    def train(make: Callable[[], nn.Module], rows: int = 16) -> tuple[list[Tensor], int]:
        """Losses, state and random numbers after eight steps, and the peak of a ninth."""
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = model(torch.randn(rows, 40, 32)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found = [*losses, *(t.clone() for t in model.state_dict().values()), torch.rand(3)]
        optimizer.zero_grad()
        memory = torch.randn(rows, 40, 32)
        return found, peak(lambda: model(memory).square().mean().backward())

    @pytest.mark.parametrize("make", [Decoder, Halves])
    def test_trained_by_the_tape_to_the_bit(self, make: Callable[[], nn.Module]) -> None:
        plain, before = self.train(make)
        with session(max_overhead=3.0) as handed:
            found, after = self.train(make)
            summary = handed.summary()
        for a, b in zip(found, plain, strict=True):
            assert (bits(a) == bits(b)).all()
        assert after < 0.8 * before
        assert (summary.steps, summary.compiled_graphs) == (9, 0)
        assert summary.predicted_peak is not None and summary.eager_peak is not None
        assert summary.predicted_peak < summary.eager_peak
        (reason,) = [why for what, why, _ in summary.unhandled if "tape" in why]
        assert re.match(r"run by the tape engine: it is a graph of \d+ ops, to be compiled in about 1 minute", reason)

    def test_other_roots_are_compiled(self) -> None:
        model = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh()), Decoder()])

        def losses() -> list[float]:
            torch.manual_seed(0)
            found = []
            for _ in range(6):
                loss = model[1](model[0](torch.randn(16, 40, 32))).square().mean()
                loss.backward()
                found.append(loss.item())
            return found

        plain, before = losses(), nn.Module.__call__
        model.zero_grad()
        model[1].norm.reset_running_stats()
        with session(max_overhead=0.5) as handed:
            assert losses() == plain
            summary = handed.summary()
        assert len(plans) == 1  # once: handing over the other changes nothing for it
        assert any(layer.startswith("Decoder") for layer, _, _ in summary.rebuilt)
        assert nn.Module.__call__ is before

    def test_several_share_one_tape(self) -> None:
        first, second = Decoder(), Decoder()
        with session(max_overhead=0.5) as handed:
            for _ in range(7):
                out = first(torch.randn(16, 40, 32)).square().mean()
                (out + second(torch.randn(16, 40, 32)).square().mean()).backward()
            summary = handed.summary()
            assert handed.graph is not None
            layers = {op.layer.split(".")[0] for op in handed.graph.ops}
        assert {"Decoder", "Decoder#2"} <= layers
        assert len([why for _, why, _ in summary.unhandled if "tape engine" in why]) == 1

    def test_an_error_with_strict(self) -> None:
        with session(strict=True), pytest.raises(CaptureError, match=r"Decoder is a graph of \d+ ops"):
            Decoder()(torch.randn(16, 40, 32))

    def test_in_the_users_own_compilation_a_warning(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.undo()
        # Nothing is planned for a graph that is in a cache.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        monkeypatch.setitem(_backends.COMPILING, "echo", Compiling(0.1, 2))
        layer = nn.Linear(4, 4)
        with pytest.warns(UserWarning, match=r"Inductor was given a graph of \d+ ops"):
            torch.compile(layer, backend="echo")(torch.randn(2, 4)).sum().backward()
        assert len(plans) == 1
