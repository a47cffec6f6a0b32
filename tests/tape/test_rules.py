"""Each rule of the tape engine, by a program that comes out wrong without it."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_echo
from torch_echo import compat
from torch_echo.errors import BudgetInfeasible, CaptureError, UnsupportedDevice
from torch_echo.options import Options
from torch_echo.rules import _ELEMENTWISE, may_reuse, rule_of
from torch_echo.tape._install import decide
from torch_echo.tape._mode import Tape
from torch_echo.tape._recipe import Passes, Recipe
from torch_echo.tape.session import Session

from .harness import (
    Case,
    Choice,
    ForcedSession,
    Trace,
    bits,
    check_baseline,
    check_footprint,
    check_same,
    compare,
    everything,
    forced,
    leaked,
    loop,
    producers,
    train,
)
from .models import CASES, MLP, AttentionDecoder, normal, simple_step, tokens

both = pytest.mark.parametrize("every", [False, True], ids=["apply", "run"])
LEAF = "torch::autograd::AccumulateGrad"
LINE = 32
"""Width of the models here."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


FINDS_PROFILES = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="a profile is lost with its thread, and none can be started in the process after that; or to another one",
)


class Net(nn.Module):
    """Two linear layers around a function of the test's."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = LINE) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def square_loss(model: nn.Module, i: int) -> Tensor:
    x = normal(i, 16, LINE)
    return model(x).square().mean()


def same(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor] = square_loss,
    *,
    step: Any = None,
    every: bool = False,
    choose: Choice = everything,
    steps: int = 5,
    **case: Any,
) -> ForcedSession:
    """Plain and taped are the same, and something was rebuilt."""
    session = compare(Case(build, step or simple_step(loss), sgd, **case), choose, every=every, steps=steps)
    assert isinstance(session, ForcedSession)
    assert session.plan is not None
    assert session.plan.rerun
    return session


def start(model: nn.Module, step: Callable[[int], Any], steps: int = 2) -> None:
    """The steps before a plan is in force."""
    model.train()
    for i in range(steps):
        step(i)


class DropAll(Tape):
    """Drops whatever may be dropped, without a plan."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._drop(func, args, kwargs or {}, -1)


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, tape: Tape | None = None) -> Tensor:
    """Of the function's sum. A tape is on while the function runs."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    if tape is not None:
        tape.switch(True, True)
    try:
        out = function(x)
    finally:
        if tape is not None:
            tape.lift()
    (grad,) = torch.autograd.grad(out.sum(), x)
    return grad


# --- backward ----------------------------------------------------------------------------------------------------------


class Spy(torch.autograd.Function):
    """Notes what is active when its backward runs."""

    seen: list[tuple[Any, Any]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[tuple[Any, Any]]) -> Tensor:
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.seen.append((compat.dispatch_modes.top(), compat.top_hooks()))
        return grad, None


class TestBackward:
    @both
    def test_no_mode_in_backward(self, every: bool) -> None:
        seen: list[tuple[Any, Any]] = []
        same(lambda: Net(lambda h: Spy.apply(torch.tanh(torch.sigmoid(h)), seen)), every=every)
        assert len(seen) == 10
        assert set(seen) == {(None, None)}

    @both
    def test_no_mode_in_a_backward_inside_of_a_forward(self, every: bool) -> None:
        seen: list[tuple[Any, Any]] = []

        def inner(h: Tensor) -> Tensor:
            y = Spy.apply(torch.tanh(h), seen).sigmoid()
            (grad,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
            return torch.tanh(y + grad)

        same(lambda: Net(inner), every=every, static=False)
        assert len(seen) == 20
        assert set(seen) == {(None, None)}

    def test_a_residual_chain_reruns_each_op_once(self) -> None:
        """Counting only the handles as readers made such a chain re-run its ops again and again."""

        class Chain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(100))

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = x + torch.tanh(block(x))
                return x

        session = same(Chain, lambda m, i: m(normal(i, 4, 8)).square().mean(), steps=4)
        assert session.plan is not None
        assert 290 <= len(session.plan.rerun) == len(set(session.plan.rerun)) <= 302

    def test_twenty_thousand_dropped_ops_in_a_row(self) -> None:
        """Recursion would end after a few hundred."""

        def chain(x: Tensor) -> Tensor:
            for _ in range(20_000):
                x = torch.sin(x)
            return x

        with forced(nn.Linear(1, 1)):  # so that passes are seen
            before = Passes.rerun
            x = torch.ones(3)
            assert torch.equal(gradient(chain, x, DropAll()), gradient(chain, x))
            assert Passes.rerun - before == 19_999  # the last one's output is not asked for

    @both
    def test_retain_graph(self, every: bool) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            loss = square_loss(model, i)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            return loss

        same(MLP, step=step, every=every, passes=1, static=False)

    @both
    def test_a_graph_retained_and_never_freed_by_backward(self, every: bool) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            loss = square_loss(model, i)
            loss.backward(retain_graph=True)
            optimizer.step()
            return loss.detach()

        same(MLP, step=step, every=every)

    @pytest.mark.parametrize(
        ("every", "static"),
        [
            (False, False),
            (True, False),
            (False, True),
        ],
    )
    def test_inputs(self, every: bool, static: bool) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            loss = square_loss(model, i)
            loss.backward(inputs=[model.layers[2].weight, model.head.bias])
            optimizer.step()
            return loss.detach()

        same(MLP, step=step, every=every, static=static)

    @both
    def test_grad(self, every: bool) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
            loss = square_loss(model, i)
            parameters = list(model.parameters())
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = g
            optimizer.step()
            optimizer.zero_grad()
            return [loss.detach()]

        same(MLP, step=step, every=every)

    @both
    def test_a_pass_within_forward_reads_what_later_ops_read_too(self, every: bool) -> None:
        """The first pass lets go of what was rebuilt for it; the script still has the tensor, and saves it once more."""

        def function(x: Tensor) -> Tensor:
            h = torch.tanh(x)
            with torch.no_grad():
                k = h.exp()
            (slope,) = torch.autograd.grad(torch.tanh(h @ k.T.contiguous()).square().sum(), h)
            return h.sin() * slope + h * k

        same(lambda: Net(function), every=every)

    @both
    def test_partial_backward(self, every: bool) -> None:
        """Two outputs, of which only one is ever asked for."""

        class Heads(MLP):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                x = torch.tanh(self.layers[0](x))
                return torch.tanh(self.layers[1](x)).sigmoid(), torch.tanh(self.layers[2](x)).exp()

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            x = normal(i, 64, LINE)
            left, right = model(x)
            loss = (left if i != 3 else right).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        same(Heads, step=step, every=every, static=False)

    @both
    def test_two_backward_passes_over_parts_of_one_graph(self, every: bool) -> None:
        class Heads(MLP):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                x = torch.tanh(self.layers[0](x)) * torch.sigmoid(x)
                return torch.tanh(self.layers[1](x)).sigmoid(), torch.tanh(self.layers[2](x)).exp()

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            x = normal(i, 64, LINE)
            left, right = model(x)
            left.mean().backward(retain_graph=True)
            right.mean().backward()
            optimizer.step()
            return left.detach()

        same(Heads, step=step, every=every, static=False)

    @both
    def test_gradient_penalty(self, every: bool) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
            optimizer.zero_grad()
            x = normal(i, 16, LINE).requires_grad_()
            out = model(x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = out.square().mean() + (grad.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return [loss.detach(), x.grad]

        same(MLP, step=step, every=every, static=False)

    def test_vectorised_backward(self) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
            optimizer.zero_grad()
            x = normal(i, 3, LINE)
            out = model(x)
            basis = torch.eye(3)[:, :, None].expand(3, 3, out.shape[1])
            rows = torch.autograd.grad(out, list(model.parameters()), basis, is_grads_batched=True, retain_graph=True)
            out.sum().backward()
            optimizer.step()
            return list(rows)

        same(lambda: Net(lambda h: torch.tanh(h) * torch.sigmoid(h)), step=step, static=False)

    def test_saved_tensors_read_outside_of_a_pass(self) -> None:
        """As tools that look into a graph do."""
        model = Net(lambda h: torch.tanh(h).sigmoid())
        with forced(model):
            start(model, lambda i: square_loss(model, i).backward())
            loss = square_loss(model, 2)
            node, found = loss.grad_fn, []
            while node is not None:
                if hasattr(node, "_saved_result"):
                    found += [node._saved_result, node._saved_result]
                inner = [n for n, _ in node.next_functions if n is not None and n.name() not in ("TBackward0", LEAF)]
                node = inner[0] if inner else None
            assert len(found) == 4
            before = [p.grad.clone() for p in model.parameters()]
            loss.backward()
        sigmoid, _, tanh, _ = found
        assert torch.equal(torch.sigmoid(tanh), sigmoid)
        assert all(not torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


# --- versions ------------------------------------------------------------------------------------------------------


class TestVersions:
    @pytest.mark.parametrize("choose", [everything, producers("aten::tanh"), lambda graph: ()])
    @both
    def test_an_error_of_eager_stays_one(self, choose: Choice, every: bool) -> None:
        """PyTorch's own check is off under hooks: for what is dropped, and for what is kept too."""

        class Spoiled(nn.Module):
            spoil = False

            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(LINE, LINE)

            def forward(self, x: Tensor) -> Tensor:
                y = torch.tanh(self.linear(x))
                z = torch.sigmoid(y * 2)
                kept = z.exp()
                if self.spoil:
                    y.add_(1)
                return kept + y

        message = r"has been modified by an inplace operation: \[.*FloatTensor \[16, 32\]\].* is at version 1; expected"
        model = Spoiled()
        for _ in range(2):  # plain first
            session = ForcedSession(choose)
            if every:
                session.watch_all()
            else:
                session.watch(model)
            try:
                start(model, lambda i: square_loss(model, i).backward(), 3)
                model.spoil = True
                loss = square_loss(model, 3)
                with pytest.raises(RuntimeError, match=message.replace("expected", "expected version 0")):
                    loss.backward()
                model.spoil = False
                square_loss(model, 4).backward()
            finally:
                session.close()

    @both
    def test_kept_outputs_and_inputs_written_by_the_script(self, every: bool) -> None:
        model = Net(torch.tanh)
        with forced(None if every else model, producers("aten::tanh")):
            start(model, lambda i: square_loss(model, i).backward(), 3)
            x = normal(3, 16, LINE)
            loss = model(x).square().mean()
            x.zero_()  # the first linear has saved it
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_kept_tensors_of_a_module_in_which_others_are_dropped(self) -> None:
        spoil = False

        def function(h: Tensor) -> Tensor:
            kept = torch.sigmoid(h)
            out = torch.tanh(kept * 2) * 3
            if spoil:
                kept.add_(1)
            return out

        model = Net(function)
        with forced(model, producers("aten::tanh")) as session:
            start(model, lambda i: square_loss(model, i).backward(), 4)
            assert session.plan is not None
            assert len(session.plan.rerun) == 1
            spoil = True
            loss = square_loss(model, 4)
            with pytest.raises(
                RuntimeError, match=r"inplace operation: \[torch.FloatTensor \[16, 32\]\].* is at version 1"
            ):
                loss.backward()

    @both
    def test_a_write_seen_while_a_recipe_needs_the_old_content(self, every: bool) -> None:
        def build() -> Net:
            calls = 0

            def function(h: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                a = h * 2
                y = torch.tanh(a)  # saved, dropped; its recipe reads a
                if calls > 3:  # not in the recorded step: a plan for one that writes would not rebuild y from a
                    a.add_(1)
                z = torch.sigmoid(a)
                if calls > 3:
                    a.view(-1)[3:].mul_(0.5)
                return y * 2 + z + a

            return Net(function)

        same(build, every=every, choose=producers("aten::tanh", "aten::sigmoid"), static=False)

    def test_a_write_nobody_saw(self) -> None:
        """The script overwrites in a later step what a recipe reads: an error with the op's name, never a gradient."""

        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(LINE, LINE)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                a = self.linear(x)
                return a, torch.tanh(a)

        model = Two()
        with forced(model, producers("aten::tanh")):
            start(model, lambda i: model(normal(i, 4, LINE))[1].sum().backward(), 3)
            a, y = model(normal(3, 4, LINE))
            loss = y.sum()
            del y
            with torch.no_grad():
                a.add_(1)
            with pytest.raises(RuntimeError, match=r"\[4, 32\].*aten::tanh.*changed in place"):
                loss.backward()
            model(normal(4, 4, LINE))[1].sum().backward()

    def test_numpy_memory_is_never_a_leaf(self) -> None:
        """What NumPy shares may change without a version."""
        array = np.zeros((16, LINE), np.float32)

        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(LINE))

            def forward(self, x: Tensor) -> Tensor:
                shared = torch.from_numpy(array)
                return torch.tanh(torch.sigmoid(shared) * self.scale) * x

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            array[:] = i
            x = normal(i, 16, LINE)
            loss = model(x).square().mean()
            array[:] = 77  # eager has saved what was computed from it
            loss.backward()
            optimizer.step()
            return loss

        same(Shared, step=step, static=False)

        def function(h: Tensor) -> Tensor:
            return torch.tanh(torch.sigmoid(torch.from_numpy(array)) * h)

        x = normal(0, 16, LINE)
        array[:] = 1
        expected = gradient(function, x)
        leaves = DropAll()
        x.requires_grad_()
        leaves.switch(True, True)
        try:
            out = function(x)
        finally:
            leaves.lift()
        array[:] = 77
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)

    def test_running_statistics_are_updated_once(self) -> None:
        session = same(
            lambda: nn.Sequential(nn.Linear(LINE, LINE), nn.BatchNorm1d(LINE), nn.Tanh(), nn.BatchNorm1d(LINE))
        )
        assert session.graph is not None
        assert session.plan is not None
        assert sum(session.graph.ops[o].name == "aten::native_batch_norm" for o in session.plan.rerun) == 2

    def test_batch_norm_in_evaluation_mode(self) -> None:
        def build() -> nn.Module:
            model = nn.Sequential(nn.Linear(LINE, LINE), nn.BatchNorm1d(LINE), nn.Tanh())
            model.register_forward_pre_hook(lambda module, _: module[1].eval() and None)
            return model

        same(build)

    def test_arguments_written_without_a_version(self) -> None:
        """rrelu saves its noise before it writes it."""
        same(lambda: nn.Sequential(nn.Linear(LINE, LINE), nn.RReLU(), nn.Tanh()), choose=everything)

        def function(h: Tensor) -> Tensor:
            return F.rrelu(h * 2, training=True)

        with forced(nn.Linear(1, 1)):
            x = normal(0, 16, LINE)
            assert torch.equal(gradient(function, x, DropAll()), gradient(function, x))

    @pytest.mark.parametrize("name", CASES)
    def test_the_table_of_writes(self, name: str) -> None:
        """Over the zoo: each argument whose content an op changes is one that the rules say it writes."""

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if compat.current_node() is not None:  # ops of the backward pass are never re-run
                    return func(*args, **kwargs)
                before = []
                for i, a in [*enumerate(args), *kwargs.items()]:
                    for t in a if isinstance(a, (list, tuple)) else [a]:
                        if isinstance(t, Tensor) and t.layout is torch.strided:
                            before.append((i, t, bits(t)))
                out = func(*args, **kwargs)
                rule = rule_of(func)
                for i, t, old in before:
                    # Kernels of the backward pass are never re-run (oneDNN's LSTM writes into its workspace there).
                    if i not in rule.writes(args) and not rule.name.endswith("_backward"):
                        assert np.array_equal(bits(t), old), f"{func} writes argument {i}"
                return out

        case = CASES[name]
        torch.manual_seed(0)
        model = case.build().train()
        optimizer = case.optimizer(model)
        with Watch():
            case.step(model, optimizer, 0)


