"""A language model of two LSTMCells, unrolled in a Python loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import MeanSquare, Place, Workload, directly

VOCAB, WIDTH, LAYERS, BATCH, LENGTH = 2000, 256, 2, 64, 35


class LanguageModel(nn.Module):
    """Embedding, cells, output layer over all positions at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.cells = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, VOCAB)
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
        state = tuple(embedded.new_zeros(ids.shape[0], WIDTH) for _ in range(2 * LAYERS))
        out = []
        for t in range(ids.shape[1]):
            state = self.place(self.step, embedded[:, t], *state)
            out.append(state[-2])
        logits: Tensor = self.output(torch.stack(out, 1))
        return logits


def make() -> Workload:
    """See the package."""
    torch.manual_seed(0)
    model = LanguageModel()
    return Workload(
        name="lstm_lm",
        module=MeanSquare(model),
        inputs=(torch.randint(0, VOCAB, (BATCH, LENGTH)),),
        places={"per step": lambda place: setattr(model, "place", place)},
    )
