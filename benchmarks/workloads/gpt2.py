"""GPT-2 from transformers; `paper` is the small one of 124 million parameters."""

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


SIZES = {"gpt2": {"small": Size(8, 128, 4, 192, 4, 1000), "paper": Size(8, 1024, 12, 768, 12, 50257)}}


def make(size: Size) -> Workload:
    """See the package."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config: Any = GPT2Config(
        vocab_size=size.vocabulary, n_positions=size.length, n_embd=size.width, n_layer=size.layers, n_head=size.heads,
        resid_pdrop=size.dropout, embd_pdrop=size.dropout, attn_pdrop=size.dropout, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = Named(GPT2LMHeadModel(config), "input_ids", "labels")
    text = tokens(size.vocabulary, size.batch, size.length)
    return Workload(
        module=model, inputs=(text, text.clone()), checkpointing=model.enable_checkpointing, random=size.dropout > 0
    )
