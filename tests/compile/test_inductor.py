"""``backend="echo"``: Inductor with torch-echo's plans, its caches included."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_echo import compat
from torch_echo.compile import Promise, _partition, plans, promised
from torch_echo.errors import BudgetInfeasible, OptionError
from torch_echo.footprint import replay

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")

WIDTH = 64


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's caches are one test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Blocks(nn.Module):
    """Linear layers and element-wise chains: what is between the layers can be rebuilt inside other kernels."""

    def __init__(self, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(torch.tanh(layer(x)) * 2), self.dropout)
        return x.square().mean()


def step(f: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = f(x)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def measured_peak(f: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> int:
    """Most bytes alive during a step that were not alive before it."""
    step(f, model, x)
    model.zero_grad()
    gc.collect()
    profile = compat.MemoryProfile()
    profile.start()
    torch.manual_seed(3)
    f(x).backward()
    profile.stop()
    return profile.rise(torch.device("cpu"))[0]


def predicted() -> int:
    """The peak that the last plan promises, above parameters and inputs."""
    graph = plans[-1].graph
    return plans[-1].plan.peak - graph.start_bytes


def compiled(model: nn.Module, **options: object) -> nn.Module:
    torch._dynamo.reset()
    f: nn.Module = torch.compile(model, backend="echo", options=options)  # type: ignore[arg-type]
    return f


def test_gradients_and_peaks() -> None:
    model = Blocks()
    x = torch.randn(512, WIDTH)
    loss, grads = step(model, model, x)
    eager = measured_peak(model, model, x)
    peaks = []
    for overhead in (0.0, 1.0):
        f = compiled(model, max_overhead=overhead)
        mine, my_grads = step(f, model, x)
        torch.testing.assert_close(mine, loss)
        for a, b in zip(my_grads, grads, strict=True):
            torch.testing.assert_close(a, b)
        peaks.append(measured_peak(f, model, x))
        assert peaks[-1] == pytest.approx(predicted(), rel=0.001)
        graph = plans[-1].graph
        replayed = replay(graph, plans[-1].plan.dropped).peak - graph.start_bytes
        assert replayed == pytest.approx(
            predicted(), rel=0.1, abs=1.01 * x.nbytes
        )  # Inductor writes one more of its own accord
    assert len(plans) == 2
    assert peaks[1] < 0.75 * peaks[0] <= 0.75 * eager


class Summed(nn.Module):
    """The mean square of what a model makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        return loss


def test_convolutions_that_take_much_with_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's with one channel: given channels last, it unfolds its input; given what the model gives it, it does not."""
    model = Summed(nn.Sequential(nn.Conv2d(1, 8, (21, 11), padding=(10, 5)), nn.ReLU(), nn.Conv2d(8, 8, 3)))
    x = torch.randn(4, 1, 64, 48)
    loss, grads = step(model, model, x)
    peaks = []
    for overhead in (0.3, 0.0):  # analytic: neither layout takes longer
        f = compiled(model, max_overhead=overhead, cost="analytic")
        mine, my_grads = step(f, model, x)
        torch.testing.assert_close(mine, loss)
        for a, b in zip(my_grads, grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert any("laid out as they come" in note for note in plans[-1].plan.notes)
        peaks.append(measured_peak(f, model, x))
        assert peaks[-1] == pytest.approx(predicted(), rel=0.01)
    monkeypatch.setattr(_partition._Planner, "_much_for_layout", lambda *_: False)
    with_channels_last = compiled(model, max_overhead=0.3, cost="analytic", epilogue_fusion=False)
    step(with_channels_last, model, x)
    assert max(peaks) < 0.7 * measured_peak(with_channels_last, model, x)


def test_convolutions_that_take_nothing_have_their_channels_last() -> None:
    model = Summed(nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)))
    step(compiled(model, max_overhead=0.3, cost="analytic"), model, torch.randn(4, 16, 24, 24))
    assert len(plans) == 1
    assert not any("laid out" in note for note in plans[-1].plan.notes)


