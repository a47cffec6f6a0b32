"""The tape at work: a dispatch mode that notes recipes, and the hooks that store handles in place of tensors.

The hot path is ``Tape.__torch_dispatch__`` for an op that the plan leaves alone: two dictionary look-ups.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from sys import _getframe, getrefcount
from time import perf_counter
from typing import Any

import torch

from torch_echo import compat
from torch_echo.rules import Rule, may_reuse, rule_of
from torch_echo.tape._gate import CLOSED, HOOKS, MODE, Door, Place, unknown
from torch_echo.tape._gates import Part
from torch_echo.tape._layer import GatesRecipe, Inside, LayerRecipe, layer_rule, own_part, plain
from torch_echo.tape._recipe import (
    NO_KWARGS,
    Leaf,
    Passes,
    Recipe,
    Slot,
    View,
    disjoint,
    rebuild,
    region,
    tensors_in,
    written,
)
from torch_echo.tape._scope import Gathered, Scope
from torch_echo.tape._stack import Site, Stackable, overwritten, unpack

__all__ = ["OFF", "Decision", "Dropped", "Table", "Tape", "generator_of", "gone", "next_order", "unpack"]


next_order = itertools.count().__next__
"""Numbers for ops, in the order in which they run."""


class Decision:
    """What the plan says of one class of ops in one call of its module: for each instance, which outputs to drop (a bit mask).

    Instances beyond those of the planned step (a longer sequence) follow the class as a whole: `share` of `total` were
    dropped there, mostly with the mask `common`.
    """

    __slots__ = ("common", "count", "each", "masks", "share", "starts", "total")

    def __init__(
        self, masks: list[int], common: int, share: int, total: int, starts: list[int] | None = None, each: int = 1
    ) -> None:
        self.masks = masks
        self.common = common
        self.share = share
        self.total = total
        self.starts = starts or []
        """First instance of each call at the class's place in the code (see ``_gate``)."""
        self.each = each
        """Instances that such a call has, on the whole."""
        self.count = 0

    def turn_to(self, turn: int) -> None:
        """The next instance is the first of this call at its place."""
        known = len(self.starts)
        self.count = self.starts[turn] if turn < known else len(self.masks) + (turn - known) * self.each

    def next(self) -> int:
        """The mask of the next instance."""
        i = self.count
        self.count = i + 1
        if i < len(self.masks):
            return self.masks[i]
        return self.common if (i + 1) * self.share // self.total > i * self.share // self.total else 0


class Table:
    """What the plan says of one call of a module: decisions by call site, and whether mode and hooks are needed at all.

    `doors`: what each call of torch's API in it needs (see ``_gate``); None where the gate did not see all: then mode and
    hooks are on throughout. `gate`: was there one in the recorded step? The places of ops are told by it.
    """

    __slots__ = ("doors", "funcs", "gate", "hooks", "layers", "mode", "other", "sites")

    def __init__(
        self,
        sites: dict[Site, Decision],
        mode: bool,
        hooks: bool,
        doors: dict[Place, Door | None] | None = None,
        gate: bool = True,
    ) -> None:
        self.sites = sites
        self.funcs = frozenset(site[0] for site in sites)
        # Sites of one kernel are as long as the place; those of layers, and of the dropout between them, are longer.
        self.layers = frozenset(site[1:4] for site in sites if len(site) > 4)
        self.gate = gate and (mode or hooks)
        self.mode = mode and doors is None
        self.hooks = hooks and doors is None
        self.doors = doors or {}
        self.other = unknown() if self.gate else CLOSED

    def reset(self) -> None:
        """A new iteration begins: instances are counted anew."""
        for decision in self.sites.values():
            decision.count = 0
        for door in self.doors.values():
            if door is not None:
                door.count = 0


OFF = Table({}, False, False)
"""Nothing to do."""


