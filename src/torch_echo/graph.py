"""The training graph: one training iteration as plain data.

This module is the common language of the package. The engines write a :class:`TrainingGraph`; the footprint replay and the
planner read it. It knows nothing of torch.

Time inside a graph is counted in *ticks*: integers that number the events of the iteration in order (an allocation, a free,
a mark). ``0 <= tick < graph.ticks``. A tick of -1 means "before the iteration", ``graph.ticks`` means "after it".
All sizes are bytes, all durations seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag

__all__ = [
    "BackwardPass",
    "CallSite",
    "Fused",
    "Kind",
    "Op",
    "OpClass",
    "Phase",
    "PlainFree",
    "Save",
    "Storage",
    "TrainingGraph",
    "Trait",
    "Value",
]


class Kind(IntEnum):
    """What the bytes of a storage are."""

    PARAMETER = 0
    BUFFER = 1
    INPUT = 2
    FEATURE_MAP = 3
    GRADIENT = 4
    OPTIMIZER_STATE = 5
    RNG_STATE = 6
    TEMPORARY = 7
    OUTPUT = 8


class Phase(IntEnum):
    """Where in the iteration an op runs."""

    FORWARD = 0
    BACKWARD = 1
    OTHER = 2


class Trait(IntFlag):
    """Properties of an op that restrict what may be done with it."""

    NONE = 0
    RANDOM = 1
    """Draws from a generator: re-running it needs the generator's state from before the draw."""
    MUTATES = 2
    """Writes into a storage that existed before it."""
    KEEP = 4
    """Must not be re-run (effectful, nondeterministic, collective, or unknown)."""
    REUSES = 8
    """A re-run may write its one output over its first read, where nothing else needs that any more."""
    COMPOSITE = 16
    """Many kernels that run, and are re-run, as one: a layer over all its steps."""


class Fused(IntFlag):
    """Where a compiler fuses what makes a storage's content into what reads it, so that it is never written to memory."""

    NOWHERE = 0
    FORWARD = 1
    """In forward, unless it is kept for backward."""
    BACKWARD = 2
    """In backward, where it is rebuilt."""


@dataclass(slots=True)
class Storage:
    """A block of device memory. Versions of its contents are :class:`Value` objects."""

    nbytes: int
    kind: Kind
    layer: str
    """Module path in which it was allocated; "" outside modules."""
    alloc: int
    """Tick of its allocation; -1 when it is older than the iteration."""
    free: int
    """Tick at which it is freed when every feature map is kept (eager PyTorch); ``graph.ticks`` when it outlives the iteration."""
    held: int = -1
    """Tick of the release of the last reference that is not autograd's: the script's locals, lists, attributes, outputs.
    Dropping the storage frees nothing before this tick. Only known (>= 0) for storages that have values."""
    fused: Fused = Fused.NOWHERE
    """Not with storages that are written in place."""


@dataclass(slots=True)
class Value:
    """The contents of a storage at one version."""

    storage: int
    version: int
    producer: int
    """Op that makes it; -1 for what exists before the iteration (parameters, inputs) or comes from an unobserved op."""
    keepable: bool = True
    """False when a later op of the forward pass overwrites it, so that it cannot be kept until backward."""


@dataclass(slots=True)
class Op:
    """One kernel call of the forward pass, or one autograd node of the backward pass."""

    name: str
    layer: str
    phase: Phase
    cls: int
    """Index into ``graph.classes``."""
    instance: int
    """How many ops of the same class ran before it in this iteration."""
    start: int
    end: int
    """First and last tick of the op."""
    reads: tuple[int, ...] = ()
    """Values whose contents it reads (a view's reader reads the storage's value)."""
    writes: tuple[int, ...] = ()
    """Values that it makes, in the order of its outputs."""
    seconds: float = 0.0
    flops: float = 0.0
    bytes_moved: int = 0
    reuse_seconds: float = 0.0
    """With Trait.REUSES: duration of a re-run that writes over its first read."""
    call: int = 0
    """Which call of its layer it ran in, counted from the start of the iteration."""
    workspace: int = 0
    """Bytes above (live at entry + all of its outputs) at the worst moment inside the op."""
    site: int = -1
    """Index into ``graph.sites``; -1 if it ran outside of any known call."""
    turn: int = 0
    """In which of the calls there."""
    traits: Trait = Trait.NONE


