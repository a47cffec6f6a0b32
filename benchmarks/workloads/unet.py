"""A U-Net with BatchNorm that segments images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly

CLASSES = 4


@dataclass(frozen=True)
class Size:
    """`layers`: how often the resolution is halved; so many `channels` at the highest."""

    batch: int
    image: int
    layers: int
    channels: int


SIZES = {"unet": {"small": Size(4, 128, 2, 16), "paper": Size(16, 512, 4, 64)}}


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
    """Down, across, up; forward returns the cross-entropy of each pixel."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        widths = [size.channels * 2**i for i in range(size.layers + 1)]
        self.down = nn.ModuleList(stage(a, b) for a, b in zip([3, *widths], widths[:-1], strict=False))
        self.bottom = stage(widths[-2], widths[-1])
        self.up = nn.ModuleList(stage(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.output = nn.Conv2d(size.channels, CLASSES, 1)
        self.place: Place = directly

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """`x`: (B, 3, H, W); `labels`: (B, H, W)."""
        across = []
        for down in self.down:
            across.append(self.place(down, x))
            x = F.max_pool2d(across[-1], 2)
        x = self.place(self.bottom, x)
        for up in self.up:
            x = self.place(up, torch.cat([F.interpolate(x, scale_factor=2), across.pop()], 1))
        return F.cross_entropy(self.output(x), labels)


def make(size: Size) -> Workload:
    """See the package."""
    model = UNet(size)
    return Workload(
        module=model,
        inputs=(
            torch.randn(size.batch, 3, size.image, size.image),
            torch.randint(0, CLASSES, (size.batch, size.image, size.image)),
        ),
        places={"per stage": lambda place: setattr(model, "place", place)},
    )
