"""Recurrent layers that PyTorch computes step by step, as one op each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torch_echo import compat
from torch_echo.graph import Phase, TrainingGraph, Trait
from torch_echo.options import Options
from torch_echo.tape import _layer
from torch_echo.tape.session import Session

from .harness import (
    Case,
    Choice,
    ForcedSession,
    check_footprint,
    compare,
    everything,
    forced,
    nothing,
    randomly,
    train,
)
from .models import simple_step

WIDTH, STEPS, BATCH = 12, 10, 5


class Net(nn.Module):
    """A recurrent module between two element-wise ops; `packed`: over sequences of many lengths."""

    def __init__(self, make: Callable[[], nn.RNNBase], packed: bool | None, state: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.rnn = make()
        self.packed = packed
        self.state = state
        self.output = nn.Linear(self.rnn.hidden_size, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        rnn = self.rnn
        begin: Any = None
        if self.state:
            rows = rnn.num_layers * (1 + rnn.bidirectional)
            begin = x.new_ones(rows, BATCH, rnn.proj_size or rnn.hidden_size) * x.mean()
            if rnn.mode == "LSTM":
                begin = (begin, x.new_ones(rows, BATCH, rnn.hidden_size) * 0.5)
        x = torch.tanh(x)
        if self.packed is not None:
            lengths = torch.arange(BATCH, 0, -1) * 2
            if not self.packed:  # not sorted
                lengths = lengths.flip(0)
            x = pack_padded_sequence(x, lengths, rnn.batch_first, enforce_sorted=self.packed)
        out, last = rnn(x, begin)
        if self.packed is not None:
            out, _ = pad_packed_sequence(out, rnn.batch_first)
        last = last[0] if isinstance(last, tuple) else last
        return out.sigmoid().mean() + last.square().mean()


def loss_of(model: nn.Module, i: int) -> Tensor:
    assert isinstance(model, Net)
    torch.manual_seed(i)
    shape = (BATCH, STEPS, WIDTH) if model.rnn.batch_first else (STEPS, BATCH, WIDTH)
    loss: Tensor = model(torch.randn(shape, dtype=model.output.weight.dtype))
    return loss


step = simple_step(loss_of)


def case(
    kind: Callable[..., nn.RNNBase],
    packed: bool | None = None,
    state: bool = False,
    dtype: torch.dtype = torch.float32,
    **given: Any,
) -> Case:
    return Case(lambda: Net(lambda: kind(WIDTH, 16, **given), packed, state, dtype), step, tolerance=0.02)


CASES = {
    "gru": case(nn.GRU),
    "gru-2-dropout": case(nn.GRU, num_layers=2, dropout=0.3),
    "gru-both-first": case(nn.GRU, bidirectional=True, batch_first=True),
    "gru-3-both-state-first": case(nn.GRU, num_layers=3, bidirectional=True, state=True, batch_first=True),
    "gru-packed": case(nn.GRU, packed=True, num_layers=2, dropout=0.2),
    "gru-packed-unsorted-both": case(nn.GRU, packed=False, bidirectional=True, batch_first=True),
    "gru-no-bias": case(nn.GRU, bias=False, num_layers=2),
    "rnn-tanh": case(nn.RNN, num_layers=2, state=True),
    "rnn-relu-both": case(nn.RNN, nonlinearity="relu", bidirectional=True),
    "lstm-projected": case(nn.LSTM, proj_size=8, num_layers=2, dropout=0.2, state=True),
    "lstm-float64": case(nn.LSTM, dtype=torch.float64, num_layers=2, bidirectional=True),
    "gru-bfloat16": case(nn.GRU, dtype=torch.bfloat16, num_layers=2),
    "lstm-packed": case(nn.LSTM, packed=False, num_layers=2, state=True),
}
plain = cache(lambda name: train(CASES[name]))


def composites(graph: TrainingGraph) -> list[int]:
    return [i for i, op in enumerate(graph.ops) if op.traits & Trait.COMPOSITE]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("choose", [pytest.param(everything, id="all"), pytest.param(randomly(3), id="half")])
def test_variants(name: str, choose: Choice) -> None:
    """Bits, peaks and the number of re-run ops; each layer is one op."""
    session = compare(CASES[name], choose, plain=plain(name))
    assert session.graph is not None
    layers = composites(session.graph)
    assert len(layers) == CASES[name].build().rnn.num_layers
    assert all(session.graph.inside(session.graph.ops[o]) for o in layers)
    if choose is everything:
        assert session.plan is not None
        assert set(layers) <= set(session.plan.rerun)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_kept_layers_run_as_ever(kind: type[nn.RNNBase]) -> None:
    """Nothing dropped, nothing changed."""
    compare(case(kind, num_layers=2), nothing)


def test_fused_layers_are_left_to_their_kernel() -> None:
    """oneDNN's LSTM is one op of PyTorch's; so are a few steps of anything, op by op."""
    session = compare(case(nn.LSTM, num_layers=2), everything)
    assert session.graph is not None
    assert not composites(session.graph)
    assert sum(op.name == "aten::mkldnn_rnn_layer" for op in session.graph.ops if op.phase is Phase.FORWARD) == 2


def test_longer_than_planned() -> None:
    """A plan is by layer, so it serves any length."""
    torch.manual_seed(0)
    model, other = (Net(lambda: nn.GRU(WIDTH, 16, 2), None, False, torch.float32) for _ in range(2))
    other.load_state_dict(model.state_dict())
    with forced(model) as session:
        for steps in (10, 10, 10, 14, 9, 30):
            x = torch.randn(steps, BATCH, WIDTH)
            for m in (model, other):
                m.zero_grad()
                m(x).backward()
            assert all(
                torch.equal(a.grad, b.grad)
                for a, b in zip(model.parameters(), other.parameters(), strict=True)
                if b.grad is not None
            )
        assert session.plan is not None


def test_longer_sequences_are_spared_memory_too() -> None:
    """All of what is inside a layer is dropped, however many steps it has."""
    held = {}
    for planned in (False, True):
        torch.manual_seed(0)
        model = Net(lambda: nn.GRU(WIDTH, 16), None, False, torch.float32)
        with forced(model, everything if planned else nothing):
            for _ in range(4):
                model(torch.randn(STEPS, BATCH, WIDTH)).backward()
            profile = compat.MemoryProfile()
            profile.start()
            loss = model(torch.randn(20 * STEPS, BATCH, WIDTH))
            profile.stop()
            held[planned] = sum(e.nbytes for e in profile.events(torch.device("cpu"))[0])
            loss.backward()
    assert held[True] < 0.2 * held[False]


def test_the_question_is_nobody_elses() -> None:
    """To ask how PyTorch runs a layer, a step of it is run, which modes of the script's must not see."""
    counts = []
    for taped in (False, True):
        model = Net(lambda: nn.GRU(WIDTH, 16), None, False, torch.float32)
        session = Session(Options(cost="analytic"))
        if taped:
            session.watch(model)
        try:
            for _ in range(3):
                with FlopCounterMode(display=False) as flops:
                    model(torch.randn(STEPS, BATCH, WIDTH)).backward()
            counts.append(flops.get_total_flops())
        finally:
            session.close()
    assert counts[0] == counts[1]