class TestReuse:
    """A re-run may write over its first argument: only where the kernel gives the same bits in place."""

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]
    )
    def test_same_bits_in_place(self, dtype: torch.dtype) -> None:
        tried: set[str] = set()
        for shape in ((32, 32), (33, 17), (7,), (5, 3, 9), (2, 4, 6, 6), (300, 257)):
            plain = torch.rand(shape, dtype=torch.float64).mul(2).add(0.1)
            base = plain.mul(3).to(dtype)
            layouts = [base]
            if base.dim() > 1:
                layouts.append(base.transpose(0, 1).contiguous().transpose(0, 1))
            if base.dim() == 4:
                layouts.append(base.to(memory_format=torch.channels_last))
            others = [base.roll(1), base[:1], torch.tensor(1.7, dtype=torch.float64), torch.tensor(2)]
            for first, name in itertools.product(layouts, sorted(_ELEMENTWISE)):
                for overload in getattr(torch.ops.aten, name).overloads():
                    func = getattr(getattr(torch.ops.aten, name), overload)
                    rule = rule_of(func)
                    for rest in self.rests(func, [*others, layouts[-1].roll(1)], plain > 1):
                        try:
                            out = func(first, *rest)
                        except (RuntimeError, NotImplementedError):
                            continue  # no such kernel
                        if may_reuse(rule, (first, *rest), out):
                            copy = torch.empty_strided(first.shape, first.stride(), dtype=dtype).copy_(first)
                            tried.add(name)
                            assert np.array_equal(bits(out), bits(rule.in_place(copy, *rest))), (func, shape, rest)
        assert len(tried) >= {torch.complex64: 0, torch.int64: 5}.get(dtype, 20)

    @staticmethod
    def rests(func: Any, others: list[Tensor], mask: Tensor) -> list[tuple[Any, ...]]:
        """Further arguments for a call of `func`."""
        needed = [a for a in func._schema.arguments if not a.has_default_value()][1:]
        if len(needed) == 2:
            return [(mask, 0.3 if func._overloadname == "Scalar" else torch.tensor(0.3))]
        if not needed:
            return [()]
        return [(o,) for o in others] if "Tensor" in str(needed[0].type) else [(1.7,), (3,), (0.1,)]

    @both
    def test_chains_over_one_block(self, every: bool) -> None:
        def function(h: Tensor) -> Tensor:
            for _ in range(3):
                h = (torch.tanh(h * 2) + 1).sigmoid().masked_fill(h > 0.5, 0.3).sub(0.2).exp().clamp(max=2) * h
            return h

        same(lambda: Net(function), every=every)


