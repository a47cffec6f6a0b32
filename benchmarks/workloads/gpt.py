"""A small GPT with attention written out: matrix product, softmax, matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import MeanSquare, Place, Workload, directly

LAYERS, WIDTH, HEADS, VOCAB, BATCH, LENGTH = 6, 256, 4, 2000, 8, 256


class Block(nn.Module):
    """Attention and feed-forward, each after a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        batch, length, width = x.shape
        size = width // HEADS
        q, k, v = (t.reshape(batch, length, HEADS, size).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attention = torch.softmax(q @ k.transpose(-1, -2) / size**0.5, -1)
        x = x + self.proj((attention @ v).transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.place: Place = directly

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.place(block, x)
        logits: Tensor = self.head(x)
        return logits


def make() -> Workload:
    """See the package."""
    torch.manual_seed(0)
    model = GPT()
    return Workload(
        name="gpt",
        module=MeanSquare(model),
        inputs=(torch.randint(0, VOCAB, (BATCH, LENGTH)),),
        places={"per block": lambda place: setattr(model, "place", place)},
    )
