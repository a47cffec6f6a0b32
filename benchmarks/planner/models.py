"""Models whose joint graphs are planned. Forward returns the loss. No dropout: PyTorch's budget draws other masks in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import build

__all__ = ["MODELS", "make"]

Made = tuple[nn.Module, tuple[Tensor, ...]]


class AttentionLSTM(nn.Module):
    """A decoder of LSTMCells with additive attention and input feeding, unrolled; hidden size 512."""

    def __init__(self, vocabulary: int = 8000, width: int = 512) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        self.cell = nn.LSTMCell(2 * width, width)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.join = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, memory: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        h = c = fed = memory.new_zeros(memory.shape[0], self.width)
        keys, embedded = self.key(memory), self.embedding(target)
        logits = []
        for t in range(target.shape[1]):
            h, c = self.cell(torch.cat([embedded[:, t], fed], -1), (h, c))
            scores = self.score(torch.tanh(self.query(h).unsqueeze(1) + keys)).squeeze(-1)
            context = torch.bmm(torch.softmax(scores, -1).unsqueeze(1), memory).squeeze(1)
            fed = torch.tanh(self.join(torch.cat([h, context], -1)))
            logits.append(self.output(fed))
        return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), target.flatten())


class Block(nn.Module):
    """A transformer layer with plain attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)) / (d // self.heads) ** 0.5
        later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Embeddings, layers, loss."""

    def __init__(self, layers: int, width: int, length: int, vocabulary: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Cross-entropy."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Loss(nn.Module):
    """A packaged model, called with these names for its inputs, and the loss of its output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.names, self.loss = model, names, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss."""
        return self.loss(self.model(**dict(zip(self.names, inputs, strict=True))))


def _attention_lstm() -> Made:
    return AttentionLSTM(), (torch.randn(64, 50, 512), torch.randint(0, 8000, (64, 30)))


def _gpt() -> Made:
    return GPT(12, 512, 512, 8000, 8), (torch.randint(0, 8000, (4, 512)),)


def _deep_gpt() -> Made:
    return GPT(96, 256, 256, 256, 4), (torch.randint(0, 256, (8, 256)),)


def _bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager")
    tokens = torch.randint(0, 30000, (8, 128))
    return Loss(BertForMaskedLM(config), ("input_ids", "labels"), lambda out: out.loss), (tokens, tokens)


def _resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    return Loss(model, ("pixel_values", "labels"), lambda out: out.loss), (images, labels)


def _unet() -> Made:
    workload = build("unet")
    return workload.module, workload.inputs


MODELS: dict[str, Callable[[], Made]] = {
    "attention_lstm": _attention_lstm,
    "gpt": _gpt,
    "bert": _bert,
    "resnet": _resnet,
    "unet": _unet,
    "deep_gpt": _deep_gpt,
}


def make(name: str) -> Made:
    """A model in training mode and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.train(), inputs
