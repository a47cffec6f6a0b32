"""A word-level language model: nn.LSTM, dropout, a large output layer (Zaremba et al., 2014)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly, tokens


@dataclass(frozen=True)
class Size:
    """So many `layers` of `width`."""

    batch: int
    length: int
    layers: int
    width: int
    vocabulary: int
    dropout: float = 0.5


SIZES = {"lstm_lm": {"small": Size(24, 35, 2, 256, 2000), "paper": Size(64, 140, 2, 1500, 33000)}}


class LanguageModel(nn.Module):
    """Forward returns the cross-entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.layers = nn.ModuleList(nn.LSTM(size.width, size.width, batch_first=True) for _ in range(size.layers))
        self.output = nn.Linear(size.width, size.vocabulary)
        self.place: Place = directly

    def forward(self, text: Tensor) -> Tensor:
        """`text`: (B, T + 1)."""
        x = self.dropout(self.embedding(text[:, :-1]))
        for layer in self.layers:
            x = self.dropout(self.place(layer, x)[0])
        return F.cross_entropy(self.output(x).flatten(0, 1), text[:, 1:].flatten())


def make(size: Size) -> Workload:
    """See the package."""
    model = LanguageModel(size)
    return Workload(
        module=model,
        inputs=(tokens(size.vocabulary, size.batch, size.length + 1),),
        places={"per layer": lambda place: setattr(model, "place", place)},
        random=size.dropout > 0,
    )
