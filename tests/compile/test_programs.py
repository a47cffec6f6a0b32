"""What programs hand to ``torch.compile`` besides plain layers, with as much recomputed as can be."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.compile.test_eager import DEEP, peak
from tests.tape.harness import bits
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torch_echo.compile import echo_eager, plans
from torch_echo.graph import Trait

pytestmark = [pytest.mark.filterwarnings("error::FutureWarning"), pytest.mark.filterwarnings("error:torch-echo leaves")]

WIDTH = 32
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")

draws: list[int] = []


@torch.library.custom_op("echo_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """An op of the user's that draws random numbers, and tells nobody."""
    draws.append(x.numel())
    return x + torch.rand_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noise.register_autograd(lambda _, gradient: gradient)


@torch.library.custom_op("echo_tests::add_one", mutates_args=("x",))
def add_one(x: Tensor) -> None:
    """An op of the user's that overwrites its argument."""
    x.add_(1)


@torch.compiler.nested_compile_region
def region(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(F.dropout(F.gelu(x @ weight), 0.3))


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("count", torch.zeros(WIDTH))


class Checkpointed(Program):
    context: Any = None

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.tanh(self.second(F.dropout(torch.sigmoid(self.first(x)), 0.3)))

        more = {"context_fn": self.context} if self.context else {}
        y = checkpoint(inner, x, use_reentrant=False, **more)
        return torch.sin(self.last(torch.tanh(y))).square().sum()


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Checkpointed):
    context = staticmethod(partial(create_selective_checkpoint_contexts, keep_products))


class Regions(Program):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.first, self.second):
            x = torch.sin(region(x, layer.weight))
        return self.last(torch.tanh(x)).square().sum()


class Autocast(Program):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.last(F.gelu(self.second(torch.tanh(self.first(x)))))
        return x.float().square().sum()


class Attention(Program):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(-1, 16, 2, WIDTH // 2).transpose(1, 2) for layer in (self.first, self.second, self.last)
        )
        return torch.tanh(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)).square().sum()


class Broken(Program):
    """Three graphs a step. (Dynamo gives up a frame that is broken in a loop.)"""

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first, x)
        torch._dynamo.graph_break()
        x = self.block(self.second, x)
        torch._dynamo.graph_break()
        return torch.tanh(self.last(x)).square().sum()

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sin(torch.tanh(layer(F.dropout(torch.sigmoid(x), 0.3))))
        return x


class Noisy(Program):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = torch.sin(noise(torch.tanh(layer(x))))
        return torch.tanh(self.last(x)).square().sum()


class Counting(Program):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        add_one(self.count)
        return torch.sin(self.second(torch.tanh(x * self.count))).square().sum()


class Rectified(Program):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = torch.tanh(F.rrelu(torch.tanh(layer(x)), training=True))
        return self.last(x).square().sum()


class Branching(Program):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.cond(x.sum() > 0, lambda x: torch.sin(torch.tanh(x)), torch.cos, (x,))
        return torch.tanh(self.second(torch.tanh(x))).square().sum()


class Reducing(Program):
    def forward(self, x: Tensor) -> Tensor:
        x = collectives.all_gather_tensor_autograd(torch.tanh(self.first(x)), 0, dist.group.WORLD)
        x = torch.sin(collectives.all_reduce(torch.tanh(x), "sum", dist.group.WORLD))
        return torch.tanh(self.second(x)).square().sum() + x.sum()


