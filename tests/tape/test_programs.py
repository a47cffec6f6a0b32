"""Generated programs under forced plans: gradients to the bit, peaks to the byte, errors where plain PyTorch has them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .harness import (
    Case,
    ForcedSession,
    Trace,
    check_baseline,
    check_footprint,
    check_same,
    everything,
    randomly,
    train,
)
from .models import simple_step
from .programs import Program, Spec, program_loss, programs

EXAMPLES = 75
STEPS = 4


def run(spec: Spec, session: ForcedSession | None, every: bool) -> Trace | RuntimeError:
    """Train; an error of PyTorch's is a result."""
    case = Case(lambda: Program(spec), simple_step(program_loss), lambda m: torch.optim.SGD(m.parameters(), lr=1e-3))
    try:
        return train(case, session, every=every, steps=STEPS)
    except RuntimeError as error:
        return RuntimeError(str(error))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("every", [False, True], ids=["apply", "run"])
def test_programs(every: bool, share: float) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )
    @given(programs(), st.integers(0, 1000))
    def check(spec: Spec, seed: int) -> None:
        plain = run(spec, None, every)
        session = ForcedSession(everything if share == 1.0 else randomly(seed, share))
        taped = run(spec, session, every)
        if isinstance(plain, RuntimeError):
            assert isinstance(taped, RuntimeError)
            assert str(taped)[:80] == str(plain)[:80]
            return
        if isinstance(taped, RuntimeError):
            raise taped
        check_same(plain, taped)
        if spec.static:
            check_baseline(plain, session)
            check_footprint(session)
            assert session.plan is not None
            assert taped.reruns[2:] == [len(session.plan.rerun)] * (STEPS - 2)

    check()
