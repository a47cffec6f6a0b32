"""Watching one iteration.

The forward pass is seen by a dispatch mode, the backward pass never is: there autograd would take other formulas. What
happens in backward is learnt from the handles that autograd saves (packed, unpacked, let go), from the death of tensors and
from the profiler, which lists every allocation and every autograd node. To place what Python sees among the allocations,
each event of ours leaves a *mark* in the allocation stream.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from sys import _getframe
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from torch_echo import compat
from torch_echo.cost import OpSpec, spec_of
from torch_echo.graph import Kind
from torch_echo.memory import live_bytes
from torch_echo.rules import Rule, may_reuse, nondeterministic_on, rule_of
from torch_echo.tape._gate import Place
from torch_echo.tape._gates import Part
from torch_echo.tape._layer import layer_rule, layer_spec, long, of_outputs, plain, stepwise
from torch_echo.tape._loss import CrossEntropy
from torch_echo.tape._mode import OFF, Dropped, Table, Tape
from torch_echo.tape._recipe import Passes, Region, region, tensors_in, written
from torch_echo.tape._scope import Gathered, Scope
from torch_echo.tape._stack import Site, Stackable, unpack

__all__ = ["LossCall", "Mark", "OpCall", "PeakMeter", "Recorder", "SavedTensor", "SeenStorage"]

_CROSS_ENTROPY = Rule(name="aten::cross_entropy_loss")


@dataclass(slots=True)
class SeenStorage:
    """A storage that an op of the forward pass read or wrote."""

    ptr: int
    nbytes: int
    kind: Kind
    layer: str
    guard: Any = None


@dataclass(slots=True)
class OpCall:
    """One op of the forward pass as it ran."""

    func: Any
    rule: Rule
    spec: OpSpec | None
    layer: str
    call: int
    site: Site
    sequence: int
    reads: list[int]
    made: list[int]
    """Storages of its outputs."""
    mutated: list[int]
    """Storages that it wrote in place."""
    regions: list[tuple[int, Region]]
    """Where in them."""
    keep: bool
    place: Place | None = None
    turn: int = 0
    """The call of torch's API that it belongs to: its place in the code, how many were there before."""
    reuses: bool = False
    seconds: float = 0.0
    inside: list[int] | None = None
    """Of a layer that runs as one op: storages that autograd saves and that are no outputs."""
    loss: LossCall | None = None
    """Of a cross-entropy in one block."""
    outputs: LayerCalls | None = None
    """The layer that it is a call of, if what is inside can be rebuilt from the outputs."""
    nodes: int = 1
    """Autograd nodes that it makes."""
    scopes: tuple[int, ...] = ()
    """Calls of sharded modules that it runs in, outermost first."""
    needs: tuple[int, ...] = ()
    """Those of them in which the parameters that it reads are gathered."""


@dataclass(slots=True)
class LayerCalls:
    """A recurrent layer whose inside can be rebuilt from its outputs."""

    calls: list[OpCall]
    output: int
    """Its storage."""


@dataclass(slots=True)
class LossCall:
    """A cross-entropy in one block."""

    logits: int
    """Their storage."""
    nbytes: int
    beside: int
    """Bytes that PyTorch has beside the gradients of the log-softmax, while it adds them up: with label smoothing there are two."""
    saved: list[int] = field(default_factory=list)
    """What autograd saved of it."""
    over: bool = False
    """Did their gradient take their place?"""


@dataclass(slots=True)
class SavedTensor:
    """One tensor that autograd saved."""

    storage: int
    region: Region
    layer: str
    call: int
    place: Place | None
    turn: int
    scopes: tuple[int, ...] = ()
    """As of the op that it was saved for."""


@dataclass(slots=True)
class Mark:
    """Something that happened, in order with the allocations."""

    what: str
    payload: Any = None


