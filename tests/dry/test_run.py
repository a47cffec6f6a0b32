"""What is done in place of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_echo import CaptureError, compat
from torch_echo.dry import DryRun


@pytest.fixture
def run() -> Iterator[DryRun]:
    with DryRun() as run:
        yield run


def names(run: DryRun) -> list[str]:
    return [call.spec.op for _, call in run.calls]


def test_outputs_have_the_strides_of_the_kernels(run: DryRun) -> None:
    x = torch.randn(8, 16, 40, 40)
    assert F.conv2d(x.to(memory_format=torch.channels_last), torch.randn(32, 16, 3, 3)).is_contiguous(
        memory_format=torch.channels_last
    )
    assert (x.transpose(1, 3) * 2).stride() == x.transpose(1, 3).stride()
    assert F.max_pool2d(x, 2, return_indices=True)[1].dtype is torch.int64


def test_gradients_are_added_in_place_as_ever(run: DryRun) -> None:
    x = torch.randn(200, 200, requires_grad=True)
    y = x.tanh()
    (y.sin() * y.exp()).sum().backward()
    assert "aten.add_.Tensor" in names(run) and "aten.add.Tensor" not in names(run)


def test_gradients_of_parameters_are_taken_over_not_copied(run: DryRun) -> None:
    model = nn.Linear(200, 200)
    model(torch.randn(300, 200)).square().mean().backward()
    assert "aten.clone.default" not in names(run) and "aten.copy_.default" not in names(run)


def test_views_in_place_change_the_tensor(run: DryRun) -> None:
    x = torch.randn(300, 200)
    x.transpose_(0, 1)
    assert x.shape == (200, 300) and x.stride() == (1, 200)


def test_nothing_is_written(run: DryRun) -> None:
    x = torch.zeros(500, 500)
    x += 1
    with torch.no_grad():
        assert x.data_ptr() % 64 == 0
    assert names(run)[-1] == "aten.add_.Tensor"


def test_small_content_is_computed(run: DryRun) -> None:
    lengths = torch.tensor([5, 9, 3])
    assert int(lengths.max()) == 9
    assert (torch.arange(9) < lengths[:, None]).sum(1).tolist() == [5, 9, 3]
    assert [t.shape[0] for t in torch.randn(17, 300).split(lengths.tolist())] == [5, 9, 3]


def test_masks_choose_as_many_rows_as_they_do(run: DryRun) -> None:
    mask = torch.arange(40) % 3 == 0
    x = torch.randn(40, 500, requires_grad=True)
    y = x[mask]
    assert y.shape == (14, 500)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: nn.utils.rnn.pack_padded_sequence(x.unsqueeze(-1), (x[0] > 0).sum(0, keepdim=True).expand(300)),
    ],
)
def test_content_that_was_not_computed_is_refused(run: DryRun, look: object) -> None:
    x = torch.randn(300, 300)
    with pytest.raises(CaptureError, match=r"test_run.py:\d+: aten\.\w+.* reads what a tensor contains"):
        look(x)  # type: ignore[operator]


def test_sparse_gradients_are_refused(run: DryRun) -> None:
    loss = nn.Embedding(300, 200, sparse=True)(torch.randint(0, 300, (500,))).sum()
    with pytest.raises(CaptureError, match="only dense tensors"):
        loss.backward()


@pytest.mark.skipif(compat.sparse_passes_by, reason="only what makes sparse tensors is seen")
def test_sparse_tensors_are_refused() -> None:
    sparse = torch.eye(300).to_sparse()
    with DryRun(), pytest.raises(CaptureError, match="only dense tensors"):
        torch.sparse.mm(sparse, torch.randn(300, 300))


def test_one_at_a_time(run: DryRun) -> None:
    with pytest.raises(CaptureError, match="under way"), DryRun():
        pass


def test_afterwards_all_is_as_before() -> None:
    with DryRun():
        torch.randn(300, 300) @ torch.randn(300, 300)
    a = torch.full((300, 300), 2.0, requires_grad=True)
    (a * a).sum().backward()
    assert a.grad is not None and bool((a.grad == 4).all())


class TestOnAGPU:
    @pytest.fixture
    def run(self) -> Iterator[DryRun]:
        with DryRun("cuda") as run:
            yield run

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    @pytest.mark.parametrize(
        "options", [{}, {"batch_first": True, "bidirectional": True}, {"num_layers": 2, "dropout": 0.1}]
    )
    def test_recurrent_layers_return_what_those_of_a_cpu_do(
        self, kind: type[nn.RNNBase], options: dict[str, object]
    ) -> None:
        def shapes(x: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
            out, state = kind(24, 32, **options)(x)  # type: ignore[arg-type]
            return [(t.shape, t.stride()) for t in (out, *(state if isinstance(state, tuple) else (state,)))]

        expected = shapes(torch.randn(70, 50, 24))
        with DryRun("cuda") as run:
            found = shapes(torch.randn(70, 50, 24))
        assert [s for s, _ in found] == [s for s, _ in expected]
        assert "aten._cudnn_rnn.default" in names(run)

    def test_cells_and_their_backward_are_fused(self, run: DryRun) -> None:
        x, h = torch.randn(300, 64), torch.randn(300, 64)
        for cell, state in ((nn.LSTMCell(64, 64), (h, h)), (nn.GRUCell(64, 64), h)):
            out = cell(x, state)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        told = " ".join(names(run))
        for op in ("_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"):
            assert op in told

    def test_masks_of_dropout_are_truth_values(self, run: DryRun) -> None:
        x = torch.randn(300, 300, requires_grad=True)
        y = F.dropout(x, 0.3)
        saved = y.grad_fn._saved_result1  # type: ignore[union-attr]
        assert saved.dtype is torch.bool

    def test_functions_choose_as_on_a_cpu_afterwards(self) -> None:
        with DryRun("cuda"):
            pass
        y = F.dropout(torch.ones(300, 300, requires_grad=True), 0.3)
        assert "NativeDropout" not in type(y.grad_fn).__name__