@dataclass(slots=True)
class Save:
    """One tensor that autograd saves in the forward pass: a packed handle."""

    value: int
    pack: int
    """Tick at which it is saved."""
    unpack: int
    """Tick at which backward first reads it; -1 if it never does."""
    release: int
    """Tick at which its node lets it go."""
    reader: int
    """Backward op that reads it; -1 if none."""
    layer: str = ""
    """Module path in which it was packed."""
    call: int = 0
    """Which call of that layer."""
    site: int = -1
    """Index into ``graph.sites``; -1 if it was packed outside of any known call."""
    turn: int = 0
    """In which of the calls there."""


@dataclass(slots=True)
class OpClass:
    """Ops at the same place in the code: the steps of a loop are instances of one class."""

    name: str
    layer: str
    site: tuple[int, ...] = ()
    """Identifies the call site within the module; opaque to the planner."""


@dataclass(slots=True)
class CallSite:
    """A place in a module's code where the framework's API is called, in one of the module's calls."""

    layer: str
    call: int
    place: tuple[int, ...]
    """Identifies the place in the code; opaque to the planner."""
    count: int
    """How often it is called there."""


@dataclass(slots=True)
class BackwardPass:
    """One run of the autograd engine."""

    start: int
    end: int
    keeps_graph: bool = False
    """With ``retain_graph`` rebuilt values stay until the end of the pass, and recipes stay for the next one."""


@dataclass(slots=True)
class PlainFree:
    """When a storage would be freed in the script's own run."""

    storage: int
    tick: int
    """That of its allocation: it would not be there."""


