"""Whole scripts, run by ``python`` and by ``torch-echo run``: output, status and last words are the same; values are dropped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import torch_echo

SOURCE = Path(torch_echo.__file__).parents[1]

MODEL = """
import hashlib, sys
import torch
from torch import nn

torch.manual_seed(3)
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, out)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.second(self.drop(torch.tanh(self.norm(torch.sigmoid(self.first(x))))))

def show(*modules):
    state = [p.detach().numpy().tobytes() for m in modules for p in (*m.parameters(), *m.buffers())]
    state.append(torch.get_rng_state().numpy().tobytes())
    print(hashlib.sha256(b"".join(state)).hexdigest(), flush=True)

"""

GAN = """
g, d = Block(64, 64), Block(64, 1)
to_g, to_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
loss = nn.BCEWithLogitsLoss()
for i in range(12):
    to_d.zero_grad()
    fake = g(torch.randn(128, 64))
    real = loss(d(torch.randn(128, 64)), torch.ones(128, 1))
    real.backward()
    made = loss(d(fake.detach()), torch.zeros(128, 1))
    made.backward()
    to_d.step()
    to_g.zero_grad()
    fooled = loss(d(fake), torch.ones(128, 1))
    fooled.backward()
    to_g.step()
    show(g, d)
"""

WORKERS = """
class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 384

    def __getitem__(self, i):
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        x = torch.randn(64, generator=torch.Generator().manual_seed(i))
        return torch.tanh(nn.functional.linear(x, torch.eye(64))), i % 7  # ops of its own

def main():
    model = Block(64, 7)
    optimizer = torch.optim.Adam(model.parameters())
    loader = torch.utils.data.DataLoader(
        Noise(), batch_size=128, shuffle=True, num_workers=2, multiprocessing_context=sys.argv[1],
        persistent_workers=len(sys.argv) > 2,
    )
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            show(model)

if __name__ == "__main__":
    main()
"""

SAVES = """
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(Block(64, 64), Block(64, 4))

model = Net()
optimizer = torch.optim.Adam(model.parameters())
torch.serialization.add_safe_globals([Net, Block, nn.Linear, nn.LayerNorm, nn.Dropout, set])
for i in range(9):
    optimizer.zero_grad()
    model(torch.randn(128, 64)).square().mean().backward()
    optimizer.step()
    show(model)
    torch.save(model, "model.pt")
    print(sorted(model.state_dict()))
    if i == 5:
        model = torch.load("model.pt", weights_only=True)
        optimizer = torch.optim.Adam(model.parameters())
    if i == 8:
        show(model)
        sys.exit(3)
"""

ENDS = """
import os, signal
class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.calls = Block(64, 64), 0

    def forward(self, x):
        x = torch.tanh(self.block(x))
        self.calls += 1
        if self.calls == 8:
            if sys.argv[1] == "raise":
                raise ValueError("in the middle of forward")
            os.kill(os.getpid(), int(sys.argv[1]))
        return x

model = Ends()
optimizer = torch.optim.Adam(model.parameters())
for i in range(12):
    try:
        optimizer.zero_grad()
        model(torch.randn(128, 64)).square().mean().backward()
        optimizer.step()
    except ValueError:
        if len(sys.argv) < 3:
            raise
        print("caught")
    show(model)
"""


def run(folder: Path, text: str, *args: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """The script plainly and under torch-echo; returns the latter, and its report, if it left one."""
    (folder / "script.py").write_text(MODEL + textwrap.dedent(text))
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_ECHO") or k == "TORCH_ECHO_CACHE"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    launcher = ["-m", "torch_echo", "run", "--max-overhead", "100", "--cost", "analytic", "--report", "report.json"]

    def one(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, "script.py", *args],
            cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    plain, taped = one(), one(*launcher)
    assert taped.stdout == plain.stdout, taped.stderr
    assert taped.returncode == plain.returncode
    assert taped.stderr.partition("torch-echo: ")[0] == plain.stderr
    report = folder / "report.json"
    return taped, json.loads(report.read_text())["summary"] if report.exists() else None


def check_dropped(summary: dict[str, Any] | None) -> None:
    assert summary is not None
    assert summary["rebuilt"]
    assert summary["measured_peak"] < summary["eager_peak"]
    assert not summary["unhandled"]


def test_gan(tmp_path: Path) -> None:
    _, summary = run(tmp_path, GAN)
    check_dropped(summary)
    assert summary is not None
    # The whole step is one iteration: the fakes are made in its first of three backward passes, and read in its last.
    assert any(record["layer"].startswith("Block.") for record in summary["rebuilt"])


@pytest.mark.parametrize("args", [("fork",), ("spawn", "persistent")], ids=lambda args: args[0])
def test_workers_of_a_data_loader(tmp_path: Path, args: tuple[str, ...]) -> None:
    taped, summary = run(tmp_path, WORKERS, *args)
    check_dropped(summary)
    assert taped.stderr.count("training steps") == 1


def test_saves_loads_and_exits(tmp_path: Path) -> None:
    taped, summary = run(tmp_path, SAVES)
    assert taped.returncode == 3
    check_dropped(summary)


@pytest.mark.parametrize("args", [("raise",), ("raise", "caught")], ids=" ".join)
def test_an_exception_in_forward(tmp_path: Path, args: tuple[str, ...]) -> None:
    taped, summary = run(tmp_path, ENDS, *args)
    assert taped.returncode == (1 if len(args) == 1 else 0)
    check_dropped(summary)


def test_a_signal_in_forward(tmp_path: Path) -> None:
    taped, _ = run(tmp_path, ENDS, str(int(signal.SIGTERM)))
    assert taped.returncode == -signal.SIGTERM
