"""Orders of kernels, on made-up ones."""

from __future__ import annotations

import itertools
import random

import pytest

from torch_echo.compile._order import Block, Kernels, improve, improved, in_turn, peak_of


def kernels(n: int, blocks: list[Block], overwrites: list[tuple[int, int]] | None = None) -> Kernels:
    """Each waits for those that write what it reads."""
    waits = [frozenset(w for b in blocks if k in b.readers for w in b.writers if w != k) for k in range(n)]
    return Kernels(waits, blocks, overwrites or [])


def legal(made: Kernels, order: list[int]) -> bool:
    at = {k: i for i, k in enumerate(order)}
    return sorted(order) == list(range(len(made.waits))) and all(
        at[w] < at[k] for k, waits in enumerate(made.waits) for w in waits
    )


def made_up(seed: int) -> Kernels:
    draw = random.Random(seed)
    n = draw.randint(3, 7)
    blocks = [Block(draw.randint(1, 9), (), tuple(sorted(draw.sample(range(n), draw.randint(1, 2)))))]
    for k in range(n):
        later = range(k + 1, n)
        readers = tuple(sorted(draw.sample(later, min(len(later), draw.randint(0, 2)))))
        blocks.append(Block(draw.randint(1, 9), (k,), readers, stays=not readers))
    return kernels(n, blocks)


def least(made: Kernels) -> int:
    orders = (list(o) for o in itertools.permutations(range(len(made.waits))))
    return min(peak_of(made, o) for o in orders if legal(made, o))


def test_peak() -> None:
    """Alive from its writer to its last reader; what stays, to the end; what is given, from the beginning."""
    made = kernels(
        3, [Block(1, (), (1,)), Block(10, (0,), (2,)), Block(100, (1,), ()), Block(1000, (2,), (), stays=True)]
    )
    assert peak_of(made, [0, 1, 2]) == 1010  # 1 + 10, 1 + 10 + 100, 10 + 1000
    assert peak_of(kernels(2, [Block(7, (0,), (), stays=True), Block(5, (1,), ())]), [0, 1]) == 12
    assert peak_of(kernels(2, [Block(7, (0,), ()), Block(5, (1,), ())]), [0, 1]) == 7


def test_what_is_written_over_is_not_there_twice() -> None:
    chain = [Block(8, (), (0,)), Block(8, (0,), (1,)), Block(8, (1,), (), stays=True)]
    assert peak_of(kernels(2, chain), [0, 1]) == 16
    assert peak_of(kernels(2, chain, [(0, 1), (1, 2)]), [0, 1]) == 8
    read_later = [Block(8, (), (0, 1)), Block(8, (0,), (1,)), Block(8, (1,), (), stays=True)]
    assert peak_of(kernels(2, read_later, [(0, 1)]), [0, 1]) == 24
    one_for_two = [Block(8, (), (0,)), Block(8, (0,), (), stays=True), Block(8, (0,), (), stays=True)]
    assert peak_of(kernels(1, one_for_two, [(0, 1), (0, 2)]), [0]) == 16


def test_a_block_of_parts_is_there_from_the_first() -> None:
    assert peak_of(kernels(3, [Block(8, (0, 2), ()), Block(5, (1,), ())]), [0, 1, 2]) == 13
    assert peak_of(kernels(3, [Block(8, (0, 2), ()), Block(5, (1,), ())]), [1, 0, 2]) == 8


@pytest.mark.parametrize("late", [True, False])
def test_what_is_written_too_early_is_put_off_and_what_is_read_too_late_is_drawn(late: bool) -> None:
    """Kernel 0 makes zeros that kernel 3 reads; or kernel 3 could have let go of what kernel 0 made before the peak at 2."""
    if late:
        blocks = [Block(10, (0,), (3,)), Block(10, (1,), (2,)), Block(10, (2,), ()), Block(1, (3,), (), stays=True)]
    else:
        blocks = [Block(10, (0,), (3,)), Block(2, (1,), (2,)), Block(20, (2,), ()), Block(1, (3,), (), stays=True)]
    made = kernels(4, blocks)
    better = improve(made, range(4))
    assert legal(made, better)
    assert peak_of(made, better) == least(made) < peak_of(made, range(4))
    assert improved(list(made.waits), [(b.nbytes, b.writers, b.readers, b.stays) for b in blocks], []) == better


def test_chains_go_along() -> None:
    """A gradient's sum: each part is made from what came before, and could be added at once."""
    blocks = [Block(4, (k,), (k + 4,)) for k in range(4)]
    blocks += [Block(4, (4 + k,), (5 + k,)) for k in range(3)] + [Block(4, (7,), (), stays=True)]
    made = kernels(8, blocks)
    better = improve(made, range(8))
    assert legal(made, better)
    assert peak_of(made, range(8)) == 20
    assert peak_of(made, better) == least(made) == 12


def test_made_up_ones() -> None:
    """Legal, never worse, and mostly the best there is."""
    best = 0
    for seed in range(60):
        made = made_up(seed)
        given = list(range(len(made.waits)))
        found = improve(made, given)
        assert legal(made, found)
        assert peak_of(made, found) <= peak_of(made, given)
        best += peak_of(made, found) == least(made)
    assert best >= 54


def test_too_little_is_left_alone() -> None:
    """Kernel 0 can be put off to after the peak at 1: of one byte in a thousand, or of many."""
    waits = [frozenset[int](), frozenset[int](), frozenset({0})]
    for nbytes, order in ((1, None), (100, [1, 0, 2])):
        blocks = [(nbytes, (0,), (2,), False), (1000, (1,), (), False), (1, (2,), (), True)]
        assert improved(waits, blocks, []) == order


def test_in_turn() -> None:
    """What nothing is waited for comes by its number; what waits, when it can."""
    waits = [frozenset({2}), frozenset[int](), frozenset[int](), frozenset({0, 1})]
    assert in_turn(waits, [0, 1, 2, 3]) == [1, 2, 0, 3]
    assert in_turn(waits, [3, 2, 1, 0]) == [2, 1, 0, 3]


def test_the_search_begins_at_the_best_order() -> None:
    """Steps that are all rebuilt at once, too many to be put off one by one: kernels 2t and 2t + 1 of step t make what kernel
    2n + t reads."""
    n = 400
    waits = [
        frozenset({2 * t - 2} if t else ()) if not half else frozenset({2 * t}) for t in range(n) for half in (0, 1)
    ]
    waits += [frozenset({2 * t + 1, *({2 * n + t - 1} if t else ())}) for t in range(n)]
    blocks = [(1, (2 * t,), (2 * t + 1, *([2 * t + 2] if t + 1 < n else [])), False) for t in range(n)]
    blocks += [(100, (2 * t + 1,), (2 * n + t,), False) for t in range(n)]
    places = [3 * t + half for t in range(n) for half in (0, 1)] + [3 * t + 2 for t in range(n)]
    kernels = Kernels(waits, [Block(*b) for b in blocks])
    found = improved(waits, blocks, [], [places])
    assert found is not None
    assert legal(kernels, found)
    assert peak_of(kernels, found) < 250 < 35_000 < peak_of(kernels, improve(kernels, range(3 * n)))
