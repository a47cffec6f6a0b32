"""What is inside recurrent layers, rebuilt from their outputs (with `reorder`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from torch_echo.graph import TrainingGraph, Trait
from torch_echo.options import Options
from torch_echo.planning import Plan
from torch_echo.tape import _build, _gates, _layer, _record
from torch_echo.tape import session as tape_session
from torch_echo.tape._gate import HOOKS, LAYERS
from torch_echo.tape._gates import Products
from torch_echo.tape._install import decide
from torch_echo.tape.session import Session

from .harness import (
    Case,
    Choice,
    ForcedSession,
    Trace,
    check_same,
    compare,
    everything,
    forced,
    leaked,
    legal,
    nothing,
    randomly,
    tape_objects,
    train,
)
from .models import simple_step

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


def loss_of(model: nn.Module, i: int) -> Tensor:
    assert isinstance(model, Net)
    torch.manual_seed(i)
    shape = (BATCH, STEPS, WIDTH) if model.rnn.batch_first else (STEPS, BATCH, WIDTH)
    loss: Tensor = model(torch.randn(shape, dtype=model.head.weight.dtype))
    return loss


step = simple_step(loss_of)


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


def run(made: Case, choose: Choice, expected: Trace, slack: float = 0.03) -> ForcedSession:
    """Train under a forced plan; gradients, the peak (at most `slack` below what is planned), and the number of re-run ops."""
    session = ForcedSession(choose, Options(cost="analytic", reorder=True))
    got = train(made, session)
    check_close(expected, got)
    assert session.plan is not None
    assert session.graph is not None
    for measured, planned in session.checks:
        rise = planned - session.graph.start_bytes
        assert -slack * rise <= measured - planned <= 0.01 * rise, f"{measured - planned:+d} bytes of {rise}"
    assert set(got.reruns[2:]) <= {0, got.reruns[-1]}  # none in a step that is recorded once more
    assert got.reruns[-1] == len(session.plan.rerun)
    return session


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("choose", [inner, outer, everything])
def test_variants(name: str, choose: Choice, products: list[bool]) -> None:
    """Gradients up to rounding, draws the same, peaks as planned; all is rebuilt by products over many steps."""
    session = run(CASES[name], choose, plain(name), 0.005 if choose is inner else 0.03)
    assert session.graph is not None
    ops = insides(session.graph)
    assert len(ops) == CASES[name].build().rnn.num_layers
    assert all(session.graph.inside(session.graph.ops[o]) for o in ops)
    assert all(products)
    if choose is inner:
        assert session.plan is not None
        assert session.plan.rerun == ops[::-1]
        assert len(products) == 3 * len(ops)
        tables = [t for tables in decide(session.graph, session.plan.dropped).tables.values() for t in tables]
        doors = [door for table in tables for door in table.doors.values() if door is not None]
        assert any(need & LAYERS for door in doors for need in door.needs)
        assert not any(need & HOOKS for door in doors for need in door.needs)  # a layer brings its own


@pytest.mark.parametrize("saved", [True, False])
def test_time_of_a_step(saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only rebuilds is no part of a step; and a rebuild that takes as long as the layer is not worth an op."""
    made = case(nn.GRU, saved=saved)
    graphs: list[TrainingGraph] = []
    steps: list[float] = []
    built = tape_session.build

    def build(*args: Any, **kwargs: Any) -> TrainingGraph:
        graph = built(*args, **kwargs)
        steps.append(graph.step_seconds)
        return graph

    monkeypatch.setattr(tape_session, "build", build)
    for share in (1.0, 0.5):
        monkeypatch.setattr(_build, "rebuild_seconds", lambda cost, f, spec, s=share: s * cost.seconds(f, spec))
        session = ForcedSession(inner, Options(cost="analytic", reorder=True))
        train(made, session)
        assert session.graph is not None
        graphs.append(session.graph)
    layers = [[op.seconds for op in graph.ops if op.traits & Trait.COMPOSITE] for graph in graphs]
    assert len(layers[0]) == 1
    (whole,) = layers[0]
    assert layers[1] == pytest.approx([whole, whole / 2])
    assert steps[1] == pytest.approx(sum(op.seconds for op in graphs[1].ops) - whole / 2)


