"""What happens on threads that the profiler does not see, such as those of a process group."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch
from torch import nn

import torch_echo


def elsewhere(action: Callable[[], object]) -> None:
    thread = Thread(target=action)
    thread.start()
    thread.join()


class Model(nn.Module):
    """Another thread lets go of feature maps and of gradients while forward goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU(), nn.Tanh())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        held = [x[:16].sigmoid() for _ in range(3)]  # small: until its address is given out again, a death is not known
        elsewhere(held.clear)
        elsewhere(lambda: self.zero_grad())
        return self.layers(x)


def test_deaths_elsewhere_are_placed_among_the_allocations() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch_echo.apply(model, max_overhead=1.0, cost="analytic") as handle:
        for _ in range(6):
            model(torch.randn(256, 64)).sum().backward()
            optimizer.step()
        session, summary = handle._session, handle.summary()
    assert not summary.unhandled
    assert session.plan is not None and session.plan.dropped
    assert summary.measured_peak is not None
    assert summary.measured_peak < session.plan.base_peak
