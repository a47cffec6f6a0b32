"""Modules whose parameters ``fully_shard`` gathers and lets go of: in a process group of one, where storages are emptied as ever.

Real jobs of two processes are in ``test_distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method

import torch_echo
from torch_echo import compat
from torch_echo.errors import CaptureError
from torch_echo.options import Options
from torch_echo.tape._scope import Scope, gathered_keys
from torch_echo.tape.session import Session

WIDTH = 32


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    """Begins and ends with what is made from its own parameters and is cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.norm(x)
        return torch.tanh(self.scale * (x + self.down(F.gelu(self.up(self.hidden)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(x + self.offset)
        for block in self.blocks:
            x = block(x)
        return (x * torch.sigmoid(self.offset)).square().mean()


class Twice(Model):
    """Parameters are let go of and gathered again while forward goes on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(torch.sigmoid(x))
        return x.square().mean()


class Leaking(Model):
    """What a block has made from its parameters is read outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            x = block(x)
            total = total + (torch.sigmoid(block.hidden) * block.hidden).mean()
        return total + x.square().mean()


class ByMethod(Model):
    """Blocks gather their parameters in another method than forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.encode(x)  # type: ignore[operator]
        return x.square().mean()


def encode(self: Block, x: torch.Tensor) -> torch.Tensor:
    return Block.forward(self, x)


def shard(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
        if isinstance(model, ByMethod):
            type(block).encode = encode  # type: ignore[attr-defined]
            register_fsdp_forward_method(block, "encode")
    return fully_shard(model)


def train(
    make: Callable[[], nn.Module], options: dict[str, Any] | None, before: bool = False
) -> tuple[list[torch.Tensor], Any]:
    """Parameters after some steps, and the session. `before`: torch-echo is applied before the model is sharded."""
    torch.manual_seed(0)
    model = make()
    if not before:
        shard(model)
    handle = torch_echo.apply(model, **options) if options is not None else None
    if before:
        shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(7):
        model(torch.randn(64, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    parameters = [part.clone() for p in model.parameters() for part in compat.parts_of(p.detach())]
    return parameters, handle._session if handle is not None else None


OVERHEAD: dict[str, Any] = {"max_overhead": 1.0}
BUDGET: dict[str, Any] = {"memory_budget": 1, "on_infeasible": "least"}


@pytest.mark.parametrize("make", [Model, Twice, Leaking, ByMethod])
@pytest.mark.parametrize("options", [OVERHEAD, BUDGET], ids=["overhead", "budget"])
def test_equal(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    assert_equal(make, options, before=False)


@pytest.mark.parametrize("options", [OVERHEAD, BUDGET], ids=["overhead", "budget"])
def test_sharded_after_apply(options: dict[str, Any]) -> None:
    assert_equal(Model, options, before=True)


def assert_equal(make: Callable[[], nn.Module], options: dict[str, Any], before: bool) -> None:
    plain, _ = train(make, None)
    taped, session = train(make, options, before)
    assert all(torch.equal(a, b) for a, b in zip(plain, taped, strict=True))
    assert not session.unhandled
    assert session.plan.dropped
    assert session.measured_peak < session.plan.base_peak
    assert session.measured_peak == pytest.approx(session.plan.peak, rel=0.01)


def test_what_is_rebuilt_within_a_block_may_read_its_parameters() -> None:
    _, session = train(Model, BUDGET)
    makers = [session.graph.ops[session.graph.values[v].producer] for v in session.plan.dropped]
    assert any(op.name == "aten::native_layer_norm" and op.layer.startswith("FSDPModel.blocks") for op in makers)
    last = [op for op in makers if op.name in ("aten::mul", "aten::tanh") and op.layer.startswith("FSDPModel.blocks")]
    assert not last


def test_a_step_is_not_run_twice_for_a_comparison() -> None:
    torch.manual_seed(0)
    model = shard(Model())
    session = Session(Options(check=True, max_overhead=1.0))
    session.watch(model)
    for _ in range(6):
        model(torch.randn(64, WIDTH)).backward()
    session.close()
    assert [(what, why) for what, why, _ in session.unhandled] == [
        ("check", "a step of a sharded model can't be run twice: it communicates")
    ]
    assert session.comparison is None
    assert session.plan is not None and session.plan.dropped


def test_scope_knows_the_gathered_storages() -> None:
    model = shard(Model())
    block = model.get_submodule("blocks.0")
    assert not gathered_keys(block)
    scope = Scope(block)
    assert not scope.keys  # none before the first call
    model(torch.randn(2, WIDTH))
    assert len(scope.keys) == len(list(block.parameters()))
    assert all(compat.is_emptied(t) for t in compat.gathered(block))
    assert not scope.keys & {compat.storage_key(t) for p in block.parameters() for t in compat.parts_of(p)}


class TestFlat:
    def test_is_left_to_plain_pytorch(self) -> None:
        wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        with pytest.raises(CaptureError, match="fully_shard"):
            torch_echo.apply(wrapped)

    def test_steps_around_it_go_on(self) -> None:
        wrapped = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
        with pytest.raises(CaptureError, match="called no module"):
            torch_echo.explain(lambda: wrapped(torch.randn(2, 4)).sum().backward())
        assert wrapped[0].module.weight is not None
