"""The inside of a recurrent layer, rebuilt from its outputs.

PyTorch computes ``nn.GRU``, ``nn.RNN`` and some of ``nn.LSTM`` step by step: each multiplies the hidden state that the one before
left with the weights. When the layer is run again in backward, these states are known, if its output is still there: they are the
output. So the products of many steps are one large matrix product, which reads the weights once. Sums are taken in another order
then, so this is for ``Options.reorder``.

How. The layer is run again as ever (see ``_layer``), by PyTorch's own function, so that what autograd saves comes in its order.
Below autograd, the kernel that multiplies states and weights hands out a row of the large product instead. The stacks of all steps'
states at the end are not made: nobody reads them.

Memory. Of each large product is no more than half of what the layer has still to make, so that it never adds to the peak.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_echo import compat
from torch_echo.cost import CostModel, OpSpec

__all__ = ["Part", "Products", "rebuild_seconds", "rebuildable", "saving"]

CHUNK = 64
"""Most steps of one product."""


class Part(NamedTuple):
    """Where in the output of a layer the hidden states lie that a call left."""

    batch_first: bool
    first: int
    """Step."""
    steps: int
    column: int = 0
    columns: int = 1
    """The call's features are one of so many parts of the output's."""
    backwards: bool = False
    """Did it run from the last step to the first?"""

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """[step, batch, feature], in the order of the sequence."""
        states = (output.transpose(0, 1) if self.batch_first else output).narrow(0, self.first, self.steps)
        width = states.shape[2] // self.columns
        return states.narrow(2, self.column * width, width)


class _Direction:
    """The products of one direction, handed out one step after the other."""

    def __init__(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, backwards: bool) -> None:
        self.states = states
        self.weight = weight
        self.bias = bias
        self.backwards = backwards
        self.steps = states.shape[0]
        self.step = 0
        """That comes next."""
        self._block: torch.Tensor | None = None
        self._end = 0
        """Step after those of the block."""

    @property
    def done(self) -> bool:
        return self.step == self.steps

    def fits(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Is this product the next one?"""
        return not self.done and left.shape == self.states.shape[1:] and right.shape == self.weight.shape[::-1]

    def next(self) -> torch.Tensor | None:
        """The product of the next step; None: it is to be computed alone."""
        t = self.step
        self.step += 1
        if t >= self._end:
            self._multiply(t)
        if self._block is None:
            return None
        row = self._block[self._end - 1 - t if self.backwards else t - self._end].clone()
        if self.step == self._end:
            self._block = None
        return row

    def _multiply(self, t: int) -> None:
        """The products of the steps from t on. The first of all reads the initial state, which is not among `states`."""
        n = min(CHUNK, (self.steps - t) // 2) if t else 1
        self._end = t + n
        if n < 2:
            return
        read = self.states.narrow(0, self.steps - t - n + 1 if self.backwards else t - 1, n)
        rows = read.reshape(-1, read.shape[2])
        right = self.weight.t()
        product = rows.mm(right) if self.bias is None else torch.addmm(self.bias, rows, right)
        self._block = product.view(n, read.shape[1], -1)


class Products:
    """Those of hidden states and weights in one call of one layer, given the states."""

    def __init__(
        self, weights: Sequence[torch.Tensor], biases: bool, states: torch.Tensor, both: bool, backwards: bool
    ) -> None:
        """`states`: [step, batch, feature]; `both` directions have half of the features each."""
        directions = 1 + both
        each, width = len(weights) // directions, states.shape[2] // directions
        self._of = {}
        for d in range(directions):
            weight, bias = weights[d * each + 1], weights[d * each + 3] if biases else None
            self._of[weight.data_ptr()] = _Direction(
                states.narrow(2, d * width, width), weight, bias, backwards or d == 1
            )
        self._last: _Direction | None = None
        self.told_apart = len(self._of) == directions
        """Are they? Not where both directions have the same weights."""

    @property
    def complete(self) -> bool:
        """Was each asked for once?"""
        return self.told_apart and all(d.done for d in self._of.values())

    def run(self, func: Callable[..., Any], *args: Any) -> Any:
        """Call ``func(*args)``, in which these products are not computed one by one. What it returns has no content."""
        _local.products = self
        try:
            with compat.other_kernels(_KERNELS):
                return func(*args)
        finally:
            _local.products = None

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
        """``left @ right`` (and the bias), if it is one of these and not to be computed alone."""
        direction = self._of.get(right.data_ptr())
        if direction is None or not direction.fits(left, right):
            return None
        self._last = direction
        return direction.next()

    @property
    def between(self) -> bool:
        """Have the steps of a direction run, and those of the next not begun?"""
        return self._last is not None and self._last.done


class _Local(threading.local):
    products: Products | None = None


_local = _Local()


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    assert _local.products is not None
    made = _local.products.product(left, right)
    return left.mm(right) if made is None else made


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    assert _local.products is not None
    made = _local.products.product(left, right)
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha) if made is None else made


