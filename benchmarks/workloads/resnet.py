"""ResNet-50 and ResNet-152 on images, from transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Named, Place, Workload


@dataclass(frozen=True)
class Size:
    """`depths`: blocks in each stage. `width`: channels after the first convolution."""

    batch: int
    image: int
    depths: tuple[int, ...]
    width: int = 64
    classes: int = 1000


SIZES = {
    "resnet50": {"small": Size(16, 96, (3, 4, 6, 3), 16, 10), "paper": Size(64, 224, (3, 4, 6, 3))},
    "resnet152": {"small": Size(12, 128, (3, 8, 36, 3), 8, 10), "paper": Size(32, 224, (3, 8, 36, 3))},
}


class Placed(nn.Module):
    """A block that is called through something."""

    def __init__(self, block: nn.Module, place: Place) -> None:
        super().__init__()
        self.block, self.place = block, place

    def forward(self, x: Tensor) -> Tensor:
        """As the block."""
        out: Tensor = self.place(self.block, x)
        return out


def make(size: Size) -> Workload:
    """See the package."""
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = [4 * size.width * 2**i for i in range(len(size.depths))]
    config: Any = ResNetConfig(
        embedding_size=size.width, hidden_sizes=widths, depths=list(size.depths), num_labels=size.classes
    )
    model: Any = ResNetForImageClassification(config)
    stages = model.resnet.encoder.stages

    def places(parts: Callable[[Any], nn.ModuleList | nn.Sequential]) -> Callable[[Place], None]:
        def put(place: Place) -> None:
            for stage in stages:
                layers = parts(stage)
                for i, layer in enumerate(layers):
                    layers[i] = Placed(layer, place)

        return put

    return Workload(
        module=Named(model, "pixel_values", "labels"),
        inputs=(torch.randn(size.batch, 3, size.image, size.image), torch.randint(0, size.classes, (size.batch,))),
        places={"per block": places(lambda stage: stage.layers)},
    )
