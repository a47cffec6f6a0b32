"""A recurrent encoder-decoder with attention."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

# isort: split
from data import BOS, EOS, PAD

State = tuple[Tensor, Tensor]


class BahdanauAttention(nn.Module):
    """Additive attention (Bahdanau et al., 2015)."""

    def __init__(self, query_size: int, memory_size: int, size: int) -> None:
        super().__init__()
        self.w_q = nn.Linear(query_size, size, bias=False)
        self.w_k = nn.Linear(memory_size, size)
        self.v = nn.Linear(size, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """The part of the scores which is the same at every step."""
        return self.w_k(memory)

    def forward(self, h: Tensor, keys: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """The context vector for the query `h`."""
        scores = self.v(torch.tanh(self.w_q(h[:, None, :]) + keys)).squeeze(-1)
        weights = torch.softmax(scores.masked_fill(padding, float("-inf")), dim=-1)
        return torch.bmm(weights[:, None, :], memory).squeeze(1)


class Encoder(nn.Module):
    """One bidirectional LSTM layer over the embedded source."""

    def __init__(self, vocab: int, embed: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed, padding_idx=PAD)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(embed, hidden, batch_first=True, bidirectional=True)
        self.bridge_h = nn.Linear(2 * hidden, hidden)
        self.bridge_c = nn.Linear(2 * hidden, hidden)

    def forward(self, src: Tensor, lengths: Tensor) -> tuple[Tensor, State]:
        """The annotations of the source, and the decoder's first state."""
        embedded = self.dropout(self.embedding(src))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        output, (h, c) = self.lstm(packed)
        memory, _ = pad_packed_sequence(output, batch_first=True, total_length=src.size(1))
        h, c = torch.cat([h[0], h[1]], dim=-1), torch.cat([c[0], c[1]], dim=-1)
        return self.dropout(memory), (torch.tanh(self.bridge_h(h)), self.bridge_c(c))


class Decoder(nn.Module):
    """An LSTM cell with attention and input feeding."""

    def __init__(self, vocab: int, embed: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed, padding_idx=PAD)
        self.dropout = nn.Dropout(dropout)
        self.cell = nn.LSTMCell(embed + hidden, hidden)
        self.attention = BahdanauAttention(hidden, 2 * hidden, hidden)
        self.combine = nn.Linear(3 * hidden, hidden)
        self.output = nn.Linear(hidden, vocab)

    def step(
        self, embedded: Tensor, feed: Tensor, state: State, keys: Tensor, memory: Tensor, padding: Tensor
    ) -> tuple[Tensor, State]:
        """One target position: the attentional vector, and the next state."""
        h, c = self.cell(torch.cat([embedded, feed], dim=-1), state)
        context = self.attention(h, keys, memory, padding)
        feed = self.dropout(torch.tanh(self.combine(torch.cat([h, context], dim=-1))))
        return feed, (h, c)

    def forward(self, tgt_in: Tensor, state: State, memory: Tensor, padding: Tensor) -> Tensor:
        """Logits at every target position, with teacher forcing."""
        keys = self.attention.keys(memory)
        embedded = self.dropout(self.embedding(tgt_in))
        feed = torch.zeros_like(state[0])
        outputs = []
        for t in range(tgt_in.size(1)):
            feed, state = self.step(embedded[:, t], feed, state, keys, memory, padding)
            outputs.append(feed)
        return self.output(torch.stack(outputs, dim=1))


class Seq2Seq(nn.Module):
    """Encoder, attention and decoder together."""

    def __init__(self, vocab: int, embed: int = 256, hidden: int = 256, dropout: float = 0.2) -> None:
        super().__init__()
        self.encoder = Encoder(vocab, embed, hidden, dropout)
        self.decoder = Decoder(vocab, embed, hidden, dropout)

    def forward(self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor) -> Tensor:
        """Logits of shape (batch, target length, vocabulary)."""
        memory, state = self.encoder(src, src_lengths)
        return self.decoder(tgt_in, state, memory, src == PAD)

    @torch.no_grad()
    def greedy(self, src: Tensor, src_lengths: Tensor, max_length: int) -> list[list[int]]:
        """The most probable next subword at each step, up to EOS."""
        decoder = self.decoder
        padding = src == PAD
        memory, state = self.encoder(src, src_lengths)
        keys = decoder.attention.keys(memory)
        feed = torch.zeros_like(state[0])
        token = torch.full_like(src[:, 0], BOS)
        finished = torch.zeros_like(token, dtype=torch.bool)
        tokens = []
        for _ in range(max_length):
            feed, state = decoder.step(decoder.embedding(token), feed, state, keys, memory, padding)
            token = decoder.output(feed).argmax(dim=-1)
            tokens.append(token)
            finished |= token == EOS
            if finished.all():
                break
        rows = torch.stack(tokens, dim=1).tolist()
        return [row[: row.index(EOS)] if EOS in row else row for row in rows]
