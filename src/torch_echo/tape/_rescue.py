"""Out of memory is not the end: what a plan keeps is dropped when an allocation fails, and the op is run again.

A kept value can be dropped later only if it is known how it was made. So each op leaves a *note*: a recipe that holds nothing.
What it read is named by slots; a slot holds no memory either until somebody relies on it.

- :class:`Soft`: the slot of a value that is kept. Its holders are the handles of saved tensors, weakly listed.
- :class:`Note`: how it was made.
- :class:`Kept`: the handle of a saved tensor that may turn into a dropped one.
- :class:`RescueTape`: a tape that writes notes, and acts when memory is short.

To drop a value, its note becomes a recipe. What that reads is *pinned* if autograd keeps it anyway, or if there is no other way
to it; else its own note becomes a recipe too, and so on. Pinned values may be dropped in their turn: who reads a slot does not
care where its content comes from. Dropped is what costs the least seconds for each byte; all that would have to be re-run
counts, also for values dropped before, so that a chain is not dropped as a whole.

In backward the same is done ahead of what is to be rebuilt. A kernel of the backward pass that fails is not run again.

Not done: values made by random ops, or in storages of ``unsafe_chunk`` and its like, are never dropped here (a plan does); what
was rebuilt is not given up for what is wanted sooner.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Collection
from sys import _getframe
from time import perf_counter
from types import FrameType
from typing import Any, TypeVar

import torch

from torch_echo import compat
from torch_echo.cost import spec_of, work_of
from torch_echo.rules import Rule, may_reuse, nondeterministic_on, rule_of
from torch_echo.tape._limit import Limit
from torch_echo.tape._loss import CrossEntropy
from torch_echo.tape._mode import Dropped, Table, Tape, generator_of, gone, next_order
from torch_echo.tape._recipe import (
    NO_KWARGS,
    Leaf,
    Passes,
    RebuildError,
    Recipe,
    Slot,
    View,
    private,
    slots_in,
    tensors_in,
    written,
)
from torch_echo.tape._stack import Site

__all__ = ["Kept", "Note", "RescueTape", "Soft"]

_Result = TypeVar("_Result")

_LONGEST = 500
"""Ops, at most, that may have to be re-run for one value."""

_NEAR = 16
"""Frames, ours among them, in which the forward of a function of the script's own is looked for around an op."""

_PORTIONS = 64
"""At least so small a part of all memory is freed at a time: looking for what is cheapest takes a while."""

_BALANCE = 20
"""FLOPs in the time that a byte takes to be moved, where ops can't be timed as they are launched."""


class Note:
    """One op as it ran, holding nothing of what it read."""

    __slots__ = ("args", "func", "grad", "kwargs", "made", "order", "reuses", "rule", "seconds")

    def __init__(self, func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], order: int) -> None:
        self.func = func
        self.rule = rule
        self.args = args
        self.kwargs = kwargs
        self.order = order
        self.grad = torch.is_grad_enabled()
        self.reuses = False
        self.seconds = -1.0
        """What it took; below 0: not known."""
        self.made: weakref.ref[Recipe] | None = None
        """The recipe that was last made of it."""

    def reads(self) -> list[Slot]:
        """What it read, parameters aside."""
        return slots_in(self.args, self.kwargs)

    def recipe(self) -> Recipe:
        """The recipe: that which was made before and has not run, or a new one."""
        known = self.made() if self.made is not None else None
        if known is not None and known.args:
            return known
        recipe = Recipe(self.func, self.rule, self.args, self.kwargs, self.order)
        recipe.grad, recipe.reuses, recipe.seconds = self.grad, self.reuses, self.seconds
        for slot in self.reads():
            slot.readers += 1
        self.made = weakref.ref(recipe)
        return recipe


def _described(arg: Any) -> Any:
    """An argument of a note as one without data."""
    if type(arg) is View:
        return torch.empty_strided(arg.size, arg.stride, dtype=arg.dtype, device="meta")
    if type(arg) is list:
        return [_described(a) for a in arg]
    return arg.tensor.to("meta") if hasattr(arg, "tensor") else arg


