"""An attention decoder alone: embedding, LSTMCell, additive attention, an output layer for each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import MeanSquare, Place, Workload, directly


@dataclass(frozen=True)
class Size:
    """`length` steps over a source of `source` positions."""

    batch: int = 32
    length: int = 20
    source: int = 50
    width: int = 256
    vocabulary: int = 2000


SIZES = {"decoder": {"small": Size()}}


class Decoder(nn.Module):
    """Forward returns logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        w = self.width = size.width
        self.embedding = nn.Embedding(size.vocabulary, w)
        self.cell = nn.LSTMCell(2 * w, w)
        self.query = nn.Linear(w, w, bias=False)
        self.key = nn.Linear(w, w, bias=False)
        self.score = nn.Linear(w, 1, bias=False)
        self.output = nn.Linear(2 * w, size.vocabulary)
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
        """`memory`: (B, S, width); `target`: (B, T)."""
        h = c = context = memory.new_zeros(memory.shape[0], self.width)
        keys = self.key(memory)
        embedded = self.embedding(target)
        out = []
        for t in range(target.shape[1]):
            h, c, context = self.place_step(self.step, embedded[:, t], context, h, c, keys, memory)
            out.append(self.output(torch.cat([h, context], -1)))
        return torch.stack(out, 1)


def make(size: Size) -> Workload:
    """See the package."""
    model = Decoder(size)
    target = torch.randint(0, size.vocabulary, (size.batch, size.length))
    return Workload(
        module=MeanSquare(model),
        inputs=(torch.randn(size.batch, size.source, size.width), target),
        places={
            "per step": lambda place: setattr(model, "place_step", place),
            "attention": lambda place: setattr(model, "place_attention", place),
        },
    )
