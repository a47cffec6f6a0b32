"""An nn.LSTM of width 128 over thousands of steps, which predicts the next value of sixteen series."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly

WIDTH, BATCH = 128, 16


class Predictor(nn.Module):
    """Forward returns the mean square of what is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH)
        self.output = nn.Linear(WIDTH, 1)
        self.place: Place = directly

    def forward(self, series: Tensor) -> Tensor:
        """`series`: (steps + 1, batch, 1)."""
        hidden, _ = self.place(self.lstm, series[:-1])
        loss: Tensor = (self.output(hidden) - series[1:]).square().mean()
        return loss


def make(length: int) -> Workload:
    """See the package."""
    torch.manual_seed(0)
    model = Predictor()
    time = torch.arange(length + 1.0).view(-1, 1, 1)
    series = torch.sin(time * torch.rand(BATCH, 1)) + 0.1 * torch.randn(length + 1, BATCH, 1)
    return Workload(
        name=f"long_lstm{length}",
        module=model,
        inputs=(series,),
        places={"lstm": lambda place: setattr(model, "place", place)},
    )
