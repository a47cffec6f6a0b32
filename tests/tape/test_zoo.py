"""Models of many kinds, trained for five steps: every bit as in plain PyTorch, every peak as predicted."""

from __future__ import annotations

from functools import cache

import pytest

from .harness import Choice, compare, everything, randomly, train
from .models import CASES

plain = cache(lambda name: train(CASES[name]))

FORCED: list[tuple[str, Choice, bool]] = [
    ("all-apply", everything, False),
    ("all-run", everything, True),
    ("half-run", randomly(1), True),
    ("few-apply", randomly(2, 0.2), False),
]


@pytest.mark.parametrize(("choose", "every"), [pytest.param(c, e, id=name) for name, c, e in FORCED])
@pytest.mark.parametrize("name", CASES)
def test_forced_plans(name: str, choose: Choice, every: bool) -> None:
    """Plans that drop what no planner would."""
    compare(CASES[name], choose, every=every, plain=plain(name))


@pytest.mark.parametrize("name", CASES)
def test_planned(name: str) -> None:
    """The planner's own plan, over the whole step."""
    compare(CASES[name], None, every=True, plain=plain(name))
