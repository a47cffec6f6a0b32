"""GPT-2 from transformers; `paper` is the small one of 124 million parameters."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.base import TextSize, Workload, text_workload

SIZES = {"gpt2": {"small": TextSize(8, 128, 4, 192, 4, 1000), "paper": TextSize(8, 1024, 12, 768, 12, 50257)}}


def make(size: TextSize) -> Workload:
    """See the package."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config: Any = GPT2Config(
        vocab_size=size.vocabulary, n_positions=size.length, n_embd=size.width, n_layer=size.layers, n_head=size.heads,
        resid_pdrop=size.dropout, embd_pdrop=size.dropout, attn_pdrop=size.dropout, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return text_workload(GPT2LMHeadModel(config), size.vocabulary, size.batch, size.length, random=size.dropout > 0)
