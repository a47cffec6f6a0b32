"""Recurrent layers as one op each, where PyTorch computes them step by step.

``nn.GRU``, ``nn.RNN``, and ``nn.LSTM`` with projections, in float64 or over packed sequences run as a dozen kernels for every step.
To the planner a layer's call is one op all the same: what autograd saves inside is kept, or the whole layer is run again for it.
Nothing of autograd's own graph changes, so gradients are summed in the order they ever are. Calls of several layers are
taken apart, so that each is an op of its own.

Layers that PyTorch has one kernel for (oneDNN's LSTM) are left to it.

Where sums may be taken in another order (``Options.reorder``), layers over many steps run in *stretches* of some steps, each
from the state that the one before left: then what backward needs at a time is that of one stretch, not that of all steps. The
gradients of the weights are sums over stretches instead of over all steps at once. And what is inside may be rebuilt from
the outputs, if they are kept, in less time than the layer takes (see ``_gates``): then it is an op of its own, which reads them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

from torch_echo import compat
from torch_echo.cost import Literal, OpSpec, spec_of
from torch_echo.rules import Rule
from torch_echo.tape._gates import Part, Products, rebuildable, saving
from torch_echo.tape._recipe import NO_KWARGS, Leaf, Recipe, tensors_in

__all__ = [
    "GatesRecipe",
    "Inside",
    "LayerRecipe",
    "LayerRunner",
    "in_layers",
    "layer_rule",
    "layer_spec",
    "long",
    "of_outputs",
    "own_part",
    "plain",
    "shape_of",
    "stepwise",
]


class Inside(IntEnum):
    """What a call's inside is rebuilt from."""

    LAYER = 0
    """Running it again."""
    OWN = 1
    """Its output."""
    WHOLE = 2
    """That of the layer, of which it is a stretch."""


class LayerRunner(Protocol):
    """Runs layers and stretches."""

    def run_layer(self, number: int, func: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Run one: its layer's number, the function and its arguments."""

    def layer_over(self, output: torch.Tensor, parts: Sequence[Part]) -> None:
        """A layer is over; `output` is its output, in which its calls left these parts, in their order (of packed sequences:
        none)."""


_FEWEST_STEPS = 8
"""Layers over fewer steps are left to the tape op by op: a plan may then re-run less than all of it."""

STRETCH = 64
"""Steps, about; only layers over twice as many run in stretches."""

_FUSED = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")


class _Call(NamedTuple):
    """The arguments of torch.gru and its like. `sizes`: batch size of each step, of a packed sequence."""

    x: torch.Tensor
    sizes: torch.Tensor | None
    state: torch.Tensor | tuple[torch.Tensor, ...]
    weights: list[torch.Tensor]
    biases: bool
    layers: int
    dropout: float
    train: bool
    both: bool
    batch_first: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> _Call:
        if isinstance(args[3], (list, tuple)):
            return cls(*args)
        return cls(args[0], None, *args[1:])

    def args(self) -> tuple[Any, ...]:
        if self.sizes is None:
            return (self.x, *self[2:])
        return tuple(self[:-1])

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        return (self.state,) if isinstance(self.state, torch.Tensor) else tuple(self.state)

    def part(
        self, x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], both: bool
    ) -> _Call:
        """One layer of this call."""
        state = states[0] if isinstance(self.state, torch.Tensor) else tuple(states)
        return _Call(x, self.sizes, state, list(weights), self.biases, 1, 0.0, self.train, both)

    def weights_in(self, parts: int) -> list[list[torch.Tensor]]:
        """Those of each of so many layers, or directions of one."""
        each = len(self.weights) // parts
        return [self.weights[i * each : (i + 1) * each] for i in range(parts)]

    @property
    def stretched(self) -> bool:
        """Are there steps enough for stretches?"""
        return self.sizes is None and self.x.dim() == 3 and self.steps >= 2 * STRETCH

    @property
    def steps(self) -> int:
        if self.sizes is not None:
            return len(self.sizes)
        return self.x.shape[1 if self.batch_first else 0]


class _Probe(compat.TensorMode):
    """Which kernels run?"""

    def __init__(self) -> None:
        super().__init__()
        self.fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused |= any(name in str(func) for name in _FUSED)
        return func(*args, **kwargs or {})


