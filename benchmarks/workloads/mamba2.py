"""Mamba-2 from transformers, a state-space model, by its PyTorch code (the scan in chunks).

`paper` is the one of 130 million parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.workloads.base import Workload, text_workload


@dataclass(frozen=True)
class Size:
    """So many `layers` of `width`; the scan goes over `chunk` steps at a time."""

    batch: int
    length: int
    layers: int
    width: int
    state: int
    chunk: int
    vocabulary: int


SIZES = {"mamba2": {"small": Size(8, 128, 4, 128, 32, 32, 1000), "paper": Size(4, 1024, 24, 768, 128, 256, 50288)}}
HEAD = 32


def make(size: Size) -> Workload:
    """See the package."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config: Any = Mamba2Config(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers, state_size=size.state,
        head_dim=HEAD, num_heads=2 * size.width // HEAD, n_groups=1, chunk_size=size.chunk, use_cache=False,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return text_workload(Mamba2ForCausalLM(config), size.vocabulary, size.batch, size.length)