def test_dropout_draws_the_same_mask_again() -> None:
    """Where an output is 0, so is its gradient: at budgets below 1, PyTorch's own partitioner draws another mask."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = F.dropout(torch.tanh(x), 0.5)
            return (y * y).sum(), y

    x = torch.randn(64, WIDTH, requires_grad=True)
    loss, y = compiled(Masked(), max_overhead=1.0)(x)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)
    assert 0.3 < (y == 0).float().mean() < 0.7


def test_a_changed_option_never_meets_an_old_plan_and_an_unchanged_one_is_found_again() -> None:
    model = Blocks()
    x = torch.randn(256, WIDTH)
    step(compiled(model, max_overhead=0.0), model, x)
    assert len(plans) == 1
    step(compiled(model, max_overhead=1.0), model, x)
    assert len(plans) == 2 and plans[1].plan.peak < plans[0].plan.peak
    deep = measured_peak(compiled(model, max_overhead=1.0), model, x)
    step(compiled(model, max_overhead=1.0), model, x)
    assert len(plans) == 2  # from the cache
    assert promised[1:] == [Promise.of(plans[1].plan)] * 3 != [promised[0]] * 3
    assert deep == measured_peak(compiled(model, max_overhead=1.0), model, x)


def test_options_of_inductor_and_of_ours() -> None:
    model = Blocks(1)
    x = torch.randn(8, WIDTH)
    step(compiled(model, max_overhead=0.1, epilogue_fusion=False), model, x)
    assert len(plans) == 1
    with pytest.raises(OptionError, match=r"options \['max_overheat'\]: must be among"):
        step(compiled(model, max_overheat=0.1), model, x)


def test_an_infeasible_budget() -> None:
    """Not inside an exception of Dynamo's or of Inductor's."""
    model = Blocks(1)
    with pytest.raises(BudgetInfeasible, match=r"1\.0 KiB"):
        step(compiled(model, memory_budget="1KiB"), model, torch.randn(8, WIDTH))


def test_sums_of_many_gradients_do_not_wait_for_all_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight readers of one tensor, as in attention: Inductor alone computes the gradients of all of them in one late kernel."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.score = nn.Linear(WIDTH, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            keys, h = self.key(x), x[:, 0]
            for _ in range(8):
                weights = torch.softmax(self.score(torch.tanh(keys + self.query(h).unsqueeze(1))), 1)
                h = torch.bmm(weights.transpose(1, 2), x).squeeze(1)
            return h.square().mean()

    model = Attention()
    x = torch.randn(16, 128, WIDTH)
    eager = measured_peak(model, model, x)
    mine = measured_peak(compiled(model, max_overhead=0.0), model, x)
    assert mine == pytest.approx(predicted(), rel=0.001)
    monkeypatch.setattr(_partition, "write_parts", lambda joint: None)
    theirs = measured_peak(compiled(model, max_overhead=1e-9), model, x)  # another key in caches
    assert mine < eager < theirs


def test_sums_of_many_gradients_are_not_fused_again() -> None:
    """Twenty readers of one tensor, each with a product after it: one kernel that adds them all up would wait for all products."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.scales = nn.Parameter(torch.randn(20, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            keys = self.key(x)
            return torch.stack([self.value(torch.tanh(keys * s)).square().mean() for s in self.scales]).sum()

    model = Scaled()
    x = torch.randn(2000, WIDTH)
    mine = measured_peak(compiled(model, max_overhead=0.5), model, x)
    assert mine == pytest.approx(predicted(), rel=0.001)
    assert mine < 24 * x.nbytes, "35, if all are there at once"


class Messages(nn.Module):
    """Nodes of a graph with eight edges each: what is gathered along the edges is eight times as large as the nodes."""

    def __init__(self, nodes: int, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.score = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("source", torch.randint(0, nodes, (8 * nodes,)))
        self.register_buffer("target", torch.arange(nodes).repeat(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            weights = torch.sigmoid((h * self.score).sum(-1)[self.source])
            messages = h[self.source] * weights.unsqueeze(-1)
            x = x + torch.tanh(torch.zeros_like(h).index_add(0, self.target, messages))
        return x.square().mean()


def test_indices_with_many_readers_have_no_gradients() -> None:
    """Inductor's kernels are what they are by themselves."""
    model = Messages(500)
    x = torch.randn(500, WIDTH)
    mine = measured_peak(compiled(model, max_overhead=1.0), model, x)
    theirs = measured_peak(compiled(model, max_overhead=1.0, max_fusion_unique_io_buffers=None), model, x)
    assert mine == theirs


def test_a_gather_is_re_run_inside_what_reads_it() -> None:
    """There it costs what is read, and not what a kernel of its own takes: it is dropped even if no time may be lost."""
    model = Messages(500)
    x = torch.randn(500, WIDTH)
    mine = measured_peak(compiled(model, max_overhead=0.0), model, x)
    assert mine < measured_peak(torch.compile(model), model, x)
