"""The order of a compiler's kernels, for the least peak.

Problem. Kernels read and write buffers; a buffer is there from the kernel that writes it to the last one that reads it. Of the
orders in which each kernel comes after those that it waits for, find one with a small peak. The smallest is NP-hard to find.

Method. Local search from the best of several orders: the compiler's, and those of the graph that the kernels are made of, in which
the partitioner puts what is recomputed just before its first reader (a kernel made of several ops goes by its first or by its
last). What is there at the peak without being needed there is there too early, or too long. So the kernel that writes it is put
off until just before its first reader, with all that wait for it in between; or its last readers are drawn to before the peak,
with all that they wait for; and each of these kernels alone goes as far up or down as it can. Of the moves of one round the best
is made, as long as the peak falls, or stays and less lies near it.

Cost: a move is tried in time linear in kernels and buffers (NumPy); the number of tries is limited.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "Kernels", "improve", "improved", "in_turn", "peak_of"]

IntArray = NDArray[np.int64]

_WORK = 20_000_000
"""Kernels and buffers looked at, all tries together."""
_NEAR = 0.9
"""What lies above so much of the peak is summed up, to tell orders of the same peak apart."""
_WORTH = 0.99
"""Of the peak: it has to be lower than that for another order to be taken."""


@dataclass(frozen=True)
class Block:
    """A buffer."""

    nbytes: int
    writers: tuple[int, ...]
    """Kernels that write it, parts of it perhaps; none: it is there from the beginning."""
    readers: tuple[int, ...]
    """Kernels that read it."""
    stays: bool = False
    """Is it there when all have run?"""


@dataclass(frozen=True)
class Kernels:
    """Kernels, by their position in the order that is given, and their buffers."""

    waits: Sequence[frozenset[int]]
    """For each kernel, those that it has to come after."""
    blocks: Sequence[Block]
    overwrites: Sequence[tuple[int, int]] = ()
    """(block read, block written) of the same size: a kernel that is the last reader of the first writes the second over it."""


class _Book:
    """Looks up what an order takes."""

    def __init__(self, kernels: Kernels) -> None:
        self.n = len(kernels.waits)
        blocks = kernels.blocks
        self.nbytes = np.array([b.nbytes for b in blocks], np.int64)
        self.given = np.array([not b.writers for b in blocks], bool)
        self.stays = np.array([b.stays for b in blocks], bool)
        self.writers, self.first_writer = _flat([b.writers or (0,) for b in blocks])
        self.readers, self.first_reader = _flat([b.readers or b.writers or (0,) for b in blocks])
        self.over_read = np.array([a for a, _ in kernels.overwrites], np.int64)
        self.over_written = np.array([b for _, b in kernels.overwrites], np.int64)

    def lives(self, order: Sequence[int]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Position of each kernel; of each block its first and last position, and the bytes alive at each position."""
        at = np.empty(self.n, np.int64)
        at[np.asarray(order, np.int64)] = np.arange(self.n)
        birth = np.minimum.reduceat(at[self.writers], self.first_writer)
        birth[self.given] = 0
        death = np.maximum(np.maximum.reduceat(at[self.readers], self.first_reader), birth)
        death[self.stays] = self.n - 1
        change = np.zeros(self.n + 1, np.int64)
        np.add.at(change, birth, self.nbytes)
        np.add.at(change, death + 1, -self.nbytes)
        alive = np.cumsum(change[:-1])
        if len(self.over_read):
            taken = death[self.over_read] == birth[self.over_written]
            _, first = np.unique(self.over_read[taken], return_index=True)  # one block is written over once
            written = self.over_written[taken][first]
            _, first = np.unique(written, return_index=True)
            written = written[first]
            np.subtract.at(alive, birth[written], self.nbytes[written])
        return at, birth, death, alive

    def value(self, order: Sequence[int]) -> tuple[int, int]:
        """The peak, and how much lies near it."""
        alive = self.lives(order)[3]
        most = int(alive.max(initial=0))
        return most, int(np.maximum(0, alive - int(_NEAR * most)).sum())


def _flat(lists: Sequence[tuple[int, ...]]) -> tuple[IntArray, IntArray]:
    """All in one, and where each begins."""
    sizes = np.array([len(each) for each in lists], np.int64)
    return np.array([i for each in lists for i in each], np.int64), np.cumsum(sizes) - sizes