def stepwise(func: Any, args: tuple[Any, ...]) -> bool:
    """Does PyTorch compute this call step by step, over more than a few steps? A step or two are run to find out."""
    call = _Call.of(args)
    if call.steps < _FEWEST_STEPS or torch.is_autocast_enabled(call.x.device.type):
        return False
    probe = _Probe()
    if call.sizes is None:
        first = call._replace(x=call.x.narrow(1 if call.batch_first else 0, 0, 1), dropout=0.0)
    else:
        # Sequences of one length are no different from a tensor to oneDNN: first and last step tell.
        ends = call.sizes[[0, -1]]
        first = call._replace(x=call.x[: int(ends.sum())], sizes=ends, dropout=0.0)
    with compat.alone(probe):
        func(*first.args())
    return not probe.fused


def long(args: tuple[Any, ...]) -> bool:
    """Are there steps enough in this call for it to run in stretches?"""
    return _Call.of(args).stretched


def of_outputs(func: Any, args: tuple[Any, ...]) -> bool:
    """Can what is inside the layers of this call be rebuilt from their outputs?"""
    call = _Call.of(args)
    layers = call.weights_in(call.layers)
    return call.sizes is None and all(rebuildable(func, weights, call.biases, call.both) for weights in layers)


def in_layers(func: Any, args: tuple[Any, ...], runner: LayerRunner, stretches: bool) -> tuple[torch.Tensor, ...]:
    """The call ``func(*args)``, layer after layer, each through `runner`. Kernels and random draws are those of the whole call
    (on a CPU; cuDNN's are not taken apart); with `stretches`, long layers go through it several times."""
    call = _Call.of(args)
    stretches = stretches and call.stretched
    if call.layers == 1 and not stretches:
        return _whole(func, call, runner, 0)
    x = call.x.transpose(0, 1) if call.batch_first else call.x
    rows = 1 + call.both
    last: list[tuple[torch.Tensor, ...]] = []
    for i, weights in enumerate(call.weights_in(call.layers)):
        states = [s.narrow(0, i * rows, rows) for s in call.states]
        layer = call.part(x, states, weights, call.both)
        x, *end = (_in_stretches if stretches else _whole)(func, layer, runner, i)
        last.append(tuple(end))
        if call.dropout and call.train and i + 1 < call.layers:
            x = torch.dropout(x, call.dropout, True)
    if call.batch_first:
        x = x.transpose(0, 1)
    return x, *(torch.cat(s) for s in zip(*last, strict=True))


def _whole(func: Any, layer: _Call, runner: LayerRunner, number: int) -> tuple[torch.Tensor, ...]:
    """One layer."""
    out = runner.run_layer(number, func, layer.args())
    runner.layer_over(out[0], [own_part(layer.args())] if layer.sizes is None else [])
    return out


def own_part(args: tuple[Any, ...]) -> Part:
    """Where in its own output a call's hidden states lie."""
    call = _Call.of(args)
    return Part(call.batch_first, 0, call.steps)


def _in_stretches(func: Any, layer: _Call, runner: LayerRunner, number: int) -> tuple[torch.Tensor, ...]:
    """One layer, in each direction stretch after stretch."""
    directions = 1 + layer.both
    size = math.ceil(layer.steps / round(layer.steps / STRETCH))
    outs, ends, parts = [], [], []
    for d, weights in enumerate(layer.weights_in(directions)):
        states: Sequence[torch.Tensor] = [s.narrow(0, d, 1) for s in layer.states]
        made, first = [], 0
        for x in (layer.x.flip(0) if d else layer.x).split(size):
            part = layer.part(x, states, weights, False)
            out, *states = runner.run_layer(number, func, part.args())
            made.append(out)
            steps = len(x)
            parts.append(Part(False, layer.steps - first - steps if d else first, steps, d, directions, d == 1))
            first += steps
        out = torch.cat(made)
        outs.append(out.flip(0) if d else out)
        ends.append(states)
    whole = torch.cat(outs, -1) if layer.both else outs[0]
    runner.layer_over(whole, parts)
    return whole, *(torch.cat(s) if layer.both else s[0] for s in zip(*ends, strict=True))


