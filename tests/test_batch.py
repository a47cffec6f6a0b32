"""Replays of many plans at once against replays one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.graphs import Builder, examples, random_graph, residual_chain, transformer
from torch_echo._batch import Batch
from torch_echo.footprint import Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.planning import MinCut


def agrees(graph: TrainingGraph, seed: int, plans: int = 12) -> Batch:
    """On random legal plans."""
    rng = np.random.default_rng(seed)
    replayer = Replayer(graph)
    cut, batch = MinCut(replayer), Batch(replayer)
    share = rng.choice([0.2, 0.6, 0.95], (plans, 1))
    masks, legal = cut.complete_all((rng.random((plans, replayer.n_values)) < share) & cut.rebuildable)
    masks = masks[legal]
    found = batch.replay(masks)
    for i, mask in enumerate(masks):
        assert np.array_equal(found.masks[i], cut.prune(mask))
        one = replayer.replay(np.flatnonzero(found.masks[i]).tolist())
        assert (found.peaks[i], found.ticks[i]) == (one.peak, one.tick)
        assert found.seconds[i] == pytest.approx(one.extra_seconds)
    return batch


@examples(400)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_agrees_with_replays_one_by_one(seed: int, keeps_graph: bool, functional: bool) -> None:
    """Overwritten and fused values, random ops, blocks taken over, values that the script holds, saves never read."""
    rng = random.Random(seed)
    agrees(random_graph(rng, rng.choice([4, 8, 16]), keeps_graph=keeps_graph, functional=functional), seed)


@pytest.mark.parametrize("graph", [transformer(3), residual_chain(40)], ids=["transformer", "chain"])
def test_agrees_on_larger_graphs(graph: TrainingGraph) -> None:
    """More plans than go at once."""
    batch = agrees(graph, 0, plans=70)
    assert batch.most < 70


def test_no_plan_and_nothing_to_drop() -> None:
    b = Builder()
    b.op("mm", [b.outside(100)], [10])
    batch = Batch(Replayer(b.backward()))
    nothing = np.zeros((2, 2), bool)
    assert batch.replay(nothing).peaks.tolist() == [110, 110]
    assert batch.replay(nothing[:0]).peaks.tolist() == []
    assert Batch(Replayer(TrainingGraph(base_bytes=5))).replay(np.zeros((1, 0), bool)).peaks.tolist() == [5]
