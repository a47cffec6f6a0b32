"""Cross-entropy in one block.

At a language model's loss plain PyTorch holds up to three blocks of the size of the logits, [rows, classes]: log-softmax and what
it was made from in forward; log-softmax, its gradient (zeros, but for one number a row) and the logits' gradient in backward. Each
row is computed by itself in all of these ops, so the same kernels are called here for some rows after the others: forward leaves
the logits alone, and backward writes their gradient over them. Loss and gradient are PyTorch's to the bit: rows are the same
numbers in the same order, and what is summed over rows is summed over all of them at once, from a value each.

Cost: log-softmax is computed again in backward, a block at a time in caches. That takes no more time than it saves.

Where. PyTorch's op is above autograd, a composite; a kernel of ours for it is asked first, whoever calls it. It serves threads
that a tape or a recorder has the say of (:func:`compute_by`), and leaves to PyTorch what it doesn't know: class weights,
probabilities as targets, other layouts, small logits.

Logits that somebody else still holds are left as they are: then their gradient gets a block of its own. Where backward is itself
differentiated, the logits' gradients come together one op later than in PyTorch, which may change last bits: a session that has
seen that leaves cross-entropies to PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torch_echo import compat
from torch_echo.tape._recipe import Passes

__all__ = ["CrossEntropy", "LossRunner", "compute_by", "computes", "cross_entropy"]

aten = torch.ops.aten

LEAST_BYTES = 1 << 20
"""Logits smaller than this are left to PyTorch."""

_PARTS, _PART_BYTES = 32, 1 << 17
"""Rows are taken together by one of so many parts of the logits, or so many bytes if that is more."""

_TOGETHER = 64
"""Rows taken together are a multiple of this: so each begins where the whole one's would, as seen from vector loads."""

_NONE, _MEAN = 0, 1
"""Reductions (a sum is 2)."""


