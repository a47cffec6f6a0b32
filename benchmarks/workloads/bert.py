"""BERT's masked language model from transformers; `paper` is BERT-base."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.base import TextSize, Workload, text_workload

SIZES = {"bert": {"small": TextSize(8, 128, 4, 192, 4, 1000), "paper": TextSize(32, 512, 12, 768, 12, 30522)}}


def make(size: TextSize) -> Workload:
    """See the package."""
    from transformers import BertConfig, BertForMaskedLM

    config: Any = BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=4 * size.width, max_position_embeddings=size.length,
        hidden_dropout_prob=size.dropout, attention_probs_dropout_prob=size.dropout,
    )  # fmt: skip
    return text_workload(BertForMaskedLM(config), size.vocabulary, size.batch, size.length, random=size.dropout > 0)