def plain(func: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """One layer or a stretch of it as PyTorch runs it. All such calls have this place in the code."""
    result: tuple[torch.Tensor, ...] = func(*args)
    return result


def layer_rule(func: Any) -> Rule:
    """See :mod:`torch_echo.rules`: it writes nothing, and draws nothing (dropout is between layers)."""
    return Rule(name=f"aten::{func.__name__}")


def layer_spec(func: Any, args: tuple[Any, ...]) -> tuple[Any, OpSpec]:
    """The op that a call of one layer is, and its description: for a packed sequence, that of a full one of as many elements."""
    call = _Call.of(args)
    overload = getattr(torch.ops.aten, func.__name__).input
    if call.sizes is None:
        return overload, spec_of(overload, call.args())
    state = call.state[0] if isinstance(call.state, tuple) else call.state
    batch, width = state.shape[1], call.x.shape[1]
    steps = max(1, round(call.x.shape[0] / batch))
    full = call.x.new_empty(0).as_strided((0, batch, width), (batch * width, width, 1))
    spec = spec_of(overload, call._replace(x=full, sizes=None).args())
    return overload, spec._replace(args=(spec.args[0]._replace(shape=(steps, batch, width)), *spec.args[1:]))


def shape_of(spec: OpSpec) -> tuple[int, int]:
    """Directions and steps of a layer's call, by its description."""
    yes = Literal("bool", "True")
    *_, both, batch_first = spec.args
    return 1 + int(both == yes), spec.args[0].shape[1 if batch_first == yes else 0]


class LayerRecipe(Recipe):
    """A layer's call, enough to run it again and to pick out what autograd saves.

    Values are numbered in the order in which the storages are saved, then come outputs that are not saved.
    """

    __slots__ = ("results", "saves", "trained")

    def __init__(self, func: Any, rule: Rule, args: tuple[Any, ...], order: int) -> None:
        super().__init__(func, rule, (), NO_KWARGS, order)
        self.saves: list[int] = []
        """For each tensor that autograd saves, the number of its value; -1 for arguments."""
        self.results: list[int] = []
        """The same for each output."""
        self.trained = [t.requires_grad for _, t in tensors_in(args, NO_KWARGS)]

    def waiting(self) -> set[int]:
        """The values that somebody waits for."""
        return {j for j, ref in self.outputs.items() if (slot := ref()) is not None and slot.tensor is None}

    def again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[int, torch.Tensor]]:
        """See :class:`Recipe`. Only values that somebody waits for are kept."""
        return self.pick(func, args, self.waiting()).items()

    def pick(self, func: Any, args: tuple[Any, ...], wanted: Collection[int]) -> dict[int, torch.Tensor]:
        """Run the layer for some of its values."""
        found: dict[int, torch.Tensor] = {}
        numbers = iter(self.saves)

        def take(j: int, tensor: torch.Tensor) -> None:
            if j in wanted and j not in found:
                found[j] = compat.alias(tensor)

        out = saving(func, args, self.trained, lambda tensor: take(next(numbers), tensor))
        for j, tensor in zip(self.results, out, strict=True):
            take(j, tensor)
        return found


class GatesRecipe(LayerRecipe):
    """What is inside a layer's call, from the output of that or of its layer: the last of `args`, None until it is there."""

    __slots__ = ("part",)

    def __init__(self, layer: LayerRecipe, args: tuple[Any, ...], order: int) -> None:
        super().__init__(layer.func, layer.rule, args, order)
        self.saves, self.results = layer.saves, layer.results
        self.part: Part | None = None
        """Where in that output its own lies."""

    def run(self, keep: bool) -> None:
        """See :class:`Recipe`. Where the script has overwritten the output unseen, the layer is run again all the same."""
        if self.args and type(self.args[-1]) is Leaf and not self.args[-1].current():
            self.read(None, None)
        super().run(keep)

    def read(self, output: Any, part: Part | None) -> None:
        """The output is there, as an argument of a recipe."""
        self.args = (*self.args[:-1], output)
        self.part = part

    def again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[int, torch.Tensor]]:
        """See :class:`Recipe`."""
        *given, output = args
        wanted = self.waiting()
        if self.part is not None and compat.kernels_replaceable():
            call = _Call.of(tuple(given))
            products = Products(call.weights, call.biases, self.part.of(output), call.both, self.part.backwards)
            if products.told_apart:
                found: dict[int, torch.Tensor] = products.run(self.pick, func, tuple(given), wanted)
                if products.complete:
                    return found.items()
        return self.pick(func, tuple(given), wanted).items()
