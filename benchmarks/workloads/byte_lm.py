"""A byte-level language model of nn.LSTM layers over long stretches of text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly

BYTES = 256


@dataclass(frozen=True)
class Size:
    """So many `layers` of `width`."""

    batch: int = 40
    length: int = 512
    layers: int = 2
    width: int = 650


SIZES = {"byte_lm": {"small": Size()}}


class ByteModel(nn.Module):
    """Embedding, LSTM, output layer; forward returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, size.width)
        self.lstm = nn.LSTM(size.width, size.width, size.layers)
        self.output = nn.Linear(size.width, BYTES)
        self.place: Place = directly

    def forward(self, text: Tensor) -> Tensor:
        """Cross-entropy of each next byte. `text`: (T + 1, B)."""
        hidden, _ = self.place(self.lstm, self.embedding(text[:-1]))
        return F.cross_entropy(self.output(hidden).flatten(0, 1), text[1:].flatten())


def make(size: Size) -> Workload:
    """See the package."""
    model = ByteModel(size)
    return Workload(
        module=model,
        inputs=(torch.randint(0, BYTES, (size.length + 1, size.batch)),),
        places={"lstm": lambda place: setattr(model, "place", place)},
    )
