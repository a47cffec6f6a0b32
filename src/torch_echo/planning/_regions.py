"""Regions of a graph: what checkpointing by hand would recompute as a whole.

A region is a call of a module, with all that is called in it: a layer, a cell at one step of a loop. What one region makes and
another reads is its *boundary*. Where all boundaries are kept, each region can be rebuilt by itself; a chain through all steps,
which every price leaves whole (re-running it costs no more for one step than for all), is cut there.

The graph knows of each op the module that it ran in, by its path, and which call of that it was. So regions are found for each
depth of paths: they are stretches of the forward pass in modules below one path, in which no module is called again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_echo.footprint import Replayer
from torch_echo.graph import Phase

__all__ = ["boundaries"]

Mask = NDArray[np.bool_]


def boundaries(replayer: Replayer) -> list[Mask]:
    """For each depth of module paths at which there are other regions than above: the values that are read outside of the region
    in which they were made. Cost: linear in ops and reads, for each depth."""
    ops = [op for op in replayer.graph.ops if op.phase is Phase.FORWARD]
    paths = [tuple(op.layer.split(".")) for op in ops]
    reads, reader = replayer.reads_of(np.arange(len(ops)))
    made = replayer.v_producer[reads] >= 0
    reads, reader = reads[made], reader[made]
    producer = replayer.v_producer[reads]
    found: list[Mask] = []
    before = 1
    for depth in range(1, 1 + max(map(len, paths), default=0)):
        region = np.zeros(len(ops), np.int64)
        number, under = 0, None
        calls: dict[str, int] = {}
        for i, op in enumerate(ops):
            here = paths[i][:depth]
            if here != under or calls.setdefault(op.layer, op.call) != op.call:
                number, under = number + 1, here
                calls = {op.layer: op.call}
            region[i] = number
        if number <= before:
            continue
        before = number
        outside = np.zeros(replayer.n_values, bool)
        outside[reads[region[producer] != region[reader]]] = True
        found.append(outside)
    return found