class Soft(Slot):
    """A value that is kept: what there is to know should it be dropped."""

    __slots__ = ("expected", "holders", "index", "listed", "note")

    def __init__(self, note: Note | None, index: int, tensor: torch.Tensor, version: int) -> None:
        super().__init__(None, tensor, version)
        self.note = note
        """None: it can't be made again; others may be made from it."""
        self.index = index
        """Which of the note's values it is."""
        self.holders: list[weakref.ref[Kept]] = []
        self.listed = False
        self.expected = -1
        """The version of the tensor that is pinned; below 0: what is there was rebuilt."""

    def kept(self) -> list[Kept]:
        """The handles that hold the value now."""
        return [h for ref in self.holders if (h := ref()) is not None and h.tensor is not None and h.slot is self]

    def pin(self, tensor: torch.Tensor) -> None:
        """Somebody relies on the content."""
        if self.tensor is None:
            self.tensor, self.expected = tensor, tensor._version

    def intact(self) -> bool:
        """Has nobody changed what is pinned?"""
        return self.expected < 0 or self.tensor is None or self.tensor._version == self.expected

    def available(self) -> bool:
        """See :class:`Slot`."""
        if self.tensor is not None and self.expected >= 0:
            if not self.intact():
                raise RebuildError(
                    f"torch-echo: a tensor of shape {list(self.tensor.shape)} that an op of the forward pass read was changed in "
                    f"place before the backward pass (version {self.tensor._version}, expected {self.expected})"
                )
            return True
        return super().available()

    def exclusive(self) -> bool:
        """See :class:`Slot`. What is pinned is a handle's too."""
        return self.expected < 0 and super().exclusive()

    def fill(self, tensor: torch.Tensor) -> None:
        """See :class:`Slot`."""
        super().fill(tensor)
        self.expected = -1

    def done(self) -> None:
        """See :class:`Slot`."""
        super().done()
        if not self.readers:
            self.expected = -1

    def overwritten(self) -> None:
        """The storage is about to get another content."""
        self.alive = gone
        self.holders = []
        if self.tensor is not None and self.expected >= 0:
            self.fill(private(self.tensor))


class Kept(Dropped):
    """A handle: holds a saved tensor that may be dropped later."""

    __slots__ = ("slot",)

    def __init__(self, tensor: torch.Tensor, slot: Soft) -> None:
        self.tensor = self.token = compat.alias(tensor)
        self.version = tensor._version
        self.view: View | None = None
        self.slot: Soft | None = slot
        slot.holders.append(weakref.ref(self))

    def unpack(self) -> torch.Tensor:
        """See :class:`Dropped`."""
        tensor = self.tensor
        rescue = Passes.rescue
        if rescue is not None and tensor is not None and self.slot is not None:
            rescue.reading(tensor, self.slot)
        read = super().unpack()
        if tensor is None and self.tensor is not None:
            self.slot = None  # another storage
        return read

    def drop(self) -> None:
        """Let go of the tensor; it is to be rebuilt."""
        tensor, slot = self.tensor, self.slot
        assert tensor is not None and slot is not None
        self.view = View(tensor, slot)
        slot.readers += 1
        slot.handles.append(weakref.ref(self))
        self.tensor = None
        self.token = compat.alias_below(tensor)  # of its own: others may have the tensor itself, which a node gave them
        compat.strip(self.token)


