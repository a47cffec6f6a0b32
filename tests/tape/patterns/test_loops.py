"""What training loops do around their models."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..models import normal, tokens
from .script import Script, compare

WIDTH = 64
ROWS = 32
VOCAB = 50


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.second(F.gelu(self.first(self.embedding(ids)))))


class Decoder(nn.Module):
    """One step: additive attention over the keys, and a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.query, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, token: Tensor, state: Any, keys: Tensor) -> Any:
        weights = self.score(torch.tanh(keys + self.query(state[0])[:, None])).softmax(1)
        state = self.cell(torch.cat([self.embedding(token), (weights * keys).sum(1)], 1), state)
        return self.out(state[0]), state


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for m in modules for p in m.parameters() if p.requires_grad], lr=1e-3)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)
    )


def translation(length: Any, forced: Any) -> Any:
    """Encoder and decoder, each with an optimizer, called from a loop outside of any forward."""

    def make() -> Script:
        random.seed(3)
        encoder, decoder = Encoder(), Decoder()
        optimizers = [adam(encoder), adam(decoder)]

        def step(i: int) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            n = length(i)
            source, target = tokens(i, ROWS, 8, high=VOCAB), tokens(i + 50, ROWS, n + 1, high=VOCAB)
            keys = encoder(source)
            state = (keys.mean(1), torch.zeros(ROWS, WIDTH))
            token, loss = target[:, 0], torch.zeros(())
            teacher = forced(i)
            for t in range(n):
                logits, state = decoder(token, state, keys)
                loss = loss + F.cross_entropy(logits, target[:, t + 1])
                token = target[:, t + 1] if teacher else logits.argmax(1).detach()
            (loss / n).backward()
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            return loss.detach()

        return Script([encoder, decoder], step)

    return make


def test_decoder_called_from_a_loop() -> None:
    compare(translation(lambda i: 6, lambda i: True))


def test_random_lengths() -> None:
    compare(translation(lambda i: [6, 4, 7, 3, 5, 8, 6, 4][i % 8], lambda i: True), steps=16)


def test_a_coin_flip_for_teacher_forcing() -> None:
    compare(translation(lambda i: 6, lambda i: random.random() < 0.5), steps=14)


def test_gradient_accumulation() -> None:
    def make() -> Script:
        model = net()
        optimizer = adam(model)

        def step(i: int) -> Tensor:
            total = torch.zeros(())
            for j in range(4):
                loss = model(normal(4 * i + j, 4 * ROWS, WIDTH)).square().mean() / 4
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return total

        return Script([model], step)

    compare(make)


def test_lbfgs() -> None:
    def make() -> Script:
        model = nn.Sequential(*list(net())[:4], nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

        def step(i: int) -> Tensor:
            x = normal(i, 512, WIDTH)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return Script([model], step)

    compare(make)


def test_average_of_the_weights_by_deepcopy() -> None:
    def make() -> Script:
        model = net()
        average = copy.deepcopy(model).requires_grad_(False)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        optimizer = adam(model)

        def step(i: int) -> list[Tensor]:
            optimizer.zero_grad()
            x = normal(i, 4 * ROWS, WIDTH)
            with torch.no_grad():
                wanted = average(x)  # a teacher in training mode
            loss = F.mse_loss(model(x), wanted) + model(x).square().mean()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.99).add_(theirs, alpha=0.01)
            return [loss.detach(), averaged.module.eval()(x).mean().detach(), copy.deepcopy(model).eval()(x).detach()]

        return Script([model, average, averaged], step)

    compare(make)


def test_hidden_state_carried_over_batches() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.cell, self.drop = nn.GRUCell(WIDTH, WIDTH), nn.Dropout(0.2)

        def forward(self, ids: Tensor, h: Tensor) -> Any:
            out = []
            for x in self.drop(self.embedding(ids)).unbind(1):
                h = self.cell(x, h)
                out.append(h)
            return self.out(torch.tanh(self.drop(torch.stack(out, 1)))), h

    def make() -> Script:
        model = Language()
        optimizer = adam(model)
        h = torch.zeros(ROWS, WIDTH)

        def step(i: int) -> Tensor:
            nonlocal h
            ids = tokens(i, ROWS, 9, high=VOCAB)
            h = h.detach()
            logits, h = model(ids[:, :-1], h)
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make)


def test_packed_sequences_of_other_lengths_in_each_batch() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.rnn = (
                nn.Embedding(VOCAB, WIDTH),
                nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1),
            )
            self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.out(F.gelu(self.norm(out)))

    def make() -> Script:
        model = Tagger()
        optimizer = adam(model)

        def step(i: int) -> Tensor:
            length = [12, 10, 14, 9, 13, 11][i % 6]
            lengths = tokens(i, 16, high=length).clamp(min=2)
            lengths[0] = length
            ids = tokens(i, 16, length, high=VOCAB)
            loss = F.cross_entropy(model(ids, lengths).flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make, steps=14)


def test_generation_and_evaluation_inside_of_training() -> None:
    """Also under inference mode, and evaluation with gradients on."""

    def make() -> Script:
        encoder, decoder = Encoder(), Decoder()
        model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        optimizer = adam(model)

        def generate(ids: Tensor) -> Tensor:
            keys = encoder(ids)
            state, token = (keys.mean(1), torch.zeros(len(ids), WIDTH)), ids[:, 0]
            for _ in range(4):
                logits, state = decoder(token, state, keys)
                token = torch.multinomial(logits.softmax(1), 1)[:, 0]
            return token

        def step(i: int) -> list[Tensor]:
            optimizer.zero_grad()
            ids = tokens(i, ROWS, 8, high=VOCAB)
            keys = encoder(ids)
            with torch.no_grad():
                sampled = generate(ids)
            state, token, loss = (keys.mean(1), torch.zeros(ROWS, WIDTH)), sampled, torch.zeros(())
            for t in range(5):
                logits, state = decoder(token, state, keys)
                token = ids[:, t + 1]
                loss = loss + F.cross_entropy(logits, token)
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.inference_mode():
                evaluated = generate(ids).clone()
            saliency = encoder(ids).sum()
            model.train()
            return [loss.detach(), evaluated, saliency.detach()]

        return Script([model], step)

    compare(make)


def test_zero_grad_in_both_ways() -> None:
    def make() -> Script:
        model = net()
        optimizer = adam(model)

        def step(i: int) -> Tensor:
            loss = model(normal(i, 8 * ROWS, WIDTH)).square().mean()
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make)


def test_backward_and_grad_for_some_inputs() -> None:
    """``backward(inputs=…)`` and ``torch.autograd.grad``, the latter over a graph that backward goes through again."""

    def make() -> Script:
        model = net()
        optimizer = adam(model)
        some = [p for p in model.parameters() if p.dim() == 2]

        def step(i: int) -> list[Tensor]:
            optimizer.zero_grad()
            x = normal(i, 8 * ROWS, WIDTH).requires_grad_()
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward(inputs=some)
            optimizer.step()
            return [loss.detach(), slope]

        return Script([model], step)

    compare(make)


def test_scheduler_and_clipping_and_several_groups() -> None:
    def make() -> Script:
        model = net()
        groups = [{"params": [p], "lr": 1e-3 * (j + 1)} for j, p in enumerate(model.parameters())]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=50)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            loss = model(normal(i, 8 * ROWS, WIDTH)).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            return torch.stack([loss.detach(), norm])

        return Script([model], step)

    compare(make)
