"""The paper's rule on its own three cases, and what a baseline must be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from torch_echo.footprint import Replayer, check_plan
from torch_echo.graph import Kind, Op, Phase, TrainingGraph
from torch_echo.planning import MinCut, Prices, is_heavy, plan
from torch_echo.planning._paper import paper_plan

from .graphs import Builder, examples, random_graphs


def dropped(graph: TrainingGraph) -> set[int]:
    return set(np.flatnonzero(paper_plan(Prices(MinCut(Replayer(graph))))).tolist())


def fully_connected(b: Builder, x: int, nbytes: int = 100) -> int:
    w = b.outside(8)
    return b.op("addmm", [x, w], [nbytes], 10.0, saves=[x, w])[0]


def test_case_1_a_sum_of_two_products_is_kept() -> None:
    """tanh(FC(x) + FC(y)): the sum releases two tensors for one, tanh one for one (a tie)."""
    b = Builder()
    x, y = fully_connected(b, b.outside(8, Kind.INPUT)), fully_connected(b, b.outside(8, Kind.INPUT))
    s = b.op("add", [x, y], [100])[0]
    b.op("tanh", [s], [100], saves=["out0"])
    assert dropped(b.backward()) == set()


def test_case_2_additive_attention_over_shared_keys_is_rebuilt() -> None:
    """Every step makes a large tensor from the keys, which all steps share, and a small query."""
    b = Builder()
    keys = fully_connected(b, b.outside(8, Kind.INPUT), 1000)
    state = b.outside(8, Kind.INPUT)
    expected = set()
    for _ in range(5):
        query = fully_connected(b, state, 20)
        s = b.op("add", [keys, query], [1000])[0]
        t = b.op("tanh", [s], [1000], saves=["out0"])[0]
        scores = b.op("mv", [t], [50], 5.0, saves=[t])[0]
        a = b.op("softmax", [scores], [50], saves=["out0"])[0]
        state = b.op("bmm", [a, keys], [20], 5.0, saves=[a, keys])[0]
        expected |= {s, t}
    graph = b.backward()
    assert dropped(graph) == expected
    made = plan(graph, policy="paper")
    assert sorted(graph.ops[o].name for o in made.rerun) == ["add"] * 5 + ["tanh"] * 5
    assert made.peak < made.base_peak - 3000


def test_case_3_the_inner_tanh_is_kept_and_the_outer_rebuilt() -> None:
    """FC(tanh(tanh(x))): FC is not re-run, although its input is."""
    b = Builder()
    x = fully_connected(b, b.outside(8, Kind.INPUT))
    inner = b.op("tanh", [x], [100], saves=["out0"])[0]
    outer = b.op("tanh", [inner], [100], saves=["out0"])[0]
    fully_connected(b, outer)
    graph = b.backward()
    assert dropped(graph) == {outer}
    assert plan(graph, policy="paper").rerun == [2]


@examples(150)
@given(random_graphs(12))
def test_always_legal(graph: TrainingGraph) -> None:
    found = dropped(graph)
    check_plan(graph, found)


@pytest.mark.parametrize(
    ("name", "heavy"),
    [
        ("addmm", True),
        ("mm", True),
        ("aten.bmm.default", True),
        ("aten::convolution", True),
        ("_scaled_dot_product_flash_attention_for_cpu", True),
        ("mkldnn_rnn_layer", True),
        ("_cudnn_rnn", True),
        ("_thnn_fused_lstm_cell", True),
        ("tanh", False),
        ("comm", False),
        ("add", False),
        ("native_layer_norm", False),
    ],
)
def test_heavy_by_name(name: str, heavy: bool) -> None:
    assert is_heavy(Op(name, "", Phase.FORWARD, 0, 0, 0, 0)) is heavy


def test_heavy_by_intensity() -> None:
    assert is_heavy(Op("fused", "", Phase.FORWARD, 0, 0, 0, 0, flops=1e6, bytes_moved=1000))
    assert not is_heavy(Op("fused", "", Phase.FORWARD, 0, 0, 0, 0, flops=1e3, bytes_moved=1000))