class Dropped:
    """A handle: stands in for a saved tensor whose content the plan drops."""

    __slots__ = ("__weakref__", "tensor", "token", "version", "view")

    def __init__(self, tensor: torch.Tensor, slot: Slot) -> None:
        self.view: View | None = View(tensor, slot)
        slot.readers += 1
        slot.handles.append(weakref.ref(self))
        self.version = tensor._version
        self.token = compat.version_token(tensor)
        self.tensor: torch.Tensor | None = None

    def __del__(self) -> None:
        if self.view is not None:  # never read
            self.view.slot.done()

    def carry_over(self, slot: Slot | None, tensor: torch.Tensor) -> None:
        """The storage has been overwritten elsewhere than here: read the new version, a dropped one or `tensor`'s."""
        view = self.view
        assert view is not None
        view.slot.done()
        if slot is not None:
            view.slot = slot
            slot.readers += 1
            slot.handles.append(weakref.ref(self))
        else:
            with compat.below_autograd():
                self.tensor, self.view = view.of(tensor), None

    def unpack(self) -> torch.Tensor:
        """The saved tensor; raises PyTorch's error where the script has overwritten it since."""
        if self.token._version != self.version:
            raise overwritten(self.view.size if self.view else (), self.token, self.version)
        view = self.view
        if view is None:
            assert self.tensor is not None
            return self.tensor
        slot = view.slot
        with compat.below_autograd():
            tensor = view.of(rebuild(slot))
            if Passes.rescue is not None:
                Passes.rescue.reading(tensor, slot)
        if Passes.running and not Passes.keeping:
            # The node releases this handle when it has run. Until then the tensor lives as it would in eager PyTorch;
            # the slot is left to its other readers.
            self.tensor, self.view = tensor, None
            slot.done()
        return tensor


