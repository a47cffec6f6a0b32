"""DeepSpeech2: two convolutions, bidirectional GRU layers with BatchNorm over sequences, CTC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly

FEATURES, LETTERS = 161, 29


@dataclass(frozen=True)
class Size:
    """`frames` of sound, ten milliseconds each; GRU `layers` of `width`."""

    batch: int
    frames: int
    layers: int
    width: int


SIZES = {"deepspeech": {"small": Size(24, 80, 5, 192), "paper": Size(32, 800, 5, 800)}}


class SequenceNorm(nn.Module):
    """BatchNorm of each feature over all frames of all sequences."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        """(T, B, width)."""
        normed: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return normed


class Layer(nn.Module):
    """BatchNorm, then a bidirectional GRU whose directions are added."""

    def __init__(self, inputs: int, width: int, norm: bool) -> None:
        super().__init__()
        self.norm = SequenceNorm(inputs) if norm else nn.Identity()
        self.rnn = nn.GRU(inputs, width, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        """(T, B, inputs) to (T, B, width)."""
        out, _ = self.rnn(self.norm(x))
        both: Tensor = out.view(*out.shape[:2], 2, -1).sum(2)
        return both


class DeepSpeech(nn.Module):
    """Forward returns the CTC loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        widths = [32 * 41] + [size.width] * (size.layers - 1)
        self.layers = nn.ModuleList(Layer(inputs, size.width, i > 0) for i, inputs in enumerate(widths))
        self.norm = SequenceNorm(size.width)
        self.output = nn.Linear(size.width, LETTERS, bias=False)
        self.place: Place = directly

    def forward(self, sound: Tensor, letters: Tensor, lengths: Sequence[int]) -> Tensor:
        """`sound`: (B, 1, features, frames), so many `lengths` of them; `letters`: (B, most), one for eight frames."""
        x = self.convolutions(sound)
        x = x.flatten(1, 2).permute(2, 0, 1).contiguous()
        for layer in self.layers:
            x = self.place(layer, x)
        logits = self.output(self.norm(x))
        frames: Any = [(n + 1) // 2 for n in lengths]
        counts: Any = [n // 8 for n in lengths]
        return F.ctc_loss(logits.log_softmax(-1), letters, frames, counts, zero_infinity=True)


def make(size: Size) -> Workload:
    """See the package."""
    model = DeepSpeech(size)
    lengths = [round(size.frames * (1 - 0.3 * i / size.batch)) for i in range(size.batch)]
    letters = torch.randint(1, LETTERS, (size.batch, size.frames // 8))
    return Workload(
        module=model,
        inputs=(torch.randn(size.batch, 1, FEATURES, size.frames), letters, lengths),
        places={"per layer": lambda place: setattr(model, "place", place)},
    )
