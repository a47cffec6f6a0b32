"""Generated programs under forced plans: gradients to the bit, peaks to the byte, errors where plain PyTorch has them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .harness import (
    Case,
    Choice,
    ForcedSession,
    Trace,
    check_baseline,
    check_footprint,
    check_same,
    everything,
    leaked,
    loop,
    producers,
    randomly,
    tape_objects,
    train,
    unknown_inside,
)
from .models import simple_step
from .programs import Program, Spec, drawn, program_loss, programs

STEPS = 4


def case_of(spec: Spec) -> Case:
    """A program to be trained."""
    return Case(lambda: Program(spec), simple_step(program_loss), lambda m: torch.optim.SGD(m.parameters(), lr=1e-3))


def run(spec: Spec, session: ForcedSession | None, every: bool) -> Trace | RuntimeError:
    """Train; an error of PyTorch's is a result."""
    try:
        return train(case_of(spec), session, every=every, steps=STEPS)
    except RuntimeError as error:
        return RuntimeError(str(error))


UNSEEN = {"gradient", "func_grad", "checkpoint_reentrant"}
"""Instructions with a backward pass of their own inside of forward: there the tape is lifted, and counts nothing."""


def leaks(spec: Spec) -> bool:
    """Does plain PyTorch never free all of this? So it is where a node that no gradient reaches has saved what is later overwritten
    with a result of its own."""
    case = case_of(spec)

    def once() -> None:
        torch.manual_seed(7)
        model = case.build()
        torch.manual_seed(8)
        loop(model, case.optimizer(model), case.step, STEPS, Trace())

    return leaked(once) > 0


def check_one(spec: Spec, choose: Choice, every: bool) -> None:
    """One program, plain and taped."""
    there = len(tape_objects())
    plain = run(spec, None, every)
    session = ForcedSession(choose)
    taped = run(spec, session, every)
    if isinstance(plain, RuntimeError):
        assert isinstance(taped, RuntimeError)
        assert str(taped)[:80] == str(plain)[:80]
        return
    if isinstance(taped, RuntimeError):
        raise taped
    check_same(plain, taped)
    assert len(tape_objects()) == there or leaks(spec)
    if spec.static and not spec.uses(UNSEEN):
        check_baseline(plain, session)
        check_footprint(session)
        assert session.plan is not None and session.graph is not None
        # What turns out to take less than planned may be planned again after the first step.
        steps = 1 if unknown_inside(session.graph, session.plan) else STEPS - 2
        assert taped.reruns[2 : 2 + steps] == [len(session.plan.rerun)] * steps


def check_programs(examples: int, every: bool, share: float, guests: bool, seed: int) -> None:
    """Generated programs."""

    @drawn(examples, seed)
    @given(programs(guests=guests), st.integers(0, 1000))
    def check(spec: Spec, seed: int) -> None:
        check_one(spec, everything if share == 1.0 else randomly(seed, share), every)

    check()


FOUND: dict[str, tuple[Spec, Choice]] = {
    "the indices of a sparse gradient live as long as it does": (Spec(((("sparse", 7, 9, 2),),), (0,)), everything),
    "a mask does not hold the graph of what it is made of": (
        Spec(((("loop", 0, 1, 3), ("masked_fill", 1, 0, 0)),), (0,)),
        producers("aten::gt"),
    ),
}
"""Programs on which some rule broke that holds now."""


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    check_one(*FOUND[name], False)


@pytest.mark.parametrize("guests", [False, True], ids=["ops", "guests"])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("every", [False, True], ids=["apply", "run"])
def test_programs(every: bool, share: float, guests: bool) -> None:
    check_programs(15 if guests else 60, every, share, guests, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 27))
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("every", [False, True], ids=["apply", "run"])
def test_many_programs(every: bool, share: float, seed: int) -> None:
    check_programs(50, every, share, True, seed)
