"""The functions that a training script may call."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from torch_echo.errors import CaptureError, OptionError
from torch_echo.options import Options
from torch_echo.report.comparison import Comparison
from torch_echo.report.explanation import Explanation
from torch_echo.report.summary import Summary
from torch_echo.tape._state import TrainingState
from torch_echo.tape.session import Phase, Session

__all__ = ["Handle", "apply", "check", "explain"]


class Handle:
    """What :func:`apply` returns. Also a context manager: leaving it removes torch-echo from the model."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def report(self) -> Explanation:
        """Peak before and after, by layer and kind; each decision with its reason. Prints as a table.

        Raises CaptureError before the plan is made, which happens when the third training step is complete (with a memory
        budget, the second).
        """
        explanation = self._session.explanation()
        if explanation is None:
            raise CaptureError(
                f"no plan yet: {self._session.iterations} training steps seen, the plan is made when "
                f"{self._session.warm_up + 1} are complete"
            )
        return explanation

    def summary(self) -> Summary:
        """Figures of the run so far: peaks in bytes, extra seconds, what was left to plain PyTorch."""
        return self._session.summary()

    def remove(self) -> None:
        """Back to plain PyTorch. The model is as it ever was; a step under way ends as it began. Idempotent."""
        self._session.close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def apply(
    model: torch.nn.Module,
    *,
    memory_budget: int | float | str | None = None,
    max_overhead: float | None = None,
    policy: str = "echo",
    cost: str = "measured",
    on_infeasible: str = "raise",
    reorder: bool = False,
    check: bool = False,
    strict: bool = False,
    memory_limit: int | float | str | None = None,
) -> Handle:
    """Train `model` in less memory: feature maps of its forward pass are dropped and rebuilt in backward, bit-exactly.

    The first three training steps run as plain PyTorch (the third is recorded), and then the plan is in force; with a memory
    budget it is one step less. Only the model's own forward pass is taped: loss code outside of it is not.

    `memory_budget`: peak of the whole device to stay under: bytes, "8GiB", or a fraction of the device's memory; the plan with
    the least extra time that fits is taken. `max_overhead`: fraction of a step's time that rebuilding may add (default 0.05 if
    neither is given); the plan with the least memory is taken. `policy`: "echo", or "paper" for the rule of the Echo paper
    (ISCA 2020). `cost`: op durations "measured" on this device or from an "analytic" model. `on_infeasible`: "raise"
    BudgetInfeasible from the model's call after planning, or use the plan with the "least" peak. `reorder`: also allow what
    computes the same sums in another order, so that results are equal up to rounding. `check`: compare one step under the plan with
    plain PyTorch (`summary().comparison`); if it differs, a warning says where, and training is left to plain PyTorch. `strict`:
    make an error of what would be left to plain PyTorch with a warning. `memory_limit`: for tests,
    have allocations beyond it fail.

    Raises OptionError for bad options, UnsupportedDevice for devices other than CPU and CUDA, CaptureError for a model wrapped in
    FullyShardedDataParallel.
    """
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"model={model!r}: must be a torch.nn.Module")
    options = Options(
        memory_budget=memory_budget,
        max_overhead=max_overhead,
        policy=policy,  # type: ignore[arg-type]
        cost=cost,  # type: ignore[arg-type]
        on_infeasible=on_infeasible,  # type: ignore[arg-type]
        reorder=reorder,
        check=check,
        strict=strict,
        memory_limit=memory_limit,
    )
    session = Session(options, name="apply")
    session.watch(model)
    return Handle(session)


def explain(step: Callable[[], Any], **options: Any) -> Explanation:
    """Run `step` three times (a whole training step: forward, backward, optimizer) and say what torch-echo would do about it.

    The steps are real: parameters move. Options are those of :func:`apply`; nothing is dropped while explaining. Raises
    CaptureError if no training step was seen, BudgetInfeasible if the budget can't be met.
    """
    session = Session(Options(**options), name="explain")
    session.watch_all()
    try:
        for _ in range(4):
            seen = session.iterations
            step()
            if session.iterations == seen:
                raise CaptureError("the step called no module for training with gradients on, and ran no backward pass")
            if session.phase is Phase.RECORD:
                session.finish()
            if session.explanation() is not None or session.phase is Phase.OFF:
                break
        explanation = session.explanation()
    finally:
        session.close()
    if explanation is None:
        raise CaptureError(f"the step could not be planned{_reasons(session)}")
    return explanation


def _reasons(session: Session) -> str:
    """What was left to plain PyTorch, to be put at the end of a message."""
    why = "; ".join(f"{what}: {reason}" for what, reason, _ in session.unhandled)
    return f": {why}" if why else ""


def check(step: Callable[[], Any], **options: Any) -> Comparison:
    """Run `step` (a whole training step: forward, backward, optimizer) plainly and under torch-echo's plan, from the same state and
    random seeds, and compare: what it returns, models' outputs, rebuilt values, gradients, buffers, parameters, random states.

    `step` is run until there is a plan (three times; these steps are real), then twice plainly, to know that it can be repeated,
    and once under the plan; the models' state and their optimizers' is put back in between. It must use the same data each time.
    Options are those of :func:`apply`. Raises CaptureError if there is no plan, or if two plain runs differ.
    """
    session = Session(Options(**options), name="check")
    session.watch_all()
    try:
        for _ in range(session.warm_up + 4):
            step()
            session.finish()
            if session.plan is not None or session.phase is Phase.OFF:
                break
        if session.plan is None or session.phase is Phase.OFF:
            raise CaptureError(f"the step could not be planned{_reasons(session)}")
        state = TrainingState(list(session.trained.roots().values()), session.trained.optimizers(), session.device)
        runs = []
        for _ in range(2):
            with session.paused():
                runs.append(state.after(step()))
            state.restore()
        unlike = runs[0].differences(runs[1])
        if unlike:
            raise CaptureError(
                f"the step can't be repeated, so it can't be compared: run twice from one state, {unlike[0]}"
            )
        session.compare_next()
        result = state.after(step())
        session.finish()
        comparison = session.comparison
        if comparison is None:
            raise CaptureError(f"the step was not taped{_reasons(session)}")
        runs[0].compare(result, comparison)
        return comparison
    finally:
        session.close()