def _joined(join: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(join)
    def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        assert _local.products is not None
        # Of another shape, so that whatever would read it fails.
        return tensors[0].new_empty(0, 0, 0) if _local.products.between else join(tensors, dim)

    return joined


_stack, _cat = _joined(torch.stack), _joined(torch.cat)


_KERNELS: dict[str, Callable[..., Any]] = {"mm": _mm, "addmm": _addmm, "stack": _stack, "cat": _cat}


# --- may it be done, does it pay? ----------------------------------------------------------------------------------------


def saving(
    func: Callable[..., Any], args: Sequence[Any], trained: Sequence[bool], pack: Callable[[torch.Tensor], None]
) -> Any:
    """Below autograd, call `func` so that autograd records it. `trained`: which of its tensors need gradients; `pack` is given
    each tensor that is saved."""
    flags = iter(trained)

    def argument(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return compat.alias(a).requires_grad_(next(flags))
        return [argument(b) for b in a] if type(a) in (list, tuple) else a

    with compat.above_autograd():
        args = [argument(a) for a in args]
        compat.push_hooks(pack, _unread)
        try:
            return func(*args)
        finally:
            compat.pop_hooks()


def _unread(_: Any) -> torch.Tensor:
    raise AssertionError("no backward pass runs through a layer that is run again")


def rebuildable(func: Any, weights: Sequence[torch.Tensor], biases: bool, both: bool) -> bool:
    """Can the inside of such a layer be rebuilt from its outputs? Tried once for each kind of layer, on a small one."""
    each = len(weights) // (1 + both)
    apart = {w.data_ptr() for w in weights[1::each]}
    if any(w.device.type != "cpu" for w in weights) or len(apart) < 1 + both or not compat.kernels_replaceable():
        return False
    return _tried(func, weights[0].dtype, each, biases, both)


@functools.cache
def _tried(func: Any, dtype: torch.dtype, each: int, biases: bool, both: bool) -> bool:
    steps, batch, inputs, hidden = 9, 2, 3, 4
    directions, projected = 1 + both, each % 2 == 1
    out = 2 if projected else hidden
    rows = hidden * {"lstm": 4, "gru": 3}.get(func.__name__, 1)
    shapes = [(rows, inputs), (rows, out)] + [(rows,), (rows,)] * biases + [(out, hidden)] * projected
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    with compat.below_autograd():
        weights = [made(*shape) for _ in range(directions) for shape in shapes]
        states = [made(directions, batch, out), made(directions, batch, hidden)]
        state = states if func.__name__ == "lstm" else states[0]
        args = (made(steps, batch, inputs), state, weights, biases, 1, 0.0, True, both, False)
        trained = [True] * (3 + len(weights))
        usual: list[torch.Tensor] = []
        output, *_ = saving(func, args, trained, lambda t: usual.append(compat.alias(t)))
        products = Products(weights, biases, compat.alias(output), both, False)
        found: list[torch.Tensor] = []
        try:
            products.run(saving, func, args, trained, lambda t: found.append(compat.alias(t)))
        except RuntimeError:  # a PyTorch that computes such layers in another way
            return False
        error = 0.1 if dtype.itemsize < 4 else 1e-4
        return (
            products.complete
            and [t.shape for t in usual] == [t.shape for t in found]
            and all(torch.allclose(a, b, rtol=error, atol=error) for a, b in zip(usual, found, strict=True))
        )


class _Rebuild:
    """The rebuild of a layer's inside as a cost model sees an op. It is called below autograd."""

    def __init__(self, overload: Any) -> None:
        self.overload = overload
        self._schema = overload._schema

    def __call__(self, x: torch.Tensor, state: Any, weights: Sequence[torch.Tensor], biases: bool, *args: Any) -> Any:
        *_, both, batch_first = args
        if x.is_meta:  # somebody asks for sizes
            return self.overload(x, state, weights, biases, *args)
        steps, batch = x.shape[:2][::-1] if batch_first else x.shape[:2]
        states = x.new_zeros(()).expand(steps, batch, (1 + both) * weights[1].shape[1])
        return Products(weights, biases, states, both, False).run(self.overload, x, state, weights, biases, *args)


_rebuild = functools.cache(_Rebuild)


def rebuild_seconds(cost: CostModel, overload: Any, spec: OpSpec) -> float:
    """What it takes to rebuild the inside of a layer (see :func:`rebuildable`), whose call `spec` describes. To an analytic model
    that is no different from running the layer."""
    return cost.seconds(_rebuild(overload), spec._replace(op=spec.op + ".gates"))
