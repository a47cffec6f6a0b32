"""From a watched iteration to a :class:`TrainingGraph`.

One walk over the allocator's events in order. Each event is a tick; the recorder's marks among them say where ops begin and
end, what autograd saves, reads and lets go, and when the script's own references die.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from torch_echo import compat
from torch_echo.cost import CostModel, OpSpec, work_of
from torch_echo.errors import CaptureError
from torch_echo.graph import (
    BackwardPass,
    CallSite,
    Kind,
    Op,
    OpClass,
    Phase,
    PlainFree,
    Save,
    Storage,
    TrainingGraph,
    Trait,
    Value,
)
from torch_echo.tape._gate import Place
from torch_echo.tape._gates import rebuild_seconds
from torch_echo.tape._layer import Inside, shape_of
from torch_echo.tape._recipe import Region, disjoint
from torch_echo.tape._record import LayerCalls, LossCall, OpCall, Recorder, SavedTensor
from torch_echo.tape._stack import Site

__all__ = ["build"]

GAIN = 0.95
"""Share of a layer's time that it must take to rebuild what is inside from the outputs, at most, for that to be a choice."""

_SLACK = 8
"""Ticks between the release of the last reference to a storage and the event of its free: other handles of the same node."""


@dataclass
class _Walk:
    """State of the walk over the events."""

    graph: TrainingGraph
    storage: dict[int, int] = field(default_factory=dict)
    """Graph storage of each recorded storage."""
    value: dict[int, int] = field(default_factory=dict)
    """Current value of each recorded storage."""
    open: dict[int, int] = field(default_factory=dict)
    """Graph storage of each live block, by address."""
    live: int = 0
    ops: dict[int, Op] = field(default_factory=dict)
    """Graph op of each call of a layer whose inside may be an op of its own, by identity of the call."""
    died: dict[int, int] = field(default_factory=dict)
    """Tick of the death of the last tensor object, by recorded storage."""
    sites: dict[tuple[str, int, Place | None], int] = field(default_factory=dict)
    """Graph call site of each place in a call of a module."""
    saves: list[Save] = field(default_factory=list)
    saves_of: dict[int, list[int]] = field(default_factory=dict)
    """Those packed so far, by value."""
    classes: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    """Ops so far, by class."""
    beside: float = 0.0
    """Seconds of ops that no step runs but to rebuild."""
    losses: dict[int, _Loss] = field(default_factory=dict)
    """Cross-entropies in one block, by identity of the call."""


@dataclass
class _Loss:
    """A cross-entropy in one block."""

    call: LossCall
    op: Op
    begin: int = -1
    end: int = -1
    """Ticks within its backward node."""


