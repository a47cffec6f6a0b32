"""Recipes: how a dropped value is made again.

A recipe is what this very step executed: a function, its arguments, the generator's state before a draw. The plan only says
what to drop; whatever control flow, length or batch the step had, rebuilding repeats exactly what ran.

- :class:`Slot`: a dropped value (a storage at one version). It knows its recipe, and holds the rebuilt tensor while it has
  readers.
- :class:`Recipe`: one op that can be re-run.
- Readers of a slot are handles (what autograd saved) and the recipes of other slots. Each holds a reference to the slot
  and gives it up when it has read; the rebuilt tensor goes with the last of them. Counting is Python's own.

Rebuilding is iterative, in the order of the forward pass, each op at most once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from torch_echo import compat
from torch_echo.rules import Rule
from torch_echo.tape._scope import Scope

__all__ = [
    "NO_KWARGS",
    "Leaf",
    "Passes",
    "Recipe",
    "RebuildError",
    "Region",
    "Rescuer",
    "Slot",
    "View",
    "disjoint",
    "private",
    "rebuild",
    "region",
    "slots_in",
    "tensors_in",
    "written",
]


_Kind = TypeVar("_Kind")

NO_KWARGS: dict[str, Any] = {}
"""Shared by all calls without keyword arguments: the tape makes few objects, for the collector's sake."""


class RebuildError(RuntimeError):
    """A dropped value can't be rebuilt as it was: something that its recipe reads has changed since."""


class Leaf:
    """An argument of a recipe that is kept: the tensor and its version at that time."""

    __slots__ = ("__weakref__", "key", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, key: int) -> None:
        # While a recorder watches, the script's own object is left to it: its death is to be seen.
        self.tensor = tensor if Passes.observer is None else compat.alias_below(tensor)
        self.version = compat.version_of(tensor)
        self.key = key

    def current(self) -> bool:
        """Is its content that of then?"""
        return compat.version_of(self.tensor) == self.version and compat.storage_key(self.tensor) == self.key

    def copy(self) -> None:
        """Take a private copy, because an op is about to overwrite the storage."""
        copy = private(self.tensor)
        self.tensor, self.version, self.key = copy, copy._version, compat.storage_key(copy)


