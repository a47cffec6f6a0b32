"""Why a plan is as it is: one decision per class of ops, with bytes, seconds and a reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from torch_echo.footprint import Footprint, Replayer
from torch_echo.graph import Kind, Phase, Trait
from torch_echo.planning._prices import Prices
from torch_echo.units import format_bytes

__all__ = ["Decision", "explain"]


@dataclass(frozen=True)
class Decision:
    """What a plan does with the values that the ops of one class make."""

    name: str
    """Name of the ops."""
    layer: str
    cls: int
    """Index into ``graph.classes``."""
    instances: int
    """How many ops of the class ran."""
    n_dropped: int
    """How many of them have an output that is dropped."""
    bytes_dropped: int
    """Sum of what they made and is dropped."""
    bytes_kept: int
    """Sum of what they made and is kept for backward."""
    bytes_less_at_peak: int
    """Bytes of the class that were alive where the peak stood with everything kept, and no longer are."""
    seconds_more: float
    """Time of re-running its ops."""
    action: str
    """"keep" or "rebuild" (some or all)."""
    reason: str
    rebuilt_from: tuple[str, ...] = ()
    """The ops (as "layer:name") and kinds of data that the re-run ops read."""

    @property
    def bytes(self) -> int:
        """What a table shows: bytes less at the peak."""
        return self.bytes_less_at_peak


def explain(prices: Prices, dropped: Collection[int], base: Footprint, footprint: Footprint) -> list[Decision]:
    """The decisions of a plan, by bytes; `base` and `footprint` are the replays without and with it. Cost: linear."""
    replayer = prices.replayer
    graph = replayer.graph
    mask = replayer.mask(dropped)
    records, reads, _ = replayer.records(mask)
    needed = replayer.v_saved > 0
    needed[reads] = True

    then, now = base.storages_at(base.tick), footprint.storages_at(base.tick)
    less = {s: n - now.get(s, 0) for s, n in then.items()}
    ops_of: dict[int, list[int]] = {}
    for o, op in enumerate(graph.ops):
        if op.phase == Phase.FORWARD and op.writes:
            ops_of.setdefault(op.cls, []).append(o)
    recorded = set(records.tolist())

    decisions = []
    for c, ops in ops_of.items():
        values = [w for o in ops for w in graph.ops[o].writes if needed[w] or mask[w]]
        if not values:
            continue
        gone = [w for w in values if mask[w]]
        stay = [w for w in values if not mask[w]]
        rerun = [o for o in ops if o in recorded]
        storages = {graph.values[w].storage for o in ops for w in graph.ops[o].writes}
        decisions.append(
            Decision(
                name=graph.classes[c].name,
                layer=graph.classes[c].layer,
                cls=c,
                instances=len(ops),
                n_dropped=len({graph.values[w].producer for w in gone}),
                bytes_dropped=_bytes(replayer, gone),
                bytes_kept=_bytes(replayer, stay),
                bytes_less_at_peak=sum(less.get(s, 0) for s in storages),
                seconds_more=float(replayer.op_cost[rerun].sum()) if rerun else 0.0,
                action="rebuild" if gone else "keep",
                reason=_why_rebuilt(prices, gone) if gone else _why_kept(prices, ops, stay, needed),
                rebuilt_from=_sources(replayer, rerun) if gone else (),
            )
        )
    decisions.sort(key=lambda d: (-d.bytes_dropped, -d.bytes_kept, d.layer, d.name, d.cls))
    return decisions


def _bytes(replayer: Replayer, values: list[int]) -> int:
    return int(replayer.s_bytes[np.unique(replayer.v_storage[values])].sum()) if values else 0


def _why_rebuilt(prices: Prices, gone: list[int]) -> str:
    saved = sum(int(prices.replayer.v_saved[v] > 0) for v in gone)
    if not saved:
        return "only to rebuild what is made from it"
    return "backward reads it" if saved == len(gone) else "backward reads some of it, the rest rebuilds others"


def _why_kept(prices: Prices, ops: list[int], stay: list[int], needed: np.ndarray) -> str:
    graph, cut = prices.replayer.graph, prices.cut
    if any(graph.ops[o].traits & Trait.KEEP for o in ops):
        return "the op must not be re-run"
    if all(prices.free[v] for v in stay):
        return "in memory anyway for as long as backward needs it"
    if not any(cut.rebuildable[v] for v in stay):
        return "cannot be rebuilt: something that it is made from is overwritten"
    nbytes, seconds = _bytes(prices.replayer, stay), float(prices.replayer.op_cost[ops].sum())
    if not any(prices.replayer.v_saved[v] for v in stay):
        return "kept to rebuild others from"
    return f"kept: re-running the op alone takes {seconds * 1e3:.3g} ms for {format_bytes(nbytes)}"


def _sources(replayer: Replayer, rerun: list[int]) -> tuple[str, ...]:
    """What re-running the ops reads, in words."""
    graph = replayer.graph
    found: dict[str, None] = {}
    for o in rerun:
        for r in replayer.reads[o]:
            value = graph.values[r]
            if value.producer >= 0:
                op = graph.ops[value.producer]
                found[f"{op.layer}:{op.name}" if op.layer else op.name] = None
            else:
                kind = graph.storages[value.storage].kind
                found["parameters" if kind == Kind.PARAMETER else f"{kind.name.lower().replace('_', ' ')}s"] = None
    return tuple(found)
