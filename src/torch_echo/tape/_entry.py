"""Where the tape gets in: module calls, cross-entropies, the autograd engine, optimizer steps.

Process-wide wrappers, installed when the first session starts and taken out with the last. Modules carry nothing of
torch-echo: what is known of them lives in ``entries``, by identity, so that pickle, deepcopy and state_dict are untouched.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_echo import compat
from torch_echo.tape._loss import cross_entropy
from torch_echo.tape._pause import CollectorPause
from torch_echo.tape._recipe import Passes

__all__ = ["Entry", "Owner", "entries", "install", "uninstall"]


class Owner(Protocol):
    """A session, as the entries see it."""

    def call(self, entry: Entry, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module's call under this session."""

    def meet(self, module: torch.nn.Module) -> Entry | None:
        """A training call of a module that no session knows, outside of any other: take it in, or None."""

    def before_backward(self, keep_graph: bool, create_graph: bool) -> Any:
        """The engine is about to run on this thread; the result goes to `after_backward`."""

    def rehearse(self, backward: Callable[[list[torch.Tensor]], Any]) -> None:
        """The pass that is about to run can be run before for gradients only: `backward` gives those of some leaves."""

    def after_backward(self, state: Any) -> None:
        """The engine has run, or failed."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def failed(self, error: BaseException) -> None:
        """The engine, or a call, ended with this error."""

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""

    def close(self) -> None:
        """Stop."""

    def lift(self) -> Any:
        """Take mode and hooks off this thread; the result goes to `lower`."""

    def lower(self, state: Any) -> None:
        """Undo `lift`."""


class Entry:
    """What a session knows of one module."""

    __slots__ = ("beyond", "calls", "module", "owner", "parts", "path", "sharded", "tables")

    def __init__(self, owner: Owner, module: torch.nn.Module, path: str) -> None:
        self.owner = owner
        self.path = path
        self.parts: list[weakref.ref[torch.nn.Module]] | None = None
        """The modules in it that have parameters of their own, if somebody asked."""
        self.tables: list[Any] | None = None
        """For each call in an iteration, what the plan says of it; None where there is nothing to do."""
        self.beyond: Any = None
        """The same for calls beyond those planned."""
        self.calls = 0
        """Calls in this iteration."""
        self.sharded = compat.is_sharded(module)
        """Are its parameters gathered in each call (see ``_scope``)?"""
        key = id(module)
        self.module = weakref.ref(module, lambda _: entries.pop(key, None))


entries: dict[int, Entry | None] = {}
"""By id of the module. None: known, and nothing to do for it."""

owners: list[Owner] = []
watchers: list[Owner] = []
"""Sessions that take in every root module."""

_undo: list[Callable[[], None]] = []
_lock = threading.Lock()
_compiled_watched = False
_missing: Any = object()
original_call: Callable[..., Any] = compat.module_call()


def _module_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return original_call(module, *args, **kwargs)
    entry = entries.get(id(module), _missing)
    if entry is _missing:
        if not watchers or not torch.is_grad_enabled() or not module.training:
            return original_call(module, *args, **kwargs)
        entry = watchers[0].meet(module)
    if entry is None:
        return original_call(module, *args, **kwargs)
    return entry.owner.call(entry, module, args, kwargs)


def _wrap_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # (grad_outputs, retain_graph, create_graph, inputs, …), as torch.autograd calls it
        create = len(args) < 3 or bool(args[2])
        keep = create or bool(args[1])
        states = [(owner, owner.before_backward(keep, create)) for owner in owners]
        if len(args) > 3 and not args[2] and not args[3] and kwargs.get("accumulate_grad", True):
            for owner in owners:
                owner.rehearse(
                    lambda leaves: original(
                        outputs, args[0], True, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
                    )
                )
        Passes.begin(keep)
        try:
            with CollectorPause():
                return original(outputs, *args, **kwargs)
        except BaseException as error:
            for owner in owners:
                owner.failed(error)
            raise
        finally:
            Passes.end(keep)
            for owner, state in reversed(states):
                owner.after_backward(state)

    return run_backward


def _wrap_hooks_disabled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextmanager
    def disable(*args: Any, **kwargs: Any) -> Iterator[None]:
        # A functorch transform begins: it refuses to run under saved-tensor hooks.
        states = _lift_all()
        try:
            with original(*args, **kwargs):
                yield
        finally:
            _lower_all(states)

    return disable


def _lift_all() -> list[tuple[Owner, Any]]:
    return [(owner, owner.lift()) for owner in owners]


def _lower_all(states: list[tuple[Owner, Any]]) -> None:
    for owner, state in reversed(states):
        owner.lower(state)


def watch_compiled() -> None:
    """Lift everything around what ``torch.compile`` made: Dynamo runs it as plain code under a dispatch mode, and would trace a
    function mode. To be called again and again: Dynamo may be imported at any time."""
    global _compiled_watched
    if _compiled_watched or not compat.dynamo_imported():
        return
    with _lock:
        if owners and not _compiled_watched:
            _compiled_watched = True
            _undo.append(compat.wrap_compiled_calls(_lift_all, _lower_all))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for owner in owners:
        owner.before_optimizer(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for owner in owners:
        owner.after_optimizer(optimizer)


@atexit.register
def _close_all() -> None:
    """No profiler may run, and no mode or hooks be on, while the interpreter shuts down."""
    for owner in list(owners):
        owner.close()


def install(owner: Owner, watch_all: bool) -> None:
    """Add a session; the first puts the wrappers in."""
    global original_call
    with _lock:
        if not owners:
            original_call = compat.module_call()
            functools.update_wrapper(_module_call, original_call)
            compat.set_module_call(_module_call)
            _undo.append(lambda call=original_call: compat.set_module_call(call))  # type: ignore[misc]
            _undo.append(compat.wrap_backward(_wrap_engine))
            _undo.append(compat.wrap_hooks_disabled(_wrap_hooks_disabled))
            _undo.append(compat.on_cross_entropy(cross_entropy))
            _undo.append(register_optimizer_step_pre_hook(_before_step).remove)
            _undo.append(register_optimizer_step_post_hook(_after_step).remove)
        if owner not in owners:
            owners.append(owner)
        if watch_all:
            watchers.append(owner)


def uninstall(owner: Owner) -> None:
    """Take a session out; the last takes the wrappers with it. Handles of earlier steps keep working."""
    global _compiled_watched
    with _lock:
        if owner not in owners:
            return
        owners.remove(owner)
        if owner in watchers:
            watchers.remove(owner)
        for key in [k for k, e in entries.items() if e is None or e.owner is owner]:
            entries.pop(key, None)
        if not owners:
            _compiled_watched = False
            while _undo:
                _undo.pop()()
