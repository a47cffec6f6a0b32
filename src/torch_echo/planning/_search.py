"""Candidate plans for one graph, whatever the budget, and the front of those that are worth having.

Problem. The exact cut needs prices, and the right prices are not known: what a kept byte costs depends on when the peak
stands, which depends on the plan. Identical layers tie at one price, so a sweep alone jumps from "none of them" to "all
of them".

Method. Many cuts at different prices, and plans made from them, each judged by a full replay; the front of (peak, time) is kept.

1. *Sweep*: one price per byte; then one price per byte that is alive where the peak stands. Between two plans the next price is
   that at which they cost the same, so each cut is a corner of the convex hull or proves that there is none. The paper's plan
   joins them.
2. *Moments*: where dropping moves the peak, prices at several moments. Each replay adds its own peak moment to the
   weights (fictitious play, "cut against moment"); early rebuilds that stand at the peak are charged to the ops that
   cause them.
3. *Regions*: what goes from one call of a module to another is kept, for each depth of calls, and the rest by price (``_regions``).
   *Segments*: what a plan of the sweep keeps becomes dear except at the ends of k stretches, which are then rebuilt one
   at a time.
4. *Order*: between neighbours on the front, wherever the gap is widest: one plan before a threshold along the forward
   order and the other after it, both ways.
5. *Moves*: from points of the front, values and classes changed one by one, and the best of these together (``_moves``). In graphs
   of a few values, also two or three at a time.
6. *Nested segments*, for engines that can rebuild values more than once: see ``_segments``.
7. *The gap asked for*: when a budget or a time is given, more moves between the two points of the front that it falls between, and
   only there (:meth:`Front.refine_by`).
8. *The low end*, when a budget is below all of these, or a time beyond that of the smallest: from the smallest plan of each part of
   the search, moves towards smaller peaks for as long as there are any. One of them alone often ends in a dead end.

Cost. Replays are made in batches (:mod:`torch_echo._batch`). Some sixty for 100,000 ops, some hundreds for small graphs: the number
is fixed by the size of the graph, never by a clock, so planning is deterministic.

What it does not do. Each cut is optimal at its prices; the front is not proved optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from torch_echo._batch import Batch, Replays
from torch_echo.footprint import Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.planning._cut import MinCut
from torch_echo.planning._front import Front, Gap, Point
from torch_echo.planning._moves import Moves
from torch_echo.planning._paper import paper_plan
from torch_echo.planning._prices import Prices
from torch_echo.planning._regions import boundaries
from torch_echo.planning._segments import nested_points

__all__ = ["Effort", "Search", "front"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]

_NO_CLOSER = 1e-2
"""Neighbours in a sweep, as a share of all charged bytes and seconds."""
_STALE = 2
"""Rounds without a new plan after which prices at moments are given up."""
_STRETCHES = (32, 12, 4, 64, 24, 8)
_PAIRS = 4
"""Gaps of the front that are filled at once."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many cuts (sweep, segments, moments) or replays (order, moves) each part of the search may spend; where a gap is
    searched once more, from how many plans below it, above it, and in it; and how many rounds of moves the low end gets."""

    sweep: int
    segments: int
    moments: int
    order: int
    moves: int
    gap: int = 0
    low: int = 0

    @classmethod
    def for_size(cls, ops: int) -> Effort:
        """In proportion to what a replay costs: a tenth of a second for 1,000 ops, up to ten for 100,000."""
        total = int(min(500, max(32, 1_000_000 // max(1, ops))))
        small = ops <= 20_000
        return cls(
            sweep=max(8, total // 12),
            segments=max(4, total // 40),
            moments=max(4, total // 8),
            order=max(16, total // 2),
            moves=total // 4 if small else 0,
            gap=3 if small else 0,
            low=total // 30 if small else 0,
        )


def front(
    graph: TrainingGraph,
    fixed_seconds: Callable[[frozenset[int]], float] | None = None,
    *,
    effort: Effort | None = None,
    replayer: Replayer | None = None,
    nested: bool = False,
) -> Front:
    """All plans worth having for `graph`.

    `fixed_seconds`: what an engine costs beyond the re-runs when a given set is dropped, for instance its dispatch
    mode. `nested`: the engine can rebuild values more than once.
    """
    return Search(Prices(MinCut(replayer or Replayer(graph))), fixed_seconds, effort).run(nested)


@dataclass(frozen=True, slots=True)
class _Swept:
    """A cut of a sweep."""

    rate: float
    """Seconds per byte."""
    mask: Mask
    tick: int
    """Of its peak."""


class Search:
    """One search. `replays` counts what it spent."""

    def __init__(
        self,
        prices: Prices,
        fixed_seconds: Callable[[frozenset[int]], float] | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.prices = prices
        self.cut, self.replayer = prices.cut, prices.replayer
        self.batch = Batch(self.replayer)
        self.effort = effort or Effort.for_size(len(self.replayer.graph.ops))
        self.fixed_seconds = fixed_seconds
        self.replays = 1
        nothing = np.zeros((1, self.replayer.n_values), bool)
        base = self.batch.replay(nothing)
        self.base_tick = int(base.ticks[0])
        self.front = Front(Point(frozenset(), int(base.peaks[0]), 0.0, "baseline"))
        self._seen: dict[bytes, tuple[Mask, int, int, float]] = {}
        """Plans replayed: without what is not needed, peak, tick, seconds."""
        self._seen[self._keys(nothing)[0]] = nothing[0], int(base.peaks[0]), self.base_tick, 0.0
        self._masks: dict[frozenset[int], Mask] = {frozenset(): nothing[0]}
        self._fixed: dict[frozenset[int], float] = {}
        self._swept: list[_Swept] = []
        self._swept_at_peak: list[_Swept] = []
        self._moves: Moves | None = None
        self._starts: dict[str, tuple[int, Mask]] = {}
        """The plan with the least peak that each part of the search has found, and that peak."""

    def run(self, nested: bool = False) -> Front:
        """All parts, one after the other; see :func:`front`."""
        if len(self.cut.ops):
            self.sweep()
            self.moments()
            self.regions()
            self.segments()
            self.order()
            self.moves()
            self.values()
        if nested:
            for point in nested_points(self.prices):
                self.replays += 1
                self.front.add(point)
        self.front.candidates = self.replays
        if self.effort.gap:
            self.front.refine_by(self.between, self.below)
        return self.front

    # -- candidates --------------------------------------------------------------------------------------------------

    def _keys(self, masks: Mask) -> list[bytes]:
        return [row.tobytes() for row in np.packbits(masks[:, self.batch.made], axis=1)]

    def judge(self, masks: Mask, origin: str, front: Front | None = None) -> Replays:
        """Replay legal plans, unless they have been, and offer them to a front, the search's own if none is named."""
        front = front or self.front
        keys = self._keys(masks)
        fresh = {key: i for i, key in reversed(list(enumerate(keys))) if key not in self._seen}
        if fresh:
            rows = sorted(fresh.values())
            found = self.batch.replay(masks[rows])
            self.replays += len(rows)
            pruned = self._keys(found.masks)
            columns = (found.masks, found.peaks.tolist(), found.ticks.tolist(), found.seconds.tolist())
            for i, key, *one in zip(rows, pruned, *columns, strict=True):
                self._seen[keys[i]] = self._seen.setdefault(key, tuple(one))  # type: ignore[arg-type]
        every = [self._seen[key] for key in keys]
        for mask, peak, _, seconds in every:
            at = front.for_budget(peak)
            if at is None or seconds < at.extra_seconds:
                self._offer(front, mask, peak, seconds, origin)
        kept, peaks, ticks, extra = zip(*every, strict=True)
        found = Replays(np.array(kept), np.array(peaks, np.int64), np.array(ticks, np.int64), np.array(extra))
        peak, mask = _smallest(found)
        if front is self.front and peak < self._starts.get(origin, (self.front.baseline.peak,))[0]:
            self._starts[origin] = peak, mask
        return found

    def _offer(self, front: Front, mask: Mask, peak: int, seconds: float, origin: str) -> None:
        dropped = frozenset(np.flatnonzero(mask).tolist())
        if self.fixed_seconds and dropped:
            if dropped not in self._fixed:
                self._fixed[dropped] = self.fixed_seconds(dropped)
            seconds += self._fixed[dropped]
        if front.add(Point(dropped, peak, seconds, origin)):
            self._masks[dropped] = mask

    def _judge_legal(
        self, masks: Sequence[Mask] | Mask, origin: str, front: Front | None = None
    ) -> tuple[Replays, Mask] | None:
        """Complete plans, and replay those that are possible: these, and which they are."""
        if not len(masks):
            return None
        completed, legal = self.cut.complete_all(np.asarray(masks) & self.cut.rebuildable)
        return (self.judge(completed[legal], origin, front), legal) if legal.any() else None

    # -- 1 -----------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """One price for every byte; then one for every byte at the moment of the peak; and the paper's rule for
        comparison."""
        self.judge(paper_plan(self.prices)[None], "paper")
        self._swept = self._sweep(self.prices.nbytes, self.prices.states(), "sweep")
        self._swept_at_peak = self._sweep(*self.prices.at_moments({self.base_tick: 1.0}), "sweep at the peak")

    def _sweep(self, unit: FloatArray, op_unit: FloatArray, origin: str) -> list[_Swept]:
        """Cuts at multiples of the unit prices, by ascending price: each where two neighbours cost the same, the two that are
        furthest apart first."""
        cost, values = self.replayer.op_cost, self.cut.values
        if not unit[values].any():
            return []
        dear = 1e6 * float(cost[self.cut.ops].sum()) / float(unit[values].sum())
        masks = [np.zeros(len(unit), bool), self.cut.solve(unit * dear, op_unit * dear)]
        nbytes, seconds = map(list, zip(*(self._place(mask, unit, op_unit) for mask in masks), strict=True))
        rates = [0.0, dear]
        gaps = [(0, 1)]
        for _ in range(self.effort.sweep):
            apart = [
                (nbytes[a] - nbytes[b]) / max(1e-30, nbytes[0]) + (seconds[b] - seconds[a]) / max(1e-30, seconds[1])
                for a, b in gaps
            ]
            if not gaps or max(apart) < _NO_CLOSER:
                break
            a, b = gaps.pop(int(np.argmax(apart)))
            if nbytes[a] <= nbytes[b] or seconds[a] >= seconds[b]:
                continue
            rate = (seconds[b] - seconds[a]) / (nbytes[a] - nbytes[b])
            mask = self.cut.solve(unit * rate, op_unit * rate)
            n, s = self._place(mask, unit, op_unit)
            if s + rate * n < (seconds[a] + rate * nbytes[a]) * (1 - 1e-9):
                gaps += [(a, len(masks)), (len(masks), b)]
                masks.append(mask)
                rates.append(rate)
                nbytes.append(n)
                seconds.append(s)
        if len(masks) > 2:
            rates[1] = 2 * max(rates[2:])
        order = [i for i in np.argsort(rates, kind="stable").tolist() if masks[i].any()]
        if not order:
            return []
        judged = self.judge(np.array([masks[i] for i in order]), origin)
        ticks = judged.ticks.tolist()
        return [_Swept(rates[i], mask, tick) for i, mask, tick in zip(order, judged.masks, ticks, strict=True)]

    def _place(self, mask: Mask, unit: FloatArray, op_unit: FloatArray) -> tuple[float, float]:
        """Charged bytes and seconds of re-runs of a cut."""
        ops = np.unique(self.replayer.v_producer[mask])
        needed = self.replayer.v_saved > 0
        needed[self.replayer.reads_of(ops)[0]] = True
        kept = unit[needed & ~mask & self.cut.keepable].sum() + op_unit[ops].sum()
        return float(kept), float(self.replayer.op_cost[ops].sum())

    @staticmethod
    def _spread(swept: list[_Swept], count: int) -> list[_Swept]:
        """At most `count` of them, evenly by rank."""
        if len(swept) <= count:
            return swept
        return [swept[i] for i in np.unique(np.linspace(0, len(swept) - 1, count).round().astype(int)).tolist()]

    # -- 2 -----------------------------------------------------------------------------------------------------------

    def moments(self) -> None:
        """Prices at the moments of the peak, where dropping moved it."""
        moved = [one for one in self._swept_at_peak if one.tick != self.base_tick]
        rates = [one.rate for one in self._spread(moved, max(1, min(8, self.effort.moments // 4)))]
        weights = [{self.base_tick: 1.0} for _ in rates]
        early = [np.zeros(self.replayer.n_ops) for _ in rates]
        stale = 0
        for k in range(1, 1 + self.effort.moments // max(1, len(rates))):
            masks = []
            for rate, weight, charge in zip(rates, weights, early, strict=True):
                nbytes, states = self.prices.at_moments(weight)
                masks.append(self.cut.solve(nbytes * rate, states * rate + charge))
            if not masks or stale == _STALE:
                return
            before = self.replays
            judged = self.judge(np.array(masks), "moments")
            stale = stale + 1 if self.replays == before else 0
            share = 1.0 / (k + 1)
            for i, rate in enumerate(rates):
                tick = int(judged.ticks[i])
                weights[i] = {t: w * (1 - share) for t, w in weights[i].items()}
                weights[i][tick] = weights[i].get(tick, 0.0) + share
                early[i] *= 1 - share
                early[i] += self.prices.early_rebuilds(judged.masks[i], tick, rate * share)

    # -- 3 -----------------------------------------------------------------------------------------------------------

    def regions(self) -> None:
        """Boundaries kept, and what is inside of regions at few prices."""
        starts = self._spread(self._swept, 3)[::-1]
        ways = [(kept, one) for kept in boundaries(self.replayer) for one in starts][: 2 * self.effort.segments]
        masks = [self.cut.solve(np.where(kept, 0.0, self.prices.nbytes * one.rate)) for kept, one in ways]
        if masks:
            self.judge(np.array(masks), "regions")

    def segments(self) -> None:
        """Stretches that are rebuilt one at a time."""
        starts = self._spread(self._swept, 4)[::-1]
        ways = [(one, k, window) for k in _STRETCHES for one in starts for window in (0.1, 0.4)]
        ways = [way for way in ways if 2 * way[1] <= self.prices.places(way[0].mask)][: self.effort.segments]
        masks = [self.cut.solve(self.prices.waists(one.rate, one.mask, k, window)) for one, k, window in ways]
        if masks:
            self.judge(np.array(masks), "segments")

    # -- 4 -----------------------------------------------------------------------------------------------------------

    def order(self) -> None:
        """Thresholds along the forward order: first between neighbours on the hull of the front, which all that is
        found between them should come near, then wherever the front is thinnest."""
        done: set[tuple[frozenset[int], frozenset[int]]] = set()
        start = self.replays
        for share, neighbours in ((0.6, self.front.hull), (1.0, lambda: self.front.points)):
            limit = start + int(share * self.effort.order)
            while self.replays < limit:
                pairs = [p for p in pairwise(neighbours()) if (p[0].dropped, p[1].dropped) not in done]
                pairs = [p for p in pairs if p[1].peak - p[0].peak >= 0.002 * self.front.baseline.peak]
                if not pairs:
                    break
                masks: list[Mask] = []
                for small, large in sorted(pairs, key=self._gap, reverse=True)[:_PAIRS]:
                    done.add((small.dropped, large.dropped))
                    masks += self._mixed(small, large)
                self._judge_legal(masks[: max(2, limit - self.replays)], "order")

    def _mixed(self, small: Point, large: Point) -> list[Mask]:
        """Plans that follow one point before a threshold and another after it."""
        one, other = self._masks[small.dropped], self._masks[large.dropped]
        differ = np.sort(self.prices.position[one != other])
        count = max(1, min(11, self.effort.order // 5))
        cuts = np.unique(differ[np.linspace(0, len(differ) - 1, count + 2).astype(int)[1:-1]]).tolist()
        cuts.insert(0, cuts.pop(len(cuts) // 2))
        first = [self.prices.position < position for position in cuts]
        return [np.where(before, *way) for before in first for way in ((one, other), (other, one))]

    def _gap(self, pair: tuple[Point, Point]) -> float:
        """How wide a gap is: by bytes and seconds."""
        small, large = pair
        slowest = max(p.extra_seconds for p in self.front.points)
        memory = (large.peak - small.peak) / max(1, self.front.baseline.peak)
        return memory * (0.05 + (small.extra_seconds - large.extra_seconds) / max(1e-30, slowest))

    @staticmethod
    def _relative_gap(pair: tuple[Point, Point]) -> float:
        """The same, by how many times as many seconds."""
        small, large = pair
        return (large.peak - small.peak) * (1 - large.extra_seconds / max(1e-30, small.extra_seconds))

    # -- 5 -----------------------------------------------------------------------------------------------------------

    def moves(self) -> None:
        """Moves from the least plan, and from where the front is thinnest."""
        limit = self.replays + self.effort.moves
        done: set[frozenset[int]] = set()
        while self.replays < limit:
            pairs = [p for p in pairwise(self.front.points) if p[0].dropped not in done]
            if not pairs:
                return
            way = len(done) % 3
            small, large = pairs[0] if not way else max(pairs, key=self._gap if way == 1 else self._relative_gap)
            done.add(small.dropped)
            self._move(small, large.peak - 1 - small.peak)

    def _move(self, point: Point, room: int, front: Front | None = None, drop: bool | None = None) -> None:
        """Moves from a point; those that take up to `room` bytes more are made together. `drop`: only those that drop, or keep."""
        if not point.groups:
            self._move_from(self._masks[point.dropped], room, front, drop)

    def _move_from(
        self, start: Mask, room: int, front: Front | None = None, drop: bool | None = None
    ) -> tuple[int, Mask] | None:
        """The same from any plan that was replayed. The least peak that was found, and its plan."""
        if self._moves is None:
            self._moves = Moves(self.prices, self.batch.made, self.fixed_seconds is not None)
        _, peak, tick, seconds = self._seen[self._keys(start[None])[0]]
        moves, singles = self._moves.around(start, tick)
        if drop is not None:
            singles = sum(dropped == drop for _, dropped in moves[:singles])
            moves = [move for move in moves if move[1] == drop]
        tried = self._judge_legal(self._moves.changed(start, moves), "moves", front)
        if tried is None:
            return None
        judged, legal = tried
        single = np.flatnonzero(legal[:singles])
        saved, more = seconds - judged.seconds[: len(single)], judged.peaks[: len(single)] - peak
        back, away = self._moves.ranked(saved, more, max(1, room))
        together = [self._moves.cumulated(start, [moves[single[i]] for i in ranked]) for ranked in (back, away)]
        both = self._judge_legal(np.concatenate(together), "moves together", front)
        return min([_smallest(judged), *([_smallest(both[0])] if both else [])], key=itemgetter(0))

    def values(self) -> None:
        """For graphs of a few values: up to two or three values at a time."""
        values = self.cut.values[self.cut.rebuildable[self.cut.values]]
        if len(values) > 24:
            return
        most = 3 if len(values) <= 12 else 2
        some = [values[list(few)] for size in range(1, most + 1) for few in combinations(range(len(values)), size)]
        limit = self.replays + max(self.effort.moves, len(some))
        done: set[frozenset[int]] = set()
        while self.replays < limit:
            fresh = [p for p in self.front.points if p.dropped not in done]
            if not fresh:
                return
            point = fresh[len(done) * 7 % len(fresh)]
            done.add(point.dropped)
            masks = np.repeat(self._masks[point.dropped][None], len(some), axis=0)
            for mask, few in zip(masks, some, strict=True):
                mask[few] = ~mask[few]
            self._judge_legal(masks, "values")

    # -- 7 -----------------------------------------------------------------------------------------------------------

    def between(self, points: list[Point], at: int) -> list[Point]:
        """More points between two neighbours: see :meth:`Front.refine_by`. Moves that keep more from those below, and drop more
        from those above; then both from where it is widest."""
        most = points[at + 1].peak - 1
        gap = Gap(points[at], points[at + 1])
        done: set[frozenset[int]] = set()
        for i in range(self.effort.gap):
            if at >= i:
                self._move(points[at - i], most - points[at - i].peak, gap, drop=False)
            if at + 1 + i < len(points):
                self._move(points[at + 1 + i], 1, gap, drop=True)
        for _ in range(self.effort.gap):
            pairs = [p for p in pairwise(gap.points) if p[0].dropped not in done]
            if not pairs:
                break
            point = max(pairs, key=lambda pair: pair[1].peak - pair[0].peak)[0]
            done.add(point.dropped)
            self._move(point, most - point.peak, gap)
        self.front.candidates = self.replays
        return gap.points[:-1]

    # -- 8 -----------------------------------------------------------------------------------------------------------

    def below(self) -> list[Point]:
        """Points with smaller peaks than all that there are: see :meth:`Front.refine_by`."""
        front = Gap(None, self.front.least)
        rounds = self.effort.low
        for peak, mask in sorted(self._starts.values(), key=itemgetter(0)):
            while rounds:
                rounds -= 1
                found = self._move_from(mask, 1, front)
                if found is None or found[0] >= peak:
                    break
                peak, mask = found
        self.front.candidates = self.replays
        return front.points[:-1]


def _smallest(found: Replays) -> tuple[int, Mask]:
    """The least peak among them, and its plan."""
    least = int(np.argmin(found.peaks))
    return int(found.peaks[least]), found.masks[least]
