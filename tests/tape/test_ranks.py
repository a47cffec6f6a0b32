"""How ranks agree on a plan: with a store in this process, seen from either side. Real jobs are in ``test_distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_echo
from torch_echo import compat
from torch_echo.planning import Plan, plan
from torch_echo.tape import _ranks
from torch_echo.tape._ranks import Ranks, class_names, given_plan, plan_as_text, plan_from_text


def step(model: nn.Module, batch: int) -> None:
    model(torch.randn(batch, 12, 32))[0].sum().backward()


def recorded(batch: int = 16, layers: int = 3) -> tuple[Any, dict[int, Any]]:
    """A training graph, and the code objects that it knows."""
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Linear(32, 32), nn.GELU(), nn.Tanh())]
    model = nn.Sequential(*blocks, nn.GRU(32, 32, batch_first=True))
    with torch_echo.apply(model, cost="analytic") as handle:
        for _ in range(4):
            step(model, batch)
        session = handle._session
    kind = session.kinds.heaviest
    assert kind is not None and kind.graph is not None
    return kind.graph, kind.codes


class World:
    """Two ranks of one process: whoever asks is the one that is `speaking`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.HashStore()
        self.speaking = 0
        monkeypatch.setattr(compat, "process_group_store", lambda: self.store)
        monkeypatch.setattr(dist, "get_rank", lambda: self.speaking)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(_ranks, "START_PATIENCE", 0.05)
        monkeypatch.setattr(_ranks, "PATIENCE", 0.05)
        monkeypatch.setattr(Ranks, "_sessions", Ranks._sessions.__class__())
        self.notes: list[str] = []
        first = Ranks("run", self.notes.append)
        Ranks._sessions.clear()
        self.ranks = first, Ranks("run", self.notes.append)

    def at(self, rank: int) -> Ranks:
        self.speaking = rank
        return self.ranks[rank]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture(scope="module")
def graph() -> Any:
    return recorded()


def never() -> Plan:
    raise AssertionError("this rank was to take another's plan")


def front_of(graph: Any, share: float) -> Callable[[], Plan]:
    return lambda: plan(graph, max_overhead=share)


class TestText:
    def test_there_and_back(self, graph: Any) -> None:
        recorded_graph, codes = graph
        names = class_names(recorded_graph, codes)
        made = plan(recorded_graph, max_overhead=5.0)
        assert made.dropped
        text = plan_as_text(recorded_graph, made.dropped, names)
        back = plan_from_text(text, recorded_graph, names)
        assert back == made.dropped
        again = given_plan(recorded_graph, back)
        assert (again.peak, again.base_peak, again.dropped) == (made.peak, made.base_peak, made.dropped)

    def test_other_shapes(self, graph: Any) -> None:
        small, codes = graph
        large, codes_there = recorded(batch=40)
        names, there = class_names(small, codes), class_names(large, codes_there)
        assert {n for n in names if n} == {n for n in there if n}
        made = plan(small, max_overhead=5.0)
        taken = plan_from_text(plan_as_text(small, made.dropped, names), large, there)
        assert taken is not None
        where = [sorted((g.ops[g.values[v].producer].layer, g.ops[g.values[v].producer].name) for v in dropped)
                 for g, dropped in ((small, made.dropped), (large, taken))]  # fmt: skip
        assert where[0] == where[1]

    def test_names_do_not_repeat(self, graph: Any) -> None:
        names = [n for n in class_names(*graph) if n]
        assert len(names) == len(set(names))
        assert not any(str(identity) in name for identity in graph[1] for name in names)


