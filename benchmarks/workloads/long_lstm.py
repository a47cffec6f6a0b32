"""An nn.LSTM over thousands of steps, which predicts the next value of some series."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly


@dataclass(frozen=True)
class Size:
    """`batch` series."""

    batch: int = 16
    length: int = 4000
    width: int = 128


SIZES = {"long_lstm": {"small": Size()}}


class Predictor(nn.Module):
    """Forward returns the mean square of what is wrong."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width)
        self.output = nn.Linear(width, 1)
        self.place: Place = directly

    def forward(self, series: Tensor) -> Tensor:
        """`series`: (steps + 1, batch, 1)."""
        hidden, _ = self.place(self.lstm, series[:-1])
        loss: Tensor = (self.output(hidden) - series[1:]).square().mean()
        return loss


def make(size: Size) -> Workload:
    """See the package."""
    model = Predictor(size.width)
    time = torch.arange(size.length + 1.0).view(-1, 1, 1)
    series = torch.sin(time * torch.rand(size.batch, 1)) + 0.1 * torch.randn(size.length + 1, size.batch, 1)
    return Workload(module=model, inputs=(series,), places={"lstm": lambda place: setattr(model, "place", place)})
