"""Translation by a recurrent encoder-decoder with additive attention: the Echo paper's own case.

The encoder's first layer is bidirectional; the decoder is a loop over time, with input feeding. With `norm`, gates, attention and
the layers' outputs are normalised: such cells have no fused kernel, and are stepped through in Python in the encoder too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Place, Workload, directly, tokens

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """Of the encoder and of the decoder: so many `layers` of `width`."""

    batch: int
    length: int
    layers: int
    width: int
    source: int
    """Words of the source vocabulary."""
    target: int
    norm: bool = False
    dropout: float = 0.2


SIZES = {
    "nmt": {"small": Size(48, 32, 2, 160, 1000, 500), "paper": Size(128, 100, 2, 512, 17200, 7700)},
    "nmt1000": {"small": Size(48, 24, 1, 256, 1000, 500, True), "paper": Size(80, 100, 1, 1000, 17200, 7700, True)},
    "nmt4": {"small": Size(64, 20, 4, 128, 1000, 500, True), "paper": Size(32, 100, 4, 512, 17200, 7700, True)},
}


class NormCell(nn.Module):
    """An LSTM cell whose gates and cell state are normalised."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.norm_input, self.norm_hidden = nn.LayerNorm(4 * width), nn.LayerNorm(4 * width)
        self.norm_cell = nn.LayerNorm(width)

    def forward(self, x: Tensor, state: State) -> State:
        """The next state."""
        h, c = state
        i, f, g, o = (self.norm_input(self.input(x)) + self.norm_hidden(self.hidden(h))).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(self.norm_cell(c)), c


class NormLSTM(nn.Module):
    """A layer of such cells over time, batch first."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.cell = NormCell(inputs, width)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, inputs) to (B, T, width)."""
        h = c = x.new_zeros(x.shape[0], self.width)
        out = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            out.append(h)
        return torch.stack(out, 1)


class LSTM(nn.LSTM):
    """PyTorch's layer, without the last state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(B, T, inputs) to (B, T, directions x width)."""
        out: Tensor = super().forward(x)[0]
        return out


class Both(nn.Module):
    """Two layers, the second from the end."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.forth, self.back = NormLSTM(inputs, width), NormLSTM(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, inputs) to (B, T, 2 width)."""
        return torch.cat([self.forth(x), self.back(x.flip(1)).flip(1)], -1)


class Encoder(nn.Module):
    """Embedding and layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        w = size.width
        self.embedding = nn.Embedding(size.source, w)
        self.dropout = nn.Dropout(size.dropout)
        first = Both(w, w // 2) if size.norm else LSTM(w, w // 2, batch_first=True, bidirectional=True)
        rest = (NormLSTM(w, w) if size.norm else LSTM(w, w, batch_first=True) for _ in range(size.layers - 1))
        self.layers = nn.ModuleList([first, *rest])
        self.place: Place = directly

    def forward(self, source: Tensor) -> Tensor:
        """(B, T) to (B, T, width)."""
        x = self.dropout(self.embedding(source))
        for layer in self.layers:
            x = self.dropout(self.place(layer, x))
        return x


class Attention(nn.Module):
    """Additive: a hidden layer of the size batch x length x width at each step of the decoder."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        w = size.width
        self.query, self.key = nn.Linear(w, w, bias=False), nn.Linear(w, w)
        self.norm = nn.LayerNorm(w) if size.norm else nn.Identity()
        self.score = nn.Linear(w, 1, bias=False)

    def forward(self, h: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        """The context of a query."""
        scores = self.score(torch.tanh(self.norm(self.query(h).unsqueeze(1) + keys))).squeeze(-1)
        return torch.bmm(torch.softmax(scores, -1).unsqueeze(1), memory).squeeze(1)


class Decoder(nn.Module):
    """Embedding, cells, attention, output layer over all positions at once."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        w = size.width
        self.embedding = nn.Embedding(size.target, w)
        self.dropout = nn.Dropout(size.dropout)
        cell = NormCell if size.norm else nn.LSTMCell
        self.cells = nn.ModuleList(cell(2 * w if i == 0 else w, w) for i in range(size.layers))
        self.attention = Attention(size)
        self.combine = nn.Linear(2 * w, w)
        self.output = nn.Linear(w, size.target)
        self.place_step: Place = directly
        self.place_attention: Place = directly

    def step(self, x: Tensor, feed: Tensor, keys: Tensor, memory: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """One position: what is fed to the next, and the new state."""
        new: list[Tensor] = []
        x = torch.cat([x, feed], -1)
        for i, cell in enumerate(self.cells):
            h, c = cell(x, (state[2 * i], state[2 * i + 1]))
            new += [h, c]
            x = self.dropout(h)
        context = self.place_attention(self.attention, h, keys, memory)
        return (self.dropout(torch.tanh(self.combine(torch.cat([h, context], -1)))), *new)

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        """Logits."""
        keys, embedded = self.attention.key(memory), self.dropout(self.embedding(target))
        first = memory.mean(1)
        feed, state = torch.zeros_like(first), (first, torch.zeros_like(first)) * len(self.cells)
        out = []
        for t in range(target.shape[1]):
            feed, *state = self.place_step(self.step, embedded[:, t], feed, keys, memory, *state)
            out.append(feed)
        logits: Tensor = self.output(torch.stack(out, 1))
        return logits


class Translation(nn.Module):
    """Forward returns the cross-entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(size), Decoder(size)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """`source`: (B, T); `target`: (B, T + 1)."""
        logits = self.decoder(target[:, :-1], self.encoder(source))
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def make(size: Size) -> Workload:
    """See the package."""
    model = Translation(size)

    def per_layer_and_step(place: Place) -> None:
        model.encoder.place = model.decoder.place_step = place

    def attention(place: Place) -> None:
        model.decoder.place_attention = place

    return Workload(
        module=model,
        inputs=(tokens(size.source, size.batch, size.length), tokens(size.target, size.batch, size.length + 1)),
        places={"attention": attention, "per layer and step": per_layer_and_step},
        random=size.dropout > 0,
    )