class TestAgree:
    def test_rank_0s_plan_is_taken(self, world: World, graph: Any) -> None:
        world.at(0).begin(1)
        made = world.at(0).agree(1, *graph, None, front_of(graph[0], 5.0))
        world.at(1).begin(1)
        taken = world.at(1).agree(1, *graph, None, never)
        assert made.dropped == taken.dropped
        assert not world.notes

    def test_alone(self, monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
        ranks = Ranks("run", pytest.fail)
        ranks.begin(1)
        assert ranks.agree(1, *graph, None, front_of(graph[0], 5.0)).dropped
        assert (ranks.rank, ranks.size) == (0, 1)

    def test_rank_0_that_never_begins_is_waited_for_once(self, world: World, graph: Any) -> None:
        own = front_of(graph[0], 0.0)
        for number in range(1, 20):
            assert not world.at(1).agree(number, *graph, None, own).dropped
            world.ranks[1]._start_patience = world.ranks[1]._start_patience and 1e9
        assert not world.notes

    def test_rank_0_that_does_not_come_to_an_end(self, world: World, graph: Any) -> None:
        world.at(0).begin(1)
        assert not world.at(1).agree(1, *graph, None, front_of(graph[0], 0.0)).dropped
        assert len(world.notes) == 1 and "no plan came from rank 0" in world.notes[0]
        world.at(0).begin(2)
        world.ranks[1]._patience = world.ranks[1]._patience and 1e9  # it is not to wait a second time
        world.at(1).agree(2, *graph, None, front_of(graph[0], 0.0))

    def test_rank_0_that_gives_up_is_not_waited_for(self, world: World, graph: Any) -> None:
        world.ranks[1]._patience = 1e9
        world.at(0).begin(1)
        world.at(0).give_up(1)
        assert not world.at(1).agree(1, *graph, None, front_of(graph[0], 0.0)).dropped
        assert not world.notes

    def test_other_code(self, world: World, graph: Any) -> None:
        world.at(0).begin(1)
        world.at(0).agree(1, *graph, None, front_of(graph[0], 5.0))
        other = recorded(layers=2)
        assert not world.at(1).agree(1, *other, None, front_of(other[0], 0.0)).dropped
        assert "ran other code" in world.notes[0]

    def test_a_budget_goes_before(self, world: World, graph: Any) -> None:
        budget = plan(graph[0], max_overhead=5.0).peak
        world.at(0).begin(1)
        world.at(0).agree(1, *graph, budget, front_of(graph[0], 0.0))
        assert world.at(1).agree(1, *graph, budget, front_of(graph[0], 5.0)).peak <= budget
        assert "memory budget" in world.notes[0]

    def test_a_budget_that_no_plan_meets(self, world: World, graph: Any) -> None:
        world.at(0).begin(1)
        made = world.at(0).agree(1, *graph, 1, front_of(graph[0], 5.0))
        assert world.at(1).agree(1, *graph, 1, front_of(graph[0], 0.0)).dropped == made.dropped

    def test_a_rank_that_records_again_keeps_the_plan(self, world: World, graph: Any) -> None:
        world.at(0).begin(1)
        made = world.at(0).agree(1, *graph, None, front_of(graph[0], 5.0))
        for number in (1, 2, 3):
            assert world.at(1).agree(number, *graph, None, never).dropped == made.dropped

    def test_a_newer_plan_is_followed(self, world: World, graph: Any) -> None:
        world.at(0).begin(1)
        world.at(0).agree(1, *graph, None, front_of(graph[0], 0.0))
        world.at(1).agree(1, *graph, None, never)
        assert not world.at(1).newer(10)
        world.at(0).begin(2)
        made = world.at(0).agree(2, *graph, None, front_of(graph[0], 5.0))
        assert [i for i in range(11, 41) if world.at(1).newer(i)] == [20]
        given = world.at(1).given(*graph)
        assert given is not None and given.dropped == made.dropped

    def test_a_lost_store(self, world: World, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        class Lost:
            def __getattr__(self, _: str) -> Any:
                raise dist.DistNetworkError("gone")

        monkeypatch.setattr(compat, "prefixed_store", lambda *_: Lost())
        world.at(1).begin(1)
        assert not world.at(1).agree(1, *graph, None, front_of(graph[0], 0.0)).dropped
        assert world.notes == ["ranks plan apart: DistNetworkError: gone"]


class TestPeaks:
    def test_all_are_collected(self, world: World) -> None:
        for rank, peak in enumerate((5, 7)):
            world.at(rank).tell(peak, [("module", "too odd", "train.py:3")] if rank else [])
        world.at(0).collect()
        assert world.at(0).peaks == {0: 5, 1: 7}
        assert world.at(0).notes == {1: [("module", "too odd", "train.py:3")]}

    def test_it_does_not_go_on_for_ever(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        world.at(0).tell(5, [])
        asked: list[Any] = []
        prefixed = compat.prefixed_store

        def counted(*args: Any) -> Any:
            asked.append(args)
            return prefixed(*args)

        for _ in range(2 * _ranks.ATTEMPTS):
            world.at(0).collect()
        monkeypatch.setattr(compat, "prefixed_store", counted)
        world.at(0).collect()
        assert not asked
