"""What a workload is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MeanSquare", "Named", "Place", "TextSize", "Trainer", "Workload", "directly", "text_workload", "tokens"]

Place = Callable[..., Any]
"""Calls its first argument with the others: directly, or through torch.utils.checkpoint."""


def directly(function: Callable[..., Any], *args: Any) -> Any:
    """No checkpointing."""
    return function(*args)


@dataclass
class Workload:
    """A model with its loss, and one batch of its data."""

    module: nn.Module
    """Forward takes `inputs` and returns the loss, so that loss code belongs to what torch-echo tapes, as under
    ``torch-echo run``; or the loss and what the training script holds until its next step."""
    inputs: tuple[Any, ...]
    places: dict[str, Callable[[Place], None]] = field(default_factory=dict)
    """Ways to place torch.utils.checkpoint by hand: each takes what the model is to call its parts through."""
    checkpointing: Callable[[], None] | None = None
    """Turns on the checkpointing that the model brings along."""
    random: bool = False
    """Does forward draw random numbers?"""

    @property
    def batch(self) -> int:
        """Examples in a step: the size of the first dimension of the first input, unless the model puts time first."""
        return int(self.inputs[0].shape[0])


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


class Named(nn.Module):
    """A model of transformers, whose inputs have these names and which returns its loss."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).loss
        return loss

    def enable_checkpointing(self) -> None:
        """Turns on what transformers has for it: each layer is a region."""
        model: Any = self.model
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def tokens(vocabulary: int, *shape: int) -> Tensor:
    """Random tokens; 0 (padding, in most models) is not among them."""
    return torch.randint(1, vocabulary, shape)


@dataclass(frozen=True)
class TextSize:
    """Of a Transformer over text: so many `layers` of `width`."""

    batch: int
    length: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    dropout: float = 0.1


def text_workload(model: nn.Module, vocabulary: int, *shape: int, random: bool = False) -> Workload:
    """A model of transformers that predicts the text it is given, on random text of this shape."""
    named, text = Named(model, "input_ids", "labels"), tokens(vocabulary, *shape)
    return Workload(named, (text, text.clone()), checkpointing=named.enable_checkpointing, random=random)


class Trainer:
    """Training steps of a workload: forward, backward, Adam."""

    def __init__(self, workload: Workload, call: Callable[..., Any] | None = None) -> None:
        self.module = workload.module
        self.call = workload.module if call is None else call
        """What forward is called through: the module, or what a compiler made of it."""
        self.inputs = workload.inputs
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-4)

    def follow(self, other: Trainer) -> None:
        """Go on from where another stands: its parameters, buffers and optimizer states."""
        self.module.load_state_dict(other.module.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def clear(self) -> None:
        """All gradients gone."""
        for p in self.parameters:
            p.grad = None

    def forward(self) -> tuple[Tensor, Any]:
        """The loss, and what the script holds beside it."""
        out = self.call(*self.inputs)
        return out if isinstance(out, tuple) else (out, None)

    def step(self) -> Tensor:
        """One step; its loss. Gradients stay until the next."""
        self.clear()
        loss, held = self.forward()
        loss.backward()
        self.optimizer.step()
        del held
        return loss.detach()
