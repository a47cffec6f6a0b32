"""Each op, called on parts of its operands as its rule says, gives the parts of its result, or summands of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_echo.compile._rows import RowRules, Rows, shape_of

aten = torch.ops.aten
N, V, B = 12, 5, 4
LABELS = torch.arange(N) % V
WEIGHT = torch.rand(V, 7)


def nodes_of(f: Callable[..., Any], *inputs: Tensor) -> list[fx.Node]:
    return list(make_fx(f, tracing_mode="fake")(*inputs).graph.nodes)


def part(value: Tensor, rows: Rows, low: int, high: int) -> Tensor:
    flat = value.flatten(rows.dim, rows.dim + rows.dims - 1)
    return flat.narrow(rows.dim, low * rows.factor, (high - low) * rows.factor)


def check(f: Callable[..., Any], x: Tensor, rows: Rows, units: int, *others: Tensor) -> tuple[Rows | None, str]:
    """Every node with a rule, in three parts. Returns the rows of the result and how it is put together ("" without a rule)."""
    nodes = nodes_of(f, x, *others)
    marks, values = {nodes[0]: rows}, dict(zip(nodes, (x, *others), strict=False))
    book, last = RowRules(units, marks), (None, "")
    bounds = [0, units // 3, units // 2, units]
    for node in nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
        rule = book.rule(node) if any(n in marks for n in node.all_input_nodes) else None
        last = (None, "") if rule is None else (rule.out, "rows" if rule.out else rule.total)
        if rule is None:
            continue
        made = []
        for low, high in pairwise(bounds):
            target, args, kwargs = rule.call(high - low) if rule.call else (node.target, node.args, node.kwargs)

            def operand(n: fx.Node, needs: Any = rule.needs, at: tuple[int, int] = (low, high)) -> Any:
                return part(values[n], needs[n], *at) if n in needs else values[n]

            args, kwargs = fx.map_arg((args, kwargs), operand)
            made.append(target(*args, **kwargs))
        if rule.out is None:
            shares = [(h - low) / units if rule.total == "mean" else 1 for low, h in pairwise(bounds)]
            torch.testing.assert_close(sum(m * s for m, s in zip(made, shares, strict=True)), values[node])
        else:
            marks[node] = rule.out
            for m, low, high in zip(made, bounds, bounds[1:], strict=False):
                torch.testing.assert_close(m, part(values[node], rule.out, low, high))
    return last


FIRST, SECOND, SPREAD = Rows(0), Rows(1), Rows(0, 2)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x, w, y: torch.exp(x) * torch.ones(V) + torch.ones(N, 1), FIRST),
        (lambda x, w, y: torch.where(x > 0, x, 0.0).to(torch.float64), FIRST),
        (lambda x, w, y: x.log_softmax(-1), FIRST),
        (lambda x, w, y: x.t().softmax(0), SECOND),
        (lambda x, w, y: x.amax(-1, keepdim=True), FIRST),
        (lambda x, w, y: x.logsumexp(1), FIRST),
        (lambda x, w, y: x.argmax(1), FIRST),
        (lambda x, w, y: x.t().sum(0), FIRST),
        (lambda x, w, y: x @ w, FIRST),
        (lambda x, w, y: torch.addmm(torch.ones(7), x, w), FIRST),
        (lambda x, w, y: w.t() @ x.t(), SECOND),
        (lambda x, w, y: x.unsqueeze(0).unsqueeze(-1), SECOND),
        (lambda x, w, y: x.unsqueeze(1).squeeze(1), FIRST),
        (lambda x, w, y: x[:, 1:4], FIRST),
        (lambda x, w, y: x.unsqueeze(1).expand(N, 3, V), FIRST),
        (lambda x, w, y: x.gather(1, y.unsqueeze(1)), FIRST),
        (lambda x, w, y: aten.scatter(x, 1, y.unsqueeze(1), -1.0), FIRST),
        (lambda x, w, y: torch.nn.functional.pad(x, (1, 2)), FIRST),
        (lambda x, w, y: aten.slice_backward(x, [N, 9], 1, 0, V, 1), FIRST),
        (lambda x, w, y: aten.slice_scatter(torch.zeros(N, 9), x, 1, 2, 7), FIRST),
        (lambda x, w, y: x.view(B, N // B, V), SPREAD),
        (lambda x, w, y: x.view(B, N // B, V).tanh().log_softmax(-1).view(N, V), FIRST),
        (lambda x, w, y: x.view(B, N // B, V).sum(-1), SPREAD),
        (lambda x, w, y: x.view(1, N, V), SECOND),
        (lambda x, w, y: aten.nll_loss_backward(torch.ones(()), x, y, None, 1, -100, w.sum()), FIRST),
    ],
)
def test_rows_are_kept(f: Callable[..., Tensor], expected: Rows) -> None:
    assert check(f, torch.randn(N, V), Rows(0), N, WEIGHT, LABELS) == (expected, "rows")


@pytest.mark.parametrize(
    ("f", "total"),
    [
        (lambda x, w, y: x.sum(), "sum"),
        (lambda x, w, y: x.sum(0, keepdim=True), "sum"),
        (lambda x, w, y: x.mean(), "mean"),
        (lambda x, w, y: x.t().mean(1), "mean"),
        (lambda x, w, y: x.t() @ torch.ones(N, 3), "sum"),
        (lambda x, w, y: torch.ones(3, N) @ x, "sum"),
        (lambda x, w, y: x.view(B, N // B, V).sum((0, 1)), "sum"),
        (lambda x, w, y: x.view(B, N // B, V).mean(), "mean"),
    ],
)
def test_sums_over_rows(f: Callable[..., Tensor], total: str) -> None:
    assert check(f, torch.randn(N, V), Rows(0), N, WEIGHT, LABELS) == (None, total)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, y: x.softmax(0),
        lambda x, w, y: x.cumsum(0),
        lambda x, w, y: x.flip(0),
        lambda x, w, y: x.amax(0),
        lambda x, w, y: x[1:],
        lambda x, w, y: x[y],
        lambda x, w, y: x.view(V, N).sum(1),
        lambda x, w, y: x.view(torch.int32),
        lambda x, w, y: torch.addmm(torch.ones(V, 3), x.t(), torch.ones(N, 3)),
        lambda x, w, y: x.gather(0, y.unsqueeze(1)),
        lambda x, w, y: x.view(B, N // B, V).sum(1),
        lambda x, w, y: x.view(B, N // B, V) * torch.ones(B, 1, 1),
        lambda x, w, y: aten.native_dropout(x, 0.5, True)[0],
        lambda x, w, y: torch.sort(x, 1).values,
    ],
)
def test_no_rule(f: Callable[..., Tensor]) -> None:
    assert check(f, torch.randn(N, V), Rows(0), N, WEIGHT, LABELS) == (None, "")


def test_rows_in_units_of_several() -> None:
    """Parted by sequences, the rows of a sequence stay together, so that it may be cut."""

    def shifted(x: Tensor) -> Tensor:
        return x.view(B, N // B, V)[:, :-1].clone().view(-1, V).log_softmax(-1)

    assert check(shifted, torch.randn(N, V), Rows(0, 1, N // B), B) == (Rows(0, 1, N // B - 1), "rows")


def test_for_its_result() -> None:
    """A constant is taken in parts if its result has to be."""
    (_, full, *_) = nodes_of(lambda x: torch.full((N, V), 2.0) * x, torch.randn(N, V))
    rule = RowRules(N, {}).rule(full, Rows(0))
    assert rule is not None and rule.call is not None and not rule.needs
    target, args, kwargs = rule.call(3)
    assert torch.equal(target(*args, **kwargs), torch.full((3, V), 2.0))


def test_symbols_have_no_rule() -> None:
    graph = make_fx(lambda x: x.tanh(), tracing_mode="symbolic")(torch.randn(N, V)).graph
    x, tanh = list(graph.nodes)[:2]
    if tanh.target is not aten.tanh.default:  # a size comes first
        tanh = next(n for n in graph.nodes if n.target is aten.tanh.default)
    assert RowRules(N, {x: Rows(0)}).rule(tanh) is None


def test_shapes_of_parts() -> None:
    assert Rows(1, 2, 3).part([7, 4, 6, 5], 2) == [7, 6, 5]
    assert shape_of(nodes_of(lambda x: x, torch.ones(2, 3))[0]) == (2, 3)
