"""What a workload is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Place = Callable[..., Any]
"""Calls its first argument with the others: directly, or through torch.utils.checkpoint."""

GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
CONVOLUTIONS = ("aten::convolution",)


def directly(function: Callable[..., Any], *args: Any) -> Any:
    """No checkpointing."""
    return function(*args)


@dataclass
class Workload:
    """A model with its loss, and a training step."""

    name: str
    module: nn.Module
    """Forward returns the loss, so that loss code belongs to what torch-echo tapes, as under ``torch-echo run``; or the
    loss and what the training script holds until its next step."""
    inputs: tuple[Tensor, ...]
    places: dict[str, Callable[[Place], None]]
    """Ways to place torch.utils.checkpoint by hand: each takes what the model is to call its parts through."""
    heavy: tuple[str, ...] = GEMMS
    """Kernels that nobody wants to run twice."""
    whole_step: bool = False
    """With clipping and Adam; else a step is forward, loss and backward."""


class MeanSquare(nn.Module):
    """A model and the mean of the squares of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss. The output is let go of before backward."""
        y = self.model(*inputs)
        loss: Tensor = y.float().square().mean()
        return loss


class Trainer:
    """Steps of one copy of a workload's module."""

    def __init__(self, workload: Workload, module: nn.Module) -> None:
        self.module = module
        self.inputs = workload.inputs
        self.optimizer = torch.optim.Adam(module.parameters(), lr=2e-3) if workload.whole_step else None
        self.parameters = list(module.parameters())

    def follow(self, other: Trainer) -> None:
        """Go on from where another stands: its parameters, buffers and optimizer states."""
        self.module.load_state_dict(other.module.state_dict())
        if self.optimizer is not None and other.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def clear(self) -> None:
        """All gradients gone."""
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        """One step."""
        self.clear()
        loss = self.module(*self.inputs)
        loss, held = loss if isinstance(loss, tuple) else (loss, None)
        loss.backward()
        if self.optimizer is not None:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
        del held