def build(
    recorder: Recorder,
    cost: CostModel | None = None,
    states: Iterable[torch.Tensor] = (),
    node_seconds: Mapping[int, float] | None = None,
    apart: bool = True,
) -> TrainingGraph:
    """The training graph of the iteration that `recorder` watched. `states`: what optimizers keep; made in this iteration, it is
    there from the start in all later ones.

    Ops get the seconds of `cost`, or what they took while watched; autograd's nodes those of `node_seconds`, by sequence number, or
    what they took. `apart`: may what is inside recurrent layers be ops of their own?

    Raises CaptureError if marks and allocations don't match.
    """
    memory, host, nodes = recorder.events()
    marks = [e for e in host if e.nbytes == compat.MemoryProfile.MARK]
    if len(marks) != len(recorder.marks):
        raise CaptureError(f"{len(marks)} marks among the allocations, {len(recorder.marks)} expected")
    events = [
        (e.time, 0, e.ptr, e.nbytes)
        for e in memory
        if abs(e.nbytes) != compat.MemoryProfile.MARK or recorder.device.type != "cpu"
    ]
    events += [(e.time, 1, i, 0) for i, e in enumerate(marks)]
    events.sort(key=lambda e: e[0])
    times = [e[0] for e in events]
    graph = TrainingGraph(ticks=len(events))
    if recorder.device.type != "cpu":
        graph.rng_state_bytes = 0  # generators keep their states in the host's memory
    walk = _Walk(graph)
    for (layer, call), places in recorder.functions.items():
        for place, count in places.items():
            walk.sites[layer, call, place] = len(graph.sites)
            graph.sites.append(CallSite(layer, call, place, count))
    walk.saves = saves = [
        Save(-1, -1, -1, len(events), -1, s.layer, s.call, walk.sites.get((s.layer, s.call, s.place), -1), s.turn)
        for s in recorder.saved
    ]
    saved = {s.storage for s in recorder.saved}
    sequences: dict[int, int] = {}
    keep_graph: list[BackwardPass] = []
    inside: Op | None = None
    running: OpCall
    begun: list[OpCall] = []
    packed: list[int] = []
    entry = top = 0
    rebuilding = False
    rebuilt: set[int] = set()
    rebuilds: list[tuple[int, int]] = []  # times at which they begin and end
    for tick, (_, is_mark, ptr, nbytes) in enumerate(events):
        if not is_mark:
            if rebuilding and nbytes > 0:
                rebuilt.add(ptr)
                continue
            if nbytes < 0 and ptr in rebuilt:
                rebuilt.discard(ptr)
                continue
            if nbytes > 0:
                unseen = walk.open.get(ptr)
                if unseen is not None:  # freed on a thread that the profiler does not see
                    graph.storages[unseen].free = tick
                    walk.live -= graph.storages[unseen].nbytes
                walk.open[ptr] = len(graph.storages)
                graph.storages.append(Storage(nbytes, Kind.TEMPORARY, "", tick, len(events)))
            else:
                block = walk.open.pop(ptr, None)
                if block is None:
                    continue  # older than the iteration: known to the profiler from an earlier profile
                graph.storages[block].free = tick
            walk.live += nbytes
            top = max(top, walk.live)
            continue
        mark = recorder.marks[ptr]
        if mark.what == "op":
            running = mark.payload
            begun.append(running)
            inside = _begin(walk, recorder, running, tick)
            entry = top = walk.live
        elif mark.what == "end":
            assert inside is not None
            inside.end = tick
            _finish(walk, recorder, mark.payload, inside, top - entry, cost)
            for node in range(mark.payload.nodes):
                sequences.setdefault(mark.payload.sequence + node, len(graph.ops) - 1)
            for i in packed:
                _pack(walk, recorder, i)
            packed.clear()
            if mark.payload.loss is not None:
                walk.losses[id(mark.payload.loss)] = _Loss(mark.payload.loss, inside)
            layer = mark.payload.outputs
            if apart and cost is not None and layer is not None:
                walk.ops[id(mark.payload)] = inside
                if layer.output not in saved:
                    begun += _set_apart(walk, layer, [mark.payload], Inside.OWN, tick, cost)
            inside = None
        elif mark.what == "layer":
            if apart and cost is not None and mark.payload.output in saved:
                begun += _set_apart(walk, mark.payload, mark.payload.calls, Inside.WHOLE, tick, cost)
        elif mark.what == "pack":
            saves[mark.payload].pack = tick
            if inside is not None and recorder.saved[mark.payload].storage in running.made:
                packed.append(mark.payload)  # what an op makes is there when it has run
            else:
                _pack(walk, recorder, mark.payload)
        elif mark.what == "unpack":
            index, _ = mark.payload
            if saves[index].unpack < 0:
                saves[index].unpack = tick
        elif mark.what == "function":
            for s in mark.payload:
                producer = graph.values[walk.value[s]].producer if s in walk.value else -1
                if producer >= 0:
                    graph.ops[producer].traits |= Trait.KEEP
        elif mark.what == "release":
            saves[mark.payload].release = tick
        elif mark.what == "death":
            walk.died[mark.payload] = tick
        elif mark.what in ("rebuild", "rebuilt"):
            rebuilding = mark.what == "rebuild"
            if rebuilding:
                rebuilds.append((times[tick], times[tick]))
            else:
                rebuilds[-1] = (rebuilds[-1][0], times[tick])
        elif mark.what == "loss":
            walk.losses[id(mark.payload)].begin = tick
        elif mark.what == "loss done":
            walk.losses[id(mark.payload)].end = tick
        elif mark.what == "backward":
            keep_graph.append(BackwardPass(tick, tick, bool(mark.payload)))
        elif mark.what == "done":
            keep_graph[-1].end = tick
    for s in range(len(recorder.storages)):
        _value(walk, recorder, s)  # also what only existed: optimizer state, gradients
    forward_ops = len(graph.ops)
    _keep_written(graph, begun, saves)
    _confine(graph, begun, saves, recorder.saved)
    for loss in walk.losses.values():
        _in_plain_blocks(walk, recorder, loss)
    graph.saves = [s for s in saves if s.value >= 0]
    graph.passes = [p for p in keep_graph if p.end > p.start]
    _add_backward(graph, nodes, times, sequences, rebuilds, node_seconds)
    _link_readers(graph, forward_ops)
    _classify(graph, walk, recorder, forward_ops)
    graph.base_bytes = max(0, recorder.base_bytes - graph.older_bytes)
    for state in states:
        block = walk.open.get(state.untyped_storage().data_ptr())
        if block is not None:
            graph.storages[block].alloc = -1
    graph.step_seconds = sum(op.seconds for op in graph.ops) - walk.beside
    graph.meta = {"device": str(recorder.device), "torch": torch.__version__, "engine": "tape"}
    if recorder.device.type == "cuda":
        graph.meta["device_memory"] = str(torch.cuda.get_device_properties(recorder.device).total_memory)
    graph.check()
    return graph


