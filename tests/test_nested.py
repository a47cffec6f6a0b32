"""Values that are rebuilt more than once: the schedule and its footprint."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planning.graphs import Builder, examples, random_graphs
from torch_echo import nested
from torch_echo.footprint import Replayer
from torch_echo.graph import Kind, TrainingGraph, Trait
from torch_echo.planning import front


def chain(length: int, nbytes: int = 100) -> TrainingGraph:
    """Ops one after the other, of each of which backward reads the output."""
    b = Builder(step_seconds=3.0 * length)
    x = b.outside(nbytes, Kind.INPUT)
    for _ in range(length):
        x = b.op("tanh", [x], [nbytes], 1.0, saves=["out0"])[0]
    return b.backward()


@examples(400)
@given(random_graphs(10, functional=True), st.data())
def test_without_groups_it_is_the_replay(graph: TrainingGraph, data: st.DataObject) -> None:
    for op in graph.ops:
        op.traits &= ~Trait.REUSES
    replayer = Replayer(graph)
    able = [v for v, ok in enumerate(replayer.v_droppable) if ok and nested.possible(replayer, [v])]
    assume(able)
    dropped = data.draw(st.sets(st.sampled_from(able), min_size=1))
    expected, found = replayer.replay(dropped), nested.replay(replayer, dropped, ())
    assert found.rerun == expected.rerun
    assert (found.peak, found.tick) == (expected.peak, expected.tick)
    assert found.composition() == expected.composition()
    assert found.extra_seconds == pytest.approx(expected.extra_seconds)


def test_a_group_is_rebuilt_ahead_and_the_rest_from_it() -> None:
    """Of eight links the last is kept; 2 and 5 are a group, made from the input."""
    graph = chain(8)
    made = [graph.ops[i].writes[0] for i in range(8)]
    dropped = [v for i, v in enumerate(made) if i != 7]
    group = (made[2], made[5])
    replayer = Replayer(graph)
    steps = nested.schedule(replayer, dropped, [group])
    assert [(s.op, s.group) for s in steps] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0),  # what lies between is let go of
        (6, -1), (3, -1), (4, -1), (0, -1), (1, -1),
    ]  # fmt: skip
    flat, deep = replayer.replay(dropped), nested.replay(replayer, dropped, [group])
    assert flat.rerun == list(range(7))
    assert flat.peak == 800  # the input and seven links
    assert deep.peak == 400  # the input, the group, and two links at a time
    assert sum(deep.composition().values()) == deep.peak
    assert deep.extra_seconds == pytest.approx(11.0)


def test_a_long_chain_needs_memory_like_the_root_of_its_length() -> None:
    length = 400
    graph = chain(length)
    flat, deep = front(graph).least, front(graph, nested=True).least
    assert deep.groups
    assert deep.peak < 70 * 100 < flat.peak  # at best 2 * 20 and what is in the making
    found = nested.replay(Replayer(graph), deep.dropped, deep.groups)
    assert (found.peak, found.extra_seconds) == (deep.peak, pytest.approx(deep.extra_seconds))


def test_what_must_not_run_twice_again_is_refused() -> None:
    b = Builder()
    x = b.op("dropout", [b.outside(1)], [10], traits=Trait.RANDOM, saves=["out0"])[0]
    with pytest.raises(ValueError, match="random"):
        nested.replay(Replayer(b.backward()), {x}, [(x,)])
