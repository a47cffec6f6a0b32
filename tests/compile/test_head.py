"""The loss head in parts: the same losses and gradients up to the order of summation, in less memory."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torch_echo import compat
from torch_echo.compile import _partition, plans
from torch_echo.compile._head import find
from torch_echo.cost import AnalyticCost

V, D = 600, 16
NOTE = "results are equal up to the order of summation"
Loss = Callable[[Tensor, Tensor], Any]
ECHO = pytest.param(
    "echo", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's caches are one test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class LM(nn.Module):
    """Embedding, one layer, projection to the vocabulary and a loss."""

    def __init__(self, loss: Loss, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss
        self.register_buffer("weight", torch.linspace(0.1, 2, V))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.layer(self.embedding(x)))), y)


def cross_entropy(**options: Any) -> Loss:
    return lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), **options)


def weighted(z: Tensor, y: Tensor) -> Tensor:
    weight = torch.arange(V, dtype=z.dtype) / V
    return F.cross_entropy(z.view(-1, V), y.view(-1), weight=weight, label_smoothing=0.1)


def shifted(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1))


def with_logits(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(z.view(-1, V), y.view(-1)), z


def by_hand(z: Tensor, y: Tensor) -> Tensor:
    """Log-softmax over three dimensions, with a penalty and a mean over all logits."""
    picked = z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1))
    return 1e-2 * z.logsumexp(-1).square().mean() + z.square().mean() - picked.mean()


def ignoring(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.view(-1, V), y.clamp(min=3).view(-1), ignore_index=3, reduction="sum")


LOSSES: dict[str, Loss] = {
    "mean": cross_entropy(),
    "sum": ignoring,
    "none": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), reduction="none"),
    "smoothed": cross_entropy(label_smoothing=0.1),
    "weighted": weighted,
    "shifted": shifted,
    "logits": with_logits,
    "by_hand": by_hand,
}


def data(batch: int = 4, length: int = 25) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(V, (batch, length)), torch.randint(V, (batch, length))
    y[0, :3] = -100
    y[-1, -5:] = 3
    return x, y


def results(model: nn.Module, backend: str | None, inputs: tuple[Tensor, Tensor], **options: Any) -> list[Tensor]:
    """Loss and gradients."""
    torch._dynamo.reset()
    plans.clear()
    model.zero_grad()
    f: Any = torch.compile(model, backend=backend, options={"max_overhead": 100.0, "cost": "analytic", **options})
    out = f(*inputs)
    loss = out if isinstance(out, Tensor) else out[0] + out[1].square().mean()
    (loss * torch.linspace(0.5, 1, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def parts() -> int:
    """In how many parts the head of the last graph is."""
    first = plans[-1].plan.notes[0]
    return int(first.split()[3]) if NOTE in first else 1


def replayed() -> int:
    """Peak above what was there before, by which the head is put in parts. (In Inductor's code of graphs as small as these, other
    things are as large.)"""
    return plans[-1].after.peak - plans[-1].graph.base_bytes


def check(model: nn.Module, backend: str, inputs: tuple[Tensor, Tensor], tolerance: float = 1e-10) -> None:
    expected = results(model, backend, inputs)
    assert parts() == 1
    whole = replayed()
    found = results(model, backend, inputs, reorder=True)
    assert parts() > 1 and NOTE in plans[-1].plan.notes[0]
    assert replayed() < whole
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    check(LM(LOSSES[name]).double(), "echo_eager", data())


@pytest.mark.parametrize("name", ["sum", "weighted", "shifted", "logits"])
@pytest.mark.parametrize("backend", [ECHO])
def test_losses_under_inductor(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_partition, "_PARTS", (2,))  # quickly compiled
    check(LM(LOSSES[name]).double(), backend, data())


@pytest.mark.parametrize("backend", ["echo_eager", ECHO])
def test_tied_embedding_without_bias(backend: str) -> None:
    check(LM(cross_entropy(), tied=True, bias=False).double(), backend, data())


@pytest.mark.parametrize("count", [2, 4, 16])
def test_rows_that_do_not_divide(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_partition, "_PARTS", (count,))
    check(LM(cross_entropy()).double(), "echo_eager", data(1, 101))
    assert parts() == count


def test_rows_that_are_all_ignored() -> None:
    x, y = data()
    y[:] = -100
    model = LM(cross_entropy()).double()
    loss, *_ = results(model, "echo_eager", (x, y), reorder=True)
    assert parts() > 1 and loss.isnan()


def test_shifted_loss_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=32, n_embd=D, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    gpt = transformers.GPT2LMHeadModel(config).double()
    gpt.loss_type = "ForCausalLM"  # or else it logs, which breaks the graph before the loss
    gpt.eval()  # no dropout

    class Model(nn.Module):
        def __init__(self, logits: bool) -> None:
            super().__init__()
            self.gpt, self.logits = gpt, logits

        def forward(self, x: Tensor, y: Tensor) -> Any:
            out = self.gpt(x, labels=y)
            return (out.loss, out.logits) if self.logits else out.loss

    for logits in (False, True):
        check(Model(logits), "echo_eager", data(), tolerance=1e-6)  # logits become float32
        assert len(plans) == 1


def usual_rate(cost: AnalyticCost, name: str, run: Callable[[], float]) -> float:
    """What is measured otherwise, on a machine that does nothing else."""
    what, _, size = name.partition(" ")
    return {"launch": 2e-6, "peak": 5e10, "copy": 1e-10 * int(size) if what == "copy" else 0.0}.get(what, 1e-9)


class TestMemory:
    @pytest.mark.parametrize("overhead", [0.5, 100.0])
    def test_at_the_allocator_as_replayed(self, overhead: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(AnalyticCost, "_calibrated", usual_rate)  # how many parts are worth their time
        peaks = []
        x, y = data(4, 128)
        for reorder in (False, True):
            torch._dynamo.reset()
            plans.clear()
            model = LM(cross_entropy())
            options = {"max_overhead": overhead, "cost": "analytic", "reorder": reorder}
            f = torch.compile(model, backend="echo_eager", options=options)
            f(x, y).backward()
            (made,) = plans
            before = made.graph.start_bytes
            f(x, y).backward()
            model.zero_grad()
            gc.collect()
            profile = compat.MemoryProfile()
            profile.start()
            f(x, y).backward()
            profile.stop()
            peaks.append(profile.rise(torch.device("cpu"))[0])
            assert peaks[-1] == pytest.approx(made.plan.peak - before, rel=0.001)
        assert peaks[1] < 0.6 * peaks[0]

    def test_a_budget_below_what_a_whole_head_takes(self) -> None:
        x, y = data(4, 128)
        results(LM(cross_entropy()), "echo_eager", (x, y))
        budget = plans[-1].plan.floor - 200_000
        torch._dynamo.reset()
        options: dict[str, Any] = {"memory_budget": budget, "max_overhead": None}
        with pytest.raises(Exception, match="least"):
            results(LM(cross_entropy()), "echo_eager", (x, y), **options)
        results(LM(cross_entropy()), "echo_eager", (x, y), reorder=True, **options)
        assert parts() > 1 and plans[-1].plan.peak <= budget
        with pytest.raises(Exception, match="least"):
            results(LM(cross_entropy()), "echo_eager", (x, y), reorder=True, **{**options, "memory_budget": 4096})

    def test_only_where_there_is_time_for_it(self) -> None:
        """Nothing may be re-run: then parts whose log-softmax is kept are all that a head in parts can be."""
        x, y = data(4, 128)
        results(LM(cross_entropy()), "echo_eager", (x, y), reorder=True, max_overhead=0.0)
        assert not plans[-1].plan.rerun
        assert plans[-1].plan.overhead == 0


class TestLeftAlone:
    def joints(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The code of the joint graphs that are partitioned."""
        seen: list[str] = []
        partition = compat.partition

        def record(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            seen.append(joint.code)
            return partition(joint, *args, **kwargs)

        monkeypatch.setattr(compat, "partition", record)
        return seen

    def test_without_the_option(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.joints(monkeypatch)
        model = LM(cross_entropy())
        inputs = data()
        torch._dynamo.reset()
        (0.5 * torch.compile(model, backend="aot_eager")(*inputs)).backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        _, *found = results(model, "echo_eager", inputs, reorder=False)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert "nll_loss_forward" in seen[-1] and "slice" not in seen[-1]

    @pytest.mark.parametrize(
        "loss",
        [
            lambda z, y: z.softmax(0).square().mean(),  # along the rows
            lambda z, y: F.dropout(z, 0.5).square().mean(),  # random
            lambda z, y: z.sort(-1).values[..., 0].mean(),  # no rule
            lambda z, y: (z @ torch.ones(V, 64)).square().mean(),  # what is handed on is large
        ],
    )
    def test_what_is_not_understood(self, loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.joints(monkeypatch)
        model, inputs = LM(loss), data()
        codes, gradients = [], []
        for reorder in (False, True):
            torch.manual_seed(2)
            gradients.append(results(model, "echo_eager", inputs, reorder=reorder))
            codes.append(seen[-1])
        assert codes[0] == codes[1]
        assert parts() == 1
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    def test_symbolic_sizes(self) -> None:
        model = LM(cross_entropy())
        f = torch.compile(model, backend="echo_eager", dynamic=True, options={"max_overhead": 100.0, "reorder": True})
        for length in (25, 31):
            x, y = data(4, length)
            f(x, y).backward()
        assert len(plans) == 1 and parts() == 1

    def test_a_graph_without_a_product(self) -> None:
        graph = fx.Graph()
        graph.output(([graph.placeholder("primals_1")],))
        assert find(fx.GraphModule(nn.Module(), graph), 1) is None


@pytest.mark.parametrize("backend", [ECHO])
def test_the_option_is_part_of_the_key_of_caches(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_partition, "_PARTS", (2,))
    model, inputs = LM(cross_entropy()), data(4, 128)
    for reorder in (False, True):
        results(model, backend, inputs, reorder=reorder)
        assert len(plans) == 1 and (parts() > 1) == reorder
    for reorder in (False, True):
        results(model, backend, inputs, reorder=reorder)
        assert not plans  # found again
