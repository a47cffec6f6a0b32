"""A small GPT with attention written out: matrix product, softmax, matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import MeanSquare, Place, Workload, directly


@dataclass(frozen=True)
class Size:
    """So many `layers` of `width`."""

    batch: int = 8
    length: int = 256
    layers: int = 6
    width: int = 256
    heads: int = 4
    vocabulary: int = 2000


SIZES = {"gpt": {"small": Size()}}


class Block(nn.Module):
    """Attention and feed-forward, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        batch, length, width = x.shape
        size = width // self.heads
        q, k, v = (
            t.reshape(batch, length, self.heads, size).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attention = torch.softmax(q @ k.transpose(-1, -2) / size**0.5, -1)
        x = x + self.proj((attention @ v).transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocabulary)
        self.place: Place = directly

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.place(block, x)
        logits: Tensor = self.head(x)
        return logits


def make(size: Size) -> Workload:
    """See the package."""
    model = GPT(size)
    return Workload(
        module=MeanSquare(model),
        inputs=(torch.randint(0, size.vocabulary, (size.batch, size.length)),),
        places={"per block": lambda place: setattr(model, "place", place)},
    )
