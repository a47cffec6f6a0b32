"""Joint graphs as training graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_echo.compile import echo_eager, plans
from torch_echo.graph import Kind, Phase, Trait


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.norm(self.conv(x))), 0.5)
        return self.head(x.mean((2, 3)).view(-1, 4)).square().sum()


def captured(model: nn.Module, *inputs: Tensor, **options: Any) -> Any:
    torch.compile(model, backend=echo_eager, options={"cost": "analytic", **options})(*inputs).backward()
    return plans[-1].graph


def test_layers_traits_and_aliases() -> None:
    graph = captured(Net(), torch.randn(2, 2, 8, 8))
    ops = {op.name: op for op in graph.ops if op.phase is Phase.FORWARD}
    assert ops["aten::convolution"].layer.endswith("conv")
    assert ops["aten::addmm"].layer.endswith("head")
    assert ops["aten::native_dropout"].traits & Trait.RANDOM
    assert not any(
        op.name in ("aten::view", "aten::t", "aten::detach") for op in ops.values()
    )  # no values of their own
    layers = {op.layer for op in graph.ops if op.phase is Phase.BACKWARD}
    assert any(layer.endswith("conv") for layer in layers)  # backward ops too
    assert len(graph.passes) == 1


def test_what_is_older_and_what_outlives_the_step() -> None:
    model = Net()
    x = torch.randn(2, 2, 8, 8)
    graph = captured(model, x)
    inputs = [s for s in graph.storages if s.alloc < 0]
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x)) - model.norm.num_batches_tracked.nbytes
    assert own <= sum(s.nbytes for s in inputs) <= own + 8
    assert all(s.free == graph.ticks for s in inputs)
    gradients = sorted(s.nbytes for s in graph.storages if s.free == graph.ticks and s.alloc > graph.passes[0].start)
    assert gradients == sorted(p.nbytes for p in model.parameters())


def test_what_overwrites_a_buffer_runs_when_forward_ends() -> None:
    """It stands at the end of the joint graph; what it copies is not there until then."""
    graph = captured(Net(), torch.randn(2, 2, 8, 8))
    begin = graph.passes[0].start
    counter = next(
        i for i, v in enumerate(graph.values) if v.producer >= 0 and graph.ops[v.producer].name == "aten::add"
    )
    assert graph.nbytes(counter) == 8
    assert graph.storages[graph.values[counter].storage].free < begin
    assert counter not in {save.value for save in graph.saves}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            mask = torch.ones(32, 32).triu(1) > 0
            x = x + F.dropout(layer(x).masked_fill(mask, 0.0)) + F.dropout(x)
        return x.square().sum()


def test_equal_ops_are_one_but_draws_are_not() -> None:
    names = [op.name for op in captured(Masked(), torch.randn(32, 32)).ops if op.phase is Phase.FORWARD]
    assert [names.count(f"aten::{name}") for name in ("ones", "triu", "gt")] == [1, 1, 1]
    assert names.count("aten::native_dropout") == 6


def test_gradients_where_equal_ops_are_one() -> None:
    gradients = []
    for backend in ("aot_eager", echo_eager):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Masked()
        torch.compile(model, backend=backend)(torch.randn(32, 32)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_workspace_is_part_of_the_graph() -> None:
    graph = captured(Net(), torch.randn(2, 2, 64, 64))
    backward = next(op for op in graph.ops if op.name == "aten::convolution_backward")
    inside = [
        s for s in graph.storages if s.kind is Kind.TEMPORARY and (s.alloc, s.free) == (backward.start, backward.end)
    ]
    assert sum(s.nbytes for s in inside) == backward.workspace > 0


def test_buffers_that_forward_updates_are_not_read_again() -> None:
    graph = captured(Net(), torch.randn(2, 2, 8, 8), max_overhead=100.0)
    norm = next(op for op in graph.ops if "batch_norm" in op.name and op.phase is Phase.FORWARD)
    stale = [v for v in norm.reads if not graph.values[v].keepable]
    assert len(stale) == 2  # running mean and variance
    assert not any(graph.ops[o] is norm for o in plans[-1].plan.rerun)
