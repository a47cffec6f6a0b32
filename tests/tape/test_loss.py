"""Cross-entropy in one block: PyTorch's bits, a third of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_echo.footprint import replay
from torch_echo.options import Options
from torch_echo.prediction import predict
from torch_echo.tape import _loss
from torch_echo.tape._stack import Stackable
from torch_echo.tape.session import Session

from .harness import Case, ForcedSession, check_same, compare, everything, nothing, train

ROWS, CLASSES = 600, 1000
LOGITS = ROWS * CLASSES * 4
BLOCK = 64 * CLASSES * 4
"""Rows that are computed together, of these logits."""


class Head(nn.Module):
    """A language model's end. Logits are seen by others if `hold`: the script, or a second loss that saves them."""

    def __init__(self, hold: str = "", **options: Any) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.hold, self.options = hold, options
        self.logits: Tensor | None = None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.out(torch.tanh(self.body(x)))
        if self.hold == "script":
            self.logits = logits
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **self.options)
        if self.hold == "node":
            loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        return loss.sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
    """One step on made-up data."""
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(4, ROWS // 4, 32, generator=generator)
    target = torch.randint(0, CLASSES, (4, ROWS // 4), generator=generator)
    target[:, ::7] = -100
    optimizer.zero_grad()
    loss: Tensor = model(x, target)
    loss.backward()
    if isinstance(model, Head):
        model.logits = None
    optimizer.step()
    return loss.detach()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call that was computed in one block."""
    seen: list[int] = []
    run = _loss.CrossEntropy.run

    def counted(self: _loss.CrossEntropy, logits: Tensor, target: Tensor) -> Tensor:
        seen.append(len(logits))
        return run(self, logits, target)

    monkeypatch.setattr(_loss.CrossEntropy, "run", counted)
    return seen


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}], ids=str
)
def test_training_is_the_same(options: dict[str, Any], every: bool, calls: list[int]) -> None:
    """Bits; the recorded and the planned peak; plain PyTorch's, of which nothing was recorded."""
    session = compare(Case(lambda: Head(**options), step, tolerance=0), nothing, every=every)
    assert len(calls) == 3 + 1  # but the step before the recorded one, and one without plan
    graph = session.graph
    assert graph is not None
    assert abs(replay(graph.plain).peak - replay(graph).peak - 2 * (LOGITS - BLOCK)) < 16 * ROWS


@pytest.mark.parametrize("hold", ["script", "node"])
def test_logits_that_others_hold_are_not_overwritten(hold: str) -> None:
    """Their gradient has a block of its own then."""
    session = compare(Case(lambda: Head(hold), step, tolerance=1e-5), nothing, every=True)
    graph = session.graph
    assert graph is not None
    copies = 2 if hold == "script" else 1  # the other node's gradient is there too
    assert abs(replay(graph.plain).peak - replay(graph).peak - copies * LOGITS) < 3 * BLOCK


@pytest.mark.parametrize("hold", ["", "script", "node"])
def test_logits_that_are_rebuilt(hold: str) -> None:
    """The rebuilt block is overwritten, unless somebody else reads it."""
    session = compare(Case(lambda: Head(hold), step, tolerance=0.01), everything, every=True)
    graph, plan = session.graph, session.plan
    assert graph is not None
    assert plan is not None
    assert any(graph.nbytes(v) == LOGITS for v in plan.dropped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1030, 515), (128, 8193), (66, 37001)], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "ignore_index": 3}, {"reduction": "none"}], ids=str)
def test_bits(dtype: torch.dtype, threads: int, shape: tuple[int, int], options: dict[str, Any]) -> None:
    """Rows and classes that fill no block, in several types and threads."""
    hidden, weight = torch.randn(shape[0], 8, dtype=dtype), torch.randn(shape[1], 8, dtype=dtype)
    target = torch.randint(0, shape[1], shape[:1])
    target[::5] = options.get("ignore_index", -100)
    torch.set_num_threads(threads)
    try:
        plain, ours = [
            [loss, *torch.autograd.grad(loss, leaves, torch.linspace(0.5, 2, loss.numel()).view_as(loss).to(dtype))]
            for run in (contextless, in_one_block)
            for leaves in [(hidden.clone().requires_grad_(), weight.clone().requires_grad_())]
            for loss in [run(lambda a=leaves: F.cross_entropy(a[0] @ a[1].t(), target, **options))]  # type: ignore[misc]
        ]
    finally:
        torch.set_num_threads(1)
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a, b)


def contextless(function: Callable[[], Tensor]) -> Tensor:
    """As it is."""
    return function()


