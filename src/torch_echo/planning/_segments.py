"""Plans in which values are rebuilt more than once: segments within segments.

Problem. Rebuilt once, a model needs something of each of its layers: the peak grows with depth.

Method. *Waists* are places in the forward order over which few bytes are handed on. Inner waists cut it into short stretches,
every k-th of them is an outer one. What crosses an outer waist is kept; what crosses an inner one forms a group with the others
between the same outer waists, rebuilt ahead of that part of backward (see :mod:`torch_echo.nested`); all else that can be is
rebuilt once more, stretch by stretch. In the last part what crosses is kept: backward begins there. A replay for each of some
numbers of stretches and some k.

Cost. A replay a candidate, some twenty in all, four for 100,000 ops; about two seconds for 10,000, ten for 100,000.

What it does not do. Two levels only; everything is rebuilt, whatever it costs, so these are plans for the low end of the front.

Source. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from torch_echo import nested
from torch_echo.graph import Phase
from torch_echo.planning._front import Point
from torch_echo.planning._prices import Prices

__all__ = ["nested_points"]

_STRETCHES = (12, 24, 48, 96, 192)
_PARTS = (2, 3, 4, 6, 8, 12)
_SHORTEST = 6
"""Ops in a stretch."""
_WINDOW = 0.45
"""How far from its even place a waist may lie, in stretches."""

_REPLAYED = 300_000
"""Ops in all replays together."""

Mask = NDArray[np.bool_]


def nested_points(prices: Prices) -> Iterator[Point]:
    """Plans with groups, replayed."""
    forward = [o for o, op in enumerate(prices.replayer.graph.ops) if op.phase == Phase.FORWARD]
    crossing = _Crossing(prices, forward)
    ways = [(s, p) for s in _STRETCHES for p in _PARTS if s * _SHORTEST <= len(forward) and 2 * p < s]
    ways.sort(key=lambda way: abs(math.log(way[1] ** 2 / way[0])))  # at the root, parts and stretches in them balance
    for stretches, parts in ways[: max(4, _REPLAYED // max(1, len(forward)))]:
        point = _plan(prices, crossing, crossing.waists(stretches), parts)
        if point is not None:
            yield point


class _Crossing:
    """Which values are handed on over a place in the forward order: made before, and read after, by an op."""

    def __init__(self, prices: Prices, forward: list[int]) -> None:
        self.prices, self.forward = prices, np.array(forward, np.int64)
        replayer = prices.replayer
        self.last = np.full(replayer.n_values, -1, np.int64)
        reads, owner = replayer.reads_of(self.forward)
        np.maximum.at(self.last, reads, self.forward[owner])
        # Kept anyway, or worth nothing: the place is no worse for it.
        self.costs = prices.cut.rebuildable & (replayer.v_producer >= 0) & (self.last > replayer.v_producer)
        change = np.zeros(replayer.n_ops + 1, np.int64)
        values = np.flatnonzero(self.costs)
        nbytes = replayer.s_bytes[replayer.v_storage[values]]
        np.add.at(change, replayer.v_producer[values], nbytes)
        np.subtract.at(change, self.last[values], nbytes)
        self.bytes = np.cumsum(change)
        """Handed on from op i to what comes after it."""

    def waists(self, stretches: int) -> list[int]:
        """Ops after which the fewest bytes are handed on, near even distances."""
        length = len(self.forward) / stretches
        found = []
        for i in range(1, stretches):
            low, high = int((i - _WINDOW) * length), max(int((i - _WINDOW) * length) + 1, int((i + _WINDOW) * length))
            near = self.forward[low:high]
            found.append(int(near[np.argmin(self.bytes[near])]))
        return sorted(set(found))

    def over(self, op: int) -> Mask:
        """The values handed on over the place after an op."""
        crossing: Mask = self.costs & (self.prices.replayer.v_producer <= op) & (self.last > op)
        return crossing


def _plan(prices: Prices, crossing: _Crossing, waists: list[int], parts: int) -> Point | None:
    replayer, cut = prices.replayer, prices.cut
    if 2 * parts > len(waists):
        return None
    outer = [waists[i] for i in np.linspace(0, len(waists), parts + 1).astype(int)[1:-1]]
    kept = np.zeros(replayer.n_values, bool)
    for op in outer:
        kept |= crossing.over(op)
    members: list[Mask] = [np.zeros(replayer.n_values, bool) for _ in range(parts)]
    for op in waists:
        if op not in outer:
            members[int(np.searchsorted(outer, op))] |= crossing.over(op)
    kept |= members.pop()
    stays = kept | (np.array(replayer.adoptable_list) >= replayer.begin)
    stays |= (replayer.v_producer >= 0) & replayer.op_random[replayer.v_producer]
    mask = cut.complete(cut.rebuildable & ~stays)
    if mask is None:
        return None
    groups = tuple(tuple(np.flatnonzero(group & mask).tolist()) for group in members)
    groups = tuple(group for group in groups if group)
    dropped = frozenset(np.flatnonzero(mask).tolist())
    if not groups or not nested.possible(replayer, dropped):
        return None
    footprint = nested.replay(replayer, dropped, groups)
    return Point(dropped, footprint.peak, footprint.extra_seconds, f"{len(waists)} stretches in {parts} parts", groups)