def _keep_written(graph: TrainingGraph, calls: list[OpCall], saves: list[Save]) -> None:
    """Keep what is made blank and read without having been filled by an op: something else has filled it."""

    def read(value: int) -> None:
        maker = graph.values[value].producer
        if maker >= 0 and calls[maker].rule.blank:
            graph.ops[maker].traits |= Trait.KEEP

    for save in saves:
        if save.value >= 0:
            read(save.value)
    for op, call in zip(graph.ops, calls, strict=True):
        written = {graph.values[v].storage for v in op.writes}
        for v in op.reads:
            maker = graph.values[v].producer
            unfilled = maker >= 0 and calls[maker].rule.unfilled
            if graph.values[v].storage not in written or (unfilled and not call.rule.fills):
                read(v)


def _confine(graph: TrainingGraph, calls: list[OpCall], saves: list[Save], saved: list[SavedTensor]) -> None:
    """Ops that read gathered parameters and that backward might want to re-run elsewhere than where these are gathered are kept.

    From the last op to the first: the calls of sharded modules that surround all places in which a value may be read, by a
    saved tensor or by the re-run of an op, are a common prefix of theirs.
    """
    if not any(call.needs for call in calls):
        return
    around: dict[int, tuple[int, ...]] = {}

    def narrow(value: int, scopes: tuple[int, ...]) -> None:
        known = around.get(value, scopes)
        around[value] = tuple(a for a, b in zip(known, scopes, strict=False) if a == b)

    for save, tensor in zip(saves, saved, strict=True):
        if save.value >= 0:
            narrow(save.value, tensor.scopes)
    for op, call in zip(reversed(graph.ops), reversed(calls), strict=True):
        readers = [around[v] for v in op.writes if v in around]
        if any(need not in scopes for need in call.needs for scopes in readers):
            op.traits |= Trait.KEEP
        if not op.traits & Trait.KEEP:
            for v in op.reads:
                for scopes in readers:
                    narrow(v, scopes)


def _in_plain_blocks(walk: _Walk, recorder: Recorder, loss: _Loss) -> None:
    """Note what a cross-entropy in one block would take as PyTorch's ops (see ``_loss``): log-softmax from forward to the end of
    its node, its gradient in there, and the logits' gradient beside them; the logits only as long as others need them."""
    graph, call, op = walk.graph, loss.call, loss.op
    block = walk.storage[call.logits]
    logits = graph.storages[block]
    of_loss = set(call.saved)
    mine = [walk.saves[i] for i in call.saved if recorder.saved[i].storage == call.logits]
    others = [
        save.release
        for i, save in enumerate(walk.saves)
        if i not in of_loss and recorder.saved[i].storage == call.logits
    ]
    gone = max((save.release for save in mine), default=logits.free) if loss.end < 0 else loss.end
    if call.over:
        for save in mine:
            save.release = max(save.release, min(logits.free, graph.ticks))
    inside = [(op.start, op.end), (loss.begin, loss.end)]
    for i, storage in enumerate(graph.storages):
        if any(start < storage.alloc and storage.free <= end for start, end in inside):
            graph.plain_frees.append(PlainFree(i, storage.alloc))
    for i in call.saved:  # the target: its node lets go of it before the logits' gradient is made
        storage = graph.storages[walk.storage[recorder.saved[i].storage]]
        if storage is not logits and loss.begin <= storage.free <= walk.saves[i].release + _SLACK:
            graph.plain_frees.append(PlainFree(walk.storage[recorder.saved[i].storage], loss.begin))
    held = max([walk.died.get(call.logits, graph.ticks), op.end, *others])
    known = call.over or logits.free - max([held, gone, *(save.release for save in mine)]) <= _SLACK
    if logits.alloc >= 0 and held < logits.free and known:  # otherwise something else held it to its end
        graph.plain_frees.append(PlainFree(block, held))

    def add(nbytes: int, kind: Kind, alloc: int, free: int) -> None:
        graph.plain_storages.append(Storage(nbytes, kind, op.layer, alloc, free))

    add(call.nbytes, Kind.FEATURE_MAP, op.start, max(op.end, gone))
    if loss.end >= 0:
        add(call.nbytes + call.beside, Kind.TEMPORARY, loss.begin, loss.end)
        if call.over:
            add(call.nbytes, Kind.GRADIENT, loss.begin, max(loss.end, logits.free))


