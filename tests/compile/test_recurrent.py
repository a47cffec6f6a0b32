"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` in compiled graphs: whole, bit-equal to eager PyTorch, compiled once for all lengths."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from torch_echo import compat
from torch_echo.compile import echo_eager, plans
from torch_echo.errors import TorchEchoError
from torch_echo.recurrent import _onednn, _packed

DEEP = {"max_overhead": 100.0, "cost": "analytic"}
CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


def tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for item in found:
            yield from tensors(item)


def train(model: nn.Module, run: Any, batches: list[Any]) -> list[Tensor]:
    """Outputs and gradients of each step, then random numbers."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        found = list(tensors(run(*batch)))
        seen += [t.detach().clone() for t in found]
        torch.stack([t.float().square().sum() for t in found if t.requires_grad]).sum().backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*seen, torch.rand(1)]


def compare(model: nn.Module, batches: list[Any], backend: str = "echo_eager", **options: Any) -> None:
    """Steps of `model` and of its compiled copy, in one graph."""
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend=backend, options={**DEEP, **options}, fullgraph=True)
    expected, found = train(model, model, batches), train(other, compiled, batches)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if backend == "echo_eager":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b)


def batches(*lengths: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [(torch.randn(t, 3, 8, dtype=dtype),) for t in lengths]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stacked": {"num_layers": 3},
    "dropout": {"num_layers": 3, "dropout": 0.3},
    "all_dropped": {"num_layers": 2, "dropout": 1.0},
    "bidirectional": {"num_layers": 2, "bidirectional": True},
    "no_bias": {"bias": False, "bidirectional": True},
    "everything": {"num_layers": 2, "dropout": 0.2, "bidirectional": True, "batch_first": True},
}


class TestBitEqual:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("cell", CELLS)
    def test_variants(self, cell: str, variant: str) -> None:
        compare(CELLS[cell](8, 16, **VARIANTS[variant]), batches(5, 7, 9))
        assert len(plans) <= 2

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("cell", CELLS)
    def test_types(self, cell: str, dtype: torch.dtype) -> None:
        compare(CELLS[cell](8, 16, num_layers=2, bidirectional=True, dtype=dtype), batches(5, 7, dtype=dtype))

    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_projection(self, bidirectional: bool) -> None:
        compare(nn.LSTM(8, 16, num_layers=2, proj_size=4, bidirectional=bidirectional), batches(5, 7))

    def test_relu(self) -> None:
        compare(nn.RNN(8, 16, num_layers=2, nonlinearity="relu"), batches(5, 7))

    @pytest.mark.parametrize("cell", CELLS)
    def test_initial_states(self, cell: str) -> None:
        """Given, and learnt."""

        class Given(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = CELLS[cell](8, 16, num_layers=2, batch_first=True)
                self.first = nn.Parameter(torch.randn(2, 5, 16))

            def forward(self, x: Tensor) -> Any:
                return self.layer(x, (self.first, self.first.tanh()) if cell == "lstm" else self.first)

        compare(Given(), [(torch.randn(5, t, 8),) for t in (3, 6)])

    @pytest.mark.parametrize("cell", ["gru", "rnn"])  # eager PyTorch refuses it for oneDNN's LSTM
    def test_outputs_that_are_written_to(self, cell: str) -> None:
        class Written(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = CELLS[cell](8, 16, num_layers=2, bidirectional=True)

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.layer(x)[0]
                return y.mul_(2)

        compare(Written(), batches(5, 7))
        one = CELLS[cell](8, 16)
        gradients = []
        for run in (one, torch.compile(one, backend="echo_eager", options=DEEP)):
            one.zero_grad()
            y, _ = run(torch.ones(5, 3, 8))
            doubled = y * 2
            with torch.no_grad():
                y.zero_()
            doubled.sum().backward()
            gradients.append([p.grad for p in one.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    @pytest.mark.parametrize("cell", CELLS)
    def test_first_call(self, cell: str) -> None:
        """PyTorch compiles and runs it with other dispatch keys than later calls."""

        class Summed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = CELLS[cell](6, 8, batch_first=True)

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.layer(x.tanh())[0]
                return y.sigmoid()

        for seed in range(5):
            torch.manual_seed(seed)
            torch._dynamo.reset()
            compare(Summed(), [(torch.randn(4, 10, 6),)])

    @pytest.mark.parametrize("cell", CELLS)
    def test_unbatched(self, cell: str) -> None:
        compare(CELLS[cell](8, 16, num_layers=2), [(torch.randn(t, 8),) for t in (3, 6)])

    @pytest.mark.parametrize("cell", CELLS)
    @pytest.mark.parametrize("chosen", ["output", "last", "nothing_but_states"])
    def test_outputs_that_are_not_used(self, cell: str, chosen: str) -> None:
        class Chosen(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = CELLS[cell](8, 16, num_layers=2)

            def forward(self, x: Tensor) -> Any:
                y, states = self.layer(x)
                return {"output": y, "last": y[-1], "nothing_but_states": states}[chosen]

        compare(Chosen(), batches(5, 7))

    @pytest.mark.parametrize("cell", CELLS)
    def test_inputs_and_parameters_without_gradients(self, cell: str) -> None:
        model = CELLS[cell](8, 16, num_layers=2)
        for name, p in model.named_parameters():
            p.requires_grad_(not name.endswith("_l0"))
        compare(model, batches(5, 7))
        plans.clear()
        for bias in (True, False):  # eager's kernels depend on it, and on the input's gradient and strides
            layer = CELLS[cell](8, 16, bias=bias, batch_first=True)
            compare(nn.Sequential(nn.Linear(8, 8), layer), batches(5, 7))
            torch._dynamo.reset()

    @pytest.mark.parametrize("cell", CELLS)
    def test_without_gradients(self, cell: str) -> None:
        model = CELLS[cell](8, 16, num_layers=2)
        compiled = torch.compile(model, backend="echo_eager", fullgraph=True)
        (x,) = batches(5)[0]
        with torch.no_grad():
            for a, b in zip(tensors(model(x)), tensors(compiled(x)), strict=True):
                assert torch.equal(a, b)

    @needs_compiler
    @pytest.mark.parametrize("cell", CELLS)
    def test_by_inductor(self, cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        compare(CELLS[cell](8, 16, num_layers=2, bidirectional=True), batches(5, 7, 9), "echo")
        assert len(plans) <= 2


class Packed(nn.Module):
    """As for translation and speech: padded batches, packed on the way in, padded on the way out."""

    def __init__(self, cell: str, enforce_sorted: bool = False, total: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer = CELLS[cell](8, 16, **options)
        self.out = nn.Linear(16 * (1 + self.layer.bidirectional), 4)
        self.enforce_sorted, self.total = enforce_sorted, total

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        first = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.enforce_sorted)
        y, states = self.layer(packed)
        y = PackedSequence(F.relu(y.data), *y[1:]) if not self.enforce_sorted else y
        padded, found = pad_packed_sequence(
            y, batch_first=first, padding_value=0.5, total_length=x.shape[1 if first else 0] if self.total else None
        )
        return self.out(padded), states, found


def padded_batches(model: Packed, *longest: int) -> list[Any]:
    made = []
    for t in longest:
        lengths = torch.randint(1, t + 1, (5,))
        lengths[2] = t - model.total
        if model.enforce_sorted:
            lengths = lengths.sort(descending=True)[0]
        made.append((torch.randn(5, t, 8) if model.layer.batch_first else torch.randn(t, 5, 8), lengths))
    return made


class TestPacked:
    @pytest.mark.parametrize("enforce_sorted", [False, True])
    @pytest.mark.parametrize("total", [False, True])
    @pytest.mark.parametrize("cell", CELLS)
    def test_bit_equal(self, cell: str, total: bool, enforce_sorted: bool) -> None:
        options: dict[str, Any] = {
            "num_layers": 2,
            "dropout": 0.2,
            "bidirectional": total,
            "batch_first": enforce_sorted,
        }
        model = Packed(cell, enforce_sorted, total, **options)
        compare(model, padded_batches(model, 5, 7, 9, 6))
        assert len(plans) <= 2

    @pytest.mark.parametrize("enforce_sorted", [False, True])
    @pytest.mark.parametrize("as_list", [False, True])
    def test_on_another_device(self, as_list: bool, enforce_sorted: bool) -> None:
        """Lengths are on the CPU wherever the batch is."""
        with FakeTensorMode(shape_env=ShapeEnv()):
            x = torch.empty(5, 3, 4, device="meta")
            lengths = [5, 3, 2]
            given = lengths if as_list else torch.tensor(lengths)
            with torch.device("meta"):
                packed = _packed.pack_padded_sequence(x, given, enforce_sorted=enforce_sorted)
            padded, found = _packed.pad_packed_sequence(packed)
        assert packed.data.device == padded.device == x.device
        assert packed.batch_sizes.device.type == found.device.type == "cpu"
        assert packed.sorted_indices is None or packed.sorted_indices.device == x.device

    def test_labels_for_each_sequence(self) -> None:
        """The number of sequences is known, though that of their elements is not."""

        class Classifier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.GRU(8, 16)
                self.out = nn.Linear(16, 4)

            def forward(self, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
                _, h = self.layer(pack_padded_sequence(x, lengths))
                return F.cross_entropy(self.out(h[-1]), labels)

        labels = torch.tensor([0, 1, 2])
        given = [(torch.randn(t, 3, 8), torch.tensor([t, t - 1, 2]), labels) for t in (4, 6, 9)]
        compare(Classifier(), given)
        assert len(plans) <= 2

    @pytest.mark.parametrize("enforce_sorted", [False, True])
    @pytest.mark.parametrize("cell", CELLS)
    def test_packed_before(self, cell: str, enforce_sorted: bool) -> None:
        given = []
        for lengths in ((5, 3, 2), (7, 7, 1), (6, 5, 4)):
            given.append((pack_sequence([torch.randn(t, 8) for t in lengths], enforce_sorted=enforce_sorted),))
        compare(CELLS[cell](8, 16, num_layers=2), given)

    @needs_compiler
    def test_by_inductor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        model = Packed("lstm", num_layers=2)
        plans.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "torch-echo")
            compare(model, padded_batches(model, 5, 7, 9), "echo")
        assert any("its sizes depend on data" in note for note in plans[-1].plan.notes)
        assert len(plans) <= 2


class Words(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int = 48, cell: str = "lstm", **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = CELLS[cell](width, width, num_layers=2, **options)
        self.out = nn.Linear(width, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.layers(self.embedding(x))[0]).flatten(0, 1), y.flatten())


def words(length: int, batch: int = 8) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (length + 1, batch))
    return text[:-1], text[1:]


class TestGraphs:
    @pytest.mark.parametrize("cell", CELLS)
    def test_one_graph_for_all_lengths(self, cell: str) -> None:
        model = Words(cell=cell, dropout=0.1)
        given = [words(t) for t in (12, 15, 9, 30, 7, 22, 3, 40, 18, 25)]
        compare(model, given)
        assert len(plans) <= 2
        assert len(plans[-1].graph.ops) < 100

    def test_one_compilation_where_the_length_is_marked(self) -> None:
        run = torch.compile(Words(), backend="echo_eager", options=DEEP, fullgraph=True)
        for length in (12, 15, 9, 30):
            x, y = words(length)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(y, 0)
            run(x, y).backward()
        assert len(plans) == 1

    def test_one_op_for_each_layer_and_direction(self) -> None:
        compare(nn.LSTM(8, 16, num_layers=2, bidirectional=True), batches(5))
        names = [op.name for op in plans[0].graph.ops if op.name.startswith("torch_echo::")]
        assert names == 4 * ["torch_echo::lstm_layer"] + 4 * ["torch_echo::lstm_layer_backward"]

    def test_layers_are_rerun(self) -> None:
        compare(Words(), [words(30), words(30)])
        graph, made = plans[0].graph, plans[0].plan
        assert "torch_echo::lstm_layer" in {graph.ops[o].name for o in made.rerun}

    @pytest.mark.parametrize("overhead", [0.0, 0.3, 100.0])
    @pytest.mark.parametrize("cell", CELLS)
    def test_the_peak_is_as_replayed(self, cell: str, overhead: float) -> None:
        model = Words(cell=cell)
        x, y = words(30)
        run = torch.compile(model, backend="echo_eager", options={"max_overhead": overhead, "cost": "analytic"})

        def step() -> None:
            for p in model.parameters():
                p.grad = None
            run(x, y).backward()

        step()
        (made,) = plans
        older = made.graph.start_bytes
        step()
        for p in model.parameters():
            p.grad = None
        gc.collect()
        profile = compat.MemoryProfile()
        profile.start()
        run(x, y).backward()
        profile.stop()
        assert profile.rise(torch.device("cpu"))[0] == pytest.approx(made.plan.peak - older, rel=0.005)

    def test_less_memory_than_eager(self) -> None:
        model = Words()
        x, y = words(60, 16)

        def peak(run: Any) -> int:
            for _ in range(2):
                model.zero_grad()
                run(x, y).backward()
            model.zero_grad()
            profile = compat.MemoryProfile()
            profile.start()
            run(x, y).backward()
            profile.stop()
            return profile.rise(torch.device("cpu"))[0]

        eager = peak(model)
        kept = peak(torch.compile(model, backend="echo_eager", options={"max_overhead": 0.0}))
        torch._dynamo.reset()
        assert peak(torch.compile(model, backend="echo_eager", options=DEEP)) < kept < 0.9 * eager


def test_backends_with_options_given() -> None:
    """A backend is ours too as a partial function, as trainers are given one."""
    (x,) = batches(5)[0]
    backend = functools.partial(echo_eager, options={"max_overhead": 0.3})
    torch.compile(nn.Sequential(nn.LSTM(8, 16)), backend=backend, fullgraph=True)(x)[0].sum().backward()
    assert len(plans) == 1


class TestOtherBackends:
    def test_are_as_without_us(self) -> None:
        """A graph break at the LSTM, before and after we have compiled one."""
        model = nn.Sequential(nn.LSTM(8, 16))
        (x,) = batches(5)[0]
        inside: list[bool] = []

        def other(module: torch.fx.GraphModule, _: Any) -> Any:
            inside.append(torch._dynamo.config.allow_rnn)
            return module

        for _ in range(2):
            with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
                torch.compile(model, backend="aot_eager", fullgraph=True)(x)
            torch.compile(lambda x: x * 2, backend=other)(x)
            torch._dynamo.reset()
            torch.compile(model, backend="echo_eager", fullgraph=True)(x)[0].sum().backward()
            assert len(plans) == 1
            plans.clear()
            torch._dynamo.reset()
        assert inside == [False, False]
        assert not torch._dynamo.config.allow_rnn

    def test_packing_is_as_without_us(self) -> None:
        def pack(x: Tensor, lengths: Tensor) -> Tensor:
            return pack_padded_sequence(x, lengths).data

        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(pack, backend="aot_eager", fullgraph=True)(torch.randn(3, 2, 4), torch.tensor([3, 2]))

    def test_autocast_is_left_to_pytorch(self) -> None:
        model = nn.GRU(8, 16)
        (x,) = batches(5)[0]
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x)[0]
            found = torch.compile(model, backend="echo_eager")(x)[0]
        assert torch.equal(found, expected)


class TestModules:
    def test_state_pickle_and_class(self) -> None:
        model = Words()
        before = pickle.dumps(model.state_dict())
        torch.compile(model, backend="echo_eager")(*words(5)).backward()
        assert type(model.layers) is nn.LSTM
        assert pickle.dumps(model.state_dict()) == before
        model.zero_grad()
        again = pickle.loads(pickle.dumps(model))
        x, y = words(5)
        assert torch.equal(again(x, y), model(x, y))
        assert torch.equal(copy.deepcopy(model)(x, y), model(x, y))

    def test_weights_that_are_replaced(self) -> None:
        """As by ``.to`` and ``load_state_dict``."""
        model = nn.LSTM(8, 16)
        compiled = torch.compile(model, backend="echo_eager")
        (x,) = batches(5)[0]
        compiled(x)[0].sum().backward()
        other = nn.LSTM(8, 16)
        model.load_state_dict(other.state_dict())
        assert torch.equal(compiled(x)[0], other(x)[0])
        model.double()
        assert torch.equal(compiled(x.double())[0], other.double()(x.double())[0])


class TestWorkspace:
    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize(
        "sizes", [(1, 1, 8, 16), (35, 20, 33, 65), (7, 3, 300, 100), (4, 2, 64, 256), (3, 9, 3, 5)]
    )
    def test_backward_reads_no_more_than_is_kept(self, sizes: tuple[int, int, int, int], reverse: bool) -> None:
        steps, batch, inputs, hidden = sizes
        assert _onednn.usable(torch.float32, inputs, hidden)
        x, w_ih, w_hh = (
            torch.randn(steps, batch, inputs),
            torch.randn(4 * hidden, inputs),
            torch.randn(4 * hidden, hidden),
        )
        h, c, bias = torch.randn(batch, hidden), torch.randn(batch, hidden), [torch.randn(4 * hidden)] * 2
        *made, whole = _onednn.forward(x, h, c, w_ih, w_hh, bias, reverse, True)
        reserve = _onednn.pack(whole, x, w_hh, reverse)
        assert reserve.numel() == _onednn.reserve_bytes(x, w_hh, reverse) < (0.6 if reverse else 0.4) * whole.numel()
        kept = _onednn.unpack(reserve, x, w_hh, reverse)
        assert kept.numel() == whole.numel()
        grads = torch.randn(steps, batch, hidden), None, torch.randn(batch, hidden)
        found = [_onednn.backward(grads, x, h, c, w_ih, w_hh, bias, tuple(made), w, reverse) for w in (whole, kept)]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_of_another_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Than with the batch and length that were tried: an error, and what it says helps."""

        def longer(*args: Any) -> tuple[Tensor, ...]:
            *made, workspace = forward(*args)
            return *made, torch.cat([workspace, workspace[:4096]]) if len(args[0]) == 6 else workspace

        forward = _onednn.forward
        monkeypatch.setattr(_onednn, "forward", longer)
        model, x = nn.LSTM(8, 16), torch.randn(6, 3, 8)
        with pytest.raises(TorchEchoError, match=r"oneDNN.* input \[6, 3, 8\] .*enabled=False"):
            torch.compile(model, backend="echo_eager", options=DEEP)(x)
        torch._dynamo.reset()
        with torch.backends.mkldnn.flags(enabled=False):
            compare(model, [(x,)])
