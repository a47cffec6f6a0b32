"""A decoder of LSTMCells with additive attention, unrolled over the target: the main case of the Echo paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import MeanSquare, Place, Workload, directly

VOCAB, WIDTH, BATCH, SOURCE, TARGET = 2000, 256, 32, 50, 20


class Decoder(nn.Module):
    """Embedding, cell, attention over the source, output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.score = nn.Linear(WIDTH, 1, bias=False)
        self.output = nn.Linear(2 * WIDTH, VOCAB)
        self.place_step: Place = directly
        self.place_attention: Place = directly

    def attend(self, h: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        """The context for a query."""
        scores = self.score(torch.tanh(self.query(h).unsqueeze(1) + keys)).squeeze(-1)
        return torch.bmm(torch.softmax(scores, -1).unsqueeze(1), memory).squeeze(1)

    def step(
        self, x: Tensor, context: Tensor, h: Tensor, c: Tensor, keys: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One target position."""
        h, c = self.cell(torch.cat([x, context], -1), (h, c))
        return h, c, self.place_attention(self.attend, h, keys, memory)

    def forward(self, memory: Tensor, target: Tensor) -> Tensor:
        """Logits."""
        h = c = context = memory.new_zeros(memory.shape[0], WIDTH)
        keys = self.key(memory)
        embedded = self.embedding(target)
        out = []
        for t in range(target.shape[1]):
            h, c, context = self.place_step(self.step, embedded[:, t], context, h, c, keys, memory)
            out.append(self.output(torch.cat([h, context], -1)))
        return torch.stack(out, 1)


def make() -> Workload:
    """See the package."""
    torch.manual_seed(0)
    model = Decoder()
    inputs = (torch.randn(BATCH, SOURCE, WIDTH), torch.randint(0, VOCAB, (BATCH, TARGET)))
    return Workload(
        name="decoder",
        module=MeanSquare(model),
        inputs=inputs,
        places={
            "per step": lambda place: setattr(model, "place_step", place),
            "attention": lambda place: setattr(model, "place_attention", place),
        },
    )