@pytest.mark.parametrize("share", [0.2, 1.5])
def test_the_better_graph(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both graphs are planned, and the better plan is taken."""
    monkeypatch.setattr(_build, "GAIN", 2.0)
    monkeypatch.setattr(_build, "rebuild_seconds", lambda cost, func, spec: share * cost.seconds(func, spec))
    made = case(nn.GRU, saved=False, num_layers=3)
    found: list[Plan] = []
    planned = tape_session.plan

    def plan(*args: Any, **kwargs: Any) -> Plan:
        found.append(planned(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(tape_session, "plan", plan)
    session = Session(Options(cost="analytic", max_overhead=1e3, reorder=True))
    train(made, session)
    assert session.graph is not None and session.plan is not None
    apart, whole = found
    taken = session.plan
    assert apart.peak == whole.peak
    assert taken.extra_seconds == min(apart.extra_seconds, whole.extra_seconds)
    assert bool(insides(session.graph)) == (share < 1)


def test_without_reorder() -> None:
    """To the bit, as ever."""
    session = compare(CASES["gru-2-dropout-state"], everything, plain=plain("gru-2-dropout-state"))
    assert session.graph is not None
    assert not insides(session.graph)


def test_products_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rebuild of 300 steps, a few dozen products instead of 300."""
    model = Net(lambda: nn.GRU(WIDTH, 16), True, False, torch.float64)
    counts = []
    mm = torch.addmm
    monkeypatch.setattr(_gates.torch, "addmm", lambda *a, **k: counts.append(len(a[1])) or mm(*a, **k))
    with forced(model, inner, reorder=True) as session:
        for _ in range(4):
            counts.clear()
            model(torch.randn(120, BATCH, WIDTH, dtype=torch.float64)).backward()
        assert session.plan is not None
    steps = [n // BATCH for n in counts if n % BATCH == 0 and n != 120 * BATCH]
    assert sum(steps) == 120
    assert len(steps) < 12


STRETCHED = {
    "gru": case(nn.GRU, num_layers=2, dropout=0.2),
    "gru-both-unsaved": case(nn.GRU, saved=False, bidirectional=True, state=True),
    "gru-both-2": case(nn.GRU, bidirectional=True, num_layers=2),
    "lstm-projected-first": case(nn.LSTM, proj_size=8, batch_first=True, state=True),
    "rnn-both-first": case(nn.RNN, bidirectional=True, batch_first=True, num_layers=2),
}


@pytest.mark.parametrize("name", STRETCHED)
@pytest.mark.parametrize("choose", [inner, everything, pytest.param(randomly(2), id="half")])
def test_stretches(name: str, choose: Choice, products: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stretch has its states from the whole layer's output, or from its own where nobody else needs that."""
    monkeypatch.setattr(_layer, "STRETCH", 6)
    monkeypatch.setattr(_layer, "_FEWEST_STEPS", 4)
    made = STRETCHED[name]
    session = run(made, choose, train(made))
    assert session.graph is not None
    rnn = made.build().rnn
    ops = insides(session.graph)
    assert len(ops) == 2 * rnn.num_layers * (1 + rnn.bidirectional)
    assert all(products)
    if choose is inner:
        assert len(products) == 3 * len(ops)


@pytest.mark.parametrize("choose", [inner, outer, everything])
@pytest.mark.parametrize("later", [False, True])
def test_outputs_written_to(choose: Choice, later: bool) -> None:
    """In the planned step, or only in later ones: the rebuild reads what was there before."""

    class Writes(Net):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            out, _ = self.rnn(x)
            if not later or self.steps > 3:
                out.mul_(3.0)
            result: Tensor = (out + 1).sigmoid().mean()
            return result

    made = Case(lambda: Writes(lambda: nn.GRU(WIDTH, 16), False, False, torch.float64), step)
    session = ForcedSession(choose, Options(cost="analytic", reorder=True))
    check_close(train(made), train(made, session))
    assert session.plan is not None


def test_outputs_written_to_unseen(products: list[bool]) -> None:
    """Where the tape does not see it, the layer is run again."""

    class Returns(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.rnn(x)[0]
            return out

    def write(model: Returns, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        torch.manual_seed(i)
        out = model(torch.randn(STEPS, BATCH, WIDTH, dtype=torch.float64))
        loss = (out + 1).mean()
        with torch.no_grad():
            if i == 3:
                out.zero_()
        loss.backward()
        optimizer.step()
        return loss.detach()

    made = Case(lambda: Returns(lambda: nn.GRU(WIDTH, 16), False, False, torch.float64), write)
    session = ForcedSession(inner, Options(cost="analytic", reorder=True))
    check_close(train(made), train(made, session))
    assert len(products) == 2


@pytest.mark.parametrize("unknown", [[3], range(100)], ids=["one", "all"])
def test_other_calls_than_expected(unknown: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a product is not recognised the layer is run again, to the bit."""
    made = CASES["gru-both-first"]
    asked: Counter[int] = Counter()
    fits = _gates._Direction.fits

    def known(self: Any, left: Tensor, right: Tensor) -> bool:
        asked[id(self)] += left.shape == self.states.shape[1:]
        return asked[id(self)] not in unknown and fits(self, left, right)

    monkeypatch.setattr(_record, "of_outputs", lambda func, args: True)
    monkeypatch.setattr(_gates._Direction, "fits", known)
    session = ForcedSession(inner, Options(cost="analytic", reorder=True))
    got = train(made, session)
    assert asked
    assert session.graph is not None
    assert insides(session.graph)
    check_same(plain("gru-both-first"), got)


def test_taken_apart_by_hand() -> None:
    """Weights that both directions share can't be told apart; packed sequences are not rebuilt from outputs."""

    def shared() -> nn.GRU:
        rnn = nn.GRU(WIDTH, 16, bidirectional=True)
        rnn.weight_hh_l0_reverse = rnn.weight_hh_l0
        return rnn

    class Packed(Net):
        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, torch.arange(BATCH, 0, -1) * 2)
            result: Tensor = self.rnn(packed)[0].data.sigmoid().mean()
            return result

    for made in (
        Case(lambda: Net(shared, False, False, torch.float64), step),
        Case(lambda: Packed(lambda: nn.GRU(WIDTH, 16), False, False, torch.float64), step),
    ):
        session = ForcedSession(everything, Options(cost="analytic", reorder=True))
        check_same(train(made), train(made, session))
        assert session.graph is not None
        assert any(op.traits & Trait.COMPOSITE for op in session.graph.ops)
        assert not insides(session.graph)


@pytest.mark.parametrize("saved", [True, False])
def test_retained_graph(saved: bool) -> None:
    """Twice backward, and second derivatives."""

    def twice(model: Net, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        torch.manual_seed(i)
        x = torch.randn(STEPS, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
        loss = model(x) + model(x.flip(0))
        loss.backward(retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        again.square().sum().backward()
        optimizer.step()
        return loss.detach()

    made = case(nn.GRU, saved=saved, run=twice)
    expected = train(made)
    for choose in (inner, outer):
        check_close(expected, train(made, ForcedSession(choose, Options(cost="analytic", reorder=True))))


def test_longer_than_planned_and_nothing_left() -> None:
    """A plan is by layer. What the tape holds goes with the graph, though outputs are among what it holds."""
    torch.manual_seed(0)
    model, other = (Net(lambda: nn.GRU(WIDTH, 16, 2), True, False, torch.float64) for _ in range(2))
    other.load_state_dict(model.state_dict())
    before = len(tape_objects())
    with forced(model, inner, reorder=True) as session:
        for steps in (10, 10, 10, 14, 9, 30):
            x = torch.randn(steps, BATCH, WIDTH, dtype=torch.float64)
            for m in (model, other):
                m.zero_grad()
                m(x).backward()
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)
        assert session.plan is not None
        del x, m
        model(torch.randn(10, BATCH, WIDTH, dtype=torch.float64))  # without a backward pass
        assert leaked(lambda: model(torch.randn(10, BATCH, WIDTH, dtype=torch.float64))) == 0
    assert len(tape_objects()) == before


def test_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real durations: products with large weights and few rows take several times as long as one of all rows."""
    monkeypatch.undo()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 1024))
    session = ForcedSession(nothing, Options(cost="measured", reorder=True))
    session.watch(model)
    try:
        for _ in range(4):
            model(torch.randn(24, 4, 8))[0].square().mean().backward()
        assert session.graph is not None
        (rest,) = insides(session.graph)
        assert session.graph.ops[rest].seconds < 0.9 * session.graph.ops[rest - 1].seconds
    finally:
        session.close()
