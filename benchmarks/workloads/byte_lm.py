"""A byte-level language model of two nn.LSTM layers, width 650, batch 40, over long stretches of text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly

BYTES, WIDTH, LAYERS, BATCH = 256, 650, 2, 40


class ByteModel(nn.Module):
    """Embedding, LSTM, output layer; forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS)
        self.output = nn.Linear(WIDTH, BYTES)
        self.place: Place = directly

    def forward(self, text: Tensor) -> Tensor:
        """Cross-entropy of each next byte."""
        hidden, _ = self.place(self.lstm, self.embedding(text[:-1]))
        return F.cross_entropy(self.output(hidden).flatten(0, 1), text[1:].flatten())


def make(length: int) -> Workload:
    """See the package."""
    torch.manual_seed(0)
    model = ByteModel()
    return Workload(
        name=f"byte_lm{length}",
        module=model,
        inputs=(torch.randint(0, BYTES, (length + 1, BATCH)),),
        places={"lstm": lambda place: setattr(model, "place", place)},
    )
