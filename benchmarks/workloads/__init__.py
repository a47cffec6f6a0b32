"""Models to measure, each as a :class:`Workload`."""

from __future__ import annotations

from importlib import import_module

from benchmarks.workloads.base import Workload

__all__ = ["NAMES", "Workload", "load"]

NAMES = {
    "decoder": "attention decoder, LSTMCell, T = 20",
    "gpt": "GPT, 6 layers of 256",
    "unet": "U-Net, 16 channels",
    "lstm_lm": "LSTM language model, T = 35",
    "nmt30": "translation, length 30",
    "nmt60": "translation, length 60",
}
"""What each workload is, in a few words."""

QUICK = ("decoder", "unet", "nmt30")
"""Those of ``--quick``."""


def load(name: str) -> Workload:
    """The workload of this name, with new parameters (the same ones each time)."""
    kind = name.rstrip("0123456789")
    if kind != name:
        return import_module(f"benchmarks.workloads.{kind}").make(int(name.removeprefix(kind)))  # type: ignore[no-any-return]
    return import_module(f"benchmarks.workloads.{name}").make()  # type: ignore[no-any-return]
