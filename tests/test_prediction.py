"""Predictions beside steps that are run, and of steps that can't be."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_echo
from torch_echo.footprint import replay
from torch_echo.graph import Trait
from torch_echo.prediction import largest, predict
from torch_echo.tape._record import PeakMeter

Make = Callable[[], Callable[[], Any]]
CPU = torch.device("cpu")


def trainer(
    model: nn.Module, *inputs: Any, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
) -> Callable[[], Any]:
    """Training steps: mean square of the output."""
    model.train()
    opt = optimizer(model.parameters(), lr=1e-3)

    def step() -> None:
        opt.zero_grad()
        out = model(*inputs)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        opt.step()

    return step


def measured(make: Make) -> int:
    """The allocator's peak in the third of real steps."""
    torch.manual_seed(0)
    step = make()
    for _ in range(2):
        step()
    models = [cell.cell_contents for cell in step.__closure__ or () if isinstance(cell.cell_contents, nn.Module)]
    meter = PeakMeter(CPU, (p.grad for model in models for p in model.parameters() if p.grad is not None))
    step()
    peak = meter.stop()
    assert peak is not None
    return peak


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False)
        self.blocks = nn.Sequential(Residual(16), Residual(16))
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x), 3, stride=2, padding=1)
        logits: Tensor = self.last(self.blocks(x).mean((2, 3)))
        return logits


class Attention(nn.Module):
    """A decoder of LSTM cells with additive attention: many gradients of the keys are added up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(50, width), nn.LSTMCell(2 * width, width)
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, memory: Tensor, ids: Tensor) -> Tensor:
        h = c = context = memory.new_zeros(memory.shape[0], memory.shape[2])
        keys, out = self.key(memory), []
        for t in range(ids.shape[1]):
            h, c = self.cell(torch.cat([self.embedding(ids[:, t]), context], -1), (h, c))
            weights = torch.softmax(self.score(torch.tanh(self.query(h).unsqueeze(1) + keys)), 1)
            context = (weights * memory).sum(1)
            out.append(context)
        return torch.stack(out)


class Slices(nn.Module):
    """Gradients of slices of one tensor are added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.linear(x).tanh().chunk(4, -1)
        return a.sigmoid() * b.sin() + c.exp() * d.cos()


class Packed(nn.Module):
    """Recurrent layers over sequences of several lengths."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(24, 32, num_layers=2, bidirectional=True, dropout=0.2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0])[0]


class Regions(nn.Module):
    """A user's own checkpoint regions, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + checkpoint(part, x, use_reentrant=False)
        return x


class Letters(nn.Module):
    """CTC, whose loss has sizes by the lengths of its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.output = nn.GRU(16, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor, letters: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
        scores = self.output(self.rnn(x)[0]).log_softmax(-1)
        loss: Tensor = F.ctc_loss(scores, letters, lengths, counts, zero_infinity=True)
        return loss


def truncated() -> Callable[[], Any]:
    """Initialised by draws that are repeated for what lies outside of bounds, as Vision Transformers are."""
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 200))
    for layer in (model[0], model[2]):
        nn.init.trunc_normal_(layer.weight, std=0.02, generator=torch.Generator())
    return trainer(model, torch.randn(256, 300))


def transformer() -> Callable[[], Any]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return trainer(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(8, 40, 64))


MODELS: dict[str, Make] = {
    "convolutions": lambda: trainer(Convolutions(), torch.randn(4, 3, 64, 64)),
    "lstm": lambda: trainer(nn.LSTM(48, 64, num_layers=2, dropout=0.1), torch.randn(60, 8, 48)),
    "gru": lambda: trainer(nn.GRU(48, 64, batch_first=True), torch.randn(8, 20, 48)),
    "packed lstm": lambda: trainer(Packed(nn.LSTM), torch.randn(20, 4, 24), torch.tensor([20, 11, 5, 17])),
    "packed gru": lambda: trainer(Packed(nn.GRU), torch.randn(20, 4, 24), torch.tensor([20, 11, 5, 17])),
    "attention": lambda: trainer(Attention(), torch.randn(8, 20, 32), torch.randint(0, 50, (8, 12))),
    "slices": lambda: trainer(Slices(), torch.randn(256, 64)),
    "transformer": transformer,
    "truncated": truncated,
    "regions": lambda: trainer(Regions(), torch.randn(256, 64)),
    "ctc": lambda: trainer(
        Letters(), torch.randn(40, 4, 16), torch.randint(1, 12, (4, 9)), torch.full((4,), 40), torch.tensor([9, 4, 7, 5])
    ),
    "normalised": lambda: trainer(
        nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.SiLU(), nn.Unflatten(1, (8, 12)), nn.GroupNorm(4, 8), nn.Flatten()),
        torch.randn(300, 64), optimizer=torch.optim.AdamW,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_peak_is_the_allocators(name: str) -> None:
    make = MODELS[name]
    found = predict(make)
    assert found.eager_peak == pytest.approx(measured(make), rel=1e-3), "workspaces of LSTMs are whole pages"


def test_the_predicted_plan_is_that_of_a_recorded_step() -> None:
    """Not the same plan, as a recorded step's backward ops have times of their own, and other times lead to another search."""
    make = MODELS["transformer"]
    found = predict(make)
    recorded = torch_echo.explain(make(), cost="analytic", max_overhead=1e9)
    assert [op.name for op in found.graph.ops] == [op.name for op in recorded.graph.ops]
    least = found.plan(max_overhead=1e9)
    for dropped in (least.dropped, recorded.plan.dropped):
        assert replay(found.graph, dropped).peak == pytest.approx(replay(recorded.graph, dropped).peak, rel=1e-3)
    assert least.peak < 0.8 * found.eager_peak


