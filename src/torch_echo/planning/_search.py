"""Candidate plans for one graph, whatever the budget, and the front of those that are worth having.

Problem. The exact cut needs prices, and the right prices are not known: what a kept byte costs depends on when the peak stands,
which depends on the plan. Identical layers tie at one price, so a sweep alone jumps from "none of them" to "all of them".

Method. Many cuts at different prices, each judged by a full replay; the front of (peak, time) is kept.

1. *Sweep*: one price per byte, over the range in which the cut changes; between different neighbours, bisect.
2. *Segments*: what a plan of the sweep keeps becomes dear except at the ends of k stretches, which are then rebuilt one at a
   time.
3. *Moments*: prices only for what is alive at the moments of the peak. Each replay adds its own peak moment to the weights
   (fictitious play on "cut against moment"); early rebuilds that stand at the peak are charged to the ops that cause them.
4. *Order*: between neighbours on the front, wherever the gap is widest: one plan before a threshold along the forward order and
   the other after it, both ways.
5. *Classes*: drop or keep all instances of one class, or the first or last half, from points of the front; taken if it improves.

Cost. A few dozen replays for 100,000 ops, some hundreds for small graphs: the number is fixed by the size of the graph, never by
a clock, so planning is deterministic.

What it does not do. Each cut is optimal at its prices; the front is not proved optimal. No value is rebuilt twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_echo.footprint import Footprint, Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.planning._cut import MinCut
from torch_echo.planning._front import Front, Point
from torch_echo.planning._prices import Prices

__all__ = ["Effort", "Search", "front"]

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Effort:
    """How many replays each part of the search may spend."""

    sweep: int
    segments: int
    moments: int
    order: int
    classes: int

    @classmethod
    def for_size(cls, ops: int) -> Effort:
        """In proportion to what a replay costs: about a second for 1,000 ops, up to ten for 100,000."""
        total = int(min(500, max(30, 1_000_000 // max(1, ops))))
        small = ops <= 20_000
        return cls(
            sweep=max(8, total // 8),
            segments=max(5, total // 6),
            moments=max(10, total // 4),
            order=max(8, total // 4),
            classes=total // 4 if small else 0,
        )


def front(
    graph: TrainingGraph,
    fixed_seconds: Callable[[frozenset[int]], float] | None = None,
    *,
    effort: Effort | None = None,
    replayer: Replayer | None = None,
) -> Front:
    """All plans worth having for `graph`.

    `fixed_seconds`: what an engine costs beyond the re-runs when a given set is dropped, for instance its dispatch mode.
    """
    return Search(replayer or Replayer(graph), fixed_seconds, effort).run()


class Search:
    """One search. `replays` counts what it spent."""

    def __init__(
        self,
        replayer: Replayer,
        fixed_seconds: Callable[[frozenset[int]], float] | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.replayer = replayer
        self.cut = MinCut(replayer)
        self.prices = Prices(self.cut)
        self.effort = effort or Effort.for_size(len(replayer.graph.ops))
        self.fixed_seconds = fixed_seconds
        self.base = replayer.replay()
        self.front = Front(Point(frozenset(), self.base.peak, 0.0, "baseline"))
        self._seen: dict[bytes, tuple[Point, Footprint]] = {}
        self._note(np.zeros(replayer.n_values, bool), self.base, self.front.baseline)
        self.replays = 1
        self._swept: list[tuple[float, Mask, Point]] = []

    def run(self) -> Front:
        """All parts, one after the other."""
        if len(self.cut.ops):
            self.sweep()
            self.moments()
            self.segments()
            self.order()
            self.classes()
        self.front.candidates = self.replays
        return self.front

    # -- candidates --------------------------------------------------------------------------------------------------

    def _key(self, mask: Mask) -> bytes:
        return np.packbits(mask).tobytes()

    def _note(self, mask: Mask, footprint: Footprint, point: Point) -> None:
        footprint._trace = None  # type: ignore[assignment]  # large; nothing here looks into it again
        self._seen[self._key(mask)] = point, footprint

    def judge(self, mask: Mask, origin: str) -> tuple[Point, Footprint]:
        """Replay a plan, unless it has been, and offer it to the front."""
        known = self._seen.get(self._key(mask))
        if known is not None:
            return known
        dropped = frozenset(np.flatnonzero(mask).tolist())
        footprint = self.replayer.replay(dropped)
        self.replays += 1
        extra = footprint.extra_seconds + (self.fixed_seconds(dropped) if self.fixed_seconds else 0.0)
        point = Point(dropped, footprint.peak, extra, origin)
        self.front.add(point)
        self._note(mask, footprint, point)
        return point, footprint

    def _mask(self, point: Point) -> Mask:
        mask = np.zeros(self.replayer.n_values, bool)
        mask[list(point.dropped)] = True
        return mask

    # -- 1 -----------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """One price for every byte."""
        limit = self.replays + self.effort.sweep
        ops, values = self.cut.ops, self.cut.values
        nbytes = self.prices.nbytes[values]
        middle = float(self.replayer.op_cost[ops].sum()) / max(1.0, float(nbytes.sum()))
        solved: dict[float, Mask] = {}
        for factor in (0.25, 4.0):
            rate, same = middle, 0
            for _ in range(40):
                mask = self.cut.solve(self.prices.uniform(rate))
                same = same + 1 if any(np.array_equal(mask, m) for m in solved.values()) else 0
                solved[rate] = mask
                if (factor < 1 and not mask.any()) or same >= 4:
                    break
                rate *= factor
        rates = sorted(solved)
        for rate in rates:
            if self.replays < limit:
                self.judge(solved[rate], "sweep")
        # Bisect where neighbours differ most in bytes.
        gaps = list(itertools.pairwise(rates))
        while gaps and self.replays < limit:
            low, high = max(gaps, key=lambda g: (self._distance(solved[g[0]], solved[g[1]]), -g[0]))
            gaps.remove((low, high))
            if high / low < 1.01 or not self._distance(solved[low], solved[high]):
                continue
            rate = float(np.sqrt(low * high))
            solved[rate] = self.cut.solve(self.prices.uniform(rate))
            self.judge(solved[rate], "sweep")
            gaps += [(low, rate), (rate, high)]
        for rate in sorted(solved):
            if not self._swept or not np.array_equal(self._swept[-1][1], solved[rate]):
                known = self._seen.get(self._key(solved[rate]))
                if known is not None:
                    self._swept.append((rate, solved[rate], known[0]))

    def _distance(self, one: Mask, other: Mask) -> float:
        return float(self.prices.nbytes[one != other].sum())

    def _rates(self, count: int) -> list[float]:
        """`count` prices spread over those at which the sweep changed."""
        rates = [rate for rate, mask, _ in self._swept if mask.any()]
        if len(rates) <= count:
            return rates
        return [rates[i] for i in np.unique(np.linspace(0, len(rates) - 1, count).round().astype(int)).tolist()]

    # -- 2 -----------------------------------------------------------------------------------------------------------

    def segments(self) -> None:
        """Stretches that are rebuilt one at a time."""
        limit = self.replays + self.effort.segments
        if not self._swept:
            return
        counts = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
        if self.effort.segments <= 10:
            counts = [3, 6, 12, 24, 48]
        for rate in reversed(self._rates(2 if self.effort.segments <= 10 else 4)):
            mask = next(m for r, m, _ in self._swept if r == rate)
            for k in counts:
                for window in (0.1, 0.4):
                    if self.replays >= limit:
                        return
                    self.judge(self.cut.solve(self.prices.waists(rate, mask, k, window)), f"{k} segments")

    # -- 3 -----------------------------------------------------------------------------------------------------------

    def moments(self) -> None:
        """Prices at the moments of the peak."""
        rates = self._rates(max(2, min(8, self.effort.moments // 10)))
        if not rates:
            return
        each = max(4, self.effort.moments // (2 * len(rates)))
        for rate in rates:
            for scale in (1.0, 4.0):
                self._play(rate * scale, each)

    def _play(self, rate: float, rounds: int) -> None:
        weights = {self.base.tick: 1.0}
        op_price = np.zeros(self.replayer.n_ops)
        for k in range(1, rounds + 1):
            mask = self.cut.solve(self.prices.at_moments(weights, rate), op_price)
            before = self.replays
            _, footprint = self.judge(mask, "moments")
            share = 1.0 / (k + 1)
            if self.replays == before and share * weights.get(footprint.tick, 0.0) == share:
                return  # nothing new will come
            weights = {tick: w * (1 - share) for tick, w in weights.items()}
            weights[footprint.tick] = weights.get(footprint.tick, 0.0) + share
            op_price *= 1 - share
            op_price += self.prices.early_rebuilds(mask, footprint.tick, rate * share)

    # -- 4 -----------------------------------------------------------------------------------------------------------

    def order(self) -> None:
        """Thresholds along the forward order: first between neighbours on the hull of the front, which all that is found
        between them should come near, then wherever the front is thinnest."""
        done: set[tuple[frozenset[int], frozenset[int]]] = set()
        start = self.replays
        for share, neighbours in ((0.6, self.front.hull), (1.0, lambda: self.front.points)):
            limit = start + int(share * self.effort.order)
            while self.replays < limit:
                points = neighbours()
                pairs = [p for p in itertools.pairwise(points) if (p[0].dropped, p[1].dropped) not in done]
                if not pairs:
                    break
                small, large = max(pairs, key=self._gap)
                if large.peak - small.peak < 0.002 * self.base.peak:
                    break
                done.add((small.dropped, large.dropped))
                self._mix(small, large, limit)

    def _mix(self, small: Point, large: Point, limit: int) -> None:
        """Plans that follow one point before a threshold and another after it."""
        one, other = self._mask(small), self._mask(large)
        differ = np.sort(self.prices.position[one != other])
        count = max(1, min(11, self.effort.order // 6))
        cuts = np.unique(differ[np.linspace(0, len(differ) - 1, count + 2).astype(int)[1:-1]]).tolist()
        cuts.insert(0, cuts.pop(len(cuts) // 2))  # the middle first: it shows which way round is better
        ways = [(one, other), (other, one)]
        for position in cuts:
            found = []
            for before, after in ways:
                mixed = self.cut.complete(np.where(self.prices.position < position, before, after))
                if mixed is not None and self.replays < limit:
                    found.append(self.judge(mixed, "order")[0])
            if len(ways) == len(found) == 2:
                first, second = found
                if first.peak <= second.peak and first.extra_seconds <= second.extra_seconds:
                    ways.pop(1)
                elif second.peak <= first.peak and second.extra_seconds <= first.extra_seconds:
                    ways.pop(0)

    def _gap(self, pair: tuple[Point, Point]) -> float:
        small, large = pair
        slowest = max(p.extra_seconds for p in self.front.points)
        memory = (large.peak - small.peak) / max(1, self.base.peak)
        return memory * (0.05 + (small.extra_seconds - large.extra_seconds) / max(1e-30, slowest))

    # -- 5 -----------------------------------------------------------------------------------------------------------

    def classes(self) -> None:
        """One class at a time, from points of the front."""
        limit = self.replays + self.effort.classes
        producer = self.replayer.v_producer
        of_class = np.array([op.cls for op in self.replayer.graph.ops], np.int64)[np.maximum(producer, 0)]
        values = self.cut.values[producer[self.cut.values] >= 0]
        sizes = np.bincount(of_class[values], self.prices.nbytes[values])
        members = [values[of_class[values] == c] for c in np.argsort(-sizes, kind="stable").tolist() if sizes[c] > 0]
        visited: set[frozenset[int]] = set()
        while self.replays < limit:
            fresh = [p for p in self.front.points if p.dropped not in visited]
            if not fresh:
                return
            point = fresh[len(visited) * 7 % len(fresh)]
            visited.add(point.dropped)
            start = self._mask(point)
            for group in members:
                for part, value in self._moves(group, start):
                    if self.replays >= limit:
                        return
                    mask = start.copy()
                    mask[part] = value
                    moved = self.cut.complete(mask & self.cut.rebuildable)
                    if moved is not None:
                        self.judge(moved, "classes")

    @staticmethod
    def _moves(group: NDArray[np.int64], mask: Mask) -> list[tuple[NDArray[np.int64], bool]]:
        """Ways to change one class: all or half of it, to dropped or to kept."""
        dropped = int(mask[group].sum())
        parts = [group]
        if len(group) > 1:
            parts += [group[: len(group) // 2], group[len(group) // 2 :]]
        moves = []
        for part in parts:
            if dropped < len(group):
                moves.append((part, True))
            if dropped:
                moves.append((part, False))
        return moves