def _new_op(walk: _Walk, call: OpCall, name: str, site: Site, tick: int, reads: tuple[int, ...], traits: Trait) -> Op:
    graph = walk.graph
    cls = walk.classes.setdefault((call.layer, site), len(graph.classes))
    if cls == len(graph.classes):
        graph.classes.append(OpClass(name, call.layer, site))
        walk.counts.append(0)
    instance = walk.counts[cls]
    walk.counts[cls] += 1
    op = Op(name, call.layer, Phase.FORWARD, cls, instance, tick, tick, reads, call=call.call, traits=traits)
    op.site, op.turn = walk.sites.get((call.layer, call.call, call.place), -1), call.turn
    graph.ops.append(op)
    return op


def _begin(walk: _Walk, recorder: Recorder, call: OpCall, tick: int) -> Op:
    traits = Trait.NONE
    if call.keep:
        traits |= Trait.KEEP
    if call.rule.random:
        traits |= Trait.RANDOM
    if call.inside is not None:
        traits |= Trait.COMPOSITE
    reads = tuple(dict.fromkeys(_value(walk, recorder, s) for s in call.reads))
    return _new_op(walk, call, call.rule.name, call.site, tick, reads, traits)


def _set_apart(
    walk: _Walk, layer: LayerCalls, calls: list[OpCall], inside: Inside, tick: int, cost: CostModel
) -> list[OpCall]:
    """Make the inside of a layer's calls ops of their own, which read outputs too, if that takes less time than running the calls
    again. Returns the calls for which it did.

    They read the layer's output where autograd saves that, else their own: then nobody else may want it. Rebuilding outputs and
    inside is then two runs.
    """
    graph = walk.graph
    specs = [call.spec for call in layer.calls if call.spec is not None]
    func = layer.calls[0].func
    rebuild = {spec: rebuild_seconds(cost, func, spec) for spec in specs}
    if sum(rebuild[spec] for spec in specs) > GAIN * sum(cost.seconds(func, spec) for spec in specs):
        return []
    done = []
    for call in calls:
        op, made = walk.ops[id(call)], [walk.value[s] for s in call.inside or ()]
        if call.spec is None or not made:
            continue
        read = walk.value[call.made[0] if inside is Inside.OWN else layer.output]
        reads = tuple(dict.fromkeys((*op.reads, read)))
        if any(graph.storages[graph.values[v].storage].free < tick for v in reads):
            continue  # a rebuild would have to hold what is gone in this step
        site = (*call.site[:-1], call.site[-1] + inside)
        rest = _new_op(walk, call, f"{op.name} (inside)", site, tick, reads, op.traits)
        outputs = [v for v in op.writes if v not in set(made)]
        rest.writes, op.writes = tuple(made), tuple(outputs)
        for v in made:
            graph.values[v].producer = len(graph.ops) - 1
        rest.seconds = rest.reuse_seconds = rebuild[call.spec]
        walk.beside += rest.seconds
        op.workspace, rest.workspace = _workspaces(
            op, call.spec, graph.nbytes(outputs[0]), sum(graph.nbytes(v) for v in outputs)
        )
        done.append(call)
    return done


