"""Models to measure. Each file has one kind of model: its sizes by workload and preset, and how it is made.

:func:`build` makes any of them, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from benchmarks.workloads.base import Trainer, Workload

__all__ = ["PAPER", "PRESETS", "QUICK", "WORKLOADS", "About", "Trainer", "Workload", "build", "presets", "size_of"]

PRESETS = ("small", "paper")
"""For a machine with two CPU cores; for a GPU."""


@dataclass(frozen=True)
class About:
    """Where a workload is made, and what it is called."""

    file: str
    title: str
    listed: bool = True
    """Is it measured unless others are asked for?"""


WORKLOADS = {
    "nmt": About("nmt", "translation, attention LSTM, 2+2 layers"),
    "nmt1000": About("nmt", "translation, attention LSTM, 1 layer of 1000, LayerNorm"),
    "nmt4": About("nmt", "translation, attention LSTM, 4+4 layers, LayerNorm"),
    "deepspeech": About("deepspeech", "DeepSpeech2"),
    "transformer_base": About("transformer", "translation, Transformer base"),
    "transformer_big": About("transformer", "translation, Transformer big"),
    "resnet50": About("resnet", "ResNet-50"),
    "resnet152": About("resnet", "ResNet-152"),
    "lstm_lm": About("lstm_lm", "LSTM language model"),
    "gpt2": About("gpt2", "GPT-2"),
    "bert": About("bert", "BERT"),
    "unet": About("unet", "U-Net"),
    "vit": About("vit", "Vision Transformer"),
    "mamba2": About("mamba2", "Mamba-2, a state-space model"),
    "gnn": About("gnn", "graph attention network"),
    "decoder": About("decoder", "attention decoder, LSTMCell", listed=False),
    "gpt": About("gpt", "GPT, attention written out", listed=False),
    "lstm_cells": About("lstm_cells", "language model of two LSTMCells", listed=False),
    "byte_lm": About("byte_lm", "byte-level language model, nn.LSTM", listed=False),
    "long_lstm": About("long_lstm", "nn.LSTM over thousands of steps", listed=False),
    "example_nmt": About("example_nmt", "the translation model of examples/nmt", listed=False),
}

PAPER = ("nmt", "deepspeech", "transformer_base", "resnet152")
"""The workloads that the Echo paper's mean and maximum are taken over: attention LSTM, DeepSpeech2, Transformer, ResNet."""

QUICK = ("nmt", "resnet50", "gpt2")
"""Those of ``--quick``."""


def presets(name: str) -> tuple[str, ...]:
    """For which presets a workload has sizes."""
    return tuple(_sizes(name))


def size_of(name: str, preset: str = "small", **changes: Any) -> Any:
    """The sizes of a workload, a dataclass; `changes` replace some of its fields (``batch=64``, ``layers=4``)."""
    return replace(_sizes(name)[preset], **changes)


def build(name: str, preset: str = "small", device: str | torch.device = "cpu", **changes: Any) -> Workload:
    """A workload with new parameters and data, the same ones each time, all of it made on `device`.

    Steps are those of ``Trainer(build(...))``. `changes` replace fields of its size. Under a ``FakeTensorMode`` nothing takes
    memory; PyTorch has no fake version of what initialises `vit` (truncated normal) nor of the loss of `deepspeech` (CTC).

    Raises KeyError for a workload without this preset, TypeError for a field that its size has not.
    """
    size = size_of(name, preset, **changes)
    torch.manual_seed(0)
    with torch.device(device):
        workload: Workload = import_module(f"benchmarks.workloads.{WORKLOADS[name].file}").make(size)
    workload.module.train()
    return workload


def _sizes(name: str) -> dict[str, Any]:
    sizes: dict[str, Any] = import_module(f"benchmarks.workloads.{WORKLOADS[name].file}").SIZES[name]
    return sizes
