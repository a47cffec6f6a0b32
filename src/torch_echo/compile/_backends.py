"""Backends of ``torch.compile``: ``backend="echo"`` and ``backend="echo_eager"``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import fx

from torch_echo import compat
from torch_echo._version import __version__
from torch_echo.compile._order import improved
from torch_echo.compile._partition import Partitioner
from torch_echo.compile._promise import Promise, place_of, promised
from torch_echo.compile._share import Shared
from torch_echo.errors import OptionError, TorchEchoError
from torch_echo.memory import live_bytes
from torch_echo.options import Options
from torch_echo.recurrent import SUBSTITUTES, handled

__all__ = ["COMPILING", "Compiling", "echo", "echo_eager", "limited", "sharing"]

Backend = Callable[..., Any]


@dataclass(frozen=True)
class Compiling:
    """How long a backend takes to compile a graph."""

    node_seconds: float
    """For each node of Dynamo's graph, forward only. What compiling takes grows linearly with them."""
    limit: int
    """Nodes of the largest graph that is worth it."""

    def told(self, nodes: int) -> str:
        """How large a graph is, and how long compiling it takes, in words."""
        minutes = max(1, round(nodes * self.node_seconds / 60))
        return f"a graph of {nodes:,} ops, to be compiled in about {minutes} minute{'s' if minutes > 1 else ''}"


COMPILING = {"echo": Compiling(0.12, 1500), "echo_eager": Compiling(0.02, 9000)}
"""By backend; at the limits it takes three minutes. Measured on one core, an unrolled attention decoder of 87, 155, 291, 563 and
1,107 nodes: Inductor 43, 48, 62, 94 and 163 s (30 s of them to begin with), PyTorch's kernels 3.9, 4.5, 7.6, 12.4 and 21.5 s."""


def _errors_pass(backend: Backend) -> Backend:
    """The errors of this package reach the caller of compiled code as they are."""

    @wraps(backend)
    def call(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        try:
            return backend(module, example_inputs, **kwargs)
        except TorchEchoError as error:
            raise compat.passing(error) from error

    return call


@_errors_pass
def echo(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
    """Inductor, with forward and backward split by torch-echo's plan.

    ``torch.compile(model, backend="echo", options={"max_overhead": 0.1})``; options as for :func:`torch_echo.apply`, and those
    of Inductor. Its decompositions, passes and caches stay on; a plan is found again in the caches if options, version and,
    with a memory budget, the bytes left for the graph are the same.
    """
    mode, given = kwargs.pop("mode", None), kwargs.pop("options", None) or {}
    if kwargs:
        raise OptionError(f'{", ".join(kwargs)}: the backend "echo" takes nothing but options and a mode')
    patches, own = compat.inductor_options(mode, given)
    options = parse(own)
    nodes = compat.node_count(module)
    if nodes > COMPILING["echo"].limit:
        warnings.warn(
            f'Inductor was given {COMPILING["echo"].told(nodes)} (is a loop unrolled?); the backend "echo_eager" takes a sixth '
            "of that, torch_echo.apply compiles nothing",
            stacklevel=2,
        )
    return _inductor(module, example_inputs, options, patches)


def _inductor(
    module: fx.GraphModule, example_inputs: Any, options: Options, patches: dict[str, Any], shared: Shared | None = None
) -> Any:
    key = f"torch-echo {__version__} {options}"
    if options.memory_budget is not None:
        device = next((t.device for t in example_inputs if isinstance(t, torch.Tensor)), torch.device("cpu"))
        key += f" {options.budget_bytes(device)} {live_bytes(device)}"
    place = place_of(module, example_inputs, f"{key} {patches}")
    partitioner = Partitioner(options, True, shared)
    # Where graphs are planned together each has to be seen: only the code that Inductor makes is looked for in its caches then.
    compiled = compat.inductor(module, example_inputs, partitioner, key, patches, improved, cached=shared is None)
    promise: Promise | None
    if partitioner.plans:
        promise = Promise.of(
            max(partitioner.plans, key=lambda plan: plan.peak)
        )  # nested regions have plans of their own
        promise.write(place)
    else:
        promise = Promise.read(place)
    if promise is not None:
        promised.append(promise)
    return compiled


@_errors_pass
def echo_eager(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
    """PyTorch's own kernels, called one after the other, with forward and backward split by torch-echo's plan.

    ``torch.compile(model, backend="echo_eager", options={"max_overhead": 0.1})``; options as for :func:`torch_echo.apply`.
    """
    options = parse(kwargs.pop("options", None))
    if kwargs:
        raise OptionError(f'{", ".join(kwargs)}: the backend "echo_eager" takes nothing but options')
    return compat.eager_kernels(Partitioner(options))(module, example_inputs)


def sharing(options: Options, shared: Shared, *, inductor: bool) -> Backend:
    """A backend whose graphs are planned together with the others of a step."""

    @_errors_pass
    def backend(module: fx.GraphModule, example_inputs: Any) -> Any:
        def compile_graph() -> Any:
            if inductor:
                return _inductor(module, example_inputs, options, {}, shared)
            return compat.eager_kernels(Partitioner(options, False, shared))(module, example_inputs)

        return shared.noting(compile_graph)

    return backend


def limited(backend: Backend, limit: int, told: Callable[[int], None]) -> Backend:
    """A backend that leaves graphs of more than `limit` nodes as they are, to be run op by op by PyTorch: `told` gets to know
    of them, and may raise. What ran before a graph was met, ran: a call can't be begun anew."""

    @_errors_pass
    def call(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        nodes = compat.node_count(module)
        if nodes <= limit:
            return backend(module, example_inputs, **kwargs)
        told(nodes)
        return module

    return call


def parse(given: dict[str, Any] | None) -> Options:
    """Options of a backend. Raises OptionError."""
    known = set(Options.__dataclass_fields__)
    unknown = set(given or {}) - known
    if unknown:
        raise OptionError(f"options {sorted(unknown)}: must be among {sorted(known)}")
    options = Options(**(given or {}))
    refuse_limit(options)
    return options


def refuse_limit(options: Options) -> None:
    """Raises OptionError for a simulated limit: nobody watches the ops of a compiled graph."""
    if options.memory_limit is not None:
        raise OptionError(f"memory_limit={options.memory_limit!r}: of eager PyTorch only, not of torch.compile")


def _ours(backend: Any) -> bool:
    """Is it one of these backends, or one with options given?"""
    while isinstance(backend, partial):
        backend = backend.func
    return getattr(backend, "__code__", None) is echo.__code__  # that of what `_errors_pass` makes


compat.substitute(SUBSTITUTES, handled, _ours)
