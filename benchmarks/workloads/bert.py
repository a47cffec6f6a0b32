"""BERT's masked language model from transformers; `paper` is BERT-base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.workloads.base import Named, Workload, tokens


@dataclass(frozen=True)
class Size:
    """So many `layers` of `width`."""

    batch: int
    length: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    dropout: float = 0.1


SIZES = {"bert": {"small": Size(8, 128, 4, 192, 4, 1000), "paper": Size(32, 512, 12, 768, 12, 30522)}}


def make(size: Size) -> Workload:
    """See the package."""
    from transformers import BertConfig, BertForMaskedLM

    config: Any = BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=4 * size.width, max_position_embeddings=size.length,
        hidden_dropout_prob=size.dropout, attention_probs_dropout_prob=size.dropout,
    )  # fmt: skip
    model = Named(BertForMaskedLM(config), "input_ids", "labels")
    text = tokens(size.vocabulary, size.batch, size.length)
    return Workload(
        module=model, inputs=(text, text.clone()), checkpointing=model.enable_checkpointing, random=size.dropout > 0
    )