class _LayerSaves:
    """What autograd saves while a layer runs as one op. `mask`: what is inside the layer is dropped (bit 0), and so is output k
    (bit k + 1). `inside`: the recipe for the former."""

    def __init__(self, tape: Tape, recipe: LayerRecipe, inside: LayerRecipe, mask: int, given: set[int]) -> None:
        self.tape = tape
        self.recipe: LayerRecipe | None = recipe
        self.inside: LayerRecipe | None = inside
        self.mask = mask
        self.given = given
        """Storages of the arguments."""
        self.numbers: dict[int, int] = {}

    def slot_of(self, tensor: torch.Tensor, order: list[int], bit: int) -> Slot | None:
        """The slot of a value that the layer makes, if it is dropped. Its number goes to `order`."""
        key = compat.storage_key(tensor)
        bit = 0 if key in self.numbers else bit
        recipe = self.recipe if bit else self.inside
        assert recipe is not None
        j = -1 if key in self.given else self.numbers.setdefault(key, len(self.numbers))
        order.append(j)
        if j < 0 or not self.mask >> bit & 1:
            return None
        ref = recipe.outputs.get(j)
        slot = ref() if ref is not None else None
        if slot is None:
            slot = Slot(recipe, tensor, tensor._version)
            recipe.outputs[j] = weakref.ref(slot)
        return slot

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook for a tensor that autograd saves."""
        assert self.recipe is not None
        slot = self.slot_of(tensor, self.recipe.saves, 0)
        return self.tape.pack(tensor) if slot is None else self.tape.dropped(tensor, slot)


class Tape(Stackable):
    """The recording side, one per thread and session."""

    def __init__(self, reorder: bool = False) -> None:
        super().__init__(reorder)
        self.slots: dict[int, Slot] = {}
        """Current slot of each storage whose content is dropped."""
        self.trusted: Collection[int] = ()
        """Storages that change only where a version tells, although NumPy may have been shown them: parameters."""
        self.pinned: dict[int, list[weakref.ref[Leaf]]] = {}
        """Leaves of recipes, by storage: to be copied before an op overwrites them."""
        self.seconds = -1.0
        """What the last op took, where that is of interest."""
        self.table = OFF
        """Decisions for the module call whose code is running."""
        self.rescued: set[int] = set()
        """Storages that were dropped after all, or pinned for that, since a recorder began. See ``_rescue``."""
        self.watching = False
        """Is all that runs to be seen, whatever the tables say?"""
        self.pure: set[int] = set()
        """Ops met so far that write none of their arguments, by identity."""
        self.scopes: list[Scope] = []
        """Calls of sharded modules that are running."""
        self.gathered = Gathered(())
        self._layers: list[GatesRecipe | None] = []
        """Of the calls of the recurrent layer that is running, those whose inside is to be rebuilt from its output."""

    # --- forward: ops ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = id(func)
        if key in self.table.funcs:
            return self.execute(func, args, kwargs, self.site(key, _getframe(1)))
        if key in self.pure:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._keep(func, args, kwargs)

    def use(self, table: Table) -> None:
        """From here on, until the next call of this, `table` says what to do; mode, hooks and gate follow."""
        self.table = table
        self.gate.doors, self.gate.other = table.doors, table.other
        self.switch(table.mode, table.hooks, table.gate)

    def touches(self, key: int) -> bool:
        """Is the content of this storage dropped, or read by a recipe?"""
        return key in self.slots or key in self.pinned

    def opening(self, place: Place, code: Any, turn: int, needs: int) -> tuple[bool, bool] | None:
        """See :class:`Stackable`."""
        before = mode, hooks = self.mode_on, self.hooks_on  # on where they could not be taken off from under others
        self.switch(mode or bool(needs & MODE), hooks or bool(needs & HOOKS), True)
        return before

    def minds(self, args: Any, kwargs: Any) -> bool:
        """See :class:`Stackable`."""
        if not self.slots and not self.pinned:
            return False
        keys = [compat.storage_key(t) for _, t in tensors_in(args, kwargs)]
        return any(self.touches(key) for key in keys)

    def execute(self, func: Any, args: Any, kwargs: Any, site: Site) -> Any:
        """Run an op called at `site` of the module that is running."""
        decision = self.table.sites.get(site)
        if decision is not None:
            mask = decision.next()
            if mask:
                return self._drop(func, args, kwargs or NO_KWARGS, mask)
        return self._keep(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that is dropped."""
        return func(*args, **kwargs)

    def new_slot(self, recipe: Recipe, index: int, tensor: torch.Tensor, version: int) -> Slot:
        """The slot of a value of an op that is dropped, the recipe's output `index`."""
        return Slot(recipe, tensor, version)

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op whose outputs are kept."""
        if id(func) not in self.pure:
            rule = rule_of(func)
            if not rule.mutates:
                self.pure.add(id(func))
            elif self.slots or self.pinned:
                self._carry_over(self._before_write(rule, args, kwargs or NO_KWARGS), rule, args, kwargs or NO_KWARGS)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _drop(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mask: int) -> Any:
        """Run an op some of whose outputs the plan drops, and note its recipe."""
        rule = rule_of(func)
        writes = rule.writes(args)
        if rule.keeps(args) or (writes and rule.rerun is None and not self._owns(writes, args, kwargs)):
            return self._keep(func, args, kwargs)
        scope = self._scope_of(args, kwargs) if self.scopes or self.gathered else None
        if scope is _NOWHERE:
            return self._keep(func, args, kwargs)
        again = (func, args) if rule.rerun is None else rule.rerun(func, args)
        if rule.shape_only:
            again = _creation(func, args, kwargs)
        recipe = self.recipe(again[0], rule, next_order())
        recipe.scope = scope
        recipe.args = tuple([self._refer(a) for a in again[1]])
        if rule.shape_only:
            recipe.kwargs = again[2]  # type: ignore[misc]
        elif kwargs:
            recipe.kwargs = {k: self._refer(a) for k, a in kwargs.items()}
        if rule.random:
            recipe.generator = generator_of(args, kwargs)
            if recipe.generator is not None:
                with Passes.unseen():
                    recipe.state = recipe.generator.get_state()
        old = self._before_write(rule, args, kwargs) if writes else ()
        loose = any(slot.loose for slot in old)
        out = self.run(func, args, kwargs)
        recipe.seconds = self.seconds
        recipe.reuses = rule.in_place is not None and may_reuse(rule, args, out)
        made = written(rule, args, kwargs, out)
        if not recipe.grad or not any(t.dtype.is_floating_point or t.dtype.is_complex for t in made):
            recipe.cut_off()
        for j, tensor in enumerate(made):
            if mask >> j & 1 and type(tensor) is torch.Tensor and not tensor.is_nested:
                in_place = bool(writes) and any(t is tensor for p, t in tensors_in(args, kwargs) if p in writes)
                # An in-place op's version is counted above the level at which the tape sees it, after it returns.
                slot = self.new_slot(recipe, j, tensor, tensor._version + in_place)
                slot.loose = in_place and loose
                recipe.outputs[j] = weakref.ref(slot)
                self.slots[slot.key] = slot
        if old:
            self._carry_over(old, rule, args, kwargs)
        return out

    def recipe(self, func: Any, rule: Rule, order: int) -> Recipe:
        """A recipe without arguments yet."""
        return Recipe(func, rule, (), NO_KWARGS, order)

    def dropped(self, tensor: torch.Tensor, slot: Slot) -> Any:
        """What autograd is to hold in place of a saved tensor whose content is `slot`'s."""
        return Dropped(tensor, slot)

    def _owns(self, writes: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Are all arguments that the op writes dropped values themselves, so that a re-run can build on their rebuild?"""
        for position, t in tensors_in(args, kwargs):
            if position in writes:
                slot = self.slots.get(compat.storage_key(t))
                if slot is None or not self._here(slot):
                    return False
                if t._version < slot.version:
                    slot.loose = (
                        True  # counters only rise, so this is another one: t comes from unsafe_chunk or its like
                    )
                if slot.spent() or not slot.current(t):
                    return False
        return True

    def _slot_of(self, tensor: torch.Tensor, key: int) -> Slot | None:
        """The dropped value that `tensor`, on the storage `key`, is; None if what runs now can't count on its rebuild."""
        slot = self.slots.get(key)
        return slot if slot is not None and slot.current(tensor) and not slot.spent() and self._here(slot) else None

    def _here(self, slot: Slot) -> bool:
        """Can what is running now count on the slot's rebuild? Not outside of the scope in which its recipe can run."""
        recipe = slot.recipe
        return recipe is None or recipe.scope is None or recipe.scope in self.scopes

    def _scope_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scope | None:
        """The innermost of the scopes that a re-run of an op with these arguments needs: None if it needs none, `_NOWHERE` if it
        reads parameters that are gathered by other means than a module's call."""
        depth = -1
        for _, t in tensors_in(args, kwargs):
            key = compat.storage_key(t)
            slot = self.slots.get(key)
            if slot is not None and slot.current(t):
                if slot.recipe is not None and slot.recipe.scope in self.scopes:
                    depth = max(depth, self.scopes.index(slot.recipe.scope))
                continue
            owner = next((i for i, scope in enumerate(self.scopes) if key in scope.keys), -1)
            if owner < 0 and key in self.gathered:
                return _NOWHERE
            depth = max(depth, owner)
        return None if depth < 0 else self.scopes[depth]

    def _emptied_later(self, key: int) -> bool:
        """Is the storage one that parameters are gathered into? There is nothing to be saved from being overwritten."""
        return any(key in scope.keys for scope in self.scopes)

    def _refer(self, arg: Any) -> Any:
        """An argument as a recipe holds it: by slot where its content is dropped, else the tensor itself."""
        if isinstance(arg, torch.Tensor):
            key = compat.storage_key(arg)
            slot = self._slot_of(arg, key)
            if slot is not None:
                slot.readers += 1
                return View(arg, slot)
            if self.scopes and self._emptied_later(key):
                return Leaf(arg, key)
            pinned = self.pinned.get(key)
            if pinned is None:
                pinned = self.pinned[key] = []
            else:
                known = pinned[-1]()  # a parameter read at each step of a loop
                if known is not None and known.tensor is arg and known.version == compat.version_of(arg):
                    return known
            leaf = Leaf(arg, key)
            pinned.append(weakref.ref(leaf))
            if key != -1 and key not in self.trusted and compat.is_foreign(arg):
                leaf.copy()  # others may write there, and no version would tell
            return leaf
        if type(arg) in (list, tuple) and any(isinstance(a, torch.Tensor) for a in arg):
            return [self._refer(a) for a in arg]
        return arg

    def _before_write(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Slot]:
        """An op is about to overwrite storages: copy what recipes still need of them, and forget their slots.

        Returns these slots.
        """
        old = []
        writes = rule.writes(args)
        for position, t in tensors_in(args, kwargs):
            if position not in writes:
                continue
            key = compat.storage_key(t)
            self._spare(key)
            slot = self.slots.pop(key, None)
            if slot is not None:
                slot.alive = gone
                if rule.silent:
                    slot.tensor = compat.alias(t)
                old.append(slot)
        return old

    def _carry_over(self, old: Collection[Slot], rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Saved tensors that lie elsewhere in a storage than where the op writes are left as they are: they are taken from
        the version that it makes, so that a rebuild needs no copy of each version (the gates of an LSTM cell)."""
        for slot in old:
            if not slot.handles or rule.silent:
                continue
            writes = rule.writes(args)
            written_to = [t for p, t in tensors_in(args, kwargs) if p in writes and compat.storage_key(t) == slot.key]
            regions = [region(t) for t in written_to]
            for ref in slot.handles:
                handle = ref()
                if handle is not None and handle.view is not None and handle.view.slot is slot:
                    here = handle.view.region
                    if all(disjoint(here, r) for r in regions):
                        handle.carry_over(self.slots.get(slot.key), written_to[0])

    # --- forward: recurrent layers -----------------------------------------------------------------------------------

    def takes_apart(self, func: Any, args: tuple[Any, ...]) -> bool:
        """See :class:`Stackable`."""
        return (
            self.place in self.table.layers and self.saves_here() and not torch.is_autocast_enabled(args[0].device.type)
        )

    def run_layer(self, number: int, func: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """See :class:`Stackable`."""
        decisions = [self.table.sites.get(self.layer_site(number, func, inside)) for inside in Inside]
        mask, own, whole = [0 if decision is None else decision.next() for decision in decisions]
        self._layers.append(None)
        if not (mask or own or whole):
            return plain(func, args)
        scope = self._scope_of(args, NO_KWARGS) if self.scopes or self.gathered else None
        if scope is _NOWHERE:
            return plain(func, args)
        recipe = LayerRecipe(func, layer_rule(func), args, next_order())
        recipe.scope = scope
        recipe.args = tuple([self._refer(a) for a in args])
        inside = recipe
        if own or whole:
            inside = GatesRecipe(recipe, args, next_order())
            inside.scope = scope
            inside.args = (*[self._refer(a) for a in args], None)
        mask |= own | whole
        given = {compat.storage_key(t) for _, t in tensors_in(args, NO_KWARGS)}
        saving = _LayerSaves(self, recipe, inside, mask, given)
        mode = self.mode_on
        self.switch(False, self.hooks_on, self.gate_on)
        compat.push_hooks(saving.pack, unpack)
        begin = perf_counter()
        try:
            out: tuple[torch.Tensor, ...] = func(*args)
            recipe.seconds = perf_counter() - begin
            for k, tensor in enumerate(out):
                slot = saving.slot_of(tensor, recipe.results, k + 1)
                if slot is not None:
                    slot.alive = weakref.ref(tensor)
                    self.slots[slot.key] = slot
        finally:
            compat.pop_hooks()
            saving.recipe = saving.inside = None  # autograd keeps the hook
            self.switch(mode, self.hooks_on, self.gate_on)
        if isinstance(inside, GatesRecipe):
            inside.seconds = recipe.seconds
            if own:
                inside.read(self._refer(compat.alias(out[0])), own_part(args))
            else:
                self._layers[-1] = inside
        return out

    def layer_over(self, output: torch.Tensor, parts: Sequence[Part]) -> None:
        """See :class:`Stackable`."""
        for recipe, part in zip(self._layers[len(self._layers) - len(parts) :], parts, strict=True):
            if recipe is not None and recipe.args:
                # Another tensor: the recipe is held by nodes which the output's own holds.
                recipe.read(self._refer(compat.alias(output)), part)
        self._layers.clear()

    # --- forward: saved tensors --------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook that autograd calls for each tensor it saves."""
        if self.slots and type(tensor) is torch.Tensor:
            slot = self._slot_of(tensor, compat.storage_key(tensor))
            if slot is not None and not compat.functorch_active():
                return self.dropped(tensor, slot)
        version = tensor._version
        if compat.may_be_result(tensor, version):
            # A node that is given its own result back would be kept by it for ever, a cycle that no collector sees.
            return (compat.alias(tensor) if type(tensor) is torch.Tensor else tensor.detach(), version)
        return (tensor, version)

    def forget(self) -> None:
        """Forward is over: what handles and recipes hold stays. That of leaves stays too: recipes may outlive this pass."""
        self.slots = {}

    def spare(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are about to be written where the tape does not see it: copy what recipes still need of them."""
        live = {key for key, refs in self.pinned.items() if any(ref() is not None for ref in refs)}
        for key in live.intersection(compat.storage_key(t) for t in tensors) if live else ():
            self._spare(key)

    def _spare(self, key: int) -> None:
        for ref in self.pinned.pop(key, ()):
            leaf = ref()
            if leaf is not None and leaf.key == key and leaf.version == compat.version_of(leaf.tensor):
                leaf.copy()

    def prune(self) -> None:
        """Forget slots that nothing can refer to any more: forward passes that no backward follows must not pile up."""
        for key in reversed(list(self.slots)):  # newest first: their recipes hold older ones
            if self.slots[key].expired() and getrefcount(self.slots[key]) <= 2:  # the table's own, and this question's
                del self.slots[key]
        self.pinned = {k: live for k, refs in self.pinned.items() if (live := [r for r in refs if r() is not None])}


_NOWHERE = Scope(torch.nn.Module())


def gone() -> None:
    """In place of the weak reference of a slot whose storage has been overwritten."""


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a random op draws from."""
    device = kwargs.get("device")
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.Generator):
            return a
    for _, t in tensors_in(args, kwargs):
        device = t.device
        break
    if device is None or torch.device(device).type == "cpu":
        return torch.default_generator
    index = torch.device(device).index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def _creation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that makes a tensor from another one's metadata, as a call on a tensor without content.

    The re-run reads a tensor of the same metadata whose storage is never touched, so that nothing is pinned.
    """
    like = args[0]
    guard = compat.no_dispatch()
    empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    del guard
    options = {"dtype": like.dtype, "device": like.device, **{k: v for k, v in kwargs.items() if v is not None}}
    return func, (empty, *args[1:]), options