class RescueTape(Tape):
    """A tape that can drop what it keeps. `failed` is told of an allocation that no dropping could help."""

    def __init__(self, limit: Limit, failed: Callable[[BaseException, int], None], reorder: bool = False) -> None:
        super().__init__(reorder)
        self.limit = limit
        self.failed = failed
        self.soft: dict[int, Soft] = {}
        """Current value of each storage whose content is kept."""
        self.savings: list[weakref.ref[Soft]] = []
        """Values that autograd keeps, or recipes do."""
        self.freed = 0
        """Bytes dropped since the last failure that reached the script."""

    # --- forward: ops ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = 0
        if id(func) in self.table.funcs:
            decision = self.table.sites.get(self.site(id(func), _getframe(1)))
            mask = decision.next() if decision is not None else 0
        return self.attempt(func, args, kwargs or NO_KWARGS, mask)

    def use(self, table: Table) -> None:
        """See :class:`Tape`."""
        super().use(table)
        if self.watching:
            self.switch(True, True, table.gate)

    def execute(self, func: Any, args: Any, kwargs: Any, site: Site) -> Any:
        """See :class:`Tape`."""
        decision = self.table.sites.get(site)
        return self.attempt(func, args, kwargs or NO_KWARGS, decision.next() if decision is not None else 0)

    def attempt(self, func: Any, args: Any, kwargs: Any, mask: int) -> Any:
        """Run an op; if its allocation fails, drop something and run it again."""
        rule = rule_of(func)
        before = _Before(rule, args, kwargs) if rule.mutates or rule.random else None
        wanted = 0
        while True:
            try:
                return self._drop(func, args, kwargs, mask) if mask else self._keep(func, args, kwargs)
            except (RuntimeError, MemoryError) as error:
                if not compat.is_out_of_memory(error):
                    raise
                failure = error
            wanted = self._make_room(failure, wanted, before)

    def run_layer(self, number: int, func: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """See :class:`Stackable`. A layer draws no random numbers."""
        return self._with_room(lambda: super(RescueTape, self).run_layer(number, func, args))

    def run_loss(self, call: CrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See :class:`Stackable`."""
        return self._with_room(lambda: super(RescueTape, self).run_loss(call, logits, target))

    def _with_room(self, run: Callable[[], _Result]) -> _Result:
        """Run what is an op as a whole; if an allocation fails, drop something and run it again."""
        wanted = 0
        while True:
            try:
                return run()
            except (RuntimeError, MemoryError) as error:
                if not compat.is_out_of_memory(error):
                    raise
                failure = error
            wanted = self._make_room(failure, wanted)

    def _make_room(self, failure: BaseException, wanted: int, before: _Before | None = None) -> int:
        """An allocation has failed, after room was made for `wanted` bytes: drop something more. Returns for how many bytes; raises
        `failure` where that is no help."""
        wanted = max(2 * wanted, compat.bytes_wanted(failure))
        failure.__traceback__ = failure.__context__ = None  # which hold what the op has made
        live = self.limit.learn()
        if (before is not None and not before.restore()) or not self.release(wanted):
            self.failed(failure, live)
            raise failure
        return wanted

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op whose outputs are kept, and note how they were made."""
        rule = rule_of(func)
        kwargs = kwargs or NO_KWARGS
        writes = rule.writes(args)
        note: Note | None = None
        old: list[Slot] = []
        overwrites: list[torch.Tensor] = []
        if writes:
            overwrites = [t for p, t in tensors_in(args, kwargs) if p in writes]
            if rule.rerun is None and self._remade(overwrites):
                note = self._note(rule, func, args, kwargs)
            old = self._before_write(rule, args, kwargs)
        out = self.run(func, args, kwargs)
        if old:
            self._carry_over(old, rule, args, kwargs)
        made = written(rule, args, kwargs, out)
        if not made:
            if rule.name.startswith("aten::unsafe_"):
                self._loosen(args)
            return out
        fresh = [t for t in made if not any(t is o for o in overwrites)]
        if note is None and (rule.rerun is not None or not writes) and all(type(t) is torch.Tensor for t in fresh):
            note = self._note(rule, func, args, kwargs)
            made = fresh
        if note is not None:
            note.seconds = self.seconds if made[0].device.type == "cpu" else -1.0
            note.reuses = rule.in_place is not None and may_reuse(rule, args, out)
            for j, t in enumerate(made):
                soft = Soft(note, j, t, t._version + any(t is o for o in overwrites))
                self.soft[soft.key] = soft
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See :class:`Tape`."""
        begin = perf_counter()
        out = func(*args, **kwargs)
        self.seconds = perf_counter() - begin
        if self.limit.enforced:
            old = {compat.storage_key(t) for _, t in tensors_in(args, kwargs)}
            results = out if isinstance(out, (tuple, list)) else (out,)
            made = [t for t in results if isinstance(t, torch.Tensor) and compat.storage_key(t) not in old]
            if made:
                self.limit.check(made)
        return out

    def new_slot(self, recipe: Recipe, index: int, tensor: torch.Tensor, version: int) -> Slot:
        """See :class:`Tape`. Once rebuilt, it may be dropped again."""
        note = None
        leaves = [a for a in (*recipe.args, *recipe.kwargs.values()) if type(a) is Leaf]
        if recipe.generator is None and recipe.scope is None and all(leaf.key in self.trusted for leaf in leaves):
            note = Note(recipe.func, recipe.rule, recipe.args, recipe.kwargs, recipe.order)
            note.reuses, note.seconds = recipe.reuses, recipe.seconds
        soft = Soft(note, index, tensor, version)
        soft.recipe = recipe
        self._list(soft)
        return soft

    def _remade(self, overwrites: list[torch.Tensor]) -> bool:
        """Can what is overwritten be made again, so that a re-run can build on it?"""
        for t in overwrites:
            soft = self.soft.get(compat.storage_key(t))
            if soft is None or soft.note is None or soft.loose or not soft.current(t):
                return False
        return True

    def _loosen(self, args: Any) -> None:
        """Results of the op share memory, but no version counter, with what it read: no write to them would be seen."""
        for _, t in tensors_in(args, NO_KWARGS):
            soft = self.soft.get(compat.storage_key(t))
            if soft is not None:
                soft.loose, soft.note = True, None

    def _note(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Note | None:
        """How an op runs; None if it can't be run again, or something that it reads can't be named."""
        if self._in_function(_getframe(1)) or rule.keeps(args) or rule.random or rule.shape_only or rule.blank:
            return None
        if self.gathered:  # notes know no scopes of gathered parameters
            return None
        if rule.rerun is not None:
            func, args = rule.rerun(func, args)
        named = []
        try:
            named = [self._name(a) for a in args]
            options = {k: self._name(a) for k, a in kwargs.items()} if kwargs else NO_KWARGS
        except _Unnameable:
            return None
        for _, t in tensors_in(args, kwargs):
            if nondeterministic_on(rule, t.device.type, self.reorder):
                return None
            break
        return Note(func, rule, tuple(named), options, next_order())

    def _in_function(self, frame: FrameType) -> bool:
        """Does a function of the script's own run there? Its kernels may write, unseen, in what it was given and in what it makes:
        neither is made again."""
        given = compat.function_around(frame, _NEAR)
        if given is None:
            return False
        for _, t in tensors_in(given, NO_KWARGS):
            soft = self.soft.get(compat.storage_key(t))
            if soft is not None:
                soft.note = None
        return True

    def _name(self, arg: Any) -> Any:
        """An argument as a note has it."""
        if isinstance(arg, torch.Tensor):
            key = compat.storage_key(arg)
            if type(arg) not in (torch.Tensor, torch.nn.Parameter) or key == -1:
                raise _Unnameable
            if key in self.trusted:
                return super()._refer(arg)
            slot = self._slot_of(arg, key)
            return View(arg, slot) if slot is not None else View(arg, self._value(arg, key))
        if type(arg) in (list, tuple) and any(isinstance(a, torch.Tensor) for a in arg):
            return [self._name(a) for a in arg]
        return arg

    def _value(self, tensor: torch.Tensor, key: int) -> Soft:
        """The kept value that `tensor` is."""
        soft = self.soft.get(key)
        if soft is None or not (soft.loose or soft.current(tensor)):
            soft = self.soft[key] = Soft(None, 0, tensor, tensor._version)
        return soft

    def _refer(self, arg: Any) -> Any:
        """See :class:`Tape`. What a recipe reads is pinned, and may be dropped in its turn."""
        if type(arg) is not torch.Tensor or self.gathered:
            return super()._refer(arg)
        key = compat.storage_key(arg)
        if key == -1 or key in self.trusted or self._slot_of(arg, key) is not None or compat.is_foreign(arg):
            return super()._refer(arg)
        soft = self._value(arg, key)
        if soft.loose or arg.is_inference():
            return super()._refer(arg)
        self._list(soft)
        soft.pin(compat.alias_below(arg))
        soft.readers += 1
        return View(arg, soft)

    def _before_write(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Slot]:
        """See :class:`Tape`."""
        writes = rule.writes(args)
        for position, t in tensors_in(args, kwargs):
            if position in writes:
                soft = self.soft.pop(compat.storage_key(t), None)
                if soft is not None:
                    soft.overwritten()
                    if soft.loose:
                        self.soft[soft.key] = Soft(None, 0, t, t._version)
                        self.soft[soft.key].loose = True
        return super()._before_write(rule, args, kwargs)

    def _list(self, soft: Soft) -> None:
        """Autograd, or a recipe, is about to keep the value."""
        if not soft.listed:
            soft.listed = True
            self.savings.append(weakref.ref(soft))

    def touches(self, key: int) -> bool:
        """See :class:`Tape`."""
        soft = self.soft.get(key)
        return super().touches(key) or key in self.rescued or (soft is not None and soft.readers > 0)

    # --- forward: saved tensors --------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """See :class:`Tape`."""
        if type(tensor) is torch.Tensor:
            key = compat.storage_key(tensor)
            if self._in_function(_getframe(1)) and key != -1:
                self._value(tensor, key)  # others may be made from it
            soft = self.soft.get(key)
            if (
                soft is not None
                and self._slot_of(tensor, key) is None
                and soft.current(tensor)
                and not compat.functorch_active()
            ):
                self._list(soft)
                return Kept(tensor, soft)
        return super().pack(tensor)

    def forget(self) -> None:
        """See :class:`Tape`. Handles keep what they need."""
        super().forget()
        self.soft = {}
        self.savings = [ref for ref in self.savings if ref() is not None]

    def prune(self) -> None:
        """See :class:`Tape`."""
        super().prune()
        self.soft = {key: soft for key, soft in self.soft.items() if not soft.expired()}
        self.savings = [ref for ref in self.savings if ref() is not None]

    # --- memory is short ---------------------------------------------------------------------------------------------

    def release(self, nbytes: int, busy: Collection[int] = ()) -> int:
        """Drop kept values of so many bytes; in forward the cheapest first, in backward those that will be read last. Returns how
        many were freed: fewer if there are no more.

        `busy`: slots, by identity, that are being read.
        """
        freed = 0
        nbytes = max(nbytes, self.limit.live() // _PORTIONS)
        with Passes.lock:
            chosen: list[tuple[float, int, Soft]] = []
            for i, ref in enumerate(self.savings):
                soft = ref()
                if soft is not None and id(soft) not in busy and _droppable(soft):
                    cost = self._cost(soft)
                    if cost is not None:
                        chosen.append((i if Passes.running else cost[0], i, soft))
            heapq.heapify(chosen)
            while chosen and freed < nbytes:
                _, i, soft = heapq.heappop(chosen)
                cost = self._cost(soft) if _droppable(soft) else None
                if cost is None:
                    continue
                if not Passes.running and chosen and cost[0] > chosen[0][0]:  # dearer by what has been dropped since
                    heapq.heappush(chosen, (cost[0], i, soft))
                    continue
                freed += self._let_go(soft, cost[1], cost[2])
            self.freed += freed
        return freed

    def _cost(self, soft: Soft) -> tuple[float, list[Soft], list[tuple[Slot, torch.Tensor]]] | None:
        """(seconds for each byte, values whose notes are to become recipes, what is to be pinned for them); None if it can't be
        dropped, or to no avail."""
        harden = [soft]
        pins: list[tuple[Slot, torch.Tensor]] = []
        seen: set[int] = {id(soft)}
        ops: dict[int, float] = {}
        gain = soft.nbytes
        todo: list[Slot] = [soft]
        while todo:
            slot = todo.pop()
            note: Any = slot.recipe if slot.recipe is not None else slot.note  # type: ignore[attr-defined]
            if id(note) not in ops:
                ops[id(note)] = _price(note)
                if len(ops) > _LONGEST:
                    return None
            for u in note.reads():
                if id(u) in seen:
                    continue
                seen.add(id(u))
                if u.tensor is not None:
                    if isinstance(u, Soft) and not u.intact():
                        return None
                    continue
                if u.recipe is not None:  # dropped before
                    todo.append(u)
                    continue
                if not isinstance(u, Soft) or u.loose:
                    return None
                holders = u.kept()
                if holders:
                    held = holders[0].tensor
                    assert held is not None
                    if held._version != holders[0].version or compat.is_foreign(held):
                        return None
                    pins.append((u, held))
                elif u.note is not None:
                    harden.append(u)
                    todo.append(u)
                else:
                    tensor = u.alive()
                    if tensor is None or tensor._version != u.version or compat.is_foreign(tensor):
                        return None
                    if compat.storage_key(tensor) != u.key:
                        return None
                    pins.append((u, tensor))
                    gain -= u.nbytes
        return (sum(ops.values()) / gain, harden, pins) if gain > 0 else None

    def _let_go(self, soft: Soft, harden: list[Soft], pins: list[tuple[Slot, torch.Tensor]]) -> int:
        """Drop a value. Returns the bytes freed."""
        for slot, tensor in pins:
            assert isinstance(slot, Soft)
            slot.pin(tensor if any(h.tensor is tensor for h in slot.kept()) else compat.alias_below(tensor))
            self.rescued.add(slot.key)
        for slot in harden:
            assert slot.note is not None
            slot.recipe = slot.note.recipe()
            slot.recipe.outputs[slot.index] = weakref.ref(slot)
        for handle in soft.kept():
            handle.drop()
        soft.holders = []
        soft.tensor, soft.expected = None, -1
        self.rescued.add(soft.key)
        return soft.nbytes if soft.expired() else 0

    # --- backward ----------------------------------------------------------------------------------------------------

    def reading(self, tensor: torch.Tensor, slot: Slot) -> None:
        """See :class:`torch_echo.tape._recipe.Rescuer`. A kernel that makes a gradient makes one as large as what it reads. Twice
        that is to be free, for a real device's memory is in pieces."""
        self._ahead((1 if self.limit.enforced else 2) * tensor.untyped_storage().nbytes(), {id(slot)})

    def rerun(self, recipe: Recipe, keep: bool, slot: Slot, later: Collection[Recipe]) -> None:
        """See :class:`torch_echo.tape._recipe.Rescuer`."""
        busy = {id(s) for r in (*later, recipe) for s in r.reads()} | {id(slot)}
        self._ahead(sum(s.nbytes for ref in recipe.outputs.values() if (s := ref()) is not None), busy)
        wanted = 0
        while True:
            again = recipe.repeatable(keep)
            try:
                recipe.run(keep)
                return
            except (RuntimeError, MemoryError) as error:
                if not again or not compat.is_out_of_memory(error):
                    raise
                failure = error
            wanted = max(2 * wanted, compat.bytes_wanted(failure))
            failure.__traceback__ = failure.__context__ = None
            if not self.release(wanted, busy):
                raise failure

    def _ahead(self, nbytes: int, busy: Collection[int]) -> None:
        """So much will be wanted soon."""
        short = self.limit.short(nbytes)
        if not short:
            return
        self.release(short, busy)
        room = self.limit.room()
        if self.limit.enforced and room is not None and room < 0:
            failure = compat.out_of_memory(-room, "memory_limit is reached in the backward pass.")
            self.failed(failure, self.limit.live())
            raise failure


class _Unnameable(Exception):
    """An argument without a plain storage."""


class _Before:
    """What an op may change before it fails."""

    def __init__(self, rule: Rule, args: Any, kwargs: Any) -> None:
        self.writes = bool(rule.writes(args))
        self.statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
        if rule.rerun is not None:
            with Passes.unseen():
                self.statistics = [(t, t.clone()) for p, t in tensors_in(args, kwargs) if p in rule.writes(args)]
            self.writes = False
        self.generator = generator_of(args, kwargs) if rule.random else None
        self.state = self.generator.get_state() if self.generator is not None else None

    def restore(self) -> bool:
        """Set it back; False if that can't be done."""
        if self.writes:
            return False
        for tensor, copy in self.statistics:
            tensor.copy_(copy)
        if self.generator is not None and self.state is not None:
            self.generator.set_state(self.state)
        return True


def _droppable(soft: Soft) -> bool:
    """Can it be made again, and would its bytes be free? Not if the script, or an op that is running, has the tensor."""
    if soft.note is None or soft.loose or soft.recipe is not None or not soft.nbytes:
        return False
    holders = soft.kept()
    if not soft.intact() or any(h.token._version != h.version for h in holders):
        return False
    ours = {id(t): t for t in (*(h.tensor for h in holders), soft.tensor) if t is not None}
    return any(compat.owned(t, len(ours)) for t in ours.values())


def _price(step: Note | Recipe) -> float:
    """Seconds that running it again takes, or what is in proportion to them."""
    if step.seconds < 0:
        args = [_described(a) for a in step.args]
        work = work_of(step.func, spec_of(step.func, args, {k: _described(a) for k, a in step.kwargs.items()}))
        step.seconds = work.flops / _BALANCE + work.bytes_moved
    return step.seconds