class TestUnseenWrites:
    """More of them: the model "unseen" of the zoo."""

    def test_a_tensor_of_a_list_within_pytorch(self) -> None:
        """``ctc_loss`` makes one of the lengths: an empty tensor, written through its address."""
        lengths = [3, 2, 1, 2]

        def loss(model: nn.Module, i: int) -> Tensor:
            given = torch.tensor(lengths) + i % 2  # others in each step: old memory does not hold them by chance
            targets = torch.ones(4, 5, dtype=torch.long)
            scores = model(normal(i, 12, 4, 8)).log_softmax(-1)
            return F.ctc_loss(scores, targets, [12] * 4, given.tolist())

        same(lambda: nn.Linear(8, 6), loss, every=True, static=False)


# --- views -----------------------------------------------------------------------------------------------------------


class Keep(torch.autograd.Function):
    """Saves views, and notes what they look like in forward and in backward."""

    __module__ = "torch_echo.tests"  # what the script's own functions save is kept

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Any], *views: Tensor) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(*views)
        seen.append([look(v) for v in views])
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.seen.append([look(v) for v in ctx.saved_tensors])
        return grad, None, *([None] * len(ctx.saved_tensors))


def look(v: Tensor) -> Any:
    data = v.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()
    storage = v.untyped_storage().nbytes()
    return v.dtype, v.shape, v.stride(), v.storage_offset(), v.is_conj(), v.is_neg(), storage, data