def _workspaces(op: Op, spec: OpSpec, output: int, outputs: int) -> tuple[int, int]:
    """Of a layer's call that is run again for its outputs, and of the rebuild of its inside. `op` has that of the whole call."""
    directions, steps = shape_of(spec)
    # At its peak a call joins the states of all steps, of each direction and then of both, and has not made the last states yet.
    given = op.workspace + outputs - directions * output  # to the gates, by the input of all steps
    # Nothing is joined in the rebuild. The product of one step is there beside what is inside, unless that is the gates.
    rest = given + (output // (directions * steps) if op.name.startswith("aten::rnn") else 0)
    # For the outputs alone: what the input gives, to both directions for a moment; or what is joined, and the states themselves.
    return max(directions * given, given + directions * output - output // steps), rest


def _finish(walk: _Walk, recorder: Recorder, call: OpCall, op: Op, rise: int, cost: CostModel | None) -> None:
    graph = walk.graph
    index = len(graph.ops) - 1
    writes: list[int] = []
    for s in call.made:
        seen = recorder.storages[s]
        block = walk.open.get(seen.ptr) if seen.nbytes else None
        if block is None:  # no bytes of its own, or memory that the device's allocator does not own
            block = len(graph.storages)
            graph.storages.append(Storage(0, seen.kind, call.layer, op.end, graph.ticks))
            if seen.nbytes:
                op.traits |= Trait.KEEP
        storage = graph.storages[block]
        storage.kind, storage.layer = Kind.FEATURE_MAP, call.layer
        walk.storage[s] = block
        walk.value[s] = len(graph.values)
        writes.append(len(graph.values))
        graph.values.append(Value(block, 0, index))
    for s in call.inside or ():
        # Nobody but autograd holds it then; how much sooner the kernels let go of it is not known.
        walk.died[s] = op.end
    for s in call.mutated:
        old = _value(walk, recorder, s)
        graph.values[old].keepable = False
        if call.rule.silent and graph.values[old].producer >= 0:
            graph.ops[graph.values[old].producer].traits |= Trait.KEEP
        walk.value[s] = len(graph.values)
        again = call.rule.rerun is None  # otherwise the re-run leaves this storage alone
        graph.values.append(Value(graph.values[old].storage, graph.values[old].version + 1, index if again else -1))
        if again:
            _carry_over(walk, recorder, [r for t, r in call.regions if t == s], old, walk.value[s])
            writes.append(walk.value[s])
            op.traits |= Trait.MUTATES
            if old not in op.reads:
                op.reads = (*op.reads, old)
    op.writes = tuple(writes)
    op.workspace = max(0, rise - sum(graph.storages[walk.storage[s]].nbytes for s in call.made))
    if call.rule.random:
        op.workspace += graph.rng_state_bytes  # the generator's own state, while it is set back
    op.seconds = op.reuse_seconds = call.seconds
    if call.reuses:
        op.traits |= Trait.REUSES
    if call.spec is not None:
        work = work_of(call.func, call.spec)
        op.flops, op.bytes_moved = work.flops, work.bytes_moved
        if cost is not None:
            op.seconds = cost.seconds(call.func, call.spec)
            if call.reuses:
                in_place = call.spec._replace(op=str(call.rule.in_place))
                op.reuse_seconds = min(op.seconds, cost.seconds(call.rule.in_place, in_place))


def _pack(walk: _Walk, recorder: Recorder, index: int) -> None:
    value = walk.saves[index].value = _value(walk, recorder, recorder.saved[index].storage)
    walk.saves_of.setdefault(value, []).append(index)


def _carry_over(walk: _Walk, recorder: Recorder, regions: list[Region], old: int, new: int) -> None:
    """Saves of version `old` that lie elsewhere than where an op writes are read from version `new`. See ``Tape``."""
    packed = walk.saves_of.get(old)
    if not packed:
        return
    moved = [i for i in packed if all(disjoint(recorder.saved[i].region, r) for r in regions)]
    for i in moved:
        walk.saves[i].value = new
    walk.saves_of[old] = [i for i in packed if i not in moved]
    walk.saves_of[new] = moved


def _value(walk: _Walk, recorder: Recorder, s: int) -> int:
    """The current value of a recorded storage; made at first sight for what no watched op made."""
    value = walk.value.get(s)
    if value is None:
        graph, seen = walk.graph, recorder.storages[s]
        block = walk.open.get(seen.ptr) if seen.nbytes else None
        if block is None or graph.storages[block].nbytes < seen.nbytes:
            block = len(graph.storages)
            graph.storages.append(Storage(seen.nbytes, seen.kind, seen.layer, -1, graph.ticks))
        else:
            graph.storages[block].kind = seen.kind
        walk.storage[s] = block
        value = walk.value[s] = len(graph.values)
        graph.values.append(Value(block, 0, -1))
    return value


def _add_backward(
    graph: TrainingGraph,
    nodes: list[compat.NodeEvent],
    times: list[int],
    sequences: dict[int, int],
    rebuilds: list[tuple[int, int]],
    node_seconds: Mapping[int, float] | None,
) -> None:
    """Autograd nodes become ops of the backward phase, in the layer of the forward op that they belong to. What was rebuilt
    while the step was recorded is not counted in their durations."""
    begins = [begin for begin, _ in rebuilds]
    spent = [0, *itertools.accumulate(end - begin for begin, end in rebuilds)]
    classes: dict[tuple[str, str], int] = {}
    counts: dict[int, int] = {}
    for node in nodes:
        start, end = bisect_left(times, node.start), bisect_right(times, node.end) - 1
        if start >= graph.ticks:
            continue
        forward = sequences.get(node.sequence, -1)
        layer = graph.ops[forward].layer if forward >= 0 else ""
        cls = classes.get((node.name, layer))
        if cls is None:
            cls = classes[node.name, layer] = len(graph.classes)
            graph.classes.append(OpClass(node.name, layer))
        instance = counts.get(cls, 0)
        counts[cls] = instance + 1
        if node_seconds is None:
            inside = spent[bisect_right(begins, node.end)] - spent[bisect_left(begins, node.start)]
            seconds = (node.end - node.start - inside) * 1e-9
        else:
            seconds = node_seconds.get(node.sequence, 0.0)
        graph.ops.append(Op(node.name, layer, Phase.BACKWARD, cls, instance, start, max(start, end), seconds=seconds))


def _link_readers(graph: TrainingGraph, first: int) -> None:
    """Find the backward op in which each saved tensor is read."""
    starts = [op.start for op in graph.ops[first:]]
    reads: dict[int, list[int]] = {}
    for save in graph.saves:
        if save.unpack >= 0:
            i = bisect_right(starts, save.unpack) - 1
            while i >= 0 and graph.ops[first + i].end < save.unpack:
                i -= 1
            if i >= 0:
                save.reader = first + i
                reads.setdefault(first + i, []).append(save.value)
    for op, values in reads.items():
        graph.ops[op].reads = tuple(dict.fromkeys(values))


def _classify(graph: TrainingGraph, walk: _Walk, recorder: Recorder, first: int) -> None:
    """Kinds and layers of the blocks that no watched op made, and the script's own hold on feature maps."""
    starts = [op.start for op in graph.ops[first:]]
    begin = min((p.start for p in graph.passes), default=graph.ticks)
    end = max((p.end for p in graph.passes), default=graph.ticks)
    named = set(walk.storage.values())
    for i, storage in enumerate(graph.storages):
        if i in named:
            continue
        if storage.alloc > end:
            storage.kind = Kind.OPTIMIZER_STATE if storage.free == graph.ticks else Kind.TEMPORARY
        elif storage.alloc > begin:
            j = bisect_right(starts, storage.alloc) - 1
            if j >= 0:
                op = graph.ops[first + j]
                storage.layer = op.layer
                inside = storage.free <= op.end
                storage.kind = Kind.TEMPORARY if inside else Kind.GRADIENT
    released: dict[int, int] = {}
    for save in graph.saves:
        s = graph.values[save.value].storage
        released[s] = max(released.get(s, -1), save.release)
    for s, block in walk.storage.items():
        storage = graph.storages[block]
        if storage.alloc < 0:
            if s in walk.died and recorder.storages[s].kind == Kind.GRADIENT:
                storage.free = walk.died[s]
            continue
        held = walk.died.get(s, graph.ticks)
        if s in recorder.touched:
            # What the tape did while recording is taken back: kept, it would live to its last reference.
            storage.free = max(held, released.get(block, -1), storage.alloc)
        elif storage.free - max(held, released.get(block, -1)) > _SLACK:
            held = storage.free  # something else held it to its end
            maker = graph.values[walk.value[s]].producer
            given = storage.nbytes and s in recorder.unshared and maker >= 0
            if given and not graph.ops[maker].traits & Trait.COMPOSITE:
                # Whatever that is came by it in backward, as a sparse gradient does by its indices.
                graph.ops[maker].traits |= Trait.KEEP
        storage.held = max(storage.held, min(held, storage.free))
