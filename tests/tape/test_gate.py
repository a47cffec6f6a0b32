"""The gate: mode and hooks for those calls only that need them; and views of one storage that do not meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torch_echo import compat
from torch_echo.graph import TrainingGraph
from torch_echo.tape._mode import Tape
from torch_echo.tape._recipe import Passes, disjoint, region

from .harness import ForcedSession, forced
from .models import normal

LINE = 32


class Loop(nn.Module):
    """Steps of a matrix product, a tanh and a sigmoid."""

    def __init__(self, steps: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(LINE, LINE)
        self.steps = steps
        self.write = False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            y = self.linear(x)
            x = torch.sigmoid(torch.tanh(y))
            if self.write:
                y.add_(1)  # nothing saved y; only a recipe reads it
        return x


def first_tanhs(count: int) -> Any:
    """Drops the outputs of the first so many tanh's."""

    def choose(graph: TrainingGraph) -> set[int]:
        return {w for op in [op for op in graph.ops if op.name == "aten::tanh"][:count] for w in op.writes}

    return choose


def step(model: nn.Module, i: int) -> list[Tensor]:
    model.zero_grad()
    model(normal(i, 16, LINE)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(session: ForcedSession, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """Ops that a planned step shows to the dispatch mode, and how many saved tensors it shows to the hooks."""
    for i in range(3):
        step(model, i)
    seen: list[str] = []
    packed: list[int] = []
    dispatch, pack = Tape.__torch_dispatch__, Tape.pack

    def watch(self: Tape, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(compat.op_name(func)[0])
        return dispatch(self, func, types, args, kwargs)

    def count(self: Tape, tensor: Tensor) -> Any:
        packed.append(tensor.numel())
        return pack(self, tensor)

    monkeypatch.setattr(Tape, "__torch_dispatch__", watch)
    monkeypatch.setattr(Tape, "pack", count)
    step(model, 3)
    return seen, len(packed)


class TestGate:
    @pytest.mark.parametrize("count", [0, 3, 8])
    def test_only_the_calls_that_need_it_are_seen(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Loop()
        with forced(model, first_tanhs(count)) as session:
            seen, packed = train(session, model, monkeypatch)
            assert session.plan is not None
            assert len(session.plan.rerun) == count
        assert seen == ["aten::tanh"] * count
        assert packed == count  # its result: sigmoid saves its own

    def test_functions_of_torch_that_are_written_in_python(self) -> None:
        """Two calls at two places run the same code of torch; the first of each keeps what the second drops."""

        class Pools(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(2, 2, 3, padding=1)

            def forward(self, x: Tensor) -> Tensor:
                for _ in range(2):
                    x = F.dropout(F.max_pool2d(self.conv(x), 2), 0.5)
                x = F.dropout(torch.tanh(x), 0.5)
                return x

        def choose(graph: TrainingGraph) -> set[int]:
            pools = [op for op in graph.ops if op.name == "aten::max_pool2d_with_indices"]
            masks = [op for op in graph.ops if op.name in ("aten::empty_like", "aten::bernoulli_", "aten::div_")]
            return {w for op in (*pools[1:], *masks[3:]) for w in op.writes}

        model = Pools()
        with forced(model, choose) as session:
            for i in range(5):
                before = Passes.rerun
                model.zero_grad()
                model(normal(i, 4, 2, 16, 16)).square().mean().backward()
            assert session.plan is not None
            assert Passes.rerun - before == len(session.plan.rerun) == 1 + 2 * 3
            assert session.measured_peak == session.plan.peak

    @pytest.mark.parametrize("read", [False, True])
    def test_writes_are_seen_where_a_rebuild_would_miss_them(self, read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """A batch norm's counter is overwritten, and no recipe reads it; with `read`, what a recipe made is."""

        class Norm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(LINE)

            def forward(self, x: Tensor) -> Tensor:
                y = self.norm(x).exp()
                x = torch.sigmoid(torch.tanh(y * 2))
                if read:
                    z = y * 3
                    x = x + torch.tanh(z)
                    z.mul_(2)
                return x

        def choose(graph: TrainingGraph) -> set[int]:
            ops = [op for op in graph.ops if op.name == "aten::tanh"]
            if read:  # what the second tanh reads is overwritten before backward, so it is rebuilt too
                ops = [ops[1], graph.ops[graph.values[ops[1].reads[0]].producer]]
            return {w for op in ops for w in op.writes}

        model, plain = Norm(), Norm()
        plain.load_state_dict(model.state_dict())
        opened: list[Any] = []
        opening = Tape.opening
        with forced(model, choose):
            for i in range(3):
                step(model, i)
            monkeypatch.setattr(Tape, "opening", lambda *given: opened.append(given) or opening(*given))  # type: ignore[func-returns-value]
            after = step(model, 3)
        assert len(opened) == (3 if read else 1)  # the product, its tanh, the write; or a tanh
        for i in range(4):
            expected = step(plain, i)
        assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))

    def test_longer_than_recorded(self) -> None:
        """The turns after those that are known follow the class."""
        model, plain = Loop(), Loop()
        plain.load_state_dict(model.state_dict())
        with forced(model, first_tanhs(4)):
            for i in range(3):
                step(model, i)
            for steps, dropped in ((3, 3), (20, 4 + 6)):
                model.steps = plain.steps = steps
                before = Passes.rerun
                mine = step(model, 5)
                assert Passes.rerun - before == dropped
                assert all(torch.equal(a, b) for a, b in zip(mine, step(plain, 5), strict=True))

    def test_a_place_that_the_recorded_step_did_not_come_to(self) -> None:
        """All is on there: the write is seen, and what recipes need is copied first."""
        model, plain = Loop(), Loop()
        plain.load_state_dict(model.state_dict())
        with forced(model, first_tanhs(8)):
            for i in range(3):
                step(model, i)
            model.write = plain.write = True
            assert all(torch.equal(a, b) for a, b in zip(step(model, 3), step(plain, 3), strict=True))

    def test_modes_of_the_script_within(self) -> None:
        """A function mode of the script's is on top of the gate, and both see what they are to see."""
        names: list[str] = []

        class Names(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                names.append(getattr(func, "__name__", "?"))
                return func(*args, **(kwargs or {}))

        class Inside(Loop):
            def forward(self, x: Tensor) -> Tensor:
                with Names():
                    x = super().forward(x)
                return super().forward(x)

        model, plain = Inside(), Inside()
        plain.load_state_dict(model.state_dict())
        with forced(model) as session:
            for i in range(5):
                names.clear()
                mine = step(model, i)
                count = len(names)
                theirs = step(plain, i)
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
                assert len(names) == 2 * count
            assert session.plan is not None
            assert len(session.plan.rerun) > 0
        assert compat.function_modes.top() is None


class TestDisjoint:
    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_is_never_wrong(self, data: st.DataObject) -> None:
        """Against the elements themselves; False is always allowed."""
        base = torch.arange(2 * 6 * 8).reshape(2, 6, 8)
        if data.draw(st.booleans()):
            base = base.transpose(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)))
        views = []
        for _ in range(2):
            view = base
            for dim in range(3):
                start = data.draw(st.integers(0, view.size(dim) - 1))
                view = view.narrow(dim, start, data.draw(st.integers(1, view.size(dim) - start)))
            if data.draw(st.booleans()):
                view = view[0]
            views.append(view)
        apart = not set(views[0].flatten().tolist()) & set(views[1].flatten().tolist())
        assert apart or not disjoint(region(views[0]), region(views[1]))

    def test_chunks(self) -> None:
        for base in (torch.empty(4, 8), torch.empty(3, 4, 8)):
            for a, b in ((0, 1), (1, 3), (3, 0)):
                chunks = base.chunk(4, -1)
                assert disjoint(region(chunks[a]), region(chunks[b]))
                assert not disjoint(region(chunks[a]), region(chunks[a]))
                assert not disjoint(region(chunks[a]), region(base))

    def test_gates_of_an_lstm_cell_are_one_value(self) -> None:
        """Each is activated in place, and saved: all are read from the last version, and a rebuild makes no copies."""

        class Cells(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cell = nn.LSTMCell(LINE, LINE)

            def forward(self, x: Tensor) -> Tensor:
                h = c = x
                for _ in range(4):
                    h, c = self.cell(x, (h, c))
                return h

        model, plain = Cells(), Cells()
        plain.load_state_dict(model.state_dict())
        with forced(model) as session:
            for i in range(5):
                assert all(torch.equal(a, b) for a, b in zip(step(model, i), step(plain, i), strict=True))
            graph = session.graph
            assert graph is not None
            saved = {save.value for save in graph.saves}
            later = {(v.storage, v.version) for i, v in enumerate(graph.values) if i in saved}
            assert all((s, version + 1) not in {(v.storage, v.version) for v in graph.values} for s, version in later)
            assert session.measured_peak == session.plan.peak  # type: ignore[union-attr]