def private(t: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with the same strides, offset and storage size."""
    with compat.below_autograd(), Passes.unseen():
        copy = torch.empty(0, dtype=t.dtype, device=t.device)
        copy.set_(t.untyped_storage().clone(), t.storage_offset(), t.size(), t.stride())
        if t.is_conj():
            copy = copy.conj()
        if t.is_neg():
            copy = compat.neg_view(copy)
    return copy


class View:
    """An argument of a recipe, or a saved tensor, that reads the storage of a slot."""

    __slots__ = ("bits", "dtype", "offset", "size", "slot", "stride")

    def __init__(self, tensor: torch.Tensor, slot: Slot) -> None:
        self.slot = slot
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.bits = (tensor.is_conj(), tensor.is_neg()) if tensor.dtype.is_complex or tensor.is_neg() else None

    @property
    def region(self) -> Region:
        """Where it lies in the storage."""
        return self.size, self.stride, int(self.offset), self.dtype.itemsize

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The same view of `base`'s storage. Runs below autograd."""
        if base.dtype is self.dtype and self.bits is None:
            return base.as_strided(self.size, self.stride, self.offset)
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        view.set_(base.untyped_storage(), self.offset, self.size, self.stride)
        if self.bits is not None:
            if self.bits[0]:
                view = view.conj()
            if self.bits[1]:
                view = compat.neg_view(view)
        return view


Region = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""Size, stride, offset and bytes of an element of a strided view."""


def region(tensor: torch.Tensor) -> Region:
    """Where a tensor lies in its storage."""
    return tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype.itemsize


def disjoint(a: Region, b: Region) -> bool:
    """Do two views of one storage share no element? False where that is not plain to see.

    Views with the same strides are boxes in one grid: they are disjoint if they are in some dimension.
    """
    if a[3] != b[3]:
        return False
    ends = [r[2] + sum((n - 1) * s for n, s in zip(r[0], r[1], strict=True)) for r in (a, b)]
    if ends[0] < b[2] or ends[1] < a[2]:
        return True
    strides = sorted(set(a[1]), reverse=True)
    if a[1] != b[1] or len(strides) != len(a[1]) or strides[-1:] == [0]:
        return False
    apart, outer = False, 0
    left = [a[2], b[2]]
    for stride in strides:
        i = a[1].index(stride)
        if outer % stride:
            return False
        first = [x // stride for x in left]
        left = [x % stride for x in left]
        last = [x + r[0][i] - 1 for x, r in zip(first, (a, b), strict=True)]
        if outer and max(last) >= outer // stride:  # a row runs over into the next
            return False
        apart |= last[0] < first[1] or last[1] < first[0]
        outer = stride
    return apart


class Slot:
    """A dropped value: one storage at one version."""

    __slots__ = (
        "__weakref__",
        "alive",
        "handles",
        "key",
        "loose",
        "nbytes",
        "readers",
        "recipe",
        "stride",
        "tensor",
        "version",
    )

    def __init__(self, recipe: Recipe | None, tensor: torch.Tensor, version: int) -> None:
        self.recipe = recipe
        self.tensor: torch.Tensor | None = None
        self.readers = 0
        """Handles not yet unpacked and recipes not yet run."""
        self.handles: list[weakref.ref[Any]] = []
        self.version = version
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.stride = tensor.stride()
        self.key = compat.guard_storage(storage)
        """The storage's identity, guarded from being reused while this slot lives (its bytes are not kept)."""
        self.alive: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        self.loose = False
        """Aliases of the storage have version counters of their own (``unsafe_chunk``, as in LSTM cells)."""

    def __del__(self) -> None:
        compat.release_storage(self.key)

    def fill(self, tensor: torch.Tensor) -> None:
        """The content is there."""
        self.tensor = tensor

    def done(self) -> None:
        """A reader has read, or never will."""
        self.readers -= 1
        if not self.readers:
            self.tensor = None

    def spent(self) -> bool:
        """Is there no way to the content any more? So it is when all its readers have read, in a pass that runs before the forward
        pass is over (the gradient of a penalty)."""
        return self.recipe is None and self.tensor is None

    def expired(self) -> bool:
        """Has the script let go of the storage?"""
        return compat.storage_expired(self.key)

    def current(self, tensor: torch.Tensor) -> bool:
        """Does `tensor`, which lies in the slot's storage, still have the slot's content? A write that the tape did not
        see shows in the version."""
        return self.loose or tensor._version == self.version

    def exclusive(self) -> bool:
        """Is the content rebuilt, and may its last reader overwrite it? Not while a node or the script holds the memory."""
        return self.readers == 1 and self.tensor is not None and compat.sole_owner(self.tensor)

    def available(self) -> bool:
        """Is the content there, rebuilt or because the script still holds the tensor?"""
        if self.tensor is not None:
            return True
        tensor = self.alive()
        if tensor is None or tensor._version != self.version or compat.storage_key(tensor) != self.key:
            return False
        self.tensor = compat.alias(tensor)
        if Passes.running and not Passes.keeping:
            self.recipe = None
        elif Passes.sweeping():
            Passes.touched.append(weakref.ref(self))
        return True


class Recipe:
    """One op as it ran: enough to run it again."""

    __slots__ = (
        "__weakref__",
        "args",
        "bare",
        "func",
        "generator",
        "grad",
        "kwargs",
        "order",
        "outputs",
        "reuses",
        "rule",
        "scope",
        "seconds",
        "state",
    )

    def __init__(self, func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], order: int) -> None:
        self.func = func
        self.rule = rule
        self.order = order
        self.grad = torch.is_grad_enabled()
        self.bare = False
        """Are all leaves that it needs without autograd's history?"""
        self.outputs: dict[int, weakref.ref[Slot]] = {}
        self.args = args
        self.kwargs = kwargs
        self.reuses = False
        """Its one output has the layout of its first argument, and may be written over it."""
        self.generator: torch.Generator | None = None
        self.state: torch.Tensor | None = None
        self.scope: Scope | None = None
        """Where alone it can run, because it reads parameters that are gathered there."""
        self.seconds = -1.0
        """What the op took, where that is of interest; below 0: not known."""

    def cut_off(self) -> None:
        """Leave autograd's history of all leaves that it needs to others. An op whose output has none may outlive the graph that
        its input is part of, which would be held, with all that it saved, until the recipe is done with."""
        todo: list[Recipe | None] = [self]
        while todo:
            recipe = todo.pop()
            if recipe is None or recipe.bare:
                continue
            recipe.bare = True
            for leaf in _among(recipe.args, recipe.kwargs, Leaf):
                if leaf.tensor.requires_grad and not leaf.tensor.is_leaf:
                    leaf.tensor = compat.alias_below(leaf.tensor)
            todo.extend(slot.recipe for slot in slots_in(recipe.args, recipe.kwargs))

    def __del__(self) -> None:
        for slot in self.reads():  # never run
            slot.done()

    def reads(self) -> list[Slot]:
        """The slots among its arguments."""
        return slots_in(self.args, self.kwargs)

    def run(self, keep: bool) -> None:
        """Run the op again and hand its outputs to the slots that still have readers. Runs below autograd.

        With `keep` the recipe stays usable (the graph is retained); without, it lets go of all that it holds.
        """
        over = self.over(keep)
        args = tuple([self._resolve(a, i, keep) for i, a in enumerate(self.args)])
        kwargs = {k: self._resolve(a, k, keep) for k, a in self.kwargs.items()} if self.kwargs else NO_KWARGS
        func, outputs = self.func, self.outputs
        if over is not None:
            func, over.tensor = self.rule.in_place, None
        if self.generator is not None:
            assert self.state is not None
            before = self.generator.get_state()
            try:
                self.generator.set_state(self.state)
                made = self.again(func, args, kwargs)
            finally:
                self.generator.set_state(before)
        elif self.grad:
            made = self.again(func, args, kwargs)
        else:
            with torch.no_grad():
                made = self.again(func, args, kwargs)
        for j, tensor in made:
            ref = outputs.get(j)
            slot = ref() if ref is not None else None
            if slot is None or slot.tensor is not None or not slot.readers:
                continue
            if tensor.untyped_storage().nbytes() != slot.nbytes or not _strides_are(tensor, slot.stride):
                raise RebuildError(
                    f"torch-echo: re-running {self.rule.name} gave strides {tensor.stride()} instead of {slot.stride}; "
                    "this op can't be rebuilt exactly"
                )
            slot.fill(tensor)
            if not keep:
                slot.recipe = None
        if not keep:
            for s in self.reads():
                s.done()
            self.args, self.kwargs = (), NO_KWARGS
            self.generator = self.state = None

    def over(self, keep: bool) -> Slot | None:
        """The slot whose content the re-run will write over, if there is one."""
        over: Slot | None = self.args[0].slot if self.reuses and not keep and type(self.args[0]) is View else None
        return over if over is not None and over.exclusive() else None

    def repeatable(self, keep: bool) -> bool:
        """Could the op be run once more if its re-run failed? Not where that overwrites something."""
        return (not self.rule.mutates or self.rule.rerun is not None) and self.over(keep) is None

    def again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[int, torch.Tensor]]:
        """Call `func`, the op or the one that writes in place; the values that it makes, numbered."""
        out = func(*args, **kwargs)
        return enumerate((out,) if func is not self.func else written(self.rule, args, kwargs, out))

    def _resolve(self, arg: Any, position: int | str, keep: bool) -> Any:
        kind = type(arg)
        if kind is View:
            base = arg.slot.tensor
            if base is None:
                raise RebuildError(f"torch-echo: {self.rule.name} was to be re-run before what it reads")
            if position in self.rule.mutates:
                base = self._own(arg.slot, base, keep)
            return arg.of(base)
        if kind is Leaf:
            t = arg.tensor
            if not arg.current():
                raise RebuildError(
                    f"torch-echo: a tensor of shape {list(t.shape)} that {self.rule.name} read in the forward pass was "
                    f"changed in place before the backward pass (version {compat.version_of(t)}, expected {arg.version})"
                )
            if compat.is_emptied(t):
                raise RebuildError(
                    f"torch-echo: a sharded parameter of shape {list(t.shape)} that {self.rule.name} read in the forward "
                    "pass is not gathered where backward needs what was made of it"
                )
            return t
        if kind is list:
            return [self._resolve(a, position, keep) for a in arg]
        return arg

    def _own(self, slot: Slot, base: torch.Tensor, keep: bool) -> torch.Tensor:
        """Memory that the re-run may overwrite: the slot's own where nobody else will read it, else a copy."""
        if not keep and slot.exclusive():
            slot.tensor = None
            return base
        copy = torch.empty(0, dtype=base.dtype, device=base.device)
        return copy.set_(base.untyped_storage().clone(), base.storage_offset(), base.size(), base.stride())


