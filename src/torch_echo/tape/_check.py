"""A training step under the plan, compared with plain PyTorch while it runs (the option `check`).

Three comparisons, which need nothing of the script's to be run a second time but the models' own forward passes:

- *Forward*: before a root module's call, a copy of it is called in the same way; outputs, buffers and random state must agree.
- *Rebuilt values*: what each op on a dropped value's way made is copied; the re-run must make it again. What autograd saved is
  held beside the handle; what the handle is unpacked to must be the same.
- *Gradients*: the backward pass is run once more before, on what autograd saved, for the gradients only.

A checked step takes three times the time and the memory of a plain one. The gradients that reach the script are right in any
case: where a rebuilt value differs, the saved one is handed out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torch_echo import compat
from torch_echo._script import script_line
from torch_echo.memory import live_tensors
from torch_echo.report.comparison import Comparison
from torch_echo.rules import Rule, rule_of
from torch_echo.tape._mode import Dropped, Tape
from torch_echo.tape._recipe import NO_KWARGS, Passes, Recipe, Slot, written

__all__ = ["Check", "CheckedTape", "comparable", "distance", "random_states", "restore", "same"]

MAX_DIFFERENCES = 10
"""Differences told one by one."""


RandomStates = dict[str, Any]


def same(a: torch.Tensor, b: torch.Tensor, exact: bool = True) -> bool:
    """Are two tensors equal to the bit (NaN and the zero's sign included), or, if not `exact`, up to the rounding of sums?"""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout or a.device != b.device:
        return False
    if a.layout is torch.sparse_coo:
        a, b = a.coalesce(), b.coalesce()
        return same(a.indices(), b.indices(), exact) and same(a.values(), b.values(), exact)
    with torch.no_grad():
        a, b = (t.detach().resolve_conj().resolve_neg() for t in (a, b))
        if exact or not (a.is_floating_point() or a.is_complex()):
            flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
            return torch.equal(*flat)
        wide = torch.complex128 if a.is_complex() else torch.float64
        distance = (a.to(wide) - b.to(wide)).norm()
        return bool(distance <= 1000 * torch.finfo(a.dtype).eps * b.to(wide).norm())


def comparable(value: Any) -> bool:
    """Can `same` tell? Not of tensor subclasses and layouts without plain memory."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout in (torch.strided, torch.sparse_coo)


def random_states(device: torch.device | None) -> RandomStates:
    """The states of the random generators that a forward pass may draw from."""
    states: RandomStates = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if device is not None and device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: RandomStates, device: torch.device | None) -> None:
    """Put generators back to what `random_states` found."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device is not None:
        torch.cuda.set_rng_state(states["cuda"], device)


class Check:
    """The comparison of one iteration."""

    def __init__(self, iteration: int, device: torch.device | None, exact: bool, outer: Callable[[], Any]) -> None:
        self.found = Comparison(iteration=iteration, exact=exact)
        self.rehearsing = False
        """Is a backward pass run on what autograd saved?"""
        self._device = device
        self._outer = outer
        """A context in which this thread's calls are not taped."""
        self._copies: dict[int, torch.nn.Module | None] = {}
        """By identity of the root."""
        self._ops: list[tuple[int, str]] = []
        """Ops whose re-run differed: order in the forward pass, what to say."""
        self._handles: dict[int, str] = {}
        """Saved tensors that were not rebuilt as they were, by the order of the op that made them."""
        self._hooks: list[Any] = []

    # --- forward -------------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[Callable[[Any], None]]:
        """Around a root's call; the outputs go to what is yielded. A copy of the root is called before it, as plain PyTorch."""
        name = type(module).__name__
        twin = self._copy(module)
        if twin is None:
            yield lambda _: None
            return
        before = random_states(self._device)
        with self._outer():
            ours, theirs = copied((args, kwargs))
            expected = twin(*ours, **theirs)
        drawn = random_states(self._device)
        restore(before, self._device)
        after: list[Any] = []
        yield after.append
        if not after:
            return
        tensors = [compat.tensors_of(each) for each in (expected, after[0])]
        if len(tensors[0]) != len(tensors[1]):
            self.found.differences.append(f"{name} returned {len(tensors[1])} tensors instead of {len(tensors[0])}")
        for i, (a, b) in enumerate(zip(*tensors, strict=False)):
            self._compare("outputs", f"output {i} of {name}", a, b)
        buffers = dict(twin.named_buffers())
        for path, buffer in module.named_buffers():
            if path in buffers:
                self._compare("buffers", f"buffer {name}.{path}", buffers[path], buffer)
        now = random_states(self._device)
        for kind in ("cpu", "cuda"):
            if kind in now:
                self._compare("random_states", f"random state ({kind}) after {name}", drawn[kind], now[kind])

    def _copy(self, module: torch.nn.Module) -> torch.nn.Module | None:
        if id(module) not in self._copies:
            # Tensors with a history (hidden states that a module keeps) refuse to be copied.
            kept = [
                t for part in module.modules() for t in compat.tensors_of(list(vars(part).values())) if not t.is_leaf
            ]
            try:
                with self._outer(), torch.no_grad():
                    memo = {id(t): t.detach().clone() for t in kept}
                    self._copies[id(module)] = copy.deepcopy(module, memo)
            except Exception as error:  # whatever a module's own __deepcopy__ raises
                self._copies[id(module)] = None
                why = f"it can't be copied ({' '.join(str(error).split())[:200]})"
                self.found.skipped.append(f"the forward pass of {type(module).__name__}: {why}")
        return self._copies[id(module)]

    def _compare(self, kind: str, what: str, expected: torch.Tensor, got: torch.Tensor) -> None:
        if not comparable(got):
            return
        setattr(self.found, kind, getattr(self.found, kind) + 1)
        if not same(expected, got, self.found.exact):
            self.found.differences.append(f"{what}: {distance(expected, got)}")

    # --- rebuilt values --------------------------------------------------------------------------------------------------

    def rebuilt(self, recipe: CheckedRecipe, number: int, got: torch.Tensor) -> None:
        """An op was re-run."""
        expected = recipe.originals.pop(number, None)
        if expected is None:
            return
        self.found.values += 1
        if not same(expected, got):  # re-runs repeat what ran, also where sums may be taken in another order
            self._ops.append((recipe.order, f"{recipe.rule.name} at {recipe.where}: {distance(expected, got)}"))

    def unpacked(self, witness: Witness, got: torch.Tensor) -> torch.Tensor:
        """A saved tensor was rebuilt: what backward is to read."""
        if same(witness.original, got) and witness.original.stride() == got.stride():
            return got
        self._handles.setdefault(witness.order, f"saved tensor made at {witness.where}")
        return witness.original

    # --- backward --------------------------------------------------------------------------------------------------------

    def rehearse(self, backward: Callable[[list[torch.Tensor]], Any], leaves: list[torch.Tensor]) -> None:
        """The script's backward pass is about to begin; `backward` gives the gradients of `leaves`. They are computed from what
        autograd saved, and compared when the script's own pass has made them again."""
        before = random_states(self._device)
        # A backward pass for gradients only adds to the gradients of intermediate tensors all the same.
        retaining = [t for t in live_tensors() if t.retains_grad]
        retained = [(t, None if t.grad is None else t.grad.clone()) for t in retaining]
        self.rehearsing = True
        Passes.begin(True)
        try:
            expected = backward(leaves)
        except RuntimeError as error:  # reentrant checkpoints, functions that can run backward once only
            self.found.skipped.append(f"gradients: backward can't be run twice ({' '.join(str(error).split())[:200]})")
            return
        finally:
            self.rehearsing = False
            Passes.end(True)
            restore(before, self._device)
            for t, gradient in retained:
                t.grad = gradient
        for leaf, gradient in zip(leaves, expected, strict=True):
            if gradient is not None:
                self._hooks.append(leaf.register_hook(self._expect(leaf, gradient)))

    def _expect(self, leaf: torch.Tensor, expected: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def arrived(got: torch.Tensor) -> None:
            self._compare("gradients", f"gradient of a parameter of shape {list(leaf.shape)}", expected, got)

        return arrived

    def backward_done(self) -> None:
        """The script's backward pass has ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def close(self) -> Comparison:
        """The iteration is complete: what was found."""
        self.backward_done()
        self._copies.clear()
        first = [text for _, text in sorted(self._ops)] or [text for _, text in sorted(self._handles.items())]
        self.found.differences[:0] = first
        more = len(self.found.differences) - MAX_DIFFERENCES
        if more > 0:
            self.found.differences[MAX_DIFFERENCES:] = [f"… and {more} more"]
        self._ops, self._handles = [], {}
        return self.found


class Witness:
    """A handle with the tensor that autograd saved beside it."""

    __slots__ = ("check", "handle", "order", "original", "where")

    def __init__(self, check: Check, handle: Dropped, tensor: torch.Tensor) -> None:
        assert handle.view is not None
        recipe = handle.view.slot.recipe
        self.check = check
        self.handle = handle
        self.order = recipe.order if recipe is not None else 0
        self.original = compat.alias(tensor)
        self.where = script_line()

    def unpack(self) -> torch.Tensor:
        """The saved tensor. See :class:`torch_echo.tape._mode.Dropped`."""
        if self.check.rehearsing:
            return self.original
        return self.check.unpacked(self, self.handle.unpack())


class CheckedRecipe(Recipe):
    """A recipe that knows what the op made in the forward pass."""

    __slots__ = ("check", "originals", "where")

    def __init__(self, check: Check, func: Any, rule: Rule, order: int) -> None:
        super().__init__(func, rule, (), NO_KWARGS, order)
        self.check = check
        self.where = script_line()
        self.originals: dict[int, torch.Tensor] = {}

    def again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[int, torch.Tensor]]:
        """See :class:`Recipe`."""
        made = list(super().again(func, args, kwargs))  # now, while the generator's state is the op's
        for number, tensor in made:
            self.check.rebuilt(self, number, tensor)
        return made


class CheckedTape(Tape):
    """The tape in an iteration that is compared with plain PyTorch."""

    def __init__(self, check: Check, like: Tape) -> None:
        super().__init__(like.reorder)
        self.check = check
        self.trusted, self.gathered = like.trusted, like.gathered
        self._latest: CheckedRecipe | None = None

    def recipe(self, func: Any, rule: Rule, order: int) -> Recipe:
        """See :class:`Tape`."""
        self._latest = CheckedRecipe(self.check, func, rule, order)
        return self._latest

    def dropped(self, tensor: torch.Tensor, slot: Slot) -> Any:
        """See :class:`Tape`."""
        handle = super().dropped(tensor, slot)
        recipe = slot.recipe
        if recipe is not None and recipe.rule.opaque >= 0:
            ref = recipe.outputs.get(recipe.rule.opaque)
            if ref is not None and ref() is slot:
                return handle
        return Witness(self.check, handle, tensor)

    def _drop(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mask: int) -> Any:
        out = super()._drop(func, args, kwargs, mask)
        recipe, self._latest = self._latest, None
        rule = rule_of(func)
        if recipe is not None and not rule.shape_only:  # what `empty_like` makes has no content yet
            with compat.below_autograd():
                for j, tensor in enumerate(written(rule, args, kwargs, out)):
                    if j in recipe.outputs and j != rule.opaque:
                        recipe.originals[j] = tensor.clone()
        return out


def copied(value: Any) -> Any:
    """Arguments of a call, with tensors that share no memory with them and no history."""

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return compat.map_leaves(fresh, value)


def distance(expected: torch.Tensor, got: torch.Tensor) -> str:
    """In words, how far two tensors are apart."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return f"{got.dtype} of shape {list(got.shape)} instead of {expected.dtype} of shape {list(expected.shape)}"
    with torch.no_grad():
        a, b = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (expected, got))
        wide = torch.complex128 if a.is_complex() else torch.float64
        differs = a != b
        most = (a.to(wide) - b.to(wide)).abs().max().item() if a.numel() else 0.0
        return f"{int(differs.sum())} of {a.numel()} elements differ, by {most:.3g} at most"
