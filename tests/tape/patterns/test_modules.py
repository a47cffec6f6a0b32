"""What scripts do with their modules."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ..models import normal, tokens
from .script import Script, compare

WIDTH = 64
ROWS = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.norm(torch.tanh(self.first(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def training(build: Any, *, call: Any = lambda model, x: model(x), after: Any = lambda model: []) -> Any:
    """The usual loop around a model."""

    def make() -> Script:
        model = build()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)

        def step(i: int) -> list[Tensor]:
            optimizer.zero_grad()
            loss = call(model, normal(i, ROWS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            return [loss.detach(), *after(model)]

        return Script([model], step)

    return make


def test_saved_and_loaded_as_a_whole() -> None:
    """With the classes that a model consists of allowed, and no other; by pickle; by state dict."""

    def after(model: nn.Module) -> list[Tensor]:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        allowed = [Net, Block, nn.ModuleList, nn.Linear, nn.LayerNorm, set, torch._C._nn.gelu]
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(file, weights_only=True)
        assert list(model.state_dict()) == list(Net().state_dict())
        assert type(loaded) is Net
        assert loaded.__dict__.keys() == Net().__dict__.keys()
        x = normal(99, 4, WIDTH)
        return [m(x).detach() for m in (loaded, pickle.loads(pickle.dumps(model)), copy.deepcopy(model))]

    compare(training(Net, after=after))


def test_training_that_goes_on_with_the_loaded_model() -> None:
    def make() -> Script:
        models = nn.ModuleList([Net()])

        def step(i: int) -> Tensor:
            if i % 2 == 0:
                file = io.BytesIO()
                torch.save(models[0].state_dict(), file)
                file.seek(0)
                models[0] = Net()
                models[0].load_state_dict(torch.load(file))
            optimizer = torch.optim.SGD(models.parameters(), lr=0.01)
            loss = models[0](normal(i, ROWS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([models], step)

    compare(make)


class Direct(Net):
    """Everything by ``forward``."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return self.out.forward(x)


def test_forward_called_directly() -> None:
    compare(training(Net, call=lambda model, x: model.forward(x)))


def test_forward_called_directly_inside() -> None:
    compare(training(Direct))


def test_forward_called_directly_under_apply() -> None:
    compare(training(Net, call=lambda model, x: model.forward(x)), apply=True)


class WeightDrop(nn.Module):
    """Takes a layer's weights out and puts others, a dropout of them, in place of them in each forward."""

    def __init__(self, layer: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.layer, self.names = layer, names
        for name in names:
            weight = getattr(layer, name)
            del layer._parameters[name]
            self.register_parameter(f"raw_{name}", nn.Parameter(weight.data))

    def forward(self, *args: Any) -> Any:
        for name in self.names:
            setattr(self.layer, name, F.dropout(getattr(self, f"raw_{name}"), 0.5, self.training))
        return self.layer(*args)


def test_weight_drop() -> None:
    def build() -> nn.Module:
        layers = [WeightDrop(nn.Linear(WIDTH, WIDTH), ["weight"]) for _ in range(2)]
        return nn.Sequential(layers[0], nn.Tanh(), Block(), layers[1], nn.GELU(), nn.Linear(WIDTH, 4))

    compare(training(build))


def test_weight_drop_in_a_recurrent_layer() -> None:
    def make() -> Script:
        layer = WeightDrop(nn.GRU(WIDTH, WIDTH), ["weight_hh_l0"])
        out = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 4))
        optimizer = torch.optim.SGD([*layer.parameters(), *out.parameters()], lr=0.01)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            loss = out(layer(normal(i, 12, 16, WIDTH))[0]).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([layer, out], step)

    compare(make)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", ["weight", "spectral"])
@pytest.mark.parametrize("old", [True, False], ids=["hooks", "parametrization"])
def test_norms_of_weights(norm: str, old: bool) -> None:
    wrap: Any = getattr(nn.utils if old else parametrizations, f"{norm}_norm")

    def build() -> nn.Module:
        net = Net()
        for block in net.blocks:
            wrap(block.first)
            wrap(block.second)
        return net

    compare(training(build))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.triu() + x.triu(1).transpose(-1, -2))


def test_a_parametrization_of_the_script_also_cached() -> None:
    def build() -> nn.Module:
        net = Net()
        for block in net.blocks:
            parametrize.register_parametrization(block.first, "weight", Symmetric())
        return net

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            return model(x) + model(x.flip(0))

    compare(training(build, call=call))


def test_frozen_parts_in_evaluation_mode() -> None:
    def build() -> nn.Module:
        frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        model = nn.Sequential(frozen, Block(), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))
        frozen.requires_grad_(False)
        frozen[1].eval()
        model[2].weight.requires_grad_(False)
        return model

    compare(training(build))


class Adapter(nn.Module):
    """LoRA by hand."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * self.up(self.down(self.drop(x)))


def test_adapters_by_hand() -> None:
    def build() -> nn.Module:
        net = Net().requires_grad_(False)
        for block in net.blocks:
            block.first, block.second = Adapter(block.first), Adapter(block.second)
        return net

    compare(training(build))


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> Script:
        config = GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], lora_dropout=0.1, fan_in_fan_out=True)
        model = peft.get_peft_model(GPT2LMHeadModel(config), lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

        def step(i: int) -> Tensor:
            ids = tokens(i, 8, 32)
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make)


def test_modules_changed_between_steps() -> None:
    """A layer replaced, blocks added."""

    def make() -> Script:
        net = Net()

        def step(i: int) -> Tensor:
            if i == 5:
                net.out = nn.Sequential(Block(), nn.Linear(WIDTH, 8))
            if i == 8:
                net.blocks.append(Block())
            loss = net(normal(i, ROWS, WIDTH)).square().mean()
            net.zero_grad()
            loss.backward()
            torch.optim.SGD(net.parameters(), lr=0.01).step()
            return loss.detach()

        return Script([net], step)

    compare(make, kinds=2, steps=16)