def test_nothing_is_allocated_for_a_model_that_could_not_be() -> None:
    def make() -> Callable[[], Any]:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)) for _ in range(8))
        )
        return trainer(model, torch.randn(32768, 4096))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = predict(make)
    assert found.eager_peak > 40 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 * 2**10


def test_steps_that_look_at_content_are_refused_with_their_line() -> None:
    def make() -> Callable[[], Any]:
        model = nn.Linear(300, 300)

        def step() -> None:
            loss = model(torch.randn(300, 300)).square().mean()
            if loss.item() < 1:  # here
                loss.backward()

        return step

    line = make.__code__.co_firstlineno + 5
    with pytest.raises(torch_echo.CaptureError, match=rf"test_prediction.py:{line}: aten._local_scalar_dense"):
        predict(make)


def test_content_that_is_computed_may_be_looked_at() -> None:
    def make() -> Callable[[], Any]:
        model, lengths = nn.Linear(64, 64), torch.tensor([30, 200, 5])

        def step() -> None:
            longest = int(lengths.max())
            mask = torch.arange(longest) < lengths[:, None]
            model(torch.randn(int(mask.sum()), 64)).sum().backward()

        return step

    sizes = {s.nbytes for s in predict(make).graph.storages}
    assert 235 * 64 * 4 in sizes


def test_a_model_made_before_is_refused_and_left_alone() -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    with pytest.raises(torch_echo.CaptureError, match="made before the prediction"):
        predict(lambda: trainer(model, torch.randn(4, 8)))
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_a_prediction_leaves_no_trace() -> None:
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    predict(MODELS["slices"])
    assert torch.equal(torch.randn(3), expected)
    a = torch.full((200, 200), 2.0)
    assert float((a @ a).sum()) == 200**3 * 4


def test_a_step_that_trains_nothing_is_an_error() -> None:
    with pytest.raises(torch_echo.CaptureError, match="no training step"):
        predict(lambda: lambda: torch.ones(3))


def test_other_devices_are_refused() -> None:
    with pytest.raises(torch_echo.OptionError, match="device='tpu'"):
        predict(MODELS["slices"], device="tpu")


def test_budgets_are_of_the_device_that_is_named() -> None:
    found = predict(MODELS["transformer"], device_memory="1GiB")
    share = 0.7 * found.eager_peak / 2**30
    assert found.plan(memory_budget=share).peak <= 0.7 * found.eager_peak
    with pytest.raises(torch_echo.BudgetInfeasible):
        found.plan(memory_budget="1KiB")
    assert "fits into 1.0 GiB" in repr(found)


