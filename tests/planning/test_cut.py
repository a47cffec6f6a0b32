"""The minimum cut against all legal plans at random prices."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_echo.footprint import Replayer, check_plan
from torch_echo.graph import TrainingGraph, Trait
from torch_echo.planning import MinCut, Prices

from .brute import legal_plans, needed
from .graphs import Builder, examples, random_graphs, transformer


def cost(graph: TrainingGraph, plan: set[int], price: np.ndarray, op_price: np.ndarray) -> float:
    ops, values = needed(graph, plan)
    rerun = sum(graph.rerun_seconds(graph.ops[o]) + op_price[o] for o in ops)
    return float(rerun + sum(price[v] for v in values - plan if graph.values[v].keepable))


@examples(400)
@given(random_graphs(), st.integers(0, 2**32))
def test_no_legal_plan_is_cheaper(graph: TrainingGraph, seed: int) -> None:
    rng = random.Random(seed)
    price = np.array([rng.choice([0.0, 0.1, 1.0, 3.0, 10.0]) * rng.random() for _ in graph.values])
    op_price = np.array([rng.choice([0.0, 1.0]) * rng.random() for _ in graph.ops])
    cut = MinCut(Replayer(graph))
    mask = cut.solve(price, op_price)
    plan = set(np.flatnonzero(mask).tolist())
    check_plan(graph, plan)
    best = min((cost(graph, p, price, op_price) for p in legal_plans(graph)), default=None)
    if best is not None:
        assert cost(graph, plan, price, op_price) == pytest.approx(best, abs=1e-7)
        assert cut.cost(mask, price, op_price) == pytest.approx(best, abs=1e-7)


def mask_of(graph: TrainingGraph, plan: set[int]) -> np.ndarray:
    mask = np.zeros(len(graph.values), bool)
    mask[list(plan)] = True
    return mask


@examples(200)
@given(random_graphs(), st.data())
def test_complete_gives_a_legal_plan_that_drops_no_more_than_it_must(graph: TrainingGraph, data: st.DataObject) -> None:
    droppable = [v for v, ok in enumerate(graph.droppable()) if ok]
    asked = data.draw(st.sets(st.sampled_from(droppable))) if droppable else set()
    cut = MinCut(Replayer(graph))
    completed = cut.complete(mask_of(graph, asked))
    plans = list(legal_plans(graph, 9))
    if completed is None:
        return
    found = set(np.flatnonzero(completed).tolist())
    check_plan(graph, found)
    larger = [p for p in plans if asked <= p]
    assert all(found <= p for p in larger)


def test_ties_keep() -> None:
    b = Builder()
    x = b.op("mm", [b.outside(1)], [10], 1.0, saves=["out0"])[0]
    graph = b.backward()
    price = np.zeros(len(graph.values))
    price[x] = 1.0
    assert not MinCut(Replayer(graph)).solve(price).any()
    price[x] = 1.001
    assert MinCut(Replayer(graph)).solve(price)[x]


def test_prices_of_any_size() -> None:
    graph = transformer(2)
    cut = MinCut(Replayer(graph))
    nbytes = Prices(cut).nbytes
    assert not cut.solve(nbytes * 1e-30).any()
    everything = cut.solve(nbytes * 1e30)
    check_plan(graph, np.flatnonzero(everything).tolist())
    assert everything.sum() > 10


class TestPrices:
    def test_what_is_there_anyway_is_free(self) -> None:
        b = Builder()
        w = b.outside(100)
        x = b.op("mm", [w], [10], saves=["out0", w])[0]
        y = b.op("tanh", [x], [20], saves=["out0"])[0]
        b.hold(x)
        prices = Prices(MinCut(Replayer(b.backward())))
        assert prices.free.tolist() == [True, True, False]
        assert prices.nbytes.tolist() == [0, 0, 20]
        assert y == 2

    def test_a_value_is_charged_between_the_script_and_its_reader(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [10], saves=["out0"])[0]
        b.op("late", [b.outside(1)], [10], grad=1)
        graph = b.backward()
        prices = Prices(MinCut(Replayer(graph)))
        save = graph.saves[0]
        assert not prices.charged(graph.ops[0].start)[x]
        assert prices.charged(graph.ops[1].end)[x]
        assert prices.charged(save.unpack - 1)[x]
        assert not prices.charged(save.unpack)[x]

    def test_a_generator_state_is_charged_until_the_re_run(self) -> None:
        b = Builder(rng_state_bytes=16)
        b.op("bernoulli", [b.outside(1)], [10], traits=Trait.RANDOM, saves=["out0"])
        graph = b.backward()
        prices = Prices(MinCut(Replayer(graph)))
        assert prices.states().tolist() == [16.0, 0.0]
        assert prices.states(graph.ops[0].end).tolist() == [16.0, 0.0]
        assert prices.states(graph.saves[0].unpack).tolist() == [0.0, 0.0]