class _Handle:
    """Keeps a saved tensor during the watched iteration, and tells when it is read and let go."""

    __slots__ = ("content", "index", "recorder")

    def __init__(self, recorder: Recorder, index: int, content: Any) -> None:
        self.recorder = recorder
        self.index = index
        self.content = content

    def unpack(self) -> torch.Tensor:
        self.recorder.on_unpack(self.index, self.content)
        return unpack(self.content)

    def __del__(self) -> None:
        self.recorder.held[self.recorder.saved[self.index].storage] -= 1
        self.recorder.mark("release", self.index)


@dataclass
class _Death:
    """Callback of a weak reference to a tensor object."""

    recorder: Recorder
    storage: int

    def __call__(self, _: Any) -> None:
        self.recorder.mark("death", self.storage)


class Recorder(Stackable):
    """Records one iteration. Use: ``start()``, run the iteration with the mode and hooks on in forward, ``stop()``."""

    def __init__(
        self,
        device: torch.device,
        known: dict[int, tuple[Kind, str]],
        tape: Tape | None = None,
        tables: Mapping[str, Sequence[Table]] | None = None,
        script: bool = True,
        reorder: bool = False,
        gathered: Gathered | None = None,
    ) -> None:
        super().__init__(reorder)
        self.device = device
        self.script = script
        """Will the script's own code, outside of modules, be taped?"""
        self.stretches = reorder and device.type == "cpu"
        """May long recurrent layers run in stretches? cuDNN's draw their dropout between layers from a state of its own."""
        self.tape = tape
        """Drops values during the watched iteration too, for jobs that do not fit otherwise."""
        self.tables = tables or {}
        self.touched: set[int] = set()
        """Storages whose lives the tape changed: dropped, or pinned by a recipe."""
        self.known = known
        """Kind and layer of the storages that exist before the iteration, by storage key."""
        self.marks: list[Mark] = []
        self.storages: list[SeenStorage] = []
        self.ids: dict[int, int] = {}
        self.keys: list[int] = []
        self.calls: list[OpCall] = []
        self.saved: list[SavedTensor] = []
        self.held: Counter[int] = Counter()
        """How many of these autograd has not let go of, by storage."""
        self.read: set[int] = set()
        """The storages of those that it has read."""
        self.unshared: set[int] = set()
        """Of these storages those that only saved tensors were on, when the first of them was read."""
        self.layers: list[tuple[str, int]] = [("", 0)]
        """Module calls under way: path, and which call of it."""
        self.functions: dict[tuple[str, int], dict[Place, int]] = {}
        """Calls of torch's API, by call of a module and place in the code."""
        self.turn = 0
        self.codes: dict[int, Any] = {}
        """The code objects of these places, so that their identities stay theirs."""
        self._calls_of: dict[str, int] = {}
        self.nesting: set[tuple[str, str]] = set()
        self.base_bytes = 0
        self.scopes: list[Scope] = []
        """Calls of sharded modules that are running."""
        self.gathered = gathered or Gathered(())
        self._numbers: dict[Scope, int] = {}
        self._whole: OpCall | None = None
        """The recurrent layer, or the loss, that is running as one op."""
        self._stepwise = self._of_outputs = False
        """Does PyTorch compute the layers of the call that is running step by step? Can what is inside be rebuilt from outputs?"""
        self._layers: list[OpCall] = []
        """The calls of the layer that is running, in the second case."""
        self._losses: dict[CrossEntropy, LossCall] = {}
        self.active = False
        self._profile = compat.MemoryProfile()
        self._late: list[Mark] = []
        """Made on threads that the profiler does not see, as those of a process group: placed before the next mark of one that it
        does."""
        self._watched: list[Any] = []

    # --- life ----------------------------------------------------------------------------------------------------------

    def start(self, old: Iterable[torch.Tensor], states: Iterable[torch.Tensor] = ()) -> None:
        """Begin. `old`: tensors that exist and may die within the iteration (gradients); `states`: the optimizer's."""
        gc.collect()
        for tensor in states:
            self._storage(tensor)
        self.base_bytes = live_bytes(self.device)
        for tensor in old:
            index = self._storage(tensor)
            self._watched.append(weakref.ref(tensor, _Death(self, index)))
        self._profile.start()
        self.active = True
        if self.tape is not None:
            self.tape.rescued = set()
            Passes.observer = lambda begins: self.mark("rebuild" if begins else "rebuilt")

    def stop(self) -> None:
        """End."""
        if self.active:
            self._place_late()
            self.active = False
            Passes.observer = None
            if self.tape is not None:
                self.touched.update(i for i, key in enumerate(self.keys) if key in self.tape.rescued)
            self._profile.stop()
            self._watched.clear()

    def events(self) -> Any:
        """What the profiler saw: (events of the device, events of the CPU, autograd nodes)."""
        return self._profile.events(self.device)

    def mark(self, what: str, payload: Any = None) -> None:
        """Note that something happened now."""
        if not self.active:
            return
        if not compat.profiler_running():
            self._late.append(Mark(what, payload))
            return
        self._place_late()
        self.marks.append(Mark(what, payload))
        compat.mark()

    def _place_late(self) -> None:
        while self._late:
            self.marks.append(self._late.pop(0))
            compat.mark()

    def enter(self, layer: str) -> None:
        """A module's call begins."""
        self.nesting.add((self.layers[-1][0], layer))
        call = self._calls_of.get(layer, 0)
        self._calls_of[layer] = call + 1
        self.layers.append((layer, call))
        self._turn_to(layer, call)

    def leave(self) -> None:
        """A module's call ends."""
        self.layers.pop()
        self._turn_to(*self.layers[-1])

    def _turn_to(self, layer: str, call: int) -> None:
        if self.tape is not None:
            tables = self.tables.get(layer, ())
            self.tape.table = tables[call] if call < len(tables) else OFF

    # --- forward -------------------------------------------------------------------------------------------------------

    def opening(self, place: Place, code: Any, turn: int, needs: int) -> None:
        """See :class:`Stackable`."""
        self.codes[place[0]] = code
        counts = self.functions.setdefault(self.layers[-1], {})
        self.turn = counts.get(place, 0)
        counts[place] = self.turn + 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        frame = _getframe(1)
        self.codes[id(frame.f_code)] = frame.f_code
        rule = rule_of(func)
        own = self._in_function(frame)
        inputs = list(tensors_in(args, kwargs))
        plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and compat.has_memory(t) for _, t in inputs)
        writes = rule.writes(args)
        again = args if rule.rerun is None else rule.rerun(func, args)[1]
        read = [t for p, t in tensors_in(again, kwargs) if not (rule.shape_only and p == 0)]
        read, needs = self._without_gathered(read) if self.scopes or self.gathered else (read, ())
        call = OpCall(
            func=func,
            rule=rule,
            spec=spec_of(func, args, kwargs) if plain and not rule.keeps(args) else None,
            layer=self.layers[-1][0],
            call=self.layers[-1][1],
            site=self.site(id(func), frame),
            place=self.place,
            turn=self.turn,
            sequence=compat.sequence_number() - 1,
            reads=[self._storage(t) for t in read if compat.has_memory(t)],
            made=[],
            mutated=[],
            regions=[],
            keep=rule.keeps(args)
            or own
            or not plain
            or any(compat.is_foreign(t) and compat.storage_key(t) not in self.known for t in read)
            or nondeterministic_on(rule, self.device.type, self.reorder)
            or not (self.script or self.layers[-1][0])
            or None in needs,
            scopes=self._numbered(),
            needs=tuple(n for n in needs if n is not None),
        )
        self.mark("op", call)
        begin = perf_counter()
        out = func(*args, **kwargs) if self.tape is None else self.tape.execute(func, args, kwargs, call.site)
        call.seconds = perf_counter() - begin
        self.mark("end", call)
        before = {compat.storage_key(t) for _, t in inputs if compat.has_memory(t)}
        for t in written(rule, args, kwargs, out):
            key = compat.storage_key(t)
            if key == -1 or type(t) not in (torch.Tensor, torch.nn.Parameter):
                call.keep = True
            elif key in before:
                call.mutated.append(self._storage(t))
            else:
                index = self._storage(t, new=True)
                call.made.append(index)
                if t.device.type == self.device.type:
                    self._watched.append(weakref.ref(t, _Death(self, index)))
                else:
                    call.keep = True
        if writes and rule.rerun is None and len(call.mutated) == 0:
            call.keep = True
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and compat.has_memory(t) and compat.storage_key(t) in before:
                self._watched.append(
                    weakref.ref(t, _Death(self, self._storage(t)))
                )  # a view: it may be all the script holds
        for position, t in inputs if call.mutated else ():
            if position in writes and compat.has_memory(t):
                call.regions.append((self._storage(t), region(t)))
        call.reuses = may_reuse(rule, args, out)
        if self.tape is not None:
            self.touched.update(i for i in (*call.reads, *call.made, *call.mutated) if self._touches(i))
        self.calls.append(call)
        return out

    def _in_function(self, frame: FrameType) -> bool:
        """Does a function of the script's own run there? Its kernels may write, unseen, in what it was given and in what it makes:
        neither is made again."""
        given = compat.function_around(frame)
        if given is None:
            return False
        storages = [self._storage(t) for _, t in tensors_in(given, {}) if compat.has_memory(t)]
        self.mark("function", storages)
        return True

    def takes_apart(self, func: Any, args: tuple[Any, ...]) -> bool:
        """See :class:`Stackable`."""
        tensors = [t for _, t in tensors_in(args, {})]
        plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and compat.has_memory(t) for t in tensors)
        if not self.active or not plain or not self.saves_here() or not (self.script or self.layers[-1][0]):
            return False
        mode, hooks = self.mode_on, self.hooks_on
        self.mark("rebuild")  # what the question allocates is none of the script's
        self.switch(False, False, self.gate_on)
        try:
            self._stepwise = stepwise(func, args)
            self._of_outputs = self.reorder and self._stepwise and of_outputs(func, args)
            self._layers.clear()
        finally:
            self.switch(mode, hooks, self.gate_on)
            self.mark("rebuilt")
        return self._stepwise or (self.stretches and long(args))

    def run_layer(self, number: int, func: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """See :class:`Stackable`."""
        if not self._stepwise:
            return plain(func, args)
        op, spec = layer_spec(func, args)
        tensors = [t for _, t in tensors_in(args, {})]
        read, needs = self._without_gathered(tensors) if self.scopes or self.gathered else (tensors, ())
        call = OpCall(
            func=op,
            rule=layer_rule(func),
            spec=spec,
            layer=self.layers[-1][0],
            call=self.layers[-1][1],
            site=self.layer_site(number, func),
            place=self.place,
            turn=self.turn,
            sequence=compat.sequence_number(),
            reads=[self._storage(t) for t in read],
            made=[],
            mutated=[],
            regions=[],
            keep=any(compat.is_foreign(t) and compat.storage_key(t) not in self.known for t in tensors)
            or None in needs,
            inside=[],
            scopes=self._numbered(),
            needs=tuple(n for n in needs if n is not None),
        )
        with self._recorded_whole(call), self.as_one():
            out: tuple[torch.Tensor, ...] = func(*args)
        outputs = [self._storage(t, new=True) for t in out]
        self._watched += [weakref.ref(t, _Death(self, index)) for t, index in zip(out, outputs, strict=True)]
        call.inside = [s for s in call.made if s not in outputs]
        call.made = [*dict.fromkeys(s for s in outputs if s not in call.reads), *call.inside]
        if self.tape is not None:
            self.touched.update(i for i in (*call.reads, *call.made) if self._touches(i))
        self.calls.append(call)
        if self._of_outputs:
            self._layers.append(call)
        return out

    @contextmanager
    def _recorded_whole(self, call: OpCall) -> Iterator[None]:
        """Within, a layer or a loss runs that is one op."""
        self.mark("op", call)
        self._whole = call
        begin = perf_counter()
        try:
            yield
        finally:
            call.seconds = perf_counter() - begin
            self._whole = None
        self.mark("end", call)
        call.nodes = compat.sequence_number() - call.sequence

    def layer_over(self, output: torch.Tensor, parts: Sequence[Part]) -> None:
        """See :class:`Stackable`."""
        if self._layers:
            layer = LayerCalls(self._layers, self._storage(output))
            for call in self._layers:
                call.outputs = layer
            self.mark("layer", layer)
            self._layers = []

    def takes_loss(self, logits: torch.Tensor) -> bool:
        """See :class:`torch_echo.tape._loss.LossRunner`."""
        return self.active and super().takes_loss(logits)

    def run_loss(self, call: CrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See :class:`torch_echo.tape._loss.LossRunner`."""
        func = torch.ops.aten._log_softmax.default
        made = LossCall(self._storage(logits), logits.nbytes, bool(call.smoothing) * logits[:, 0].nbytes)
        op = OpCall(
            func=func,
            rule=_CROSS_ENTROPY,
            spec=spec_of(func, (logits, 1, False)),
            layer=self.layers[-1][0],
            call=self.layers[-1][1],
            site=(id(_CROSS_ENTROPY), *(self.place or (0, 0, 0))),
            place=self.place,
            turn=self.turn,
            sequence=compat.sequence_number(),
            reads=[self._storage(logits), self._storage(target)],
            made=[],
            mutated=[],
            regions=[],
            keep=True,
            loss=made,
            scopes=self._numbered(),
        )
        self._losses[call] = made
        first = len(self.saved)
        with self._recorded_whole(op):
            loss = super().run_loss(call, logits, target)
        made.saved = list(range(first, len(self.saved)))
        index = self._storage(loss, new=True)
        op.made = [index, *(s for s in op.made if s != index)]
        self._watched.append(weakref.ref(loss, _Death(self, index)))
        if self.tape is not None:
            self.touched.update(i for i in (*op.reads, *op.made) if self._touches(i))
        self.calls.append(op)
        return loss

    def loss_read(self, call: CrossEntropy, over: bool) -> None:
        """See :class:`torch_echo.tape._loss.LossRunner`."""
        self._losses[call].over = over
        self.mark("loss", self._losses[call])

    def loss_done(self, call: CrossEntropy) -> None:
        """See :class:`torch_echo.tape._loss.LossRunner`."""
        self.mark("loss done", self._losses[call])

    def _numbered(self) -> tuple[int, ...]:
        return tuple([self._numbers.setdefault(scope, len(self._numbers)) for scope in self.scopes])

    def _without_gathered(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int | None, ...]]:
        """Those that are no gathered parameters, and the scopes of the others; None: they were gathered by other means."""
        rest: list[torch.Tensor] = []
        needs: dict[int | None, None] = {}
        for t in tensors:
            key = compat.storage_key(t)
            owner = next((scope for scope in self.scopes if key in scope.keys), None)
            if owner is not None:
                needs[self._numbers.setdefault(owner, len(self._numbers))] = None
            elif key in self.gathered:
                needs[None] = None
            else:
                rest.append(t)
        return rest, tuple(needs)

    def _touches(self, index: int) -> bool:
        assert self.tape is not None
        return self.tape.touches(self.keys[index])

    def _storage(self, tensor: torch.Tensor, new: bool = False) -> int:
        """Number of the tensor's storage, noted at first sight."""
        key = compat.storage_key(tensor)
        index = self.ids.get(key)
        if index is None:
            storage = tensor.untyped_storage()
            kind, layer = self.known.get(key, (Kind.FEATURE_MAP if new else Kind.INPUT, self.layers[-1][0]))
            index = self.ids[key] = len(self.storages)
            self.keys.append(key)
            # The weak reference keeps the key from being reused by another storage.
            self.storages.append(SeenStorage(*compat.extent(storage), kind, layer, compat.StorageWeakRef(storage)))
        return index

    # --- saved tensors -------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook for a tensor that autograd saves."""
        # What is raised here would end the process: C++ calls it where it can't handle errors.
        if not self.active or compat.functorch_active() or not compat.has_memory(tensor):
            version = tensor._version
            return (tensor.detach() if compat.may_be_result(tensor, version) else tensor, version)
        index = len(self.saved)
        storage = self._storage(tensor, new=self._whole is not None)
        if self._whole is not None and storage not in self._whole.reads and storage not in self._whole.made:
            self._whole.made.append(storage)
        self._in_function(_getframe(1))
        scopes = self._numbered() if self.scopes else ()
        self.saved.append(SavedTensor(storage, region(tensor), *self.layers[-1], self.place, self.turn, scopes))
        content = self.tape.pack(tensor) if self.tape is not None else None
        if not isinstance(content, Dropped):
            content = (compat.alias(tensor), tensor._version)
        handle = _Handle(self, index, content)
        self.held[storage] += 1
        self.mark("pack", index)
        return handle

    def left(self) -> set[int]:
        """The feature maps that autograd saved, still holds and has never read."""
        held = {s for s, handles in self.held.copy().items() if handles}
        return {s for s in held - self.read if self.storages[s].kind == Kind.FEATURE_MAP}

    def share(self, maps: set[int]) -> float:
        """Their share, in bytes, of all that it saved."""
        every = {s.storage for s in self.saved if self.storages[s.storage].kind == Kind.FEATURE_MAP}
        part, total = (sum(self.storages[s].nbytes for s in of) for of in (maps, every))
        return part / total if total else 0.0

    def is_read(self, maps: set[int]) -> bool:
        """Has it read any of these?"""
        return not self.read.isdisjoint(maps)

    def on_unpack(self, index: int, content: Any) -> None:
        storage = self.saved[index].storage
        if storage not in self.read and type(content) is tuple and compat.owned(content[0], self.held[storage]):
            self.unshared.add(storage)
        self.read.add(storage)
        node = compat.current_node()
        self.mark("unpack", (index, -1 if node is None else compat.node_sequence(node)))


class PeakMeter:
    """Measures the peak of an iteration at the allocator, without watching anything else.

    The profiler does not tell of the free of a block that is older than itself: gradients from before leave marks.
    """

    def __init__(self, device: torch.device, old: Iterable[torch.Tensor]) -> None:
        gc.collect()
        self._device = device
        self.base = live_bytes(device)
        """Bytes there when it began."""
        self._freed: list[int] = []
        self._late: list[int] = []
        self._watched = [weakref.ref(t, functools.partial(self._died, t.untyped_storage().nbytes())) for t in old]
        self._profile = compat.MemoryProfile()
        self._profile.start()
        self._active = True

    def _died(self, nbytes: int, _: Any) -> None:
        if not self._active:
            return
        self._late.append(nbytes)
        if compat.profiler_running():
            self._place_late()

    def _place_late(self) -> None:
        """See :class:`Recorder`."""
        while self._late:
            self._freed.append(self._late.pop(0))
            compat.mark()

    def stop(self) -> int | None:
        """End; the peak in bytes, everything on the device included. None if another thread interfered."""
        self._place_late()
        self._active = False
        if not self._profile.stop():
            return None
        memory, host, _ = self._profile.events(self._device)
        marks = [e for e in host if e.nbytes == compat.MemoryProfile.MARK]
        if len(marks) != len(self._freed):
            return None
        events = [(e.time, e.nbytes, e.ptr) for e in memory if abs(e.nbytes) != compat.MemoryProfile.MARK]
        events += [(e.time, -freed, 0) for e, freed in zip(marks, self._freed, strict=True)]
        events.sort(key=lambda e: e[0])
        live = peak = self.base
        mine: dict[int, int] = {}
        for _, nbytes, ptr in events:
            if nbytes > 0:
                live -= mine.get(ptr, 0)  # freed on a thread that the profiler does not see
                mine[ptr] = nbytes
            elif ptr and not mine.pop(ptr, 0):
                continue  # older than this profile, but not than an earlier one
            live += nbytes
            peak = max(peak, live)
        return peak
