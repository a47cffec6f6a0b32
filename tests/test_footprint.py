"""The replay against a slow reference on random graphs, and its rules one by one on small graphs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.graphs import Builder, examples, random_graphs, residual_chain
from planning.reference import Reference
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
    seconds = sum(graph.rerun_seconds(graph.ops[o]) for o in found.rerun)
    seconds -= sum(graph.ops[o].seconds - graph.ops[o].reuse_seconds for o in reference.reused)
    assert found.extra_seconds == pytest.approx(seconds)
    return found


@examples(300)
@given(random_graphs(10), st.data())
def test_agrees_with_the_reference(graph: TrainingGraph, data: st.DataObject) -> None:
    found = agrees(graph, random_plan(data, graph))
    assert len(set(found.rerun)) == len(found.rerun)


@examples(300)
@given(random_graphs(10, keeps_graph=True), st.data())
def test_agrees_with_the_reference_when_a_pass_keeps_the_graph(graph: TrainingGraph, data: st.DataObject) -> None:
    agrees(graph, random_plan(data, graph))


class TestBaseline:
    def test_counts_what_is_there_before(self) -> None:
        b = Builder()
        b.op("mm", [b.outside(100)], [10])
        graph = b.backward()
        graph.base_bytes = 1000
        found = replay(graph)
        assert (found.peak, found.extra_seconds, found.rerun) == (1110, 0.0, [])
        assert found.composition() == {
            (UNTRACKED, Kind.TEMPORARY): 1000,
            ("", Kind.PARAMETER): 100,
            ("", Kind.FEATURE_MAP): 10,
        }

    def test_names_the_op_of_the_peak(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [10], saves=["out0"])[0]
        b.op("big", [x], [500], grad=1)
        found = replay(b.backward())
        assert found.op == 1
        assert found.rerun_op == -1

    def test_empty_graph(self) -> None:
        assert replay(TrainingGraph(base_bytes=5)).peak == 5


class TestRebuilding:
    def test_a_dropped_value_is_gone_between_forward_and_its_reader(self) -> None:
        b = Builder(rerun_overhead=0.5)
        x = b.op("mm", [b.outside(1)], [10], 3.0, saves=["out0"])[0]
        y = b.op("tanh", [x], [1000], 2.0, saves=["out0"])[0]
        b.op("sum", [y], [1])
        b.op("late", [b.outside(1)], [600])
        graph = b.backward()
        kept, found = replay(graph), replay(graph, {y})
        assert (kept.peak, found.peak) == (2 + 10 + 1000 + 600, 2 + 10 + 1001)
        assert (found.rerun, found.extra_seconds) == ([1], 2.5)

    def test_an_op_that_nothing_reads_from_is_not_re_run(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [10])[0]
        y = b.op("add", [x], [10])[0]
        b.op("tanh", [y], [10], saves=["out0"])
        assert replay(b.backward(), {x, y}).rerun == []

    def test_workspace_counts_while_the_op_re_runs(self) -> None:
        b = Builder()
        x = b.op("conv", [b.outside(1)], [10], workspace=700, saves=["out0"])[0]
        found = replay(b.backward(), {x})
        assert (found.peak, found.op, found.rerun_op) == (711, 1, 0)
        assert found.composition()["", Kind.TEMPORARY] == 700

    def test_a_record_pins_what_its_op_read(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [100])[0]
        y = b.op("relu", [x], [100], saves=["out0"])[0]
        b.op("sum", [y], [1])
        b.op("late", [b.outside(1)], [150])
        graph = b.backward()
        assert replay(graph, {y}).peak == 252  # x instead of y, nothing gained
        assert replay(graph, {x, y}).peak == 202

    def test_a_random_op_pins_the_state_of_its_generator(self) -> None:
        b = Builder(rng_state_bytes=40)
        m = b.op("bernoulli", [b.outside(1)], [100], traits=Trait.RANDOM, saves=["out0"])[0]
        b.op("late", [b.outside(1)], [90])
        found = replay(b.backward(), {m})
        assert found.peak == 2 + 40 + 100
        assert ("", Kind.RNG_STATE) in found.composition()

    def test_a_value_that_the_script_holds_is_used_and_not_rebuilt(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [100], saves=["out0"])[0]
        b.hold(x)
        assert replay(b.backward(), {x}).rerun == []

    def test_in_place_rebuild_takes_over_the_block(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [100])[0]
        y = b.op("relu_", [x], [], in_place=x, saves=["out0"])[0]
        graph = b.backward()
        found = replay(graph, {x, y})
        assert (found.rerun, found.peak) == ([0, 1], 101)

    def test_in_place_rebuild_copies_what_another_still_needs(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [100])[0]
        z = b.op("tanh", [x], [10], saves=["out0"])[0]
        y = b.op("relu_", [x], [], in_place=x, saves=["out0"])[0]
        graph = b.backward()
        found = replay(graph, {x, y, z})
        assert found.rerun == [0, 2, 1]  # y is read first; the first version stays for z
        assert found.peak == 1 + 100 + 100


@pytest.mark.parametrize("blocks", [100, 5000])
def test_a_residual_chain_re_runs_each_op_at_most_once(blocks: int) -> None:
    graph = residual_chain(blocks)
    droppable = {v for v, ok in enumerate(graph.droppable()) if ok}
    found = replay(graph, droppable)
    assert sorted(found.rerun) == sorted(set(found.rerun))
    assert len(found.rerun) == 2 * blocks  # all but the last sum and the loss


class TestErrors:
    def test_a_value_that_may_not_be_dropped(self) -> None:
        b = Builder()
        w = b.outside(1)
        b.op("mm", [w], [1])
        with pytest.raises(ValueError, match="value 0 may not be dropped"):
            replay(b.backward(), {w})

    def test_no_such_value(self) -> None:
        with pytest.raises(ValueError, match="indices below 0, got 7"):
            replay(TrainingGraph(), {7})

    def test_not_closed_under_versions(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [1])[0]
        y = b.op("relu_", [x], [], in_place=x, saves=["out0"])[0]
        with pytest.raises(ValueError, match="value 2 is dropped but not value 1"):
            replay(b.backward(), {y})


class TestCheckPlan:
    @examples(100)
    @given(random_graphs(), st.data())
    def test_legal_plans_pass(self, graph: TrainingGraph, data: st.DataObject) -> None:
        from planning.brute import legal_plans

        plans = list(legal_plans(graph, 8))
        if plans:
            check_plan(graph, data.draw(st.sampled_from(plans)))

    def test_re_run_from_something_overwritten(self) -> None:
        b = Builder()
        x = b.op("mm", [b.outside(1)], [1])[0]
        y = b.op("tanh", [x], [1], saves=["out0"])[0]
        b.op("relu_", [x], [], in_place=x)
        with pytest.raises(ValueError, match=r"op 1 \(:tanh\) would be re-run from value 1, which is overwritten"):
            check_plan(b.backward(), {y})

    def test_an_op_that_must_not_be_re_run(self) -> None:
        b = Builder()
        x = b.op("all_reduce", [b.outside(1)], [1], traits=Trait.KEEP, saves=["out0"])[0]
        with pytest.raises(ValueError, match="may not be dropped"):
            check_plan(b.backward(), {x})

    def test_an_op_that_writes_a_buffer_is_never_re_run(self) -> None:
        b = Builder()
        buffer = b.outside(8, Kind.BUFFER)
        y = b.op("norm", [buffer], [10], in_place=buffer, saves=["out1"])[1]
        with pytest.raises(ValueError, match="may not be dropped"):
            check_plan(b.backward(), {y})


def test_a_replayer_gives_the_same_again() -> None:
    replayer = Replayer(residual_chain(5))
    plan = {v for v, ok in enumerate(replayer.v_droppable) if ok}
    first, _, second = replayer.replay(plan), replayer.replay(), replayer.replay(plan)
    assert (first.peak, first.rerun) == (second.peak, second.rerun)
    assert first.storages_at(first.tick).keys() <= first.storages_at().keys()


def test_what_rebuilding_costs() -> None:
    b = Builder(rerun_overhead=0.5)
    b.graph.rebuilt_byte_seconds = 0.25
    b.op("split", [b.outside(4)], [8, 2], 1.0)
    assert b.graph.rerun_seconds(b.graph.ops[0]) == 1.0 + 0.5 + 0.25 * (8 + 2)
