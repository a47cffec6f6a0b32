"""Faults at any place of a step: training goes on right, and nothing of the tape is left.

A fault is an exception at the k-th op of a generated program: in the script's own code, in a kernel of the forward pass, in a
re-run, in backward, or anywhere in the planning of the recorded step. The script skips the batch, as many do. What it trains
must be what it trains without that batch, to the bit.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_echo import rules
from torch_echo.errors import CaptureError
from torch_echo.options import Options
from torch_echo.tape import session as session_module
from torch_echo.tape._mode import Tape
from torch_echo.tape._recipe import Recipe
from torch_echo.tape.session import Session

from .harness import ForcedSession, bits, everything, forced, leaked, randomly, tape_objects
from .models import CASES
from .programs import Block, Program, Spec, drawn, program_loss, programs

STEPS = 6
PLACES = ("script", "kernel", "re-run", "backward", "planning")


class Fault(RuntimeError):
    """Injected."""


class FailingOp:
    """An op that fails when it is called."""

    def __init__(self, op: Any) -> None:
        self.op = op
        rules._rules[id(self)] = (self, rules.rule_of(op))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Fault(f"kernel of {self.op}")


@dataclass
class Injector:
    """Raises at the `at`-th op of one kind, in one step."""

    place: str
    at: int
    armed: bool = False
    count: int = 0
    fired: bool = False

    def due(self) -> bool:
        """Is it this op's turn?"""
        if not self.armed or self.fired:
            return False
        self.count += 1
        self.fired = self.count > self.at
        return self.fired

    def strike(self, what: str) -> None:
        """Raise, if it is this op's turn."""
        if self.due():
            raise Fault(what)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            getattr(self, f"_{self.place.replace('-', '')}")(patch)
            yield

    def _script(self, patch: pytest.MonkeyPatch) -> None:
        original = Block.run

        def run(block: Block, *args: Any) -> Any:
            self.strike("script")
            return original(block, *args)

        patch.setattr(Block, "run", run)

    def _kernel(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("_drop", "_keep"):
            original = getattr(Tape, name)

            def run(tape: Tape, func: Any, *args: Any, original: Any = original) -> Any:
                return original(tape, FailingOp(func) if self.due() else func, *args)

            patch.setattr(Tape, name, run)

    def _rerun(self, patch: pytest.MonkeyPatch) -> None:
        original = Recipe.again

        def again(recipe: Recipe, *args: Any) -> Any:
            self.strike("re-run")
            return original(recipe, *args)

        patch.setattr(Recipe, "again", again)

    def _backward(self, patch: pytest.MonkeyPatch) -> None:
        original = Block.run

        def run(block: Block, *args: Any) -> Any:
            out = original(block, *args)
            if out.requires_grad:
                out.register_hook(lambda _: self.strike("backward"))
            return out

        patch.setattr(Block, "run", run)

    def _planning(self, patch: pytest.MonkeyPatch) -> None:
        def profiled(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                sys.setprofile(self._event)
                try:
                    return original(*args, **kwargs)
                finally:
                    sys.setprofile(None)

            return run

        for name in ("build", "plan", "install_plan"):
            patch.setattr(session_module, name, profiled(getattr(session_module, name)))

    def _event(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and "torch_echo" in code.co_filename and not code.co_name.startswith("__"):
            self.strike("planning")


@dataclass
class Result:
    """What training led to."""

    state: dict[str, bytes] = field(default_factory=dict)
    rng: bytes = b""
    fired: bool = field(default=False, compare=False)


def train(spec: Spec, session: Session | None, skip: int | None, injector: Injector | None, every: bool) -> Result:
    """Steps of plain SGD. Step `skip` is left out, or fails half-way and is undone."""
    torch.manual_seed(0)
    model = Program(spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if session is not None:
        session.watch_all() if every else session.watch(model)
    try:
        for i in range(STEPS):
            torch.manual_seed(100 + i)
            before = {k: v.clone() for k, v in model.state_dict().items()}
            if i == skip and injector is None:
                continue
            if injector is not None:
                injector.armed = i == skip
            try:
                optimizer.zero_grad()
                program_loss(model, i).backward()
                optimizer.step()
            except Fault:
                model.load_state_dict(before)
    finally:
        if session is not None:
            session.close()
    result = Result(
        {k: bits(v).tobytes() for k, v in model.state_dict().items()}, torch.get_rng_state().numpy().tobytes()
    )
    result.fired = injector is not None and injector.fired
    return result


def struck(spec: Spec, session: Session | None, step: int, injector: Injector, every: bool) -> Result:
    """What training leads to with a fault in `step`."""
    with injector.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(spec, session, step, injector, every)


def check(spec: Spec, place: str, step: int, at: int, share: float, every: bool) -> bool:
    """One fault. Was there an op for it?"""
    injector = Injector(place, at)
    session = ForcedSession(everything if share == 1.0 else randomly(at, share))
    before = len(tape_objects())
    taped = struck(spec, session, step, injector, every)
    # In planning, the script does not see it: no batch is skipped.
    plain = train(spec, None, step if taped.fired and place != "planning" else None, None, every)
    differ = [k for k, v in plain.state.items() if v != taped.state[k]]
    assert not differ, f"{differ} differ after a fault in {place} at {at} of step {step}: {spec}"
    assert plain.rng == taped.rng
    del session, injector
    left = tape_objects()[before:]
    assert not left or leaks_anyway(spec, place, step, at, every), (
        f"{left[:5]} left after a fault in {place} at {at} of step {step}: {spec}"
    )
    return taped.fired


def leaks_anyway(spec: Spec, place: str, step: int, at: int, every: bool) -> bool:
    """Does plain PyTorch lose memory too where the script fails there? A region of its reentrant checkpoint does."""
    if place not in ("script", "backward"):
        return False

    def run() -> None:
        struck(spec, None, step, Injector(place, at), every)

    run()
    return leaked(run) > 0


def resident_bytes() -> int:
    """What the process holds of the machine's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_faults(place: str, seed: int, examples: int) -> int:
    """Faults of one kind in generated programs; how many there were."""
    fired = 0

    @drawn(examples, seed)
    @given(
        spec=programs(guests=True),
        step=st.integers(0, STEPS - 2) if place != "planning" else st.just(1),
        at=st.integers(0, 30) if place != "planning" else st.integers(0, 200).map(lambda n: n * 41),
        share=st.sampled_from([1.0, 0.5]),
        every=st.booleans(),
    )
    def check_one(spec: Spec, step: int, at: int, share: float, every: bool) -> None:
        nonlocal fired
        try:
            train(spec, None, None, None, False)
        except RuntimeError:
            return  # an error of its own, which test_programs looks at
        fired += check(spec, place, step, at, share, every)

    check_one()
    return fired


@pytest.mark.parametrize("place", PLACES)
def test_faults(place: str) -> None:
    assert run_faults(place, 0, 8) > 0


def test_a_mistake_in_planning_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not raised: training goes on as plain PyTorch, with one warning and a note; strict makes it an error."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(session_module, "plan", broken)
    spec = Spec(((("tanh", 0, 0, 0), ("mul", 0, 1, 2)),), (0, 0))
    session = Session(Options(cost="analytic"))
    with pytest.warns(UserWarning, match=r"planning failed: ZeroDivisionError: a mistake \(test_faults\.py:\d+\)"):
        taped = train(spec, session, None, None, True)
    assert taped == train(spec, None, None, None, True)
    assert session.summary().unhandled[0][0] == "training step"
    with pytest.raises(CaptureError, match="a mistake"):
        train(spec, Session(Options(cost="analytic", strict=True)), None, None, True)


@pytest.mark.parametrize("steps", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_memory_is_flat_over_steps_of_changing_shapes(steps: int) -> None:
    """Neither Python objects nor the process grow with the number of steps."""
    torch.manual_seed(0)
    model = CASES["lstm_lm"].build()
    optimizer = torch.optim.Adam(model.parameters())
    rng = random.Random(0)
    objects, resident = [], []
    with forced(None, everything) as session:
        for i in range(steps):
            batch, length = rng.randint(1, 6), rng.randint(2, 20)
            optimizer.zero_grad()
            tokens = torch.randint(0, 20, (batch, length))
            model(tokens).square().mean().backward()
            optimizer.step()
            if i in (steps // 2, steps - 1):
                gc.collect()
                objects.append(len(gc.get_objects()))
                resident.append(resident_bytes())
        assert session.plan is not None and session.plan.dropped
    assert objects[1] - objects[0] < 200
    assert resident[1] - resident[0] < 16 << 20


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("place", PLACES)
def test_many_faults(place: str, seed: int) -> None:
    assert run_faults(place, seed, 100) > 25
