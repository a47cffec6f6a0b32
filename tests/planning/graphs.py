"""Graphs for tests: a builder for hand-made ones, and random ones that are consistent in the way real iterations
are."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from torch_echo.graph import BackwardPass, Fused, Kind, Op, OpClass, Phase, Save, Storage, TrainingGraph, Trait, Value

__all__ = ["Builder", "examples", "random_graph", "random_graphs", "residual_chain", "transformer"]


def examples(n: int) -> settings:
    """`n` examples, the same in every run."""
    return settings(max_examples=n, deadline=None, database=None, derandomize=True)


class Builder:
    """Builds a graph op by op, as an iteration runs: forward ops, then `backward()`.

    The script lets go of a value after the last forward op that reads it, unless `hold` says otherwise; autograd lets
    go when the backward node has read it.
    """

    def __init__(self, *, step_seconds: float = 0.0, rerun_overhead: float = 0.0, rng_state_bytes: int = 16) -> None:
        self.graph = TrainingGraph(
            step_seconds=step_seconds, rerun_overhead=rerun_overhead, rng_state_bytes=rng_state_bytes
        )
        self.tick = 0
        self.nodes: list[tuple[int, tuple[int, ...], int, int]] = []
        self._classes: dict[tuple[str, str], int] = {}
        self._count: dict[int, int] = {}
        self._held_to_end: set[int] = set()

    def now(self) -> int:
        """The next tick."""
        self.tick += 1
        return self.tick - 1

    def outside(self, nbytes: int, kind: Kind = Kind.PARAMETER) -> int:
        """A value from before the iteration."""
        self.graph.storages.append(Storage(nbytes, kind, "", -1, -1))
        self.graph.values.append(Value(len(self.graph.storages) - 1, 0, -1))
        return len(self.graph.values) - 1

    def op(
        self,
        name: str,
        reads: Sequence[int],
        sizes: Sequence[int],
        seconds: float = 1.0,
        *,
        layer: str = "",
        saves: Sequence[int | str] = (),
        grad: int = 0,
        grad_workspace: int = 0,
        traits: Trait = Trait.NONE,
        workspace: int = 0,
        in_place: int | None = None,
        flops: float = 0.0,
    ) -> list[int]:
        """A forward op. `saves`: values that its backward reads; "out0" is its first output. `grad`: bytes that its
        backward makes and that live until the next node has run. `in_place`: the value that it overwrites."""
        graph = self.graph
        cls = self._classes.setdefault((layer, name), len(graph.classes))
        if cls == len(graph.classes):
            graph.classes.append(OpClass(name, layer, (cls,)))
        instance = self._count[cls] = self._count.get(cls, -1) + 1
        o, start = len(graph.ops), self.now()
        outputs = []
        if in_place is not None:
            old = graph.values[in_place]
            old.keepable = False
            graph.values.append(Value(old.storage, old.version + 1, o))
            outputs.append(len(graph.values) - 1)
            traits |= Trait.MUTATES
        for nbytes in sizes:
            graph.storages.append(Storage(nbytes, Kind.FEATURE_MAP, layer, self.now(), -1))
            graph.values.append(Value(len(graph.storages) - 1, 0, o))
            outputs.append(len(graph.values) - 1)
        graph.ops.append(
            Op(
                name,
                layer,
                Phase.FORWARD,
                cls,
                instance,
                start,
                self.now(),
                tuple(reads),
                tuple(outputs),
                seconds,
                flops,
            )
        )
        graph.ops[-1].traits, graph.ops[-1].workspace = traits, workspace
        saved = tuple(outputs[int(s.removeprefix("out"))] if isinstance(s, str) else s for s in saves)
        self.nodes.append((o, saved, grad, grad_workspace))
        return outputs

    def hold(self, value: int) -> None:
        """The script holds the value to the end of the iteration."""
        self._held_to_end.add(self.graph.values[value].storage)

    def backward(self) -> TrainingGraph:
        """Run all nodes backward, and finish."""
        graph = self.graph
        last: dict[int, int] = {}
        for op in graph.ops:
            for v in (*op.reads, *op.writes):
                last[graph.values[v].storage] = op.end
        released: dict[int, int] = {}
        start, before = self.now(), None
        for o, saved, grad, extra in reversed(self.nodes):
            begin, made, node = self.now(), [], len(graph.ops)
            for v in saved:
                made.append(Save(v, graph.ops[o].end, self.now(), -1, node, graph.ops[o].layer))
            gradient = temporary = None
            if grad:
                gradient = Storage(grad, Kind.GRADIENT, graph.ops[o].layer, self.now(), graph.ticks)
                graph.storages.append(gradient)
            if extra:
                temporary = Storage(extra, Kind.TEMPORARY, graph.ops[o].layer, self.now(), self.now())
                graph.storages.append(temporary)
            end = self.now()
            if gradient is not None:
                if before is not None:
                    before.free = self.now()
                before = gradient
            for save in made:
                save.release = self.now()
                released[graph.values[save.value].storage] = save.release
            graph.saves.extend(made)
            op = graph.ops[o]
            graph.ops.append(
                Op(
                    f"{op.name}_backward",
                    op.layer,
                    Phase.BACKWARD,
                    op.cls,
                    op.instance,
                    begin,
                    end,
                    seconds=2 * op.seconds,
                )
            )
        done = self.now()
        graph.passes.append(BackwardPass(start, done))
        graph.ticks = self.now()
        for s, storage in enumerate(graph.storages):
            if storage.alloc < 0 or s in self._held_to_end:
                storage.free = storage.held = graph.ticks
            elif storage.kind == Kind.GRADIENT:
                storage.free = max(storage.free, done if storage is before else storage.free)
            elif storage.kind == Kind.FEATURE_MAP:
                storage.held = last[s]
                storage.free = max(storage.held, released.get(s, -1))
        graph.step_seconds = graph.step_seconds or sum(op.seconds for op in graph.ops)
        graph.check()
        return graph


def residual_chain(blocks: int, nbytes: int = 1000) -> TrainingGraph:
    """x = x + tanh(x), over and over; the sum is saved by nobody, tanh by itself."""
    b = Builder(rerun_overhead=0.01)
    x = b.op("mm", [b.outside(8, Kind.INPUT), b.outside(8)], [nbytes], 10.0, layer="in")[0]
    for i in range(blocks):
        t = b.op("tanh", [x], [nbytes], 1.0, layer=f"block.{i}", saves=["out0", x], grad=nbytes)[0]
        x = b.op("add", [x, t], [nbytes], 1.0, layer=f"block.{i}")[0]
    b.op("sum", [x], [4], 0.1, layer="loss")
    return b.backward()


def transformer(layers: int, width: int = 64, rows: int = 256) -> TrainingGraph:
    """Sizes and costs of a GPT: two large products and one cheap wide region per layer."""
    b = Builder(rerun_overhead=2e-6)
    small, gemm = rows * width * 4, 2e-11 * rows * width * width
    cheap = 2e-10 * rows * width
    x = b.op("embedding", [b.outside(8, Kind.INPUT), b.outside(8)], [small], cheap, layer="wte")[0]
    for i in range(layers):
        layer = f"h.{i}"
        w = b.outside(12 * width * width * 4)
        n, _ = b.op("layer_norm", [x], [small, rows * 8], cheap, layer=layer, saves=[x, "out1"], grad=small)
        qkv = b.op("addmm", [n, w], [3 * small], 3 * gemm, layer=layer, saves=[n, w], grad=small)[0]
        a, _ = b.op(
            "attention", [qkv], [small, rows * 16], 2 * gemm, layer=layer, saves=[qkv, "out0", "out1"], grad=3 * small
        )
        p = b.op("addmm", [a, w], [small], gemm, layer=layer, saves=[a, w], grad=small)[0]
        x2 = b.op("add", [x, p], [small], cheap, layer=layer)[0]
        n2, _ = b.op("layer_norm", [x2], [small, rows * 8], cheap, layer=layer, saves=[x2, "out1"], grad=small)
        h = b.op("addmm", [n2, w], [4 * small], 4 * gemm, layer=layer, saves=[n2, w], grad=small)[0]
        g = b.op("gelu", [h], [4 * small], 8 * cheap, layer=layer, saves=[h], grad=4 * small)[0]
        _, d = b.op(
            "dropout",
            [g],
            [small, 4 * small],
            4 * cheap,
            layer=layer,
            saves=["out0"],
            grad=4 * small,
            traits=Trait.RANDOM,
        )
        y = b.op("addmm", [d, w], [small], 4 * gemm, layer=layer, saves=[d, w], grad=4 * small)[0]
        x = b.op("add", [x2, y], [small], cheap, layer=layer)[0]
    b.op("nll", [x], [4], cheap, layer="loss", saves=[x], grad=small)
    return b.backward()


def random_graph(
    rng: random.Random, max_ops: int = 8, *, keeps_graph: bool = False, functional: bool = False
) -> TrainingGraph:
    """A random iteration: several outputs, in-place versions, random and keep-only ops, values that the script holds,
    saves that are never read. With `keeps_graph`, two passes, of which the first keeps the graph. `functional`: nothing is
    overwritten, what is saved is read, and the script holds nothing when backward begins."""
    g = TrainingGraph(
        base_bytes=rng.choice([0, 100]),
        rerun_overhead=rng.choice([0.0, 0.25]),
        rebuilt_byte_seconds=rng.choice([0.0, 0.02]),
        rng_state_bytes=rng.choice([0, 7]),
    )
    tick = 0

    def now() -> int:
        nonlocal tick
        tick += 1
        return tick - 1

    current: dict[int, int] = {}  # storage -> its last version, for what the script can reach
    saved: set[int] = set()
    nodes: list[tuple[int, list[int]]] = []
    for _ in range(rng.randint(1, 3)):
        g.storages.append(Storage(rng.randint(1, 20), rng.choice([Kind.PARAMETER, Kind.INPUT]), "", -1, -1))
        g.values.append(Value(len(g.storages) - 1, 0, -1))
        current[len(g.storages) - 1] = len(g.values) - 1

    for o in range(rng.randint(1, max_ops)):
        start = now()
        reads = rng.sample(sorted(current.values()), min(len(current), rng.randint(1, 2)))
        writes = []
        traits = rng.choice([Trait.NONE] * 6 + [Trait.RANDOM, Trait.KEEP])
        overwritable = [s for s, v in current.items() if v not in saved]
        if overwritable and not functional and rng.random() < 0.3:
            s = rng.choice(overwritable)
            old = current[s]
            if rng.random() < 0.7:
                reads = list(dict.fromkeys([old, *reads]))
            else:
                reads = [r for r in reads if r != old]
            g.values[old].keepable = False
            g.values.append(Value(s, g.values[old].version + 1, o))
            current[s] = len(g.values) - 1
            writes.append(current[s])
            traits |= Trait.MUTATES
        for _ in range(rng.randint(0 if writes else 1, 2)):
            g.storages.append(Storage(rng.choice([0, 1, 3, 10, 30]), Kind.FEATURE_MAP, f"m{o % 3}", now(), -1))
            g.values.append(Value(len(g.storages) - 1, 0, o))
            current[len(g.storages) - 1] = len(g.values) - 1
            writes.append(len(g.values) - 1)
        if rng.random() < 0.2:
            g.storages.append(Storage(rng.randint(1, 10), Kind.TEMPORARY, "", now(), now()))
        name = rng.choice(["mm", "tanh", "add"])
        g.ops.append(Op(name, f"m{o % 3}", Phase.FORWARD, o % 3, o // 3, start, now(), tuple(reads), tuple(writes)))
        g.ops[-1].seconds = rng.choice([0.5, 1.0, 2.0, 5.0])
        g.ops[-1].workspace = rng.choice([0, 0, 5, 40])
        if len(writes) == 1 and reads and not traits & Trait.MUTATES and rng.random() < 0.5:
            traits |= Trait.REUSES
            g.ops[-1].reuse_seconds = g.ops[-1].seconds / 2
            if rng.random() < 0.7:
                g.storages[g.values[writes[0]].storage].nbytes = g.nbytes(reads[0])
        g.ops[-1].traits = traits
        live = [v for v in dict.fromkeys([*reads, *writes]) if current.get(g.values[v].storage) == v]
        node = [v for v in live if rng.random() < 0.5]
        saved.update(node)
        nodes.append((o, node))
        for s in list(current):  # the script lets go of some
            if g.storages[s].alloc >= 0 and rng.random() < 0.25:
                g.storages[s].held = now()
                del current[s]
    last = {s: v for s, v in current.items() if g.storages[s].alloc >= 0}

    def script_lets_go(chance: float) -> None:
        for s in list(last):
            if rng.random() < chance:
                g.storages[s].held = now()
                del last[s]

    script_lets_go(1.0 if functional else 0.7)
    released: dict[int, int] = {}

    def run(part: list[tuple[int, list[int]]], keep: bool) -> list[Save]:
        made = []
        for o, node in part:
            begin, mine = now(), []
            for v in node:
                unpack = -1 if not functional and rng.random() < 0.1 else now()
                mine.append(Save(v, g.ops[o].end, unpack, -1, len(g.ops)))
            if rng.random() < 0.7:
                g.storages.append(Storage(rng.choice([1, 10, 30]), Kind.GRADIENT, "", now(), -1))
                g.storages[-1].free = now() if rng.random() < 0.5 else -2
            g.ops.append(Op("backward", "", Phase.BACKWARD, 0, 0, begin, now()))
            for storage in g.storages:
                if storage.free == -2 and rng.random() < 0.5:
                    storage.free = now()
            if not keep:
                release(mine)
            script_lets_go(0.1)
            made += mine
        return made

    def release(saves: list[Save], later: bool = False) -> None:
        for save in saves:
            if save.unpack >= 0 and not later and rng.random() < 0.3:
                save.release = save.unpack
            else:
                save.release = now()
            s = g.values[save.value].storage
            released[s] = max(released.get(s, -1), save.release)

    order = nodes[::-1]
    split = rng.randint(0, len(order)) if keeps_graph else 0
    if keeps_graph:
        begin = now()
        first = run(order[:split], True)
        g.passes.append(BackwardPass(begin, now(), True))
        script_lets_go(0.3)
    begin = now()
    second = run(order[split:], False)
    if keeps_graph:
        release(first, later=True)
        second = first + second
    g.passes.append(BackwardPass(begin, now()))
    g.saves = sorted(second, key=lambda save: (save.pack, save.value))
    script_lets_go(0.5)
    g.ticks = now()
    for s, storage in enumerate(g.storages):
        if storage.alloc < 0 or storage.free == -2 or s in last:
            storage.free = g.ticks
            if storage.kind != Kind.GRADIENT:
                storage.held = g.ticks
        elif storage.kind == Kind.FEATURE_MAP:
            storage.free = max(storage.held, released.get(s, -1))
    g.classes = [OpClass(n, n) for n in ("a", "b", "c")]
    once = {v.storage for v in g.values if v.producer >= 0} - {v.storage for v in g.values if v.version}
    if rng.random() < 0.4:  # compiled: nothing is written over what it reads
        for op in g.ops:
            op.traits &= ~Trait.REUSES
        for s in sorted(once):
            g.storages[s].fused = Fused(rng.randint(0, 3))
    g.step_seconds = 3 * sum(op.seconds for op in g.ops) + 1.0
    g.check()
    return g


def random_graphs(
    max_ops: int = 8, *, keeps_graph: bool = False, functional: bool = False
) -> st.SearchStrategy[TrainingGraph]:
    """Hypothesis strategy over :func:`random_graph`."""
    given = {"keeps_graph": keeps_graph, "functional": functional}
    return st.integers(0, 2**32).map(lambda seed: random_graph(random.Random(seed), max_ops, **given))
