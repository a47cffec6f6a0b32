"""Translation by PyTorch's own Transformer (Vaswani et al., 2017), base and big, with label smoothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, TextSize, Workload, directly, tokens

SIZES = {
    "transformer_base": {"small": TextSize(8, 112, 3, 160, 8, 500), "paper": TextSize(64, 64, 6, 512, 8, 37000)},
    "transformer_big": {"small": TextSize(6, 96, 3, 256, 16, 500), "paper": TextSize(64, 64, 6, 1024, 16, 37000, 0.3)},
}


class Translation(nn.Module):
    """Forward returns the loss. Embeddings and output layer share their weight."""

    def __init__(self, size: TextSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)
        self.positions = nn.Parameter(torch.randn(size.length, size.width) * 0.02)
        self.dropout = nn.Dropout(size.dropout)
        self.transformer = nn.Transformer(
            size.width, size.heads, size.layers, size.layers, 4 * size.width, size.dropout, batch_first=True
        )
        self.place: Place = directly

    def embed(self, words: Tensor) -> Tensor:
        """(B, T) to (B, T, width)."""
        out: Tensor = self.dropout(self.embedding(words) * self.positions.shape[1] ** 0.5 + self.positions)
        return out

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """`source`: (B, T); `target`: (B, T + 1)."""
        encoder: Any = self.transformer.encoder
        decoder: Any = self.transformer.decoder
        x, y = self.embed(source), self.embed(target[:, :-1])
        for layer in encoder.layers:
            x = self.place(layer, x)
        x = encoder.norm(x)
        later = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        for layer in decoder.layers:
            y = self.place(layer, y, x, later)
        logits = F.linear(decoder.norm(y), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)


def make(size: TextSize) -> Workload:
    """See the package."""
    model = Translation(size)
    return Workload(
        module=model,
        inputs=(tokens(size.vocabulary, size.batch, size.length), tokens(size.vocabulary, size.batch, size.length + 1)),
        places={"per layer": lambda place: setattr(model, "place", place)},
        random=size.dropout > 0,
    )