def slots_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Slot]:
    """The slots of the views among a recipe's arguments."""
    return [view.slot for view in _among(args, kwargs, View)]


def _among(args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[_Kind]) -> list[_Kind]:
    """Those of one kind among a recipe's arguments, lists of them included."""
    found: list[_Kind] = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if type(a) is kind:
            found.append(a)
        elif type(a) is list:
            found.extend(b for b in a if type(b) is kind)
    return found


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int | str, torch.Tensor]]:
    """(position or keyword, tensor) of every tensor among the arguments, lists of tensors included."""
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            yield i, a
        elif type(a) in (list, tuple):
            for b in a:
                if isinstance(b, torch.Tensor):
                    yield i, b
    for k, a in kwargs.items():
        if isinstance(a, torch.Tensor):
            yield k, a
        elif type(a) in (list, tuple):
            for b in a:
                if isinstance(b, torch.Tensor):
                    yield k, b


def written(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[torch.Tensor]:
    """The values that an op makes, in a fixed order: outputs in storages of their own, then the arguments that it mutates.

    Outputs that alias an argument are no values. Each storage counts once.
    """
    if type(out) is torch.Tensor and not rule.mutates:
        key = compat.storage_key(out)
        for a in args:
            if type(a) is torch.Tensor or type(a) is torch.nn.Parameter:
                if compat.storage_key(a) == key:
                    return []
            elif type(a) is list:
                for b in a:
                    if isinstance(b, torch.Tensor) and compat.storage_key(b) == key:
                        return []
        return [out]
    writes = rule.writes(args)
    seen = {compat.storage_key(t) for _, t in tensors_in(args, kwargs)}
    found: list[torch.Tensor] = []
    for t in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(t, torch.Tensor) and compat.storage_key(t) not in seen:
            seen.add(compat.storage_key(t))
            found.append(t)
    if writes:
        seen = set()
        for position, t in tensors_in(args, kwargs):
            if position in writes and compat.storage_key(t) not in seen:
                seen.add(compat.storage_key(t))
                found.append(t)
    return found


_UNWATCHED = nullcontext()


@contextmanager
def _telling(observer: Callable[[bool], None]) -> Iterator[None]:
    observer(True)
    try:
        yield
    finally:
        observer(False)


def _strides_are(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Does the tensor lie as these strides say? Along a dimension of size 1 they say nothing."""
    found = tensor.stride()
    if found == strides:
        return True
    return len(found) == len(strides) and all(
        n == 1 or a == b for n, a, b in zip(tensor.shape, found, strides, strict=True)
    )


class Rescuer(Protocol):
    """What can make room while values are rebuilt. See ``_rescue``."""

    def reading(self, tensor: torch.Tensor, slot: Slot) -> None:
        """A node is about to read a saved tensor, the content of `slot`."""

    def rerun(self, recipe: Recipe, keep: bool, slot: Slot, later: Collection[Recipe]) -> None:
        """Have `recipe` run; then `later` ones, for a reader of `slot`."""


class Passes:
    """The backward passes that are running, in every thread (the engine runs CUDA nodes on threads of its own)."""

    lock = threading.RLock()
    running = 0
    keeping = 0
    """How many of the running passes retain the graph."""
    touched: ClassVar[list[weakref.ref[Slot]]] = []
    """Slots rebuilt in passes that retain the graph, until these end."""
    rerun = 0
    """Ops re-run since the process started."""
    rescue: Rescuer | None = None
    """Frees memory where that is short, in the pass that is running."""
    observer: Callable[[bool], None] | None = None
    """Told when the tape begins (True) and ends (False) to allocate for itself, while a recorder watches."""

    @classmethod
    def unseen(cls) -> AbstractContextManager[None]:
        """What is allocated within is the tape's, not the script's."""
        return _UNWATCHED if cls.observer is None else _telling(cls.observer)

    @classmethod
    def begin(cls, keep: bool) -> None:
        with cls.lock:
            cls.running += 1
            cls.keeping += keep

    @classmethod
    def end(cls, keep: bool) -> None:
        """Let go of what a retaining pass rebuilt: its recipes are still there for the next pass."""
        with cls.lock:
            cls.running -= 1
            cls.keeping -= keep
            if cls.keeping == 0:
                cls.sweep()

    @classmethod
    def sweeping(cls) -> bool:
        """Will what is rebuilt now be swept? Not in a backward pass of which nobody told: its session is gone, and what it
        rebuilds goes with its handles."""
        return cls.keeping > 0 or (not cls.running and compat.current_node() is None)

    @classmethod
    def sweep(cls) -> None:
        """Let go of rebuilt values whose recipes are still there."""
        for ref in cls.touched:
            slot = ref()
            if slot is not None and slot.recipe is not None:
                slot.tensor = None
        cls.touched.clear()


def rebuild(slot: Slot) -> torch.Tensor:
    """The content of a dropped value: rebuilt if need be, with all that it needs. Iterative; cost: the ops re-run.

    To be called below autograd.
    """
    keep = Passes.keeping > 0 or Passes.running == 0
    with Passes.lock:
        if not slot.available():
            needed: list[Recipe] = []
            seen: set[int] = set()
            stack = [slot]
            while stack:
                recipe = stack.pop().recipe
                if recipe is None:
                    raise RebuildError("torch-echo: a dropped value has no recipe left")
                if id(recipe) not in seen:
                    seen.add(id(recipe))
                    needed.append(recipe)
                    stack.extend(s for s in recipe.reads() if not s.available())
            needed.sort(key=lambda r: -r.order)
            rescue = Passes.rescue
            with Passes.unseen():
                while needed:
                    recipe = needed.pop()
                    if rescue is None:
                        recipe.run(keep)
                    else:
                        rescue.rerun(recipe, keep, slot, needed)
                    Passes.rerun += 1
                    if keep and Passes.sweeping():
                        Passes.touched.extend(recipe.outputs.values())
        tensor = slot.tensor
        assert tensor is not None
        # Read outside of any backward pass (``grad_fn._saved_result``): nothing stays.
        if not Passes.running and Passes.sweeping():
            Passes.sweep()
        return tensor
