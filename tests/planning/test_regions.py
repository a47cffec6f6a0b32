"""Regions: what one call of a module hands to another is kept, the rest is rebuilt by itself."""

from __future__ import annotations

import pytest

from torch_echo.footprint import Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.planning import front
from torch_echo.planning._regions import boundaries
from torch_echo.planning._search import Search

from .graphs import Builder

STEPS = 24


def loop(layers: int = 2) -> TrainingGraph:
    """Cells over time, each with a matrix product that reads the state before, and much that is made of it."""
    b = Builder(step_seconds=1000.0)
    x = b.outside(0)
    states = [x] * layers
    for step in range(STEPS):
        below = x
        for i in range(layers):
            name = f"net.cells.{i}"
            first = len(b.graph.ops)
            (gates,) = b.op("mm", [below, states[i]], [400], 5.0, layer=f"{name}.linear", saves=[below, states[i]])
            (a,) = b.op("norm", [gates], [400], 1.0, layer=f"{name}.norm", saves=[gates, "out0"])
            (c,) = b.op("tanh", [a], [400], 1.0, layer=name, saves=["out0"])
            (h,) = b.op("mul", [c, a], [100], 1.0, layer=name, saves=[c, a])
            below = states[i] = h
            for op in b.graph.ops[first:]:
                op.call = step
    return b.backward()


def test_boundaries() -> None:
    """By depth: the steps of the network (their cells are no other regions), the cells, what is called in these."""
    graph = loop()
    found = [set(kept.nonzero()[0].tolist()) for kept in boundaries(Replayer(graph))]
    states = {op.writes[0] for op in graph.ops if op.name == "mul"}
    assert [len(kept) for kept in found] == [2 * (STEPS - 1), 2 * STEPS - 1, 2 * STEPS * 3 - 1]
    assert found[0] < found[1] < states < found[2] | states


def test_a_chain_through_all_steps_is_cut_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """No price does it: what is inside of the cells reads their states, and re-runs the chain at no further cost."""
    graph = loop()
    least = front(graph).least
    assert least.peak <= 100 * (2 * STEPS - 1) + 1300  # the states, and one cell
    monkeypatch.setattr(Search, "regions", lambda self: None)
    assert front(graph).least.peak > 1.2 * least.peak
