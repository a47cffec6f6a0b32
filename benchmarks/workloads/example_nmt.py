"""The translation model of ``examples/nmt`` on its own data, subwords of Django's Japanese catalogues."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nmt"
LANGUAGE = "ja"


@dataclass(frozen=True)
class Size:
    """Sentences of `length` subwords."""

    batch: int = 64
    length: int = 30
    width: int = 256
    vocabulary: int = 2000
    dropout: float = 0.2


SIZES = {"example_nmt": {"small": Size()}}


class Training(nn.Module):
    """The model and its loss, as in ``train.py``."""

    def __init__(self, model: nn.Module, pad: int) -> None:
        super().__init__()
        self.model = model
        self.pad = pad

    def forward(self, src: Tensor, lengths: Tensor, tgt_in: Tensor, tgt_out: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy, and the logits: ``train.py`` holds them in a local variable."""
        logits = self.model(src, lengths, tgt_in)
        return F.cross_entropy(logits.flatten(0, 1), tgt_out.flatten(), ignore_index=self.pad), logits


def make(size: Size) -> Workload:
    """See the package."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import data  # type: ignore[import-not-found]
        import model as nmt  # type: ignore[import-not-found]
        from sentencepiece import SentencePieceProcessor
    finally:
        sys.path.remove(str(EXAMPLE))
    train, _ = data.split(data.catalog_pairs([LANGUAGE]))
    subwords = SentencePieceProcessor(model_proto=data.train_subwords(train, size.vocabulary))
    batch = data.fixed_length(data.encode(train, subwords), size.batch, size.length, random.Random(1))[0]
    model: Any = nmt.Seq2Seq(subwords.vocab_size(), size.width, size.width, size.dropout)
    decoder, attention = model.decoder, model.decoder.attention
    step, attend = decoder.step, attention.forward

    def place_step(place: Place) -> None:
        decoder.step = lambda *args: place(step, *args)

    def place_attention(place: Place) -> None:
        attention.forward = lambda *args: place(attend, *args)

    device = torch.empty(0).device
    return Workload(
        module=Training(model, data.PAD),
        inputs=(batch.src.to(device), batch.src_lengths, batch.tgt_in.to(device), batch.tgt_out.to(device)),
        places={"per step": place_step, "attention": place_attention},
        random=size.dropout > 0,
    )
