"""What no plan can beat."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torch_echo.footprint import Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.graphio import save_graph
from torch_echo.planning import bound, front

from .brute import legal_plans
from .graphs import Builder, examples, random_graph, random_graphs, transformer


@examples(150)
@given(random_graphs(7), st.data())
def test_no_legal_plan_is_faster(graph: TrainingGraph, data: st.DataObject) -> None:
    replayer = Replayer(graph)
    found = [replayer.replay(plan) for plan in legal_plans(graph)]
    assume(found)
    budget = data.draw(st.sampled_from(sorted({f.peak for f in found})))
    best = min(f.extra_seconds for f in found if f.peak <= budget)
    assert bound(graph, budget).seconds <= best + 1e-6


def test_a_budget_that_nothing_meets() -> None:
    b = Builder()
    b.op("mm", [b.outside(10)], [100], saves=["out0"])
    assert bound(b.backward(), 50).seconds == math.inf


@pytest.mark.parametrize("at", range(4))
def test_the_search_is_near_the_optimum(at: int) -> None:
    graph = transformer(2)
    points = [p for p in front(graph).points if p.extra_seconds > 0]
    point = points[at * (len(points) - 1) // 3]
    least = bound(graph, point.peak)
    assert least.optimal
    assert least.seconds <= point.extra_seconds <= 1.25 * least.seconds


def test_in_words(tmp_path: Path) -> None:
    """On the command line, and nothing else there."""
    file = tmp_path / "graph"
    save_graph(transformer(2), file)
    command = [sys.executable, "-m", "torch_echo", "explain", "--max-overhead", "0.1", str(file)]
    plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    command.insert(-1, "--bound")
    *same, said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert same == plain.splitlines()
    assert said.startswith("at this peak no plan that rebuilds values once takes less than ")


def test_a_relaxation_where_time_is_short() -> None:
    graph = transformer(4)
    point = front(graph).points[0]
    exact, quick = bound(graph, point.peak), bound(graph, point.peak, time_limit=0.05)
    assert not quick.optimal
    assert 0 < quick.seconds <= exact.seconds


def test_several_passes_are_refused() -> None:
    import random

    graphs = (random_graph(random.Random(seed), keeps_graph=True) for seed in range(50))
    graph = next(g for g in graphs if any(p.keeps_graph for p in g.passes))
    with pytest.raises(ValueError, match="one backward pass"):
        bound(graph, 1)