@dataclass(eq=False)
class CrossEntropy:
    """One call."""

    reduction: int
    ignore_index: int
    smoothing: float
    runner: LossRunner
    """Is told when backward comes through."""

    def run(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss. `logits`: [rows, classes], contiguous; `target`: [rows], of class indices."""
        loss: torch.Tensor = _Function.apply(logits, target, self)  # type: ignore[no-untyped-call]
        return loss

    def in_parts(self, logits: torch.Tensor, whole: bool = False) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows, and their log-softmax; the memory of that is the next one's too. `whole`: all rows at once."""
        rows, classes = logits.shape
        size = max(_PART_BYTES, logits.nbytes // _PARTS) // (classes * logits.element_size())
        size = rows if whole else max(_TOGETHER, size // _TOGETHER * _TOGETHER)
        block = logits.new_empty(min(size, rows), classes)
        for first in range(0, rows, size):
            part = slice(first, min(first + size, rows))
            yield part, aten._log_softmax.out(logits[part], 1, False, out=block[: part.stop - first])

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and the total weight of the rows that count."""
        rows, classes = logits.shape
        chosen, summed = logits.new_empty(rows, 1), logits.new_empty(rows if self.smoothing else 0)
        whole = self.smoothing > 0 and not self.runner.sums_by_row(logits)
        for part, values in self.in_parts(logits, whole):
            # The loss of each row complains of targets that are no class.
            loss, _ = aten.nll_loss_forward(values, target[part], None, _NONE, self.ignore_index)
            torch.neg(loss, out=chosen[part, 0])
            if self.smoothing:
                torch.sum(values, 1, out=summed[part])
        ignored = target == self.ignore_index
        loss, total = aten.nll_loss_forward(chosen, ignored.long().neg_(), None, self.reduction, -1)
        if self.smoothing:  # as ATen/native/LossNLL.cpp has it
            smooth = summed.neg_().masked_fill_(ignored, 0.0)
            if self.reduction != _NONE:
                smooth = smooth.sum()
                smooth = smooth / (~ignored).sum() if self.reduction == _MEAN else smooth
            loss = (1 - self.smoothing) * loss + smooth * (self.smoothing / classes)
        return loss, total

    def backward(
        self, logits: torch.Tensor, target: torch.Tensor, total: torch.Tensor, grad: torch.Tensor, over: bool
    ) -> torch.Tensor:
        """The gradient of the logits, written `over` them or into a block of its own."""
        made = logits if over else torch.empty_like(logits)
        spread: torch.Tensor | None = None
        if self.smoothing:
            ignored = target == self.ignore_index
            each = grad * (self.smoothing / logits.shape[1])
            each = each / (~ignored).sum() if self.reduction == _MEAN else each
            spread = each.expand(len(ignored)).masked_fill(ignored, 0.0).neg_().unsqueeze(1)
            grad = grad * (1 - self.smoothing)
        block: torch.Tensor | None = None
        for part, values in self.in_parts(logits):
            block = torch.empty_like(values) if block is None else block[: len(values)]
            of_rows = grad[part] if self.reduction == _NONE else grad
            args = (of_rows, values, target[part], None, self.reduction, self.ignore_index, total)
            aten.nll_loss_backward.grad_input(*args, grad_input=block)
            if spread is not None:
                block += spread[part]
            aten._log_softmax_backward_data.out(block, values, 1, logits.dtype, out=made[part])
        return made


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, call: CrossEntropy) -> torch.Tensor:
        with compat.below_autograd():
            loss, total = call.forward(logits, target)
        # Another tensor than the script's, so that it is known whether the script, or a node, holds that.
        ctx.save_for_backward(compat.alias(logits), target, total)
        with torch.enable_grad():
            ctx.history = _History.apply(logits)  # type: ignore[no-untyped-call]
        ctx.call = call
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        call: CrossEntropy = ctx.call
        logits, target, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            again = _With.apply(ctx.history, logits)  # type: ignore[no-untyped-call]
            loss = compat.plain_cross_entropy(again, target, None, call.reduction, call.ignore_index, call.smoothing)
            (made,) = torch.autograd.grad(loss, again, grad, create_graph=True)
            return made, None, None
        over = Passes.running > 0 and not Passes.keeping and compat.sole_owner(logits)
        call.runner.loss_read(call, over)
        with compat.below_autograd():
            made = call.backward(logits, target, total, grad, over)
        call.runner.loss_done(call)
        return made, None, None


class _History(torch.autograd.Function):
    """A tensor without memory of its own that has the history, and the shape, of another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        history = tensor.new_empty(1).expand(tensor.shape)
        history.untyped_storage().resize_(0)  # nobody reads it
        return history

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _With(torch.autograd.Function):
    """A tensor with the history of another."""

    @staticmethod
    def forward(ctx: Any, history: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return compat.alias(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


# --- who computes ---------------------------------------------------------------------------------------------------------


class LossRunner(Protocol):
    """Runs cross-entropies of a thread."""

    def takes_loss(self, logits: torch.Tensor) -> bool:
        """Is this one to be computed here?"""

    def run_loss(self, call: CrossEntropy, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""

    def sums_by_row(self, logits: torch.Tensor) -> bool:
        """Is the sum over a row the same, whatever the number of rows?"""

    def loss_read(self, call: CrossEntropy, over: bool) -> None:
        """Backward begins with a call, and will write the gradient `over` the logits."""

    def loss_done(self, call: CrossEntropy) -> None:
        """The gradient is there."""


class _Local(threading.local):
    runner: LossRunner | None = None


_local = _Local()


def compute_by(runner: LossRunner | None) -> None:
    """From here on, `runner` has the say of this thread's cross-entropies; None: PyTorch."""
    _local.runner = runner


def computes() -> LossRunner | None:
    """Who has it?"""
    return _local.runner


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """In place of PyTorch's op."""
    runner = _local.runner
    if (
        runner is not None
        and weight is None
        and 0.0 <= label_smoothing <= 1.0
        and _known(logits, target)
        and torch.is_grad_enabled()
        and runner.takes_loss(logits)
    ):
        return runner.run_loss(CrossEntropy(reduction, ignore_index, label_smoothing, runner), logits, target)
    return compat.plain_cross_entropy(logits, target, weight, reduction, ignore_index, label_smoothing)


def _known(logits: torch.Tensor, target: torch.Tensor) -> bool:
    return (
        type(logits) in (torch.Tensor, torch.nn.Parameter)
        and type(target) is torch.Tensor
        and logits.requires_grad
        and logits.dim() == 2
        and target.dim() == 1
        and target.dtype is torch.int64
        and len(logits) == len(target)
        and logits.dtype.is_floating_point
        and logits.nbytes >= LEAST_BYTES
        and logits.is_contiguous()
        and not compat.unusual_autograd()
    )