class TestViews:
    @both
    def test_every_property_of_a_view(self, every: bool) -> None:
        seen: list[Any] = []

        def function(h: Tensor) -> Tensor:
            a = torch.tanh(h)
            z = torch.complex(a, a.sigmoid())
            half = a.to(torch.bfloat16)
            views = [
                *(a.t(), a[3:, 1::2], a[0].expand(5, LINE), a.reshape(4, -1)[1:], a.flatten()[7:8], a.diagonal(1)),
                *(a.detach().view(torch.int32), a.unfold(1, 5, 3), a[:0], half.t(), half[1:].view(torch.int16)),
                *(z.conj(), z.conj()[1:, ::3], torch.view_as_real(z)[:, 2:], z.conj().imag, z.imag, z.conj().t()),
                a.permute(1, 0).as_strided((2, 3), (1, 7), 5),
            ]
            return Keep.apply(a * 1, seen, *views)

        session = same(lambda: Net(function), every=every)
        assert session.plan is not None
        assert len(session.plan.rerun) >= 4
        assert len(seen) == 20
        assert all(a == b for a, b in zip(seen[::2], seen[1::2], strict=True))

    def test_strides_of_what_is_rebuilt(self) -> None:
        seen: list[Any] = []

        class Images(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)
                self.norm = nn.BatchNorm2d(4)

            def forward(self, x: Tensor) -> Tensor:
                a = self.norm(self.conv(x)).relu()
                b = F.max_pool2d(a, 2)
                c = torch.empty_strided((2, 4, 3, 3), (1, 2, 60, 20)).copy_(b).sigmoid()
                d = c.transpose(1, 3).tanh()
                return Keep.apply(d, seen, a, b, c, d)

        def loss(model: nn.Module, i: int) -> Tensor:
            x = normal(i, 2, 3, 8, 8).to(memory_format=torch.channels_last)
            return model(x).square().mean()

        same(Images, loss)
        assert all(a == b for a, b in zip(seen[::2], seen[1::2], strict=True))
        assert seen[0][0][2][1] == 1  # channels last

    @pytest.mark.parametrize("batch", [1, 2])
    def test_strides_of_dimensions_of_size_one(self, batch: int) -> None:
        """They mean nothing: dropout's mask may come back with others."""

        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = nn.LSTM(LINE, LINE, 2, dropout=0.2, batch_first=True)
                self.drop = nn.Dropout(0.2)

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.drop(self.rnn(self.drop(x))[0]))

        session = same(Recurrent, lambda model, i: model(normal(i, batch, 10, LINE)).square().mean())
        assert session.plan is not None
        assert session.plan.rerun

    @both
    def test_complex_arithmetic(self, every: bool) -> None:
        def loss(model: nn.Module, i: int) -> Tensor:
            x = normal(i, LINE, LINE)
            return model(x).square().mean()

        def square(h: Tensor) -> Tensor:
            z = torch.complex(torch.tanh(h), torch.sigmoid(h))
            w = (z.conj() * z.t().exp()).conj() * z.conj().imag.tanh()
            return torch.view_as_real(torch.fft.fft(w)).sum(-1).tanh() + w.abs()

        same(lambda: Net(square), loss, every=every)

    def test_values_without_a_storage_are_kept(self) -> None:
        class Sparse(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(LINE, LINE))

            def forward(self, x: Tensor) -> Tensor:
                mask = (x > 0.5).float().to_sparse()
                return torch.sparse.mm(mask, torch.tanh(self.weight)).sigmoid() * torch.tanh(x)

        same(Sparse, static=False)

    def test_tensor_subclasses_are_kept(self) -> None:
        class Tagged(Tensor):
            pass

        def function(h: Tensor) -> Tensor:
            tagged = torch.tanh(h).as_subclass(Tagged)
            return (tagged.sigmoid() * tagged).as_subclass(Tensor).exp()

        same(lambda: Net(function), static=False)


# --- random numbers --------------------------------------------------------------------------------------------------


