"""Number formats and kinds of tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import normal, tokens
from .script import Script, compare

WIDTH = 64
ROWS = 128


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(F.gelu(self.norm(torch.tanh(self.first(x))))))


def test_autocast_and_a_scaler() -> None:
    def make() -> Script:
        model = nn.Sequential(Net(), Net())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)

        def step(i: int) -> list[Tensor]:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(normal(i, ROWS, WIDTH)), torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return [loss.detach(), torch.tensor(scaler.get_scale())]

        return Script([model], step)

    compare(make)


def test_autocast_inside_of_forward_switched_off_in_parts() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Net(), Net()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.tanh(self.first(x))
                with torch.autocast("cpu", enabled=False):
                    x = torch.sigmoid(x.float()).exp()
                return self.last(x)

    def make() -> Script:
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            loss = model(normal(i, ROWS, WIDTH)).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    def make() -> Script:
        model = nn.Sequential(Net(), Net()).to(dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            loss = model(normal(i, ROWS, WIDTH).to(dtype)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make)


def test_complex_numbers() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 8)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(torch.fft.fft(x) @ self.mix)
            z = z.conj() * torch.polar(torch.ones_like(x), x)
            return self.out(F.gelu(torch.fft.ifft(z * torch.sigmoid(z)).real) + torch.view_as_real(z).sum(-1))

    def make() -> Script:
        model = Spectrum()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            loss = model(normal(i, ROWS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make)


def test_sparse_embeddings() -> None:
    def make() -> Script:
        words, bag = nn.Embedding(500, WIDTH, sparse=True), nn.EmbeddingBag(500, WIDTH, sparse=True, mode="sum")
        net = Net()
        dense, sparse = (
            torch.optim.Adam(net.parameters(), lr=1e-3),
            torch.optim.SparseAdam([*words.parameters(), *bag.parameters()], lr=1e-3),
        )

        def step(i: int) -> Tensor:
            ids = tokens(i, 32, 8, high=500)
            dense.zero_grad()
            sparse.zero_grad()
            loss = net(words(ids) + bag(ids)[:, None]).square().mean()
            loss.backward()
            dense.step()
            sparse.step()
            return loss.detach()

        return Script([words, bag, net], step)

    compare(make)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors(layout: torch.layout) -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.net = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Net()

        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.first(x))
            return self.net(self.last(F.relu(x)).to_padded_tensor(0.0))

    def make() -> Script:
        model = Ragged()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step(i: int) -> Tensor:
            rows = [normal(i + j, 3 + (i + j) % 4, WIDTH) for j in range(16)]
            x = torch.nested.nested_tensor(rows, layout=layout)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make, steps=14)


def test_inputs_that_need_gradients() -> None:
    """Adversarial examples: a step on the inputs, then one on the parameters."""

    def make() -> Script:
        model = nn.Sequential(Net(), Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(i: int) -> list[Tensor]:
            x = normal(i, ROWS, WIDTH).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).square().mean(), x)
            x = (x + 0.1 * slope.sign()).detach()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return [slope, loss.detach()]

        return Script([model], step)

    compare(make, kinds=2)
