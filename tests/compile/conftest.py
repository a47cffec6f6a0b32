"""Compiled code is one test's own; so is the cost cache of the test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_echo.compile import plans, promised
from torch_echo.compile._partition import left


@pytest.fixture(scope="session", autouse=True)
def cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_ECHO_CACHE", str(tmp_path_factory.mktemp("cost")))
        yield


@pytest.fixture(autouse=True)
def fresh(cost_cache: None) -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    plans.clear()
    promised.clear()
    left.clear()
    yield
    torch._dynamo.reset()
    plans.clear()
    promised.clear()
    left.clear()
