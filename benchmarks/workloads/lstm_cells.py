"""A language model of two LSTMCells, unrolled in a Python loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import MeanSquare, Place, Workload, directly


@dataclass(frozen=True)
class Size:
    """So many `layers` of `width`."""

    batch: int = 64
    length: int = 35
    layers: int = 2
    width: int = 256
    vocabulary: int = 2000


SIZES = {"lstm_cells": {"small": Size()}}


class LanguageModel(nn.Module):
    """Embedding, cells, output layer over all positions at once."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = size.width
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.cells = nn.ModuleList(nn.LSTMCell(size.width, size.width) for _ in range(size.layers))
        self.output = nn.Linear(size.width, size.vocabulary)
        self.place: Place = directly

    def step(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """One position: the new states, (h, c) of each layer."""
        new: list[Tensor] = []
        for i, cell in enumerate(self.cells):
            h, c = cell(x, (state[2 * i], state[2 * i + 1]))
            new += [h, c]
            x = h
        return tuple(new)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        embedded = self.embedding(ids)
        state = tuple(embedded.new_zeros(ids.shape[0], self.width) for _ in range(2 * len(self.cells)))
        out = []
        for t in range(ids.shape[1]):
            state = self.place(self.step, embedded[:, t], *state)
            out.append(state[-2])
        logits: Tensor = self.output(torch.stack(out, 1))
        return logits


def make(size: Size) -> Workload:
    """See the package."""
    model = LanguageModel(size)
    return Workload(
        module=MeanSquare(model),
        inputs=(torch.randint(0, size.vocabulary, (size.batch, size.length)),),
        places={"per step": lambda place: setattr(model, "place", place)},
    )