class Chosen(Program):
    """The number of rows is not known before the step."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = torch.sin(torch.tanh(x[torch.nonzero(x[:, 0] > 0).squeeze(1)]))
        return torch.tanh(self.second(y)).square().sum() * (x > 0).sum().item()


def run(
    program: type[Program],
    backend: Any,
    options: dict[str, Any] | None = None,
    rows: tuple[int, ...] = (512,),
    steps: int = 3,
    retain: bool = False,
    prepare: Callable[[Tensor], None] = lambda _: None,
    **compiling: Any,
) -> list[Tensor]:
    """Train for some steps of Adam: losses, parameters, buffers, and the generator's state at the end."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = program()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    f = torch.compile(model, backend=backend, options=options, **compiling)
    torch.manual_seed(2)
    found = []
    for i in range(steps):
        x = torch.randn(rows[i % len(rows)], WIDTH)
        prepare(x)
        optimizer.zero_grad()
        loss = f(x)
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())
    return [*found, *(p.detach() for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


def check(program: type[Program], **how: Any) -> None:
    """Bit-equal, with something recomputed."""
    expected = run(program, "aot_eager", **how)
    found = run(program, echo_eager, DEEP, **how)
    assert any(made.plan.rerun for made in plans)
    assert all((bits(a) == bits(b)).all() for a, b in zip(expected, found, strict=True))


def check_inductor(program: type[Program], **how: Any) -> None:
    """As near as kernels that are fused in another way."""
    expected = run(program, "inductor", **how)
    found = run(program, "echo", DEEP, **how)
    assert any(made.plan.rerun for made in plans)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


ALL = [Checkpointed, Selective, Regions, Autocast, Attention, Broken, Noisy, Counting, Rectified, Branching]


@pytest.mark.parametrize("program", ALL, ids=lambda p: p.__name__)
def test_training_is_bit_equal(program: type[Program]) -> None:
    check(program)


@needs_compiler
def test_training_under_inductor(own_caches: None) -> None:
    check_inductor(Noisy)


class TestSizes:
    def test_planned_once_for_all(self) -> None:
        check(Attention, rows=(512, 1024, 256), dynamic=True)
        assert len(plans) == 1

    def test_of_one_dimension(self) -> None:
        check(Checkpointed, rows=(512, 700, 300), prepare=lambda x: torch._dynamo.mark_dynamic(x, 0))
        assert len(plans) == 1

    def test_that_change_unannounced(self) -> None:
        """Dynamo compiles anew at the second size, for all to come."""
        check(Checkpointed, rows=(512, 700, 300, 5), steps=5)
        assert len(plans) == 2

    def test_that_data_decide(self) -> None:
        with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
            check(Chosen, fullgraph=True)
        assert len(plans) == 1

    @needs_compiler
    def test_under_inductor(self, own_caches: None) -> None:
        check_inductor(Attention, rows=(512, 1024, 256), dynamic=True)
        assert len(plans) == 1


class TestRetainedGraphs:
    def test_backward_twice(self) -> None:
        check(Checkpointed, retain=True)

    @needs_compiler
    def test_under_inductor(self, own_caches: None) -> None:
        """It donates buffers to backward, unless it is told not to."""
        from torch._functorch import config

        with config.patch(donated_buffer=False):
            check_inductor(Checkpointed, retain=True)


class TestNeverTwice:
    def test_random_ops_of_the_users(self) -> None:
        draws.clear()
        run(Noisy, echo_eager, DEEP)
        assert len(draws) == 3 * 2

    def test_random_ops_in_regions(self) -> None:
        """PyTorch replays random numbers in whole graphs only."""
        run(Regions, echo_eager, DEEP)
        drawn = [op for op in plans[0].graph.ops if op.name == "aten::native_dropout"]
        assert drawn and all(op.traits & Trait.KEEP for op in drawn)

    def test_collectives(self, one_process: None) -> None:
        def counted(backend: Any, options: Any = None) -> tuple[list[Tensor], int]:
            with profile(activities=[ProfilerActivity.CPU]) as p:
                found = run(Reducing, backend, options)
            return found, sum("gloo:" in event.name for event in p.events())

        expected, calls = counted("aot_eager")
        found, mine = counted(echo_eager, DEEP)
        assert calls == mine >= 3 * 3  # two in forward, one in backward
        assert plans[0].plan.rerun
        assert all((bits(a) == bits(b)).all() for a, b in zip(expected, found, strict=True))


class TestCheckpointing:
    """What the user's own checkpoints recompute is paid for already: it is never kept for want of time."""

    @pytest.mark.parametrize("overhead", [0.0, 0.05])
    def test_takes_no_more_memory_than_without_us(self, overhead: float) -> None:
        class Blocks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(
                    nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
                    for _ in range(6)
                )

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = x + checkpoint(block, x, use_reentrant=False)
                return x.square().mean()

        model, x = Blocks(), torch.randn(1024, WIDTH)

        def measured(backend: Any, options: dict[str, Any] | None = None) -> int:
            torch._dynamo.reset()
            f = torch.compile(model, backend=backend, options=options)
            f(x).backward()
            model.zero_grad()
            found = peak(lambda: f(x).backward())
            model.zero_grad()
            return found

        theirs = measured("aot_eager")
        assert measured(echo_eager, {"max_overhead": overhead, "cost": "analytic"}) <= theirs
        assert plans[0].plan.overhead <= overhead


class TestRegions:
    def test_calls_share_no_memory(self) -> None:
        """PyTorch gives all calls of a region the same fake tensors."""
        run(Regions, echo_eager, DEEP)
        graph = plans[-1].graph
        calls = [op for op in graph.ops if op.name == "invoke_subgraph"]
        made = [graph.values[v].storage for op in calls for v in op.writes]
        assert len(calls) >= 3 and len(made) == len(set(made)) >= len(calls)

    def test_with_a_budget(self) -> None:
        """It is the whole graph's; what is in a region is planned at the default overhead."""
        run(Regions, echo_eager, {"memory_budget": 1024, "on_infeasible": "least", "cost": "analytic"})
        inner, outer = plans[0].plan, plans[-1].plan
        assert outer.peak == outer.floor < outer.base_peak
        assert inner.overhead <= 0.05
        assert "budget" in " ".join(outer.notes) and "budget" not in " ".join(inner.notes)

    @needs_compiler
    def test_gradients_under_inductor(self, own_caches: None) -> None:
        """Beside differences of the loss: PyTorch's own partition draws other masks for backward (2.13)."""
        model, x = Regions(), torch.randn(512, WIDTH)
        f = torch.compile(model, backend="echo", options=DEEP)

        def loss() -> Tensor:
            torch.manual_seed(5)
            found: Tensor = f(x)
            return found

        loss().backward()
        for p in (model.first.weight, model.second.weight, model.last.weight):
            assert p.grad is not None
            direction, moved, ends = torch.randn_like(p), p.detach(), []
            for move in (1e-3, -2e-3):
                moved.add_(direction, alpha=move)
                ends.append(loss().item())
            moved.add_(direction, alpha=1e-3)
            assert (ends[0] - ends[1]) / 2e-3 == pytest.approx((p.grad * direction).sum().item(), abs=0.05)


class Wrong(Program):
    """Writes to what autograd has saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y[:, 0] = torch.sin(y[:, 1])
        y.mul_(2)
        return y.square().sum()


def test_after_a_compilation_that_failed() -> None:
    """It leaves fake tensors behind, with its exception, which must not be asked anything within another one."""
    gc.disable()
    try:
        with pytest.raises(Exception, match="inplace operation"):
            run(Wrong, "aot_eager")
        check(Checkpointed)
    finally:
        gc.enable()
