"""Candidate plans for one graph, whatever the budget, and the front of those that are worth having.

Problem. The exact cut needs prices, and the right prices are not known: what a kept byte costs depends on when the peak
stands, which depends on the plan. Identical layers tie at one price, so a sweep alone jumps from "none of them" to "all
of them".

Method. Many cuts at different prices, each judged by a full replay; the front of (peak, time) is kept.

1. *Sweep*: one price per byte, over the range in which the cut changes, bisected between different neighbours; then one
   price per byte that is alive where the peak stands. Of these cuts, a well-spread choice is replayed. The paper's plan
   joins them.
2. *Segments*: what a plan of the sweep keeps becomes dear except at the ends of k stretches, which are then rebuilt one
   at a time.
3. *Moments*: where dropping moves the peak, prices at several moments. Each replay adds its own peak moment to the
   weights (fictitious play, "cut against moment"); early rebuilds that stand at the peak are charged to the ops that
   cause them.
4. *Order*: between neighbours on the front, wherever the gap is widest: one plan before a threshold along the forward
   order and the other after it, both ways.
5. *Classes*: drop or keep all instances of one class, or the first or last half, from points of the front; taken if it
   improves. In graphs of a few values, also one or two values at a time.
6. *Room*: from points of the front, what is dearest to re-run is kept as far as the peak allows up to the next point.
7. *Nested segments*, for engines that can rebuild values more than once: see ``_segments``.

Cost. A few dozen replays for 100,000 ops, some hundreds for small graphs: the number is fixed by the size of the graph,
never by a clock, so planning is deterministic.

What it does not do. Each cut is optimal at its prices; the front is not proved optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from torch_echo.footprint import Footprint, Replayer
from torch_echo.graph import TrainingGraph
from torch_echo.planning._cut import MinCut
from torch_echo.planning._front import Front, Point
from torch_echo.planning._paper import paper_plan
from torch_echo.planning._prices import Prices
from torch_echo.planning._segments import nested_points

__all__ = ["Effort", "Search", "front"]

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]
Move = tuple[NDArray[np.int64], bool | Mask]
"""Values, and whether to drop them."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many replays each part of the search may spend."""

    sweep: int
    segments: int
    moments: int
    order: int
    classes: int
    room: int = 0

    @classmethod
    def for_size(cls, ops: int) -> Effort:
        """In proportion to what a replay costs: about a second for 1,000 ops, up to ten for 100,000."""
        total = int(min(500, max(32, 1_000_000 // max(1, ops))))
        small = ops <= 20_000
        return cls(
            sweep=max(12, total // 5),
            segments=max(4, total // 8),
            moments=max(4, total // 6),
            order=max(12, total // 4),
            classes=total // 4 if small else 0,
            room=total // 2,
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
        replayer = self.replayer
        self.effort = effort or Effort.for_size(len(replayer.graph.ops))
        self.fixed_seconds = fixed_seconds
        self.base = replayer.replay()
        self.front = Front(Point(frozenset(), self.base.peak, 0.0, "baseline"))
        self._seen: dict[bytes, tuple[Point, Footprint]] = {}
        self._note(np.zeros(replayer.n_values, bool), self.base, self.front.baseline)
        self.replays = 1
        self._way = 0
        self._swept: list[tuple[float, Mask, Point]] = []
        self._swept_at_peak: list[tuple[float, Mask, Point]] = []

    def run(self, nested: bool = False) -> Front:
        """All parts, one after the other; see :func:`front`."""
        if len(self.cut.ops):
            self.sweep()
            self.moments()
            self.segments()
            self.order()
            self.classes()
            self.values()
            self.room()
        if nested:
            for point in nested_points(self.prices):
                self.replays += 1
                self.front.add(point)
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
        """One price for every byte; then one for every byte at the moment of the peak; and the paper's rule for
        comparison."""
        self.judge(paper_plan(self.prices), "paper")
        half = self.effort.sweep // 2
        solved = self._solve_along(self.prices.nbytes, self.prices.states())
        self._swept = self._judge_spread(solved, self.prices.nbytes, half, "sweep")
        nbytes, states = self.prices.at_moments({self.base.tick: 1.0})
        solved = self._solve_along(nbytes, states)
        self._swept_at_peak = self._judge_spread(solved, nbytes, self.effort.sweep - half, "sweep at the peak")

    def _solve_along(self, unit: FloatArray, op_unit: FloatArray) -> dict[float, Mask]:
        """Cuts at multiples of the unit prices: geometric steps over the range in which they change, then bisection
        where neighbours differ most in bytes."""
        ops, values = self.cut.ops, self.cut.values
        if not unit[values].any():
            return {}
        middle = float(self.replayer.op_cost[ops].sum()) / float(unit[values].sum())
        solved = {middle: self.cut.solve(unit * middle, op_unit * middle)}
        for factor in (0.25, 4.0):
            rate, same = middle, 0
            for _ in range(40):
                before, rate = solved[rate], rate * factor
                solved[rate] = self.cut.solve(unit * rate, op_unit * rate)
                same = same + 1 if np.array_equal(before, solved[rate]) else 0
                if (factor < 1 and not solved[rate].any()) or same == 3:
                    break
        rates = sorted(solved)
        gaps = list(pairwise(rates))
        for _ in range(self.effort.sweep):
            if not gaps:
                break
            low, high = max(gaps, key=lambda g: (self._distance(solved[g[0]], solved[g[1]]), -g[0]))
            if not self._distance(solved[low], solved[high]):
                break
            gaps.remove((low, high))
            if high / low > 1.01:
                rate = float(np.sqrt(low * high))
                solved[rate] = self.cut.solve(unit * rate, op_unit * rate)
                gaps += [(low, rate), (rate, high)]
        return solved

    def _judge_spread(
        self, solved: dict[float, Mask], unit: FloatArray, count: int, origin: str
    ) -> list[tuple[float, Mask, Point]]:
        """Replay at most `count` of the cuts, spread over charged bytes and seconds; those with their prices, in
        order."""
        rates: list[float] = []
        masks: list[Mask] = []
        for rate in sorted(solved):
            if solved[rate].any() and not (masks and np.array_equal(masks[-1], solved[rate])):
                rates.append(rate)
                masks.append(solved[rate])
        if not rates:
            return []
        place = np.array([[unit[m].sum(), self.replayer.op_cost[self.replayer.records(m)[0]].sum()] for m in masks])
        place /= np.maximum(place.max(axis=0), 1e-30)
        chosen: list[int] = []
        far = np.abs(place).sum(axis=1)  # distance from dropping nothing
        while len(chosen) < min(count, len(rates)):
            chosen.append(int(np.argmax(far)))
            far = np.minimum(far, np.abs(place - place[chosen[-1]]).sum(axis=1))
            far[chosen] = -1.0
        return [(rates[i], masks[i], self.judge(masks[i], origin)[0]) for i in sorted(chosen)]

    def _distance(self, one: Mask, other: Mask) -> float:
        return float(self.prices.nbytes[one != other].sum())

    @staticmethod
    def _spread(rates: list[float], count: int) -> list[float]:
        """At most `count` of `rates`, evenly by rank."""
        if len(rates) <= count:
            return rates
        return [rates[i] for i in np.unique(np.linspace(0, len(rates) - 1, count).round().astype(int)).tolist()]

    # -- 2 -----------------------------------------------------------------------------------------------------------

    def segments(self) -> None:
        """Stretches that are rebuilt one at a time."""
        limit = self.replays + self.effort.segments
        counts = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
        if self.effort.segments <= 10:
            counts = [3, 6, 12, 24, 48]
        swept = [rate for rate, _, _ in self._swept]
        for rate in reversed(self._spread(swept, 2 if self.effort.segments <= 10 else 4)):
            mask = next(m for r, m, _ in self._swept if r == rate)
            for k in counts:
                for window in (0.1, 0.4):
                    if self.replays >= limit:
                        return
                    self.judge(self.cut.solve(self.prices.waists(rate, mask, k, window)), f"{k} segments")

    # -- 3 -----------------------------------------------------------------------------------------------------------

    def moments(self) -> None:
        """Prices at the moments of the peak, where dropping moved it."""
        limit = self.replays + self.effort.moments
        moved = [rate for rate, mask, _ in self._swept_at_peak if self.judge(mask, "")[1].tick != self.base.tick]
        rates = self._spread(moved, max(1, min(8, self.effort.moments // 4)))
        for i, rate in enumerate(rates):
            self._play(rate, (limit - self.replays) // (len(rates) - i))

    def _play(self, rate: float, rounds: int) -> None:
        weights = {self.base.tick: 1.0}
        early = np.zeros(self.replayer.n_ops)
        limit = self.replays + rounds
        for k in range(1, 2 * rounds + 1):
            if self.replays >= limit:
                return
            nbytes, states = self.prices.at_moments(weights)
            mask = self.cut.solve(nbytes * rate, states * rate + early)
            _, footprint = self.judge(mask, "moments")
            share = 1.0 / (k + 1)
            weights = {tick: w * (1 - share) for tick, w in weights.items()}
            weights[footprint.tick] = weights.get(footprint.tick, 0.0) + share
            early *= 1 - share
            early += self.prices.early_rebuilds(mask, footprint.tick, rate * share)

    # -- 4 -----------------------------------------------------------------------------------------------------------

    def order(self) -> None:
        """Thresholds along the forward order: first between neighbours on the hull of the front, which all that is
        found between them should come near, then wherever the front is thinnest."""
        done: set[tuple[frozenset[int], frozenset[int]]] = set()
        self._way = 0
        start = self.replays
        for share, neighbours in ((0.6, self.front.hull), (1.0, lambda: self.front.points)):
            limit = start + int(share * self.effort.order)
            while self.replays < limit:
                points = neighbours()
                pairs = [p for p in pairwise(points) if (p[0].dropped, p[1].dropped) not in done]
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
        count = max(1, min(11, self.effort.order // 5))
        cuts = np.unique(differ[np.linspace(0, len(differ) - 1, count + 2).astype(int)[1:-1]]).tolist()
        cuts.insert(0, cuts.pop(len(cuts) // 2))  # the middle first: it shows which way round is better
        ways = [(one, other), (other, one)]
        if abs(self._way) >= 2:  # so far, one way round was always at least as good
            ways = ways[:1] if self._way > 0 else ways[1:]
        for position in cuts:
            found = []
            for before, after in ways:
                mixed = self.cut.complete(np.where(self.prices.position < position, before, after))
                if mixed is not None and self.replays < limit:
                    found.append(self.judge(mixed, "order")[0])
            if len(ways) == len(found) == 2:
                first, second = found
                if first.peak <= second.peak * 1.001 and first.extra_seconds <= second.extra_seconds * 1.001:
                    ways.pop(1)
                    self._way = max(1, self._way + 1)
                elif second.peak <= first.peak and second.extra_seconds <= first.extra_seconds:
                    ways.pop(0)
                    self._way = min(-1, self._way - 1)
                else:
                    self._way = 0

    def _gap(self, pair: tuple[Point, Point]) -> float:
        small, large = pair
        slowest = max(p.extra_seconds for p in self.front.points)
        memory = (large.peak - small.peak) / max(1, self.base.peak)
        return memory * (0.05 + (small.extra_seconds - large.extra_seconds) / max(1e-30, slowest))

    # -- 5 -----------------------------------------------------------------------------------------------------------

    def classes(self) -> None:
        """One class at a time, from points of the front."""
        limit = self.replays + self.effort.classes
        if not self.effort.classes:
            return
        producer = self.replayer.v_producer
        of_class = np.array([op.cls for op in self.replayer.graph.ops], np.int64)[np.maximum(producer, 0)]
        values = self.cut.values[producer[self.cut.values] >= 0]
        values = values[np.argsort(of_class[values], kind="stable")]
        groups = np.split(values, np.flatnonzero(np.diff(of_class[values])) + 1)
        groups = [group for group in groups if self.prices.nbytes[group].any()]
        members = sorted(groups, key=lambda group: -float(self.prices.nbytes[group].sum()))
        layers = self._layers(values)

        def moves(start: Mask) -> list[Move]:
            # An engine may cost something in each layer where anything is dropped: little is not worth that.
            leave: list[Move] = [(group, False) for group in layers if start[group].any()]
            return leave + [m for group in members for m in self._moves(group, start)]

        self._improve(moves, "classes", limit)

    def _layers(self, values: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Values by the layer of their producer, those with the fewest bytes first."""
        by_layer: dict[str, list[int]] = {}
        for v in values.tolist():
            by_layer.setdefault(self.replayer.graph.ops[int(self.replayer.v_producer[v])].layer, []).append(v)
        groups = [np.array(group, np.int64) for group in by_layer.values()]
        return sorted(groups, key=lambda group: float(self.prices.nbytes[group].sum()))[:12]

    def values(self) -> None:
        """For graphs of a few values: up to two or three values at a time."""
        values = self.cut.values[self.cut.rebuildable[self.cut.values]]
        if len(values) > 24:
            return
        most = 3 if len(values) <= 12 else 2
        some = [values[list(few)] for size in range(1, most + 1) for few in combinations(range(len(values)), size)]
        limit = self.replays + max(self.effort.classes, len(some))
        self._improve(lambda start: [(v, ~start[v]) for v in some], "values", limit)

    def _improve(self, moves: Callable[[Mask], Sequence[Move]], origin: str, limit: int) -> None:
        """Try the moves from each point of the front, those that appear on the way included."""
        visited: set[frozenset[int]] = set()
        while self.replays < limit:
            fresh = [p for p in self.front.points if p.dropped not in visited]
            if not fresh:
                return
            point = fresh[len(visited) * 7 % len(fresh)]
            visited.add(point.dropped)
            start = self._mask(point)
            for part, value in moves(start):
                if self.replays >= limit:
                    return
                mask = start.copy()
                mask[part] = value
                moved = self.cut.complete(mask & self.cut.rebuildable)
                if moved is not None:
                    self.judge(moved, origin)

    # -- 6 -----------------------------------------------------------------------------------------------------------

    def room(self) -> None:
        """Keep more, where there is room below the next point's peak: at the least peak first, then where the front is
        thinnest."""
        limit = self.replays + self.effort.room
        done: set[frozenset[int]] = set()
        while self.replays < limit:
            pairs = [p for p in pairwise(self.front.points) if p[0].dropped not in done]
            if not pairs:
                return
            if not done:
                small, large = pairs[0]
            else:  # by seconds, and by how many times as many
                small, large = max(pairs, key=self._gap if len(done) % 2 else self._relative_gap)
            share = 8 if done else 3
            done.add(small.dropped)
            self._fill(small, large.peak - 1, min(limit, self.replays + max(8, self.effort.room // share)))

    def _relative_gap(self, pair: tuple[Point, Point]) -> float:
        small, large = pair
        return (large.peak - small.peak) * (1 - large.extra_seconds / max(1e-30, small.extra_seconds))

    def _fill(self, point: Point, most: int, limit: int) -> None:
        """Keep what is dearest to re-run, in parts that are halved where they don't fit, up to a peak of `most`."""
        mask = self._mask(point)
        group = self.replayer.v_group
        made = np.unique(group[mask & self.cut.keepable])
        made = made[np.argsort(-self.replayer.op_cost[self.replayer.v_producer[made]], kind="stable")]
        todo = [part for part in np.array_split(made, 8) if len(part)][::-1]
        while todo and self.replays < limit:
            part = todo.pop()
            moved = self.cut.complete(mask & ~np.isin(group, part))
            if moved is not None and self.judge(moved, "room")[0].peak <= most:
                mask = moved
            elif len(part) > 1:
                todo += np.array_split(part, 2)[::-1]

    @staticmethod
    def _moves(group: NDArray[np.int64], mask: Mask) -> list[Move]:
        """Ways to change one class: all or half of it, to dropped or to kept."""
        dropped = int(mask[group].sum())
        parts = [group]
        if len(group) > 1:
            parts += [group[: len(group) // 2], group[len(group) // 2 :]]
        moves: list[Move] = []
        for part in parts:
            if dropped < len(group):
                moves.append((part, True))
            if dropped:
                moves.append((part, False))
        return moves
