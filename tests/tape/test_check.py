"""Steps compared with plain PyTorch: torch_echo.check, and the option of the same name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_echo
from torch_echo import rules
from torch_echo.report.comparison import Comparison
from torch_echo.tape import _mode
from torch_echo.tape._check import same

from .models import CASES


class Net(nn.Module):
    """Something of everything: batch norm (buffers), dropout (draws), an LSTM, a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 96)
        self.norm = nn.BatchNorm1d(96)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(96, 24)
        self.rnn = nn.GRU(24, 24, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x)).flatten(0, 1)
        y = self.dropout(torch.relu(self.norm(y))).unflatten(0, x.shape[:2])
        out, _ = self.rnn(x + torch.sigmoid(self.down(y)))
        return out


def trainer(kind: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    net = Net() if kind is None else kind()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    data = torch.randn(16, 12, 24)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(data).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return net, step


@pytest.fixture
def broken_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout whose re-run draws another mask."""
    monkeypatch.setattr(_mode, "generator_of", lambda args, kwargs: None)


OPTIONS: dict[str, Any] = {"max_overhead": 10.0, "cost": "analytic"}


class TestCheck:
    def test_equal(self) -> None:
        net, step = trainer()
        found = torch_echo.check(step, **OPTIONS)
        assert found.equal, str(found)
        assert found.values > 5
        assert found.losses == 1
        assert found.outputs == 1
        count = len(list(net.parameters()))
        assert (found.gradients, found.parameters, found.buffers) == (count, count, 3)
        assert found.random_states >= 1
        assert "equals plain PyTorch to the bit" in str(found)

    def test_it_advances_by_the_steps_that_it_says(self) -> None:
        net, step = trainer()
        torch_echo.check(step, **OPTIONS)
        other, plain = trainer()
        for _ in range(4):
            plain()
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))

    @pytest.mark.usefixtures("broken_dropout")
    def test_a_difference_is_named_with_op_and_line(self) -> None:
        _, step = trainer()
        with pytest.warns(UserWarning, match="differs from plain PyTorch"):
            found = torch_echo.check(step, **OPTIONS)
        assert not found.equal
        assert "bernoulli_" in found.differences[0]
        assert __file__ in found.differences[0]
        # What differed was not used.
        assert not any("gradient" in each or "parameter" in each for each in found.differences)

    def test_a_step_that_cannot_be_repeated(self) -> None:
        net, _ = trainer()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = iter([torch.full((2, 3, 24), float(i)) for i in range(20)])

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(next(batches)).sum()
            loss.backward()
            optimizer.step()
            return loss

        with pytest.raises(torch_echo.CaptureError, match="can't be repeated"):
            torch_echo.check(step, **OPTIONS)

    def test_nothing_to_train(self) -> None:
        with pytest.raises(torch_echo.CaptureError, match="could not be planned"):
            torch_echo.check(lambda: None)

    def test_up_to_rounding_with_reorder(self) -> None:
        class Long(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = nn.LSTM(16, 16)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.rnn(x)[0]

        torch.manual_seed(0)
        net = Long()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = torch.randn(200, 4, 16)

        def step() -> None:
            optimizer.zero_grad()
            net(data).square().sum().backward()
            optimizer.step()

        found = torch_echo.check(step, reorder=True, **OPTIONS)
        assert found.equal, str(found)
        assert not found.exact
        assert found.values > 0


def steps(step: Callable[[], torch.Tensor], n: int) -> list[float]:
    losses = []
    for i in range(n):
        torch.manual_seed(i)
        losses.append(step().item())
    return losses


@pytest.mark.parametrize(
    "name", ["decoder", "gpt2", "resnet", "gru_lm", "retain_grad", "checkpoint_reentrant", "autocast", "accumulation"]
)
def test_the_zoo(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters())
    found = torch_echo.check(lambda: case.step(model, optimizer, 3), **OPTIONS)
    assert found.equal, str(found)
    assert found.values > 0
    assert [each.partition(":")[0] for each in found.skipped] == ["gradients"] * (name == "checkpoint_reentrant")


class TestOption:
    def compared(self, **options: Any) -> tuple[nn.Module, list[float], Comparison]:
        net, step = trainer()
        with torch_echo.apply(net, check=True, **OPTIONS, **options) as handle:
            losses = steps(step, 9)
            found = handle.summary().comparison
        assert found is not None
        return net, losses, found

    def test_equal(self) -> None:
        other, plain = trainer()
        expected = steps(plain, 9)
        net, losses, found = self.compared()
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
        assert found.equal, str(found)
        assert found.values > 5
        assert found.gradients == len(list(net.parameters()))
        assert found.buffers == 3
        assert found.iteration == 4

    @pytest.mark.usefixtures("broken_dropout")
    def test_a_difference_leaves_training_to_pytorch(self) -> None:
        net, step = trainer()
        with torch_echo.apply(net, check=True, **OPTIONS) as handle:
            with pytest.warns(UserWarning, match="step 4 differs from plain PyTorch: aten::bernoulli_"):
                steps(step, 9)
            found = handle.summary().comparison
            assert found is not None and not found.equal
            assert handle.summary().unhandled
        other, plain = trainer()
        steps(plain, 9)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))

    @pytest.mark.usefixtures("broken_dropout")
    def test_strict(self) -> None:
        with pytest.raises(torch_echo.DifferenceFound, match="bernoulli_"):
            self.compared(strict=True)

    def test_gradients_are_compared_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is kept and read differently by the script's own pass."""
        net, step = trainer()
        reads: list[torch.Tensor] = []

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
                (x,) = ctx.saved_tensors
                reads.append(x)
                return 2 * x * g * (1 + len(reads))  # another gradient each time

        monkeypatch.setattr(net, "forward", lambda x: Square.apply(Net.forward(net, x)))
        with torch_echo.apply(net, check=True, **OPTIONS) as handle, warnings.catch_warnings(record=True):
            steps(step, 6)
            found = handle.summary().comparison
        assert found is not None
        assert any("gradient" in each for each in found.differences)

    def test_modules_that_cannot_be_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: nn.Module, memo: Any) -> None:
            raise RuntimeError("not to be copied")

        monkeypatch.setattr(Net, "__deepcopy__", refuse, raising=False)
        _, _, found = self.compared()
        assert found.equal
        assert found.values > 5 and found.gradients > 0 and not found.outputs
        assert "not to be copied" in found.skipped[0]

    def test_the_forward_pass_of_the_copy_changes_nothing(self) -> None:
        class Counting(Net):
            def __init__(self) -> None:
                super().__init__()
                self.calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return super().forward(x) * torch.rand(())

        net, step = trainer(Counting)
        with torch_echo.apply(net, check=True, **OPTIONS) as handle:
            losses = [step().item() for _ in range(8)]
            assert handle.summary().comparison
        assert net.calls == 8
        _, plain = trainer(Counting)
        assert [plain().item() for _ in range(8)] == losses


def test_not_for_compiled_graphs() -> None:
    net = nn.Linear(4, 4)
    compiled = torch.compile(net, backend="echo_eager", options={"check": True})
    with pytest.raises(torch_echo.OptionError, match="check"):
        compiled(torch.randn(2, 4))


class TestSame:
    def test_bits(self) -> None:
        nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
        assert same(nan, nan.clone())
        assert not same(zero, -zero)
        assert not same(zero, zero.double())
        assert same(torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj())
        assert same(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous())

    def test_rounding(self) -> None:
        a = torch.rand(100)
        assert same(a, a * (1 + 1e-6), exact=False)
        assert not same(a, a * (1 + 1e-2), exact=False)

    def test_sparse(self) -> None:
        a = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
        assert same(a, torch.sparse_coo_tensor([[1]], [3.0], (3,)))
        assert not same(a, torch.sparse_coo_tensor([[2]], [3.0], (3,)))


def test_the_rule_it_leans_on() -> None:
    """Dropout draws: without the rule there would be nothing to break above."""
    assert rules.rule_of(torch.ops.aten.bernoulli_.float).random