def test_the_largest_size_is_the_last_that_fits() -> None:
    def make(batch: int) -> Callable[[], Any]:
        return trainer(Slices(), torch.randn(batch, 64))

    limit = predict(lambda: make(300)).eager_peak + 1000  # with what else is there in this process
    size, found = largest(make, lambda p: p.eager_peak, limit, start=200)
    assert found is not None and found.eager_peak <= limit < predict(lambda: make(size + 1)).eager_peak
    assert largest(make, lambda p: p.eager_peak, 1000) == (0, None)


class TestOnAGPU:
    """Which ops PyTorch chooses there; what they take is known from the schemas and from PyTorch's own fake tensors."""

    def names(self, make: Make) -> set[str]:
        return {op.name for op in predict(make, device="cuda").graph.ops}

    def test_fused_ops_take_the_place_of_those_of_a_cpu(self) -> None:
        assert "aten::native_dropout" in self.names(MODELS["transformer"])
        assert "aten::_scaled_dot_product_efficient_attention" in self.names(MODELS["transformer"])
        assert "aten::_thnn_fused_lstm_cell" in self.names(MODELS["attention"])
        for recurrent in ("lstm", "gru", "packed lstm", "packed gru"):
            assert "aten::_cudnn_rnn" in self.names(MODELS[recurrent])

    @pytest.mark.parametrize(
        ("layers", "dropout", "reorder", "deterministic", "kept"),
        [
            (1, 0.0, False, False, True),
            (1, 0.0, True, False, False),
            (1, 0.0, False, True, False),
            (2, 0.0, True, False, False),
            (2, 0.2, True, True, True),
        ],
    )
    def test_cudnns_layers_are_rebuilt_where_that_gives_the_same(
        self, layers: int, dropout: float, reorder: bool, deterministic: bool, kept: bool
    ) -> None:
        """To the bit, with deterministic algorithms; up to rounding, with `reorder`. Not where they draw masks."""

        def make() -> Callable[[], Any]:
            class Layers(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.rnn = nn.LSTM(32, 64, layers, dropout=dropout)

                def forward(self, x: Tensor) -> Tensor:
                    return self.rnn(x)[0]  # type: ignore[no-any-return]

            return trainer(Layers(), torch.randn(20, 8, 32))

        torch.use_deterministic_algorithms(deterministic)
        try:
            graph = predict(make, device="cuda", reorder=reorder).graph
        finally:
            torch.use_deterministic_algorithms(False)
        (op,) = (op for op in graph.ops if op.name == "aten::_cudnn_rnn")
        assert bool(op.traits & Trait.KEEP) is kept

    def test_reorder_leaves_cudnns_layers_whole(self) -> None:
        """On a CPU they run in stretches."""

        def make() -> Callable[[], Any]:
            return trainer(nn.LSTM(8, 16), torch.randn(150, 2, 8))

        def layers(device: str, name: str) -> int:
            return sum(op.name == name for op in predict(make, device=device, reorder=True).graph.ops)

        assert layers("cuda", "aten::_cudnn_rnn") == 1 < layers("cpu", "aten::mkldnn_rnn_layer")

    def test_blocks_are_of_the_allocators_sizes(self) -> None:
        graph = predict(MODELS["convolutions"], device="cuda").graph
        assert all(s.nbytes % 512 == 0 for s in graph.storages)
        assert graph.meta["device"] == "cuda" and graph.meta["predicted"] == "yes"

    def test_optimizers_take_all_parameters_at_once(self) -> None:
        def state_sized(device: str) -> int:
            graph = predict(MODELS["slices"], device=device).graph
            after = max(p.end for p in graph.passes)
            return max(s.nbytes for s in graph.storages if s.alloc > after)

        make = MODELS["slices"]
        ours, theirs = (predict(make, device=d).graph for d in ("cpu", "cuda"))
        names = [
            sum(s.alloc > max(p.end for p in g.passes) and s.free < g.ticks for s in g.storages) for g in (ours, theirs)
        ]
        assert names[0] and names[1]

    def test_python_takes_no_time_while_the_device_is_busy(self) -> None:
        def make() -> Callable[[], Any]:
            body = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048), nn.GELU())
            return trainer(body, torch.randn(65536, 2048))

        busy = predict(make, device="cuda")
        assert busy.slack > 0.9 * busy.step_seconds
        idle = predict(MODELS["attention"], device="cuda")
        assert idle.slack == 0
