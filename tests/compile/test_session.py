"""``torch-echo run --engine compile``: scripts, unmodified, through ``torch.compile``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
