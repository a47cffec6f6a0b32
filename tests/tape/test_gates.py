"""What is inside recurrent layers, rebuilt from their outputs (with `reorder`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torch_echo.graph import TrainingGraph, Trait
from torch_echo.options import Options
from torch_echo.tape import _build, _layer
from torch_echo.tape._gates import Products

from .harness import (
    Case,
    Choice,
    ForcedSession,
    Trace,
    check_footprint,
    everything,
    legal,
    randomly,
    train,
)

WIDTH, STEPS, BATCH = 12, 13, 5


class Net(nn.Module):
    """A recurrent module between two layers. `saved`: does autograd save what it returns?"""

    def __init__(self, make: Callable[[], nn.RNNBase], saved: bool, state: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.rnn = make()
        self.saved = saved
        self.state = state
        directions = 1 + self.rnn.bidirectional
        self.head = nn.Linear((self.rnn.proj_size or self.rnn.hidden_size) * directions, 3)
        self.to(dtype)

    def begin(self, x: Tensor) -> Any:
        rnn = self.rnn
        if not self.state:
            return None
        rows = rnn.num_layers * (1 + rnn.bidirectional)
        h = x.new_ones(rows, BATCH, rnn.proj_size or rnn.hidden_size) * x.mean()
        return (h, x.new_ones(rows, BATCH, rnn.hidden_size) * 0.5) if rnn.mode == "LSTM" else h

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(torch.tanh(x), self.begin(x))
        if self.rnn.batch_first:
            out = out.transpose(0, 1)
        out = self.head(out) if self.saved else out + 1
        last = last[0] if isinstance(last, tuple) else last
        result: Tensor = out.sigmoid().mean() + (last.square() if self.saved else last).mean()
        return result


def step(model: Net, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
    optimizer.zero_grad()
    torch.manual_seed(i)
    shape = (BATCH, STEPS, WIDTH) if model.rnn.batch_first else (STEPS, BATCH, WIDTH)
    loss = model(torch.randn(shape, dtype=model.head.weight.dtype))
    loss.backward()
    optimizer.step()
    return loss.detach()


def case(
    kind: Callable[..., nn.RNNBase],
    saved: bool = True,
    state: bool = False,
    dtype: torch.dtype = torch.float64,
    run: Callable[[Any, torch.optim.Optimizer, int], Any] = step,
    **given: Any,
) -> Case:
    return Case(lambda: Net(lambda: kind(WIDTH, 16, **given), saved, state, dtype), run)


CASES = {
    "gru": case(nn.GRU),
    "gru-unsaved": case(nn.GRU, saved=False),
    "gru-2-dropout-state": case(nn.GRU, num_layers=2, dropout=0.3, state=True),
    "gru-both-first": case(nn.GRU, bidirectional=True, batch_first=True),
    "gru-both-unsaved-state": case(nn.GRU, saved=False, bidirectional=True, state=True),
    "gru-no-bias-3": case(nn.GRU, bias=False, num_layers=3),
    "rnn-tanh-2": case(nn.RNN, num_layers=2, state=True),
    "rnn-relu-both-first": case(nn.RNN, nonlinearity="relu", bidirectional=True, batch_first=True, saved=False),
    "rnn-no-bias": case(nn.RNN, bias=False),
    "lstm-2-both": case(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2),
    "lstm-unsaved-first": case(nn.LSTM, saved=False, batch_first=True, state=True),
    "lstm-projected": case(nn.LSTM, proj_size=8, num_layers=2, state=True),
    "lstm-projected-no-bias-both": case(nn.LSTM, proj_size=8, bias=False, bidirectional=True),
}
plain = cache(lambda name: train(CASES[name]))


@pytest.fixture(autouse=True)
def _worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilding from outputs takes half of the time, whatever the sizes."""
    monkeypatch.setattr(_build, "rebuild_seconds", lambda cost, func, spec: 0.5 * cost.seconds(func, spec))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each rebuild from outputs: were all products handed out?"""
    complete: list[bool] = []

    class Noted(Products):
        def run(self, func: Callable[..., Any], *args: Any) -> Any:
            result = super().run(func, *args)
            complete.append(self.complete)
            return result

    monkeypatch.setattr(_layer, "Products", Noted)
    return complete


def insides(graph: TrainingGraph) -> list[int]:
    """The ops that rebuild from outputs."""
    return [i for i, op in enumerate(graph.ops) if op.name.endswith("(inside)")]


def inner(graph: TrainingGraph) -> frozenset[int]:
    """Drop what is inside, and nothing else."""
    return legal(graph, [v for o in insides(graph) for v in graph.ops[o].writes])


def outer(graph: TrainingGraph) -> frozenset[int]:
    """Drop what the layers make, outputs included."""
    return legal(graph, [v for op in graph.ops if op.traits & Trait.COMPOSITE for v in op.writes])


def check_close(expected: Trace, got: Trace, dtype: Any = np.float64, tolerance: float = 1e-12, steps: int = 5) -> None:
    """Equal up to rounding, in gradients of the first `steps`; the same random draws."""
    for one, other in zip(expected.gradients[:steps], got.gradients[:steps], strict=True):
        for name, bits in one.items():
            a, b = bits.view(dtype), other[name].view(dtype)
            np.testing.assert_allclose(b, a, rtol=1e3 * tolerance, atol=tolerance * np.abs(a).max(), err_msg=name)
    assert all(np.array_equal(a, b) for a, b in zip(expected.rng, got.rng, strict=True))


def run(made: Case, choose: Choice, expected: Trace, tolerance: float = 0.005) -> ForcedSession:
    """Train under a forced plan; gradients, peaks, and the number of re-run ops."""
    session = ForcedSession(choose, Options(cost="analytic", reorder=True))
    got = train(made, session)
    check_close(expected, got)
    assert session.plan is not None
    check_footprint(session, tolerance)
    assert got.reruns[2:] == [len(session.plan.rerun)] * 3
    return session


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("choose", [inner, outer, everything, pytest.param(randomly(3), id="half")])
def test_variants(name: str, choose: Choice, products: list[bool]) -> None:
    session = run(CASES[name], choose, plain(name))
    assert session.graph is not None
    ops = insides(session.graph)
    assert len(ops) == CASES[name].build().rnn.num_layers
    assert all(session.graph.inside(session.graph.ops[o]) for o in ops)
    assert all(products)
    if choose is inner:
        assert session.plan is not None
        assert session.plan.rerun == ops[::-1]
        assert len(products) == 3 * len(ops)
