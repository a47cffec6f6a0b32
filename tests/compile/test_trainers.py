"""Trainers of others: a model that is compiled in place, or a backend that is forced on what they compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tape.harness import bits
from torch import Tensor, nn

from torch_echo.compile import echo_eager, plans

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

OPTIONS = {"max_overhead": 0.3, "cost": "analytic"}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")


def in_place(model: nn.Module) -> None:
    model.compile(backend="echo_eager", options=OPTIONS)


def forced(_: nn.Module) -> None:
    torch.compiler.set_stance("default", force_backend=partial(echo_eager, options=OPTIONS))


WAYS = pytest.mark.parametrize(("way", "theirs"), [(in_place, False), (forced, True)], ids=["in_place", "forced"])
"""How torch-echo gets in, and whether the trainer is told to compile."""


def check(train: Callable[..., list[Tensor]], way: Callable[[nn.Module], None], theirs: bool) -> None:
    expected = train(lambda model: model.compile(backend="aot_eager"), theirs=False)
    torch._dynamo.reset()
    accelerate.state.AcceleratorState._reset_state(True)
    found = train(way, theirs)
    assert plans and plans[0].plan.rerun
    assert all((bits(a) == bits(b)).all() for a, b in zip(expected, found, strict=True))
    accelerate.state.AcceleratorState._reset_state(True)


@WAYS
def test_trainer_of_transformers(way: Any, theirs: bool, tmp_path: Path) -> None:
    def train(prepare: Callable[[nn.Module], None], theirs: bool) -> list[Tensor]:
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        prepare(model)
        tokens = torch.randint(0, 100, (16, 64))
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
            torch_compile=theirs,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens]).train()
        return [p.detach().clone() for p in model.parameters()]

    check(train, way, theirs)


@WAYS
def test_accelerate(way: Any, theirs: bool) -> None:
    def train(prepare: Callable[[nn.Module], None], theirs: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3))
        model = nn.Sequential(*layers)
        whole = Loss(model)
        prepare(whole)
        accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="inductor" if theirs else "no")
        compiled, optimizer = accelerator.prepare(whole, torch.optim.Adam(whole.parameters()))
        for _ in range(3):
            accelerator.backward(compiled(torch.randn(256, 32)))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    check(train, way, theirs)


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()
