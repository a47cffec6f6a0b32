"""DeepSpeech2 in small: two convolutions, five bidirectional GRU layers with BatchNorm over sequences, CTC."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly

FEATURES, WIDTH, LAYERS, LETTERS, BATCH, FRAMES = 161, 512, 5, 29, 24, 200


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

    def __init__(self, inputs: int, norm: bool) -> None:
        super().__init__()
        self.norm = SequenceNorm(inputs) if norm else nn.Identity()
        self.rnn = nn.GRU(inputs, WIDTH, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(T, B, inputs) to (T, B, WIDTH)."""
        packed = nn.utils.rnn.pack_padded_sequence(self.norm(x), lengths, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], total_length=x.shape[0])
        both: Tensor = out.view(*out.shape[:2], 2, WIDTH).sum(2)
        return both


class DeepSpeech(nn.Module):
    """Forward returns the CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        self.layers = nn.ModuleList(Layer(32 * 41 if i == 0 else WIDTH, i > 0) for i in range(LAYERS))
        self.norm = SequenceNorm(WIDTH)
        self.output = nn.Linear(WIDTH, LETTERS, bias=False)
        self.place: Place = directly

    def forward(self, sound: Tensor, lengths: Tensor, letters: Tensor, counts: Tensor) -> Tensor:
        """`sound`: (B, 1, features, frames), so many `lengths` of them; `letters`: (B, most), so many `counts`."""
        x = self.convolutions(sound)
        x = x.flatten(1, 2).permute(2, 0, 1).contiguous()
        lengths = (lengths + 1) // 2
        for layer in self.layers:
            x = self.place(layer, x, lengths)
        logits = self.output(self.norm(x))
        return F.ctc_loss(logits.log_softmax(-1), letters, lengths, counts, zero_infinity=True)


def make() -> Workload:
    """See the package."""
    torch.manual_seed(0)
    model = DeepSpeech()
    lengths = torch.linspace(FRAMES, FRAMES * 0.7, BATCH).long()
    counts = lengths // 8
    letters = torch.randint(1, LETTERS, (BATCH, int(counts.max())))
    return Workload(
        name="deepspeech",
        module=model,
        inputs=(torch.randn(BATCH, 1, FEATURES, FRAMES), lengths, letters, counts),
        places={"per layer": lambda place: setattr(model, "place", place)},
    )
