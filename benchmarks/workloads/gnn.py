"""A graph attention network on a random graph, in plain PyTorch: messages along edges, gathered and added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly


@dataclass(frozen=True)
class Size:
    """`batch` nodes with `degree` edges each; `layers` of `width` in so many `heads`."""

    batch: int
    degree: int
    layers: int
    width: int
    heads: int
    features: int = 128
    classes: int = 40


SIZES = {"gnn": {"small": Size(4000, 10, 3, 64, 4), "paper": Size(40000, 15, 4, 256, 4)}}


class Layer(nn.Module):
    """Attention of each node to those that have an edge to it (Velickovic et al., 2018)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.sender = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.receiver = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """`source`, `target`: ends of the edges."""
        nodes, heads = x.shape[0], self.sender.shape[0]
        h = self.project(self.norm(x)).view(nodes, heads, -1)
        scores = F.leaky_relu((h * self.sender).sum(-1)[source] + (h * self.receiver).sum(-1)[target], 0.2)
        weights = torch.exp(scores - scores.detach().max())
        total = weights.new_zeros(nodes, heads).index_add(0, target, weights)
        messages = h[source] * (weights / total[target]).unsqueeze(-1)
        gathered = torch.zeros_like(h).index_add(0, target, messages)
        return x + F.gelu(self.output(gathered.flatten(1)))


class GraphNetwork(nn.Module):
    """Forward returns the cross-entropy over the nodes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input = nn.Linear(size.features, size.width)
        self.layers = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.output = nn.Linear(size.width, size.classes)
        self.place: Place = directly

    def forward(self, features: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """`features`: (nodes, features)."""
        x = self.input(features)
        for layer in self.layers:
            x = self.place(layer, x, source, target)
        return F.cross_entropy(self.output(x), labels)


def make(size: Size) -> Workload:
    """See the package."""
    model = GraphNetwork(size)
    edges = size.batch * size.degree
    return Workload(
        module=model,
        inputs=(
            torch.randn(size.batch, size.features),
            torch.randint(0, size.batch, (edges,)),
            torch.arange(size.batch).repeat(size.degree),
            torch.randint(0, size.classes, (size.batch,)),
        ),
        places={"per layer": lambda place: setattr(model, "place", place)},
    )