@dataclass
class TrainingGraph:
    """One training iteration: ops in the order they ran, values, storages, what autograd saved.

    ``ops`` of the forward pass come first in execution order; backward ops follow in theirs.
    """

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    classes: list[OpClass] = field(default_factory=list)
    sites: list[CallSite] = field(default_factory=list)
    passes: list[BackwardPass] = field(default_factory=list)
    ticks: int = 0
    base_bytes: int = 0
    """Bytes alive on the device before the iteration that no storage of the graph accounts for."""
    step_seconds: float = 0.0
    """Duration of the whole iteration (forward, backward, optimizer) without recomputation."""
    rerun_overhead: float = 0.0
    """Seconds that re-running one op costs beyond its kernel."""
    rebuilt_byte_seconds: float = 0.0
    """Seconds that a rebuilt byte costs beyond that: it takes another's place in the processor's caches."""
    rng_state_bytes: int = 5056
    """Bytes of a generator's state, pinned by each dropped random value from its draw to its rebuild."""
    meta: dict[str, str] = field(default_factory=dict)
    """Provenance: device, versions."""
    plain_storages: list[Storage] = field(default_factory=list)
    """Blocks that the script's own run would have and this iteration had not: what was computed in fewer."""
    plain_frees: list[PlainFree] = field(default_factory=list)
    """Storages that it would free at other ticks, or not have at all."""

    @property
    def plain(self) -> TrainingGraph:
        """The iteration as the script's own run has it, for its footprint: this one, but for what is computed in fewer blocks."""
        if not self.plain_storages and not self.plain_frees:
            return self
        storages = self.storages + self.plain_storages
        for free in self.plain_frees:
            old = storages[free.storage]
            storages[free.storage] = replace(old, free=free.tick, held=min(old.held, free.tick))
        return replace(self, storages=storages, plain_storages=[], plain_frees=[])

    @property
    def older_bytes(self) -> int:
        """Bytes of the storages that are older than the iteration: parameters, inputs, optimizer states."""
        return sum(s.nbytes for s in self.storages if s.alloc < 0)

    @property
    def start_bytes(self) -> int:
        """Bytes alive when the iteration begins."""
        return self.base_bytes + self.older_bytes

    def rerun_seconds(self, op: Op) -> float:
        """What re-running an op costs, in seconds."""
        rebuilt = sum(self.storages[s].nbytes for s in {self.values[w].storage for w in op.writes})
        return op.seconds + self.rerun_overhead + rebuilt * self.rebuilt_byte_seconds

    def check(self) -> None:
        """Raise ValueError naming the first inconsistency. Cost: linear."""
        for i, v in enumerate(self.values):
            if not 0 <= v.storage < len(self.storages):
                raise ValueError(f"value {i}: storage {v.storage} does not exist")
            if not -1 <= v.producer < len(self.ops):
                raise ValueError(f"value {i}: producer {v.producer} does not exist")
            if v.producer >= 0 and i not in self.ops[v.producer].writes:
                raise ValueError(f"value {i}: op {v.producer} does not write it")
        for i, op in enumerate(self.ops):
            if not 0 <= op.start <= op.end <= self.ticks:
                raise ValueError(
                    f"op {i} ({op.name}): ticks {op.start}..{op.end} are outside the iteration or reversed"
                )
            for r in op.reads:
                if not 0 <= r < len(self.values):
                    raise ValueError(f"op {i} ({op.name}): reads value {r}, which does not exist")
                if self.values[r].producer >= i:
                    raise ValueError(
                        f"op {i} ({op.name}): reads value {r} before op {self.values[r].producer} makes it"
                    )
            for w in op.writes:
                if not 0 <= w < len(self.values) or self.values[w].producer != i:
                    raise ValueError(f"op {i} ({op.name}): writes value {w}, which names another producer")
        for i, s in enumerate(self.storages):
            if s.nbytes < 0 or not -1 <= s.alloc <= s.free <= self.ticks:
                raise ValueError(f"storage {i}: {s.nbytes} bytes alive from tick {s.alloc} to {s.free}")
        for i, v in enumerate(self.values):
            if v.version and self.storages[v.storage].fused:
                raise ValueError(f"value {i}: storage {v.storage} is written in place, so it can't be fused away")
        for i, save in enumerate(self.saves):
            if not 0 <= save.value < len(self.values):
                raise ValueError(f"save {i}: value {save.value} does not exist")
            if not save.pack <= save.release <= self.ticks:
                raise ValueError(f"save {i}: packed at tick {save.pack}, released at {save.release}")

    def nbytes(self, value: int) -> int:
        """Bytes of the storage behind a value."""
        return self.storages[self.values[value].storage].nbytes

    def droppable(self) -> list[bool]:
        """For every value: may it be dropped and rebuilt?

        Yes if it was made in this forward pass by ops that may be re-run, in a storage allocated in the pass (an in-place op
        on a parameter or buffer is never re-run).
        """
        ok = [False] * len(self.values)
        for i, v in enumerate(self.values):
            if v.producer < 0:
                continue
            op = self.ops[v.producer]
            own = all(self.storages[self.values[w].storage].alloc >= 0 for w in op.writes)
            ok[i] = op.phase == Phase.FORWARD and not op.traits & Trait.KEEP and own
        return ok

    def inside(self, op: Op) -> list[int]:
        """Values that a composite op makes and that nobody but autograd holds. All of them are dropped, or none; its outputs
        only with them."""
        if not op.traits & Trait.COMPOSITE:
            return []
        return [w for w in op.writes if self.storages[self.values[w].storage].held <= op.end]

    def chain(self, values: Iterable[int]) -> set[int]:
        """`values`, every earlier version of their storages that an in-place op builds on, and what is inside the same
        composite op."""
        closed: set[int] = set()
        opened: set[int] = set()
        todo = list(values)
        while todo:
            v = todo.pop()
            if v in closed or self.values[v].producer < 0:
                continue
            closed.add(v)
            if self.values[v].producer not in opened:
                opened.add(self.values[v].producer)
                todo += self.inside(self.ops[self.values[v].producer])
            for r in self.ops[self.values[v].producer].reads:
                if self.values[r].storage == self.values[v].storage:
                    todo.append(r)
        return closed
