"""Models of many kinds, trained for five steps: every bit as in plain PyTorch, every peak as predicted."""

from __future__ import annotations

from functools import cache

import pytest

from .harness import Choice, compare, everything, randomly, train
from .models import CASES

plain = cache(lambda name: train(CASES[name]))

FORCED: dict[str, Choice] = {"all": everything, "random": randomly(1), "few": randomly(2, 0.2)}


@pytest.mark.parametrize("every", [False, True], ids=["apply", "run"])
@pytest.mark.parametrize("choice", FORCED)
@pytest.mark.parametrize("name", CASES)
def test_forced_plans(name: str, choice: str, every: bool) -> None:
    """Plans that drop what no planner would."""
    compare(CASES[name], FORCED[choice], every=every, plain=plain(name))


@pytest.mark.parametrize("every", [False, True], ids=["apply", "run"])
@pytest.mark.parametrize("name", CASES)
def test_planned(name: str, every: bool) -> None:
    """The planner's own plans."""
    compare(CASES[name], None, every=every, plain=plain(name))
