"""The replay against a slow reference on random graphs, and its rules one by one on small graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.graphs import Builder, random_graph, random_graphs, residual_chain
from tests.planning.reference import Reference
from torch_echo.footprint import UNTRACKED, Footprint, Replayer, check_plan, replay
from torch_echo.graph import Kind, TrainingGraph, Trait


def random_plan(data: st.DataObject, graph: TrainingGraph) -> set[int]:
    droppable = [v for v, ok in enumerate(graph.droppable()) if ok]
    chosen = data.draw(st.sets(st.sampled_from(droppable))) if droppable else set()
    plan = graph.chain(chosen)
    return plan if plan <= set(droppable) else set()


def agrees(graph: TrainingGraph, plan: set[int]) -> Footprint:
    found, reference = replay(graph, plan), Reference(graph, plan)
    assert found.rerun == reference.rerun
    assert found.peak == reference.peak
    assert sum(found.composition().values()) == found.peak
    assert max(found.curve()[1]) == found.peak
    seconds = sum(graph.ops[o].seconds + graph.rerun_overhead for o in found.rerun)
    assert found.extra_seconds == pytest.approx(seconds)
    return found


@settings(max_examples=300, deadline=None)
@given(random_graphs(), st.data())
def test_agrees_with_the_reference(graph: TrainingGraph, data: st.DataObject) -> None:
    found = agrees(graph, random_plan(data, graph))
    assert len(set(found.rerun)) == len(found.rerun)


@settings(max_examples=200, deadline=None)
@given(random_graphs(keeps_graph=True), st.data())
def test_agrees_with_the_reference_when_a_pass_keeps_the_graph(graph: TrainingGraph, data: st.DataObject) -> None:
    agrees(graph, random_plan(data, graph))
