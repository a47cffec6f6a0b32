"""Other tools around and inside of models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from ..models import normal
from .script import Script, compare

WIDTH = 64
ROWS = 128


class Net(nn.Module):
    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(F.gelu(self.norm(torch.tanh(self.first(x))))))


def training(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor] = lambda model, i: model(normal(i, ROWS, WIDTH)).square().mean(),
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    around_all: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    def make() -> Script:
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            with around_all():
                with around():
                    value = loss(model, i)
                value.backward()
            optimizer.step()
            return value.detach()

        return Script([model], step)

    return make


def two() -> nn.Module:
    return nn.Sequential(Net(), Net())


def test_anomaly_mode() -> None:
    compare(training(two, around_all=torch.autograd.detect_anomaly))


def test_what_is_saved_goes_to_the_cpu_around_a_part() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = Net(), Net(), Net()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autograd.graph.save_on_cpu():
                x = self.middle(x)
            return self.last(x)

    compare(training(Part))


def test_what_is_saved_goes_to_the_cpu_around_the_model() -> None:
    """The model is theirs."""
    session = compare(training(two, around=torch.autograd.graph.save_on_cpu), drops=False, kinds=0)
    assert any("saved-tensor hooks of another tool" in why for _, why, _ in session.unhandled)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around_all", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize(
    "mode",
    [lambda: FlopCounterMode(display=False), Sees, Doubles, lambda: torch.device("cpu")],
    ids=["flops", "dispatch", "function", "device"],
)
def test_other_modes(mode: Any, around_all: bool) -> None:
    compare(training(two, **{"around_all" if around_all else "around": mode}))


def test_a_default_device() -> None:
    """A function mode that is there for good: the script's own code is taped all the same."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, 400)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x)

    def loss(model: nn.Module, i: int) -> Tensor:
        logits = model(torch.randn(ROWS, WIDTH))
        return torch.sigmoid(torch.tanh(logits * 2) * 3).exp().mean()

    torch.set_default_device("cpu")
    try:
        compare(training(Head, loss))
    finally:
        torch.set_default_device(None)


@pytest.mark.filterwarnings("error:The .grad attribute:UserWarning")
def test_functional_calls_and_transforms() -> None:
    """Per-sample gradients and a functional call with other parameters beside the training step."""

    def make() -> Script:
        model = Net(drop=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(i: int) -> list[Tensor]:
            x = normal(i, ROWS, WIDTH)
            parameters = {k: v.detach() for k, v in model.named_parameters()}

            def loss_of(parameters: Any, x: Tensor) -> Tensor:
                return torch.func.functional_call(model, parameters, (x,)).square().mean()

            rows = torch.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, x[:4])
            optimizer.zero_grad()
            shifted = {k: v + 0.01 for k, v in model.named_parameters()}
            loss = torch.func.functional_call(model, shifted, (x,)).square().mean()
            loss.backward()
            optimizer.step()
            return [*rows.values(), loss.detach()]

        return Script([model], step)

    compare(make)


@pytest.mark.filterwarnings("error:The .grad attribute:UserWarning")
def test_an_inner_loop_of_meta_learning() -> None:
    """A step on the parameters within the graph, by a functional call; backward goes through it (double backward)."""

    def make() -> Script:
        model = Net(drop=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(i: int) -> Tensor:
            names, values = zip(*model.named_parameters(), strict=True)
            inner = model(normal(i, ROWS, WIDTH)).square().mean()
            slopes = torch.autograd.grad(inner, values, create_graph=True)
            moved = {n: v - 0.1 * g for n, v, g in zip(names, values, slopes, strict=True)}
            loss = torch.func.functional_call(model, moved, (normal(i + 1, ROWS, WIDTH),)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make, lower=False)  # what a backward pass with a graph reads is saved again by that graph


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_script(reentrant: bool) -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = Net(), Net(), Net()

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.middle, self.first(x), use_reentrant=reentrant)
            return self.last(torch.tanh(x))

    compare(training(Checked))


def test_everything_within_checkpoints() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*[Net() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)

    compare(training(Stack), drops=False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(backend: str) -> None:
    """It is left to torch.compile; what is around it is planned."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner, self.after = Net(), Net(drop=0.0), Net()
            self.inner.compile(backend=backend)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(torch.tanh(self.inner(self.before(x))))

    torch._dynamo.reset()
    compare(training(Around))
    torch._dynamo.reset()


def test_a_compiled_root() -> None:
    torch._dynamo.reset()
    session = compare(training(lambda: torch.compile(Net(drop=0.0), backend="aot_eager")))  # the loss is dropped
    torch._dynamo.reset()
    assert any("left to it" in why for _, why, _ in session.unhandled)


def test_no_module_at_all() -> None:
    """Nothing calls a module: nothing is taped, and that is said."""

    def make() -> Script:
        model = Net(drop=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            x = torch.tanh(F.linear(normal(i, ROWS, WIDTH), model.first.weight, model.first.bias))
            loss = F.linear(x, model.second.weight).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    session = compare(make, drops=False, kinds=0)
    assert any("no module was called" in why for _, why, _ in session.unhandled)
