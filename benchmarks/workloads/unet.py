"""A U-Net with BatchNorm, three levels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import CONVOLUTIONS, MeanSquare, Place, Workload, directly

CHANNELS, BATCH, SIZE = 16, 4, 128


def stage(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Down, down, up, up."""

    def __init__(self) -> None:
        super().__init__()
        c = CHANNELS
        self.down1, self.down2, self.bottom = stage(3, c), stage(c, 2 * c), stage(2 * c, 4 * c)
        self.up2, self.up1 = stage(6 * c, 2 * c), stage(3 * c, c)
        self.output = nn.Conv2d(c, 4, 1)
        self.place: Place = directly

    def forward(self, x: Tensor) -> Tensor:
        """One map of four channels."""
        place = self.place
        a = place(self.down1, x)
        b = place(self.down2, F.max_pool2d(a, 2))
        c = place(self.bottom, F.max_pool2d(b, 2))
        u = place(self.up2, torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        v = place(self.up1, torch.cat([F.interpolate(u, scale_factor=2), a], 1))
        out: Tensor = self.output(v)
        return out


def make() -> Workload:
    """See the package."""
    torch.manual_seed(0)
    model = UNet()
    return Workload(
        name="unet",
        module=MeanSquare(model),
        inputs=(torch.randn(BATCH, 3, SIZE, SIZE),),
        places={"per stage": lambda place: setattr(model, "place", place)},
        heavy=CONVOLUTIONS,
    )
