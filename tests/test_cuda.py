"""What only a GPU can show. Skipped without one; ``TORCH_ECHO_TEST_DEVICE=cpu`` rehearses the tests on a CPU."""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_echo
from torch_echo.cost import MeasuredCost, get_cost_model, spec_of
from torch_echo.memory import live_bytes
from torch_echo.options import Options
from torch_echo.planning import plan
from torch_echo.prediction import predict
from torch_echo.tape.session import Phase, Session

DEVICE = torch.device(os.environ.get("TORCH_ECHO_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
STEPS = 8

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="no GPU"),
]


BEGAN = time.monotonic()
SECONDS = float(os.environ.get("TORCH_ECHO_TEST_SECONDS", "inf"))


@pytest.fixture(autouse=True)
def _in_time() -> None:
    """What does not fit into the time that ``gpu.sh`` has for it is left out, and the rest is reported."""
    if time.monotonic() - BEGAN > SECONDS:
        pytest.skip("no time was left")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    """Kernels that give the same bits each time: what is compared is to differ by nothing else."""
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG")
    if before is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = before


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 32, 64)
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
                for i, o in itertools.pairwise(widths)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A decoder of LSTM cells with additive attention."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(100, width), nn.LSTMCell(2 * width, width)
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, memory: Tensor, ids: Tensor) -> Tensor:
        h = c = context = memory.new_zeros(memory.shape[0], memory.shape[2])
        keys, out = self.key(memory), []
        for t in range(ids.shape[1]):
            h, c = self.cell(torch.cat([self.dropout(self.embedding(ids[:, t])), context], -1), (h, c))
            weights = torch.softmax(self.score(torch.tanh(self.query(h).unsqueeze(1) + keys)), 1)
            context = (weights * memory).sum(1)
            out.append(context)
        return torch.stack(out)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.rnn = kind(64, 128, num_layers=layers, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(F.gelu(x * 2) + x.tanh())[0]  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention by PyTorch's fused function, and a feed-forward part, both with dropout."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)  # type: ignore[no-any-return]


Made = tuple[nn.Module, tuple[Tensor, ...]]
MODELS: dict[str, Callable[[], Made]] = {
    "convolutions": lambda: (Convolutions(), (torch.randn(8, 3, 64, 64),)),
    "attention": lambda: (Attention(), (torch.randn(16, 40, 128), torch.randint(0, 100, (16, 12)))),
    "lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(40, 16, 64),)),
    "gru": lambda: (Recurrent(nn.GRU), (torch.randn(40, 16, 64),)),
    "lstm without dropout": lambda: (Recurrent(nn.LSTM, 2, 0.0), (torch.randn(40, 16, 64),)),
    "gru of one layer": lambda: (Recurrent(nn.GRU, 1, 0.0), (torch.randn(40, 16, 64),)),
    "transformer": lambda: (nn.Sequential(Block(), Block(), Block()), (torch.randn(8, 128, 128),)),
}


class Training:
    """A model on the device, and its steps."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        self.model = model.to(DEVICE).train()
        self.inputs = tuple(t.to(DEVICE) for t in inputs)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.call: Callable[..., Any] = self.model

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.call(*self.inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps(self, count: int = STEPS) -> list[Tensor]:
        torch.manual_seed(1)
        return [self.step() for _ in range(count)]

    def state(self) -> list[Tensor]:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        random = torch.cuda.get_rng_state(DEVICE) if ON_GPU else torch.get_rng_state()
        return [*self.model.state_dict().values(), *grads, random]


class Deepest(Session):
    """Drops what its least peak takes, whatever that costs."""

    def _make_plan(self, kind: Any, graph: Any, recorder: Any) -> None:
        self._install(kind, graph, plan(graph, max_overhead=1e9), recorder.nesting)


def assert_same(plain: Training, other: Training, losses: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(losses, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.state(), other.state(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_plain_pytorch_to_the_bit(name: str) -> None:
    plain, taped = Training(name), Training(name)
    losses = plain.steps()
    session = Deepest(Options(cost="analytic", max_overhead=1.0))
    session.watch(taped.model)
    theirs = taped.steps()
    session.close()
    assert session.plan is not None and session.plan.dropped, session.unhandled
    assert_same(plain, taped, losses, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_the_plans(name: str) -> None:
    training = Training(name)
    session = Session(Options(max_overhead=0.5))
    session.watch(training.model)
    training.steps(12)
    assert session.phase is Phase.STEADY, session.unhandled
    assert session.plan is not None and session.measured_peak is not None
    assert session.measured_peak == pytest.approx(session.plan.peak, rel=0.02, abs=1 << 20)
    session.close()


def test_the_peak_is_what_the_allocator_says() -> None:
    training = Training("transformer")
    session = Session(Options(max_overhead=0.5))
    session.watch(training.model)
    training.steps(12)
    plan_peak = session.plan.peak if session.plan is not None else 0
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    training.step()
    session.close()
    if ON_GPU:
        assert torch.cuda.max_memory_allocated(DEVICE) == pytest.approx(plan_peak, rel=0.05, abs=9 << 20)
    assert plan_peak > 0


def test_a_budget_is_met() -> None:
    free = torch_echo.explain(Training("transformer").step, max_overhead=1e9)
    budget = (free.plan.peak + free.plan.base_peak) // 2
    others = live_bytes(DEVICE)
    training = Training("transformer")
    session = Session(Options(memory_budget=budget + others, on_infeasible="least"))
    session.watch(training.model)
    training.steps(12)
    assert session.measured_peak is not None and session.measured_peak <= 1.01 * (budget + others)
    session.close()


@pytest.mark.parametrize("name", ["convolutions", "lstm without dropout", "gru of one layer"])
def test_with_reorder_kernels_need_not_add_in_a_fixed_order(name: str) -> None:
    """What cuDNN makes is rebuilt, and the gradients of a step are the same up to rounding."""
    torch.use_deterministic_algorithms(False)
    plain, taped = Training(name), Training(name)
    session = Deepest(Options(cost="analytic", max_overhead=1.0, reorder=True))
    session.watch(taped.model)
    for training in (plain, taped):
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.0)  # each step is the first
        training.steps()
    session.close()
    assert session.graph is not None and session.plan is not None
    rerun = {session.graph.ops[o].name for o in session.plan.rerun}
    assert not ON_GPU or rerun & {"aten::cudnn_convolution", "aten::convolution", "aten::_cudnn_rnn"}
    for ours, theirs in zip(taped.model.parameters(), plain.model.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3 * float(theirs.grad.abs().max()))


def test_check_finds_no_difference() -> None:
    comparison = torch_echo.check(Training("attention").step, max_overhead=0.5)
    assert comparison.equal, comparison.differences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2048, 1000), (333, 32003)], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}], ids=str)
def test_cross_entropy_in_one_block(dtype: torch.dtype, shape: tuple[int, int], options: dict[str, Any]) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape[1], 16, dtype=dtype) / 4)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(x @ self.weight.t(), target, **options).float().mean()

    torch.manual_seed(0)
    x = torch.randn(shape[0], 16, device=DEVICE, dtype=dtype)
    target = torch.randint(0, shape[1], shape[:1], device=DEVICE)
    target[::5] = -100
    first = Head().to(DEVICE)
    found = []
    for session in (None, Session(Options(max_overhead=0.0))):
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if session is not None:
            session.watch(model)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(x, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if session is not None:
            assert session.plan is not None
            assert any("in one block" in note for note in session.plan.notes)
            session.close()
        found.append((losses, model.weight.detach().clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_autocast_and_half_precision() -> None:
    def steps(training: Training) -> list[Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return training.steps()

    plain, taped = Training("transformer"), Training("transformer")
    losses = steps(plain)
    session = Deepest(Options(cost="analytic", max_overhead=1.0))
    session.watch(taped.model)
    theirs = steps(taped)
    session.close()
    assert_same(plain, taped, losses, theirs)


def test_the_compile_engine_gives_what_its_own_graph_gives() -> None:
    plain, compiled = Training("transformer"), Training("transformer")
    plain.call = torch.compile(plain.model, backend="echo_eager", options={"max_overhead": 0.0})
    compiled.call = torch.compile(compiled.model, backend="echo_eager", options={"max_overhead": 1.0})
    losses, theirs = plain.steps(2), compiled.steps(2)
    assert_same(plain, compiled, losses, theirs)


def test_ops_are_timed_on_the_device() -> None:
    cost = get_cost_model("measured", DEVICE)
    assert isinstance(cost, MeasuredCost)
    small, large = (torch.randn(n, n, device=DEVICE) for n in (128, 2048))
    mm = torch.ops.aten.mm.default
    assert 0 < cost.seconds(mm, spec_of(mm, (small, small))) < cost.seconds(mm, spec_of(mm, (large, large)))
    assert not cost.fallbacks


@pytest.mark.parametrize("name", ["convolutions", "transformer", "attention", "lstm", "gru"])
def test_predictions_choose_the_ops_of_the_device(name: str) -> None:
    """The same ops in the same order as the step that runs here; sizes of workspaces are estimates on a GPU."""

    def make() -> Callable[[], Any]:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            model(*inputs).square().mean().backward()
            optimizer.step()

        return step

    recorded = torch_echo.explain(Training(name).step, cost="analytic").graph
    found = predict(make, device=DEVICE.type).graph
    views = ("aten::transpose", "aten::t", "aten::view", "aten::_unsafe_view", "aten::expand", "aten::unsqueeze")

    def kernels(graph: Any) -> list[str]:
        return [op.name for op in graph.ops if op.name.startswith("aten::") and op.name not in views]

    assert kernels(found) == kernels(recorded)
