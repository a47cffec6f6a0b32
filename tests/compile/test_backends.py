"""Backends by name, as training code asks for them."""

from __future__ import annotations

from importlib.metadata import entry_points

import torch
from torch import nn

from torch_echo.compile import echo_eager, plans


def test_the_entry_point_is_the_backend() -> None:
    (found,) = entry_points(group="torch_dynamo_backends", name="echo_eager")
    assert found.load() is echo_eager


def test_by_name() -> None:
    """As in ``torch.compile(model, backend="echo_eager")``."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    torch.compile(loss, backend="echo_eager")(torch.randn(3, 4)).backward()
    assert len(plans) == 1
    assert all(p.grad is not None for p in model.parameters())
    assert "MiB" in str(plans[0]) or "KiB" in str(plans[0])