def in_one_block(function: Callable[[], Tensor]) -> Tensor:
    """Under a session that computes losses so."""
    session = Session(Options())
    session.watch(nn.Linear(1, 1))
    _loss.compute_by(Runner())
    try:
        return function()
    finally:
        session.close()


class Runner(Stackable):
    """Computes all that it may."""


def test_two_passes_through_one_graph(calls: list[int]) -> None:
    """The first must not overwrite what the second reads."""

    def twice(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        backward = Tensor.backward

        def both(loss: Tensor) -> None:
            backward(loss, retain_graph=True)
            backward(loss)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "backward", both)
            return step(model, optimizer, i)

    plain = train(Case(Head, twice))
    session = ForcedSession(everything)
    check_same(plain, train(Case(Head, twice), session))
    assert calls


def test_differentiated_twice(calls: list[int]) -> None:
    """Gradients of gradients come together elsewhere: a session that has seen it leaves the loss to PyTorch, and before, results
    are right."""

    def penalised(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        x = torch.randn(2, ROWS // 2, 32, generator=torch.Generator().manual_seed(i)).requires_grad_()
        loss = model(x, torch.arange(ROWS).view(2, -1))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    plain = train(Case(Head, penalised))
    check_same(plain, train(Case(Head, penalised), ForcedSession(everything)))
    assert not calls

    target = torch.randint(0, CLASSES, (ROWS,))
    found = []
    for run in (contextless, in_one_block):
        a = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        w = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = run(lambda a=a, w=w: F.cross_entropy(a @ w.t(), target))  # type: ignore[misc]
        (slope,) = torch.autograd.grad(loss, a, create_graph=True)
        (loss + 10 * slope.square().sum()).backward()
        found.append((slope, a.grad, w.grad))
    assert calls == [ROWS]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def _weighted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, weight=torch.linspace(0.5, 2, CLASSES))


def _probabilities(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, F.one_hot(target, CLASSES).float())


def _transposed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.t().contiguous().t(), target)


def _images(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(6, -1, CLASSES).transpose(1, 2), target.view(6, -1))


def _small(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:100], target[:100])


def _transformed(logits: Tensor, target: Tensor) -> Tensor:
    grad = torch.func.grad(lambda z: F.cross_entropy(z, target))(logits)
    return (grad * logits).sum()


def _checkpointed(logits: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = torch.utils.checkpoint.checkpoint(F.cross_entropy, logits, target, use_reentrant=False)
    return loss


def _compiled(logits: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = torch.compile(F.cross_entropy, backend="aot_eager")(logits, target)
    return loss


@pytest.mark.parametrize(
    "loss", [_weighted, _probabilities, _transposed, _images, _small, _transformed, _checkpointed, _compiled]
)
def test_left_to_pytorch(loss: Callable[[Tensor, Tensor], Tensor], calls: list[int]) -> None:
    """What is not known, or is somebody else's."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(32, CLASSES)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return loss(self.out(x.flatten(0, 1)), target.flatten().clamp(min=0))

    case = Case(Net, step)
    check_same(train(case), train(case, ForcedSession(everything), every=True))
    assert not calls


def test_the_papers_rule_is_without(calls: list[int]) -> None:
    """A baseline is to be what it was."""
    train(Case(Head, step), Session(Options(policy="paper", cost="analytic")))
    assert not calls


def test_wrong_target() -> None:
    """Complained of as ever."""
    logits, target = torch.randn(ROWS, CLASSES, requires_grad=True), torch.full((ROWS,), CLASSES)
    with pytest.raises(IndexError, match="Target 1000 is out of bounds"):
        in_one_block(lambda: F.cross_entropy(logits, target))


def test_logits_changed_before_backward() -> None:
    """PyTorch's error, not another gradient."""
    logits = torch.randn(ROWS, CLASSES, requires_grad=True) * 1.0
    loss = in_one_block(lambda: F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.int64)))
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_is_left() -> None:
    """The op is PyTorch's own again when the session is over."""
    key = "AutogradCPU"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::cross_entropy_loss", key)
    session = Session()
    session.watch(nn.Linear(1, 1))
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::cross_entropy_loss", key)
    session.close()
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::cross_entropy_loss", key)


def test_predicted() -> None:
    """Plain PyTorch's peak of what is recorded in one block."""
    plain = train(Case(Head, step))

    def make() -> Callable[[], Tensor]:
        model = Head()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        return lambda: step(model, optimizer, 0)

    predicted = predict(make)
    assert predicted.eager_peak - predicted.graph.start_bytes == plain.rise
