"""Every test of the tape starts from plain PyTorch and has to leave it behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_echo import compat
from torch_echo.tape import _entry, _loss
from torch_echo.tape._recipe import Passes

torch.set_num_threads(1)
_call = torch.nn.Module.__call__
_engine = torch.autograd.graph._engine_run_backward


@pytest.fixture(scope="session", autouse=True)
def cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cost cache of the test run's own; and what the imports made is out of the collector's way, which is run often."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_ECHO_CACHE", str(tmp_path_factory.mktemp("cost")))
        yield


@pytest.fixture(autouse=True)
def plain_torch(cost_cache: None, tmp_path: Path) -> Iterator[None]:
    """A seed; and afterwards no session, mode, hook or wrapper may be left."""
    torch.manual_seed(0)
    yield
    left = list(_entry.owners)
    for owner in left:
        owner.close()
    gc.collect()
    assert not left, "a session was not closed"
    assert not _entry.entries
    assert not _entry.watchers
    assert torch.nn.Module.__call__ is _call
    assert torch.autograd.graph._engine_run_backward is _engine
    assert compat.dispatch_modes.top() is None
    assert compat.top_hooks() is None
    assert compat.function_modes.top() is None
    assert Passes.running == Passes.keeping == 0
    assert not Passes.touched
    assert not compat.profiler_running()


@pytest.fixture(autouse=True)
def losses_in_one_block(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Cross-entropies of small logits too, other than in the tests of that."""
    if request.node.path.stem != "test_loss":
        monkeypatch.setattr(_loss, "LEAST_BYTES", 1)
