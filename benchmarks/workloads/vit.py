"""The Vision Transformer from transformers; `paper` is ViT-B/16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.workloads.base import Named, Workload


@dataclass(frozen=True)
class Size:
    """So many `layers` of `width` on patches of so many pixels."""

    batch: int
    image: int
    patch: int
    layers: int
    width: int
    heads: int
    classes: int = 1000


SIZES = {"vit": {"small": Size(16, 64, 8, 6, 192, 3, 10), "paper": Size(64, 224, 16, 12, 768, 12)}}


def make(size: Size) -> Workload:
    """See the package."""
    from transformers import ViTConfig, ViTForImageClassification

    config: Any = ViTConfig(
        image_size=size.image, patch_size=size.patch, hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=4 * size.width, num_labels=size.classes,
    )  # fmt: skip
    model = Named(ViTForImageClassification(config), "pixel_values", "labels")
    images = torch.randn(size.batch, 3, size.image, size.image)
    return Workload(
        module=model,
        inputs=(images, torch.randint(0, size.classes, (size.batch,))),
        checkpointing=model.enable_checkpointing,
    )