class TestRandom:
    @both
    def test_a_generator_of_the_script(self, every: bool) -> None:
        def build() -> nn.Module:
            generator = torch.Generator().manual_seed(3)

            def function(h: Tensor) -> Tensor:
                mask = torch.empty_like(h).bernoulli_(0.5, generator=generator)
                noise = torch.randn(h.shape, generator=generator)
                return torch.tanh(h) * mask * noise + torch.rand_like(h) * torch.sigmoid(h)

            return Net(function)

        same(build, every=every)

    def test_kinds_of_dropout(self) -> None:
        def function(h: Tensor) -> Tensor:
            h = F.dropout(torch.tanh(h), 0.3)
            h = F.alpha_dropout(h, 0.2, training=True).sigmoid()
            h = F.dropout1d(h[None], 0.2)[0].tanh()
            h = F.dropout(h * 1.5, 0.2, inplace=True)
            h = torch.native_dropout(h, 0.3, True)[0] * h
            return F.gumbel_softmax(F.rrelu(h, training=True), tau=0.5)

        same(lambda: Net(function))

    def test_the_state_is_set_back_when_a_re_run_fails(self) -> None:
        def fails() -> None:
            torch.rand(3)
            raise ValueError("no")

        recipe = Recipe(fails, rule_of(torch.ops.aten.rand.default), (), {}, 0)
        recipe.generator = torch.default_generator
        torch.manual_seed(1)
        recipe.state = torch.get_rng_state()
        torch.manual_seed(2)
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match="no"):
            recipe.run(False)
        assert torch.equal(before, torch.get_rng_state())

    def test_numbers_drawn_in_backward(self) -> None:
        """Rebuilding must not disturb draws of the script's between nodes of the backward pass."""

        class Noisy(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                return grad + torch.randn_like(grad)

        same(lambda: Net(lambda h: F.dropout(Noisy.apply(F.dropout(torch.tanh(h), 0.2)), 0.2).sigmoid()))


# --- lives -----------------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Raises in backward when told to."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if Fails.armed:
            raise KeyError("backward")
        return grad


class Failing(nn.Module):
    """Raises in the middle of its forward or backward when told to."""

    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = MLP(out=LINE), MLP(out=LINE)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = Fails.apply(torch.sigmoid(x))
        if self.armed:
            raise KeyError("forward")
        return self.last(y * x)


class TestLives:
    @both
    @pytest.mark.parametrize("where", ["forward", "backward", "loss"])
    @pytest.mark.parametrize("when", [0, 1, 2, 3])
    def test_exceptions(self, every: bool, where: str, when: int) -> None:
        """A step that fails, whatever the session is doing, leaves nothing behind, and the next ones are right."""

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            if i == when:
                model.armed, Fails.armed = where == "forward", where == "backward"
                try:
                    loss = square_loss(model, 50)
                    if where == "loss":
                        raise KeyError("loss")
                    loss.backward()
                except KeyError:
                    pass
                finally:
                    model.armed = Fails.armed = False
                loss = None
            optimizer.zero_grad()
            loss = square_loss(model, i)
            loss.backward()
            optimizer.step()
            return loss.detach()

        plain = train(Case(Failing, step, sgd), steps=7)
        session = ForcedSession(everything)
        taped = train(Case(Failing, step, sgd), session, every=every, steps=7)
        check_same(plain, taped)
        assert session.plan is not None
        if (when, where) != (1, "loss"):  # then it is recorded again: see test_a_plan_for_an_untypical_step
            assert taped.reruns[-1] == len(session.plan.rerun) > 0

    def test_a_plan_for_an_untypical_step(self) -> None:
        """The recorded step has a forward pass that no backward follows; no other step has one."""

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            if i == 1:
                square_loss(model, 50)
            optimizer.zero_grad()
            loss = square_loss(model, i)
            loss.backward()
            optimizer.step()
            return loss.detach()

        session = ForcedSession(everything)
        taped = train(Case(MLP, step, sgd), session, steps=12)
        assert session.plan is not None
        assert taped.reruns[-1] == len(session.plan.rerun)

    @both
    @pytest.mark.parametrize("where", ["forward", "backward", "abandoned", "partial", "dead", "no backward"])
    def test_nothing_leaks(self, every: bool, where: str) -> None:
        """After a step that fails or is left half-way, all of its memory is free again."""
        model = Failing()
        with forced(None if every else model):
            start(model, lambda i: square_loss(model, i).backward(), 4)
            model.zero_grad()
            x = normal(4, 16, LINE)

            def step() -> None:
                model.armed, Fails.armed = where == "forward", where == "backward"
                try:
                    out = model(x)
                    if where == "abandoned":
                        del out
                    elif where == "partial":
                        torch.autograd.grad(out[0].sum(), [model.last.head.weight])
                    elif where == "dead":
                        out.exp().sigmoid()
                        out.sum().backward()
                    elif where == "no backward":
                        out.square().mean()
                    else:
                        out.sum().backward()
                except KeyError:
                    pass
                model.armed = Fails.armed = False
                model.zero_grad()

            def steps() -> None:
                step()
                square_loss(model, 5).backward()  # what an unfinished step leaves goes with the next one
                model.zero_grad()

            assert leaked(steps) == 0

    @both
    def test_training_forward_passes_that_no_backward_follows(self, every: bool) -> None:
        model = Failing()
        with forced(None if every else model):
            start(model, lambda i: square_loss(model, i).backward(), 4)
            x = normal(4, 16, LINE)

            def many(count: int) -> None:
                for _ in range(count):
                    model(x).sum()

            once = leaked(lambda: many(1))
            assert leaked(lambda: many(20)) <= once

            def again() -> None:
                many(1)
                square_loss(model, 5).backward()
                model.zero_grad()

            assert leaked(again) <= 0

    @both
    def test_evaluation_between_steps(self, every: bool) -> None:
        """Left alone: no mode, no hooks, and the same results."""
        seen = []

        class Seen(MLP):
            def forward(self, x: Tensor) -> Tensor:
                tops = (compat.dispatch_modes.top(), compat.top_hooks(), compat.function_modes.top())
                seen.append((self.training and torch.is_grad_enabled(), tops))
                return super().forward(x)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
            x = normal(i, 64, LINE)
            model.eval()
            with torch.no_grad():
                first = model(x)
            second = model(x)
            with torch.inference_mode():
                third = model(x).clone()
            model.train()
            with torch.no_grad():
                fourth = model(x)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return [loss.detach(), first, second.detach(), torch.from_numpy(third.numpy().copy()), fourth]

        same(Seen, step=step, every=every, static=False)
        taped = seen[len(seen) // 2 :]
        quiet = [tops for training, tops in taped if not training]
        assert len(quiet) == 20
        assert set(quiet) == {(None, None, None)}
        assert any(tops[2] is not None for _, tops in taped[12:])


# --- neighbours ------------------------------------------------------------------------------------------------------


class Views(nn.Module):
    """Makes no value, so that nothing can be dropped in it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1).view_as(x)


class Count(TorchDispatchMode):
    """A dispatch mode of the script's."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += func is not torch.ops.aten.detach.default  # without hooks, autograd detaches outputs that it saves
        return func(*args, **(kwargs or {}))


class TestNeighbours:
    @both
    def test_functorch_inside(self, every: bool) -> None:
        class Transforms(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = MLP(out=LINE, dropout=0.0)
                self.scale = nn.Parameter(torch.ones(LINE))

            def forward(self, x: Tensor) -> Tensor:
                x = torch.tanh(self.net(x)) * self.scale

                def energy(row: Tensor) -> Tensor:
                    return (torch.sin(row) * self.scale).square().sum()

                grads = torch.vmap(torch.func.grad(energy))(x)
                jacobian = torch.func.jacrev(lambda r: torch.tanh(r[:3]) * self.scale[:3])(x[0])
                values = torch.vmap(lambda row: torch.tanh(row).sum())(x)
                _, tangent = torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))
                return torch.sigmoid(grads + x) + jacobian.sum() + values[:, None] + tangent

        same(Transforms, every=every, static=False)

    @both
    def test_functorch_around(self, every: bool) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
            parameters = dict(model.named_parameters())
            x = normal(i, 8, LINE)

            def loss_of(parameters: Any, x: Tensor) -> Tensor:
                return torch.func.functional_call(model, parameters, (x,)).square().mean()

            grads = torch.func.grad(loss_of)(parameters, x)
            rows = torch.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, x)
            optimizer.zero_grad()
            loss = loss_of(parameters, x)
            loss.backward()
            optimizer.step()
            return [*grads.values(), *rows.values(), loss.detach()]

        same(lambda: MLP(dropout=0.0), step=step, every=every, static=False)

    @both
    def test_foreign_hooks_around(self, every: bool) -> None:
        """The model is left to them."""

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                loss = square_loss(model, i)
            loss.backward()
            optimizer.step()
            return loss

        plain = train(Case(MLP, step, sgd))
        session = ForcedSession(everything)
        taped = train(Case(MLP, step, sgd), session, every=every)
        check_same(plain, taped)
        assert sum(taped.reruns) == 0
        assert any("hooks of another tool" in why for _, why, _ in session.unhandled)
        assert all("test_rules.py" in where for _, _, where in session.unhandled)

    @both
    def test_foreign_hooks_inside(self, every: bool) -> None:
        """What is saved under them is theirs; the modules around stay taped."""
        packed: list[int] = []

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.middle, self.last = MLP(out=LINE), MLP(out=LINE), MLP(out=LINE)
                self.views = Views()

            def forward(self, x: Tensor) -> Tensor:
                x = self.middle(torch.tanh(self.first(x)))

                def pack(t: Tensor) -> Any:
                    packed.append(t.numel())
                    return t.detach().clone().numpy()

                with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
                    x = torch.sigmoid(self.views(self.middle(x)))
                return torch.tanh(self.last(torch.tanh(x)))

        session = same(Inside, every=every, static=False)
        assert session.plan is not None
        assert session.reruns[2:] == [len(session.plan.rerun)] * 3
        assert len(packed) == 10 * (len(packed) // 10)
        assert packed[: len(packed) // 10] * 10 == packed

    @both
    def test_backward_under_foreign_hooks(self, every: bool) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            x = normal(i, 16, LINE)
            out = model(x)
            with torch.autograd.graph.save_on_cpu():
                loss = out.square().mean()
                loss.backward()
            optimizer.step()
            return loss

        same(MLP, step=step, every=every)

    @both
    @pytest.mark.parametrize("where", ["around", "inside", "loss"])
    def test_foreign_modes(self, every: bool, where: str) -> None:
        """A mode of the script's sees every op of its own block, once, and is still there where its block ends."""
        counts: list[int] = []

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.middle, self.last = MLP(out=LINE), Net(torch.sigmoid), MLP(out=LINE)
                self.views = Views()

            def forward(self, x: Tensor) -> Tensor:
                x = torch.tanh(self.first(x))
                if where != "inside":
                    return torch.tanh(self.last(self.middle(x)))
                before = compat.dispatch_modes.top()
                with Count() as count:
                    x = torch.sigmoid(self.middle(self.views(x)))
                    assert compat.dispatch_modes.top() is count
                assert compat.dispatch_modes.top() is before
                counts.append(count.ops)
                return torch.tanh(self.last(x))

        def loss(model: nn.Module, i: int) -> Tensor:
            x = normal(i, 16, LINE)
            if where == "around":
                with Count() as count:
                    out = model(x)
                counts.append(count.ops)
                return out.square().mean()
            if where == "loss":
                out = model(x)
                with Count() as count:
                    value = out.square().mean()
                counts.append(count.ops)
                return value
            return model(x).square().mean()

        same(Inside, loss, every=every, static=False)
        assert len(counts) == 10
        assert len(set(counts)) == 1

    @both
    def test_under_foreign_modes_what_is_planned_is_dropped(self, every: bool) -> None:
        """Whether the script's mode or ours is asked first is another thing while recording than later."""

        def function(x: Tensor) -> Tensor:
            y = (x * 1.5).sigmoid_()
            with Count():
                z = torch.tanh(y)
            return z * x

        session = same(lambda: Net(function), every=every)
        assert session.plan is not None
        assert session.reruns[2:] == [len(session.plan.rerun)] * 3

    @both
    def test_compiled_parts(self, every: bool) -> None:
        """They stay compiled: a mode around them would switch them off."""
        torch._dynamo.reset()
        runs: list[int] = []

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                runs.append(len(module.graph.nodes))
                return module.forward(*args)

            return run

        class Parts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = MLP(out=LINE, dropout=0.0), MLP(dropout=0.0)
                self.middle = torch.compile(MLP(out=LINE, dropout=0.0), backend=backend)
                self.second = MLP(out=LINE, dropout=0.0)
                self.second.compile(backend=backend)
                self.function = torch.compile(lambda x: torch.sin(x).exp(), backend=backend)

            def forward(self, x: Tensor) -> Tensor:
                x = torch.tanh(self.middle(torch.tanh(self.first(x))))
                return self.last(torch.sigmoid(self.function(self.second(x))))

        same(Parts, every=every, static=False)
        torch._dynamo.reset()
        assert len(runs) == 3 * 10

    def test_a_compiled_root(self) -> None:
        torch._dynamo.reset()
        runs: list[int] = []

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                runs.append(1)
                return module.forward(*args)

            return run

        case = Case(lambda: torch.compile(MLP(dropout=0.0), backend=backend), simple_step(square_loss), sgd)
        plain = train(case)
        taped = train(case, ForcedSession(everything), every=True)
        torch._dynamo.reset()
        check_same(plain, taped)
        assert len(runs) == 10


# --- scope -----------------------------------------------------------------------------------------------------------


class TestScope:
    def test_the_model_stays_as_it_is(self) -> None:
        """Pickle, deepcopy, state_dict, torch.save, type and attributes of a model under apply."""
        model, twin = AttentionDecoder(), AttentionDecoder()
        twin.load_state_dict(model.state_dict())
        with forced(model):
            start(model, lambda i: model(normal(i, 2, 4, 32), tokens(i, 2, 3)).sum().backward(), 4)
            model.zero_grad()
            assert type(model) is AttentionDecoder
            assert model.__dict__.keys() == twin.__dict__.keys()
            assert all(
                a.__dict__.keys() == b.__dict__.keys() for a, b in zip(model.modules(), twin.modules(), strict=True)
            )
            assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert list(other.state_dict()) == list(twin.state_dict())
                x, ids = normal(9, 2, 4, 32), tokens(9, 2, 3)
                torch.manual_seed(5)
                mine = model(x, ids)
                torch.manual_seed(5)
                assert torch.equal(mine, other(x, ids))

    @both
    def test_average_of_the_weights_by_deepcopy(self, every: bool) -> None:
        def build() -> nn.Module:
            model = MLP()
            object.__setattr__(model, "average", None)
            return model

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
            optimizer.zero_grad()
            loss = square_loss(model, i)
            loss.backward()
            optimizer.step()
            if i % 2:
                object.__setattr__(model, "average", copy.deepcopy(model).requires_grad_(False))
            out = [loss.detach()]
            if model.average is not None:
                for mine, theirs in zip(model.average.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
                out += [model.average.eval()(normal(i, 4, LINE))]
            return out

        same(build, step=step, every=every, static=False)

    @both
    def test_forward_called_directly(self, every: bool) -> None:
        """The call of the root is not seen then; those of its children are, or none: right either way."""

        class Direct(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = MLP(out=LINE)
                self.last = MLP()

            def forward(self, x: Tensor) -> Tensor:
                return self.last(torch.tanh(self.inner.forward(x)))

        same(Direct, every=every)

        plain = train(Case(Direct, simple_step(lambda m, i: m.forward(normal(i, 8, LINE)).square().mean()), sgd))
        session = ForcedSession(everything)
        taped = train(
            Case(Direct, simple_step(lambda m, i: m.forward(normal(i, 8, LINE)).square().mean()), sgd),
            session,
            every=every,
        )
        check_same(plain, taped)

    @both
    def test_modules_called_many_times_in_a_step(self, every: bool) -> None:
        class Often(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = MLP(out=LINE)

            def forward(self, x: Tensor) -> Tensor:
                for _ in range(6):
                    x = torch.tanh(self.net(x)) + x
                return x

        same(Often, every=every)

    @both
    def test_shapes_that_change_in_every_step(self, every: bool) -> None:
        """The plan is made for one length and holds for all."""
        shapes = [(4, 5, 5), (7, 6, 9), (7, 6, 7), (3, 9, 3), (5, 5, 12), (6, 4, 1), (2, 7, 9)]

        def loss(model: nn.Module, i: int) -> Tensor:
            batch, source, length = shapes[i]
            ids = tokens(i, batch, length + 1)
            logits = model(normal(i, batch, source, 32), ids[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

        plain = train(Case(AttentionDecoder, simple_step(loss), sgd), steps=7)
        session = ForcedSession(everything)
        taped = train(Case(AttentionDecoder, simple_step(loss), sgd), session, every=every, steps=7)
        check_same(plain, taped)
        for (_, _, length), reruns in zip(shapes[2:], taped.reruns[2:], strict=True):
            assert 24 * length <= reruns <= 30 * length + 15

    @both
    def test_several_forward_passes_before_one_backward(self, every: bool) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            first = model(normal(i, 16, LINE))
            second = model(normal(i + 1, 16, LINE))
            third = model(first.repeat(1, 4) + normal(i, 16, 28))
            loss = (first * second).mean() + third.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        same(Several, step=step, every=every, static=False)

    @both
    def test_two_models_and_two_optimizers(self, every: bool) -> None:
        """As in adversarial training: each has its own backward, and graphs cross from one to the other."""

        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.maker, self.judge = MLP(out=LINE), MLP(out=1)

        def build() -> nn.Module:
            pair = Pair()
            pair.forward = lambda x: pair.judge(pair.maker(x))
            return pair

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> list[Tensor]:
            x = normal(i, 16, LINE)
            made = model.maker(x)
            optimizer.zero_grad()
            judged = model.judge(made.detach()).sigmoid().mean() - model.judge(x).tanh().mean()
            judged.backward()
            optimizer.step()
            optimizer.zero_grad()
            fooled = -model.judge(made).sigmoid().mean()
            fooled.backward()
            optimizer.step()
            return [judged.detach(), fooled.detach()]

        plain = train(Case(build, step, sgd), steps=6)
        if every:
            session = ForcedSession(everything)
            taped = train(Case(build, step, sgd), session, every=True, steps=6)
            sessions = [session]
        else:
            sessions = [ForcedSession(everything), ForcedSession(everything)]
            torch.manual_seed(7)
            model = build()
            model.train()
            optimizer = sgd(model)
            torch.manual_seed(8)
            sessions[0].watch(model.maker)
            sessions[1].watch(model.judge)
            taped = Trace()
            loop(model, optimizer, step, 6, taped)
            for session in sessions:
                session.close()
        check_same(plain, taped)
        assert taped.reruns[-1] > 0

    def test_apply_on_two_models(self) -> None:
        first, second = MLP(), MLP(out=3)
        handles = [torch_echo.apply(m, max_overhead=0.5, cost="analytic") for m in (first, second)]
        optimizers = [sgd(first), sgd(second)]
        for i in range(5):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                square_loss(model, i).backward()
                optimizer.step()
        assert all("peak" in str(h.report()).lower() for h in handles)
        handles[0].remove()
        handles[0].remove()
        square_loss(second, 4).backward()
        handles[1].remove()

    def test_remove_in_the_middle_of_a_step(self) -> None:
        """Handles of the step under way keep working; after it everything is plain."""

        def run(session: ForcedSession | None) -> Trace:
            trace = Trace()
            torch.manual_seed(3)
            model = MLP()
            if session is not None:
                session.watch(model)

            def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
                optimizer.zero_grad()
                loss = square_loss(model, i)
                if i == 3 and session is not None:
                    session.close()
                    session.close()
                loss.backward()
                optimizer.step()
                return loss.detach()

            loop(model, sgd(model), step, 6, trace)
            return trace

        taped = run(ForcedSession(everything))
        check_same(run(None), taped)
        assert taped.reruns[2] == taped.reruns[3] > 0
        assert taped.reruns[4:] == [0, 0]

    @both
    def test_training_in_a_thread(self, every: bool) -> None:
        case = CASES["tensor_hooks"]
        plain = train(case)
        session = ForcedSession(everything)
        result: list[Trace] = []
        thread = threading.Thread(target=lambda: result.append(train(case, session, every=every)))
        thread.start()
        thread.join()
        check_same(plain, result[0])
        assert session.plan is not None
        assert result[0].reruns[-1] == len(session.plan.rerun) > 0

    @both
    def test_training_in_two_threads_at_once(self, every: bool) -> None:
        def work(seed: int) -> list[Tensor]:
            torch_seed = torch.Generator().manual_seed(seed)
            model = MLP(dropout=0.0)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn(p.shape, generator=torch_seed) * 0.3)
            if session is not None and not every:
                session._add_root(model)
            optimizer = sgd(model)
            for i in range(12):
                optimizer.zero_grad()
                square_loss(model, i + seed).backward()
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        session = None
        expected = [work(0), work(100)]
        session = ForcedSession(everything)
        if every:
            session.watch_all()
        else:
            session.watch(nn.Linear(1, 1))
        found: dict[int, list[Tensor]] = {}
        failures: list[BaseException] = []

        def run(seed: int) -> None:
            try:
                found[seed] = work(seed)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in (0, 100)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        session.close()
        assert not failures
        for seed, mine in zip((0, 100), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, found[seed], strict=True))

    @FINDS_PROFILES
    def test_a_thread_that_ends_in_the_middle_of_the_recorded_iteration(self) -> None:
        model = MLP()

        def steps(first: int, count: int) -> None:
            for i in range(first, first + count):
                model.zero_grad()
                loss = square_loss(model, i)
                if i != 1:  # the recorded one: its backward pass never comes
                    loss.backward()

        with forced(model) as session:
            for first, count in ((0, 2), (2, 6)):
                thread = threading.Thread(target=steps, args=(first, count))
                thread.start()
                thread.join()
            assert session.plan is not None
            assert not session.unhandled

    @FINDS_PROFILES
    def test_a_profile_that_is_lost_with_its_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with PyTorch 2.11: training goes on as plain PyTorch, and it is said why."""
        monkeypatch.setattr(compat.MemoryProfile, "lost", False)
        stop = torch.profiler.profile.stop
        started = threading.current_thread()

        def fail(profile: Any) -> None:
            if profile.profiler is not None:
                stop(profile)
            if threading.current_thread() is not started:
                raise RuntimeError("Can't disable Kineto profiler when it's not running")

        model, done = MLP(), []

        def steps(first: int, count: int) -> None:
            for i in range(first, first + count):
                model.zero_grad()
                loss = square_loss(model, i)
                if i != 1:
                    loss.backward()
                done.append(i)

        with forced(model) as session:
            started = threading.Thread(target=steps, args=(0, 2))
            started.start()
            started.join()
            monkeypatch.setattr(torch.profiler.profile, "stop", fail)
            thread = threading.Thread(target=steps, args=(2, 4))
            thread.start()
            thread.join()
            assert done == list(range(6)) and session.plan is None
            assert any("the thread on which a step was recorded ended" in str(why) for why in session.unhandled)

    def test_two_threads_in_the_middle_of_a_forward(self) -> None:
        """Mode and hooks of one are not those of the other."""
        meet = threading.Barrier(2, timeout=30)
        wait = False
        modes: list[Any] = []

        def function(h: Tensor) -> Tensor:
            h = torch.tanh(h)
            if wait:
                meet.wait()
                modes.append(compat.function_modes.top())
                meet.wait()
            return torch.sigmoid(h).exp()

        model = Net(function)
        with forced(model):
            start(model, lambda i: square_loss(model, i).backward(), 4)
            model.zero_grad()
            wait = True
            found: list[Tensor] = []

            def run(i: int) -> None:
                x = normal(i, 4, LINE)
                found.append(torch.autograd.grad(model(x).sum(), model.first.weight)[0])

            threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        wait = False
        assert len(found) == 2
        assert len({id(m) for m in modes if m is not None}) == 2
        expected = [torch.autograd.grad(model(normal(i, 4, LINE)).sum(), model.first.weight)[0] for i in range(2)]
        assert all(any(torch.equal(e, f) for f in found) for e in expected)

    def test_isinstance_and_names(self) -> None:
        lstm = nn.LSTM(4, 4)
        with forced(lstm):
            assert type(lstm) is nn.LSTM
            assert "torch_echo" not in repr(lstm)
            assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


class Several(nn.Module):
    """For several forward passes: 28 columns more than MLP's out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.net(F.pad(x, (0, LINE - x.shape[1]))))


class TestPlans:
    def test_what_backward_never_asks_for_is_not_dropped(self) -> None:
        """Its recipe would only pin what it reads."""
        with forced(model := Net(lambda h: torch.tanh(h) + 1)) as session:
            start(model, lambda i: square_loss(model, i).backward(), 3)
        graph = session.graph
        assert graph is not None
        (add,) = [op for op in graph.ops if op.name == "aten::add" and op.layer]
        assert decide(graph, add.writes).tables  # an input of a linear layer
        (first, _) = [op for op in graph.ops if op.name == "aten::addmm"]
        assert not decide(graph, first.writes).tables

    def test_ops_that_read_only_a_shape_pin_nothing(self) -> None:
        with forced(model := Net(lambda h: F.dropout(h * 2))) as session:
            start(model, lambda i: square_loss(model, i).backward(), 3)
        assert session.graph is not None
        (empty,) = [op for op in session.graph.ops if op.name == "aten::empty_like"]
        assert empty.reads == ()


# --- what users are told ---------------------------------------------------------------------------------------------


class TestErrors:
    def test_an_unsupported_device(self) -> None:
        with pytest.raises(UnsupportedDevice, match=r"MLP is on meta; torch-echo handles cpu and cuda"):
            torch_echo.apply(MLP().to("meta"))

    def test_an_unsupported_device_under_run(self) -> None:
        session = Session(Options(cost="analytic"))
        session.watch_all()
        try:
            model = MLP().to("meta")
            for _ in range(3):
                model(torch.empty(2, LINE, device="meta")).sum().backward()
            assert ["meta" in why for _, why, _ in session.unhandled] == [True]
        finally:
            session.close()

    def test_a_budget_that_can_not_be_met(self) -> None:
        model = MLP()
        handle = torch_echo.apply(model, memory_budget="1KiB", cost="analytic")
        optimizer = sgd(model)

        def step(i: int) -> None:
            optimizer.zero_grad()
            square_loss(model, i).backward()
            optimizer.step()

        step(0)
        step(1)
        with pytest.raises(
            BudgetInfeasible, match=r"memory_budget 1.0 KiB can't be met: the least reachable peak is "
        ) as info:
            step(2)
        assert info.value.budget == 1024 < info.value.floor
        step(3)  # in plain PyTorch
        step(4)
        handle.remove()

    def test_the_least_peak_instead(self) -> None:
        case = CASES["transformer_lm"]
        session = Session(Options(memory_budget=1024, on_infeasible="least", cost="analytic"))
        plain, taped = train(case), train(case, session)
        check_same(plain, taped)
        assert session.plan is not None
        assert session.plan.peak == session.plan.floor < session.plan.base_peak
        check_footprint(session)

    @pytest.mark.parametrize(
        "name", [name for name in CASES if name != "accumulation"]
    )  # there it is not the step's peak
    def test_the_baseline_of_a_step_that_was_spared_memory(self, name: str) -> None:
        case = CASES[name]
        session = Session(Options(memory_budget=1024, on_infeasible="least", cost="analytic"))
        plain = train(case)
        train(case, session)
        check_baseline(plain, session, 0.01)

    def test_strict(self) -> None:
        """What would be left to plain PyTorch in silence is an error."""
        model = MLP()
        handle = torch_echo.apply(model, strict=True, cost="analytic")
        with torch.autograd.graph.save_on_cpu(), pytest.raises(CaptureError, match="hooks of another tool"):
            square_loss(model, 0)
        handle.remove()

    @FINDS_PROFILES
    def test_a_profiler_of_the_script(self) -> None:
        """Planning waits until it has ended."""

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            if i < 4:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                    loss = square_loss(model, i)
                    loss.backward()
            else:
                loss = square_loss(model, i)
                loss.backward()
            optimizer.step()
            return loss.detach()

        plain = train(Case(MLP, step, sgd, static=False), steps=4)
        session = ForcedSession(everything)
        taped = train(Case(MLP, step, sgd), session, steps=8)
        for name in ("losses", "parameters", "gradients", "rng"):
            del getattr(taped, name)[4:]
        taped.buffers = taped.buffers[:4]
        check_same(plain, taped)
        assert session.plan is not None
        assert taped.reruns[-1] > 0

    def test_a_profile_that_is_lost_to_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with PyTorch 2.11. The next can be started."""
        profile = compat.MemoryProfile()
        profile.start()
        stop = profile._profile.stop

        def fail() -> None:
            stop()
            raise RuntimeError("Can't disable Kineto profiler when it's not running")

        monkeypatch.setattr(profile._profile, "stop", fail)
        assert not profile.stop()
        assert not compat.MemoryProfile.lost
        with pytest.raises(CaptureError, match="another profiler"):
            profile.events(compat.CPU)

    def test_a_report_before_there_is_a_plan(self) -> None:
        handle = torch_echo.apply(MLP())
        with pytest.raises(CaptureError, match="no plan yet: 0 training steps seen"):
            handle.report()
        handle.remove()

    def test_no_warnings_in_a_plain_run(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare(CASES["frozen"])


class TestParametersWrittenInForward:
    """A parameter is a tensor like another: what a recipe reads of it is copied before the script overwrites it."""

    def test_decay(self) -> None:
        class Decayed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(64, 64)
                self.shift = nn.Parameter(torch.ones(64), requires_grad=False)

            def forward(self, x: Tensor) -> Tensor:
                result = (self.linear(x) - self.shift).sin().square().sum()
                with torch.no_grad():
                    self.shift.mul_(1.01)
                return result

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.randn(10, 64))
            loss.backward()
            optimizer.step()
            return loss.detach()

        compare(Case(Decayed, step), everything)