def improved(
    waits: list[frozenset[int]],
    blocks: list[Any],
    overwrites: list[tuple[int, int]],
    turns: Sequence[Sequence[int]] = (),
) -> list[int] | None:
    """For :func:`torch_echo.compat.kernel_order`: an order with a peak that is lower by more than is lost in estimates, or None.
    `turns`: for each kernel a number, in as many ways as the search may begin: small ones first."""
    kernels = Kernels(waits, [Block(*b) for b in blocks], overwrites)
    given = list(range(len(waits)))
    starts = [given, *(in_turn(waits, each) for each in turns)]
    value = _Book(kernels).value
    found = improve(kernels, min(starts, key=value))
    return found if value(found)[0] < _WORTH * value(given)[0] else None


def in_turn(waits: Sequence[frozenset[int]], turns: Sequence[int]) -> list[int]:
    """Of the kernels that wait for nothing any more, the one whose turn is first, again and again."""
    followers = _followers(waits)
    open_ = [len(each) for each in waits]
    ready = [(turns[k], k) for k, n in enumerate(open_) if not n]
    heapq.heapify(ready)
    order = []
    while ready:
        _, kernel = heapq.heappop(ready)
        order.append(kernel)
        for other in followers[kernel]:
            open_[other] -= 1
            if not open_[other]:
                heapq.heappush(ready, (turns[other], other))
    return order


def _followers(waits: Sequence[frozenset[int]]) -> list[set[int]]:
    followers: list[set[int]] = [set() for _ in waits]
    for kernel, others in enumerate(waits):
        for other in others:
            followers[other].add(kernel)
    return followers


def peak_of(kernels: Kernels, order: Sequence[int]) -> int:
    """Bytes."""
    return _Book(kernels).value(order)[0]


def improve(kernels: Kernels, order: Sequence[int]) -> list[int]:
    """An order with a peak no higher than that of the one given."""
    book = _Book(kernels)
    if not kernels.blocks:
        return list(order)
    followers = _followers(kernels.waits)
    best = list(order)
    value = book.value(best)
    tries = _WORK // (book.n + len(kernels.blocks))
    while tries > 0:
        found: tuple[tuple[int, int], list[int]] | None = None
        moves = _moves(kernels, book, followers, best)
        tries -= len(moves)
        for moved in moves:
            new = book.value(moved)
            if new < value and (found is None or new < found[0]):
                found = new, moved
        if found is None:
            break
        value, best = found
    return best


def _moves(kernels: Kernels, book: _Book, followers: list[set[int]], order: list[int]) -> list[list[int]]:
    at, birth, death, alive = book.lives(order)
    peak = int(alive.argmax())
    found: list[list[int] | None] = []
    culprits = {order[peak]}
    for i in np.flatnonzero((birth <= peak) & (death >= peak)).tolist():
        block = kernels.blocks[i]
        readers = sorted(int(at[r]) for r in block.readers)
        culprits |= {order[int(death[i])], *block.writers}
        if block.writers and birth[i] < peak:
            later = [r for r in readers if r > birth[i]]
            until = later[0] if later else book.n
            if until > peak:
                found.append(_put_off(order, at, followers, int(birth[i]), until))
        if not block.stays and death[i] > peak:
            found.append(_draw(order, at, kernels.waits, [r for r in readers if r > peak], peak))
    for kernel in culprits:
        here = int(at[kernel])
        first = max((int(at[w]) + 1 for w in kernels.waits[kernel]), default=0)
        last = min((int(at[f]) for f in followers[kernel]), default=book.n)
        for to in {first, last}:
            if to < here:
                found.append([*order[:to], kernel, *order[to:here], *order[here + 1 :]])
            elif to > here + 1:
                found.append([*order[:here], *order[here + 1 : to], kernel, *order[to:]])
    return [f for f in found if f is not None]


def _put_off(order: list[int], at: IntArray, followers: list[set[int]], first: int, until: int) -> list[int]:
    """The kernel at position `first`, and what waits for it, come just before position `until`."""
    moved = {order[first]}
    for p in range(first + 1, until):
        if any(order[p] in followers[m] for m in moved):
            moved.add(order[p])
    return [
        *order[:first],
        *(k for k in order[first:until] if k not in moved),
        *(k for k in order[first:until] if k in moved),
        *order[until:],
    ]


def _draw(
    order: list[int], at: IntArray, waits: Sequence[frozenset[int]], readers: list[int], before: int
) -> list[int] | None:
    """The kernels at positions `readers`, and what they wait for, come just before position `before`; None if that one is among
    what they wait for."""
    moved = {order[r] for r in readers}
    for p in range(readers[-1], before - 1, -1):
        if order[p] in moved:
            moved |= {w for w in waits[order[p]] if at[w] >= before}
    if order[before] in moved:
        return None
    last = readers[-1] + 1
    return [
        *order[:before],
        *(k for k in order[before:last] if k in moved),
        *(k for k in order[before:last] if k not in moved),
        *order[last:],
    ]
