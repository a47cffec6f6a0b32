"""Changes to a plan, and which of them are worth trying.

Problem. Between two plans of a sweep there are others, and near each of them better ones, that no price makes a minimum cut: prices
are the same for all bytes of a moment, and what is saved or lost depends on what else is dropped.

Method. From one plan: single values the other way round (what is dearest to re-run among what is dropped; what frees most for its
time, where the peak stands, among what is kept), classes of ops as a whole or by halves, the cheapest few together. Then those that
were worth it together, best first: 1, 2, 3, … of them.

Cost. Replays, in batches: of about a hundred plans, then of at most 48 and 24.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torch_echo.planning._prices import Prices

__all__ = ["Move", "Moves"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]
Move = tuple[IntArray, bool]
"""Values, and whether to drop them."""

_SINGLES = 48
"""Values tried one by one, of those dropped and of those kept."""
_CLASSES = 12
_LAYERS = 12
_CHEAPEST = (1, 2, 4, 8, 16)
_KEPT, _DROPPED = 48, 24
"""Changes made together, at most."""


class Moves:
    """What can be changed in plans for one graph. `layers`: an engine costs something in each layer in which anything is
    dropped, so layers are tried as a whole."""

    def __init__(self, prices: Prices, made: IntArray, layers: bool) -> None:
        """`made`: the values that may be worth dropping."""
        self.prices = prices
        replayer, cut = prices.replayer, prices.cut
        ops, producer = replayer.graph.ops, replayer.v_producer
        made = made[cut.rebuildable[made]]
        made = made[np.argsort(replayer.v_group[made], kind="stable")]
        group = replayer.v_group[made]
        at = np.flatnonzero(np.append(True, group[1:] != group[:-1])) if len(made) else np.zeros(0, np.int64)
        self.units: list[IntArray] = np.split(made, at[1:]) if len(made) else []
        """Values that are dropped together or not at all."""
        self.first = made[at]
        self.cost = replayer.op_cost[producer[self.first]]
        self.nbytes = np.add.reduceat(prices.nbytes[made], at) if len(made) else np.zeros(0)
        by_class: dict[int, list[int]] = {}
        by_layer: dict[str, list[int]] = {}
        for v in np.sort(made).tolist():
            op = ops[int(producer[v])]
            by_class.setdefault(op.cls, []).append(v)
            by_layer.setdefault(op.layer, []).append(v)
        self.classes = self._sorted(v for v in by_class.values() if len(v) > 1)[::-1][:_CLASSES]
        """Values made by the ops of one class, in order; those with the most bytes first."""
        self.layers = self._sorted(by_layer.values())[:_LAYERS] if layers else []
        """Values made in one layer; those with the fewest bytes first."""

    def _sorted(self, groups: object) -> list[IntArray]:
        arrays = [np.array(group, np.int64) for group in groups]  # type: ignore[attr-defined]
        return sorted(arrays, key=lambda group: float(self.prices.nbytes[group].sum()))

    def around(self, start: Mask, tick: int) -> tuple[list[Move], int]:
        """Moves from the plan `start`, whose peak stands at `tick`, and how many of them, the first ones, are of single values."""
        dropped = start[self.first]
        back = np.flatnonzero(dropped)
        back = back[np.argsort(-self.cost[back], kind="stable")][:_SINGLES]
        kept = np.flatnonzero(~dropped & (self.nbytes > 0))
        frees = np.where(self.prices.charged(tick)[self.first[kept]], self.nbytes[kept], 1e-3 * self.nbytes[kept])
        there = kept[np.argsort(-frees / (self.cost[kept] + 1e-30), kind="stable")][:_SINGLES]
        moves: list[Move] = [(self.units[i], False) for i in back] + [(self.units[i], True) for i in there]
        singles = len(moves)
        cheapest = kept[np.argsort(self.cost[kept], kind="stable")]
        moves += [(np.concatenate([self.units[i] for i in cheapest[:n]]), True) for n in _CHEAPEST if n <= len(kept)]
        for group in self.classes:
            inside, half = int(start[group].sum()), len(group) // 2
            for part in (group, group[:half], group[half:]):
                moves += [(part, True)] if inside < len(group) else []
                moves += [(part, False)] if inside else []
        moves += [(group, False) for group in self.layers if start[group].any()]
        return moves, singles

    @staticmethod
    def changed(start: Mask, moves: Sequence[Move]) -> Mask:
        """A row for each move."""
        masks = np.repeat(start[None], len(moves), axis=0)
        for mask, (values, dropped) in zip(masks, moves, strict=True):
            mask[values] = dropped
        return masks

    @staticmethod
    def ranked(saved: FloatArray, more: IntArray, room: int) -> tuple[IntArray, IntArray]:
        """Of moves that by themselves save so many seconds, and take so many bytes more at the peak: those that save time within
        `room` bytes, and those that save bytes, each by what they give for what they take."""
        back = np.flatnonzero((saved > 0) & (more <= room))
        back = back[np.argsort(-saved[back] / (np.maximum(more[back], 0) + 1e-3 * room), kind="stable")][:_KEPT]
        away = np.flatnonzero((saved <= 0) & (more < 0))
        away = away[np.argsort(more[away] / (1e-12 - saved[away]), kind="stable")][:_DROPPED]
        return back, away

    @staticmethod
    def cumulated(start: Mask, moves: Sequence[Move]) -> Mask:
        """Moves made one after the other: a row for the first, one for the first two, and so on."""
        masks = np.repeat(start[None], len(moves), axis=0)
        for i, (values, dropped) in enumerate(moves):
            masks[i:, values] = dropped
        return masks