def test_twice_in_a_step_and_twice_backward() -> None:
    """The layer's own graph is autograd's: weights that two calls share get their gradients in the same order; retained graphs
    and second derivatives work."""

    def twice(model: Net, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        torch.manual_seed(i)
        x = torch.randn(STEPS, BATCH, WIDTH, requires_grad=True)
        loss = model(x) + model(x.flip(0))
        loss.backward(retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        again.square().sum().backward()
        optimizer.step()
        return loss.detach()

    compare(Case(case(nn.GRU).build, twice, passes=3, static=False), everything)


def test_autocast_and_checkpoints_are_left_alone() -> None:
    """Layers under autocast are taken op by op; those in a checkpointed region are not touched."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return result

    compare(Case(lambda: Checkpointed(lambda: nn.GRU(WIDTH, 16), None, False, torch.float32), step), everything)

    def cast(model: Net, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model, optimizer, i)

    session = compare(Case(case(nn.GRU).build, cast, static=False), everything)
    assert session.graph is not None
    assert not composites(session.graph)


def test_planned_session_needs_few_ops() -> None:
    """Whatever the length, a layer is one op to the planner."""
    sizes = []
    for steps in (20, 60):
        model = Net(lambda: nn.GRU(WIDTH, 16, 2), None, False, torch.float32)
        session = Session()
        session.watch(model)
        try:
            for _ in range(4):
                model.zero_grad()
                model(torch.randn(steps, BATCH, WIDTH)).backward()
            assert session.graph is not None
            sizes.append(sum(op.phase is Phase.FORWARD for op in session.graph.ops))
        finally:
            session.close()
    assert sizes[0] == sizes[1]


def test_memory_budget() -> None:
    """With a budget the steps before the plan are spared memory too, and the recorded one among them; the budget holds."""
    made = case(nn.GRU, num_layers=3)
    free = compare(made, None, options=Options(max_overhead=1e3, cost="analytic"))
    assert free.plan is not None
    budget = (free.plan.floor + free.plan.base_peak) // 2
    session = compare(made, None, options=Options(memory_budget=budget, cost="analytic"))
    assert session.measured_peak is not None
    assert session.measured_peak <= budget


STRETCHED: dict[str, tuple[Case, float]] = {
    "lstm": (case(nn.LSTM, num_layers=2, dropout=0.3), 1e-5),
    "lstm-both-first": (case(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True, state=True), 1e-5),
    "gru-float64": (case(nn.GRU, num_layers=2, dropout=0.2, dtype=torch.float64), 1e-12),
    "gru-both-float64": (case(nn.GRU, bidirectional=True, state=True, dtype=torch.float64), 1e-12),
    "lstm-projected-float64": (case(nn.LSTM, proj_size=8, batch_first=True, state=True, dtype=torch.float64), 1e-12),
}


@pytest.mark.parametrize("name", STRETCHED)
@pytest.mark.parametrize("choose", [pytest.param(everything, id="all"), pytest.param(randomly(2), id="half")])
def test_stretches(name: str, choose: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `reorder` long layers run in stretches: gradients equal up to rounding, the peak as planned, random draws the same."""
    monkeypatch.setattr(_layer, "STRETCH", 4)
    made, tolerance = STRETCHED[name]
    expected = train(made)
    session = ForcedSession(choose, Options(cost="analytic", reorder=True))
    got = train(made, session)
    assert session.graph is not None
    check_footprint(session, 0.02)
    layers, directions = (rnn := made.build().rnn).num_layers, 1 + made.build().rnn.bidirectional
    ops = [op for op in session.graph.ops if op.traits & Trait.COMPOSITE or op.name == "aten::mkldnn_rnn_layer"]
    assert rnn.mode in ("LSTM", "GRU")
    assert len(ops) == 2 * layers * directions
    for i, gradients in enumerate(
        expected.gradients[:4]
    ):  # the first with the plan; later ones drift with the parameters
        for key, a in gradients.items():
            dtype = np.float64 if "float64" in name else np.float32
            one, other = a.view(dtype), got.gradients[i][key].view(dtype)
            np.testing.assert_allclose(other, one, rtol=1e3 * tolerance, atol=tolerance * np.abs(one).max())
    assert all(np.array_equal(a, b) for a, b in zip(expected.rng, got.rng, strict=True))


def test_stretches_save_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace of oneDNN's LSTM is that of a stretch; without `reorder` it is that of all steps."""
    monkeypatch.setattr(_layer, "STRETCH", 16)

    def long_step(model: Net, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(128, BATCH, WIDTH))
        loss.backward()
        optimizer.step()
        return loss.detach()

    peaks = {}
    for reorder in (False, True):
        session = Session(Options(max_overhead=1e3, cost="analytic", reorder=reorder))
        train(Case(case(nn.LSTM).build, long_step), session)
        assert session.plan is not None
        assert session.graph is not None
        check_footprint(session)
        peaks[reorder] = session.plan.peak - session.graph.start_bytes
    assert peaks[True] < 0.5 * peaks[False]
