"""What the tape costs where it rebuilds nothing: ``python -m benchmarks.engine``. Prints one line of JSON.

- A planned module: the dispatch mode and the hooks are on, one of its values is dropped, all other ops are left alone.
- A module of a planned model in which nothing is dropped: neither mode nor hooks.
- A model whose plan drops nothing.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_echo.footprint import replay
from torch_echo.graph import Phase
from torch_echo.options import Options
from torch_echo.planning import Front, Point, plan
from torch_echo.tape._install import engine_seconds, install_plan
from torch_echo.tape._record import Recorder
from torch_echo.tape.session import Phase as Stage
from torch_echo.tape.session import Session

WIDTH, LENGTH = 128, 100
OPS = 3 * LENGTH
"""A transposed view, a matrix product and a tanh for each link of the chain."""


class Chain(nn.Module):
    """Many small ops in one module, as the steps of a recurrent network are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = 0.0
        """CPU seconds of the last forward pass, as the module itself sees them."""

    def forward(self, x: Tensor) -> Tensor:
        """The chain."""
        begin = time.process_time()
        for _ in range(LENGTH):
            x = torch.tanh(F.linear(x, self.weight, self.bias))
        self.seconds = time.process_time() - begin
        return x


class Pair(nn.Module):
    """A chain in which something is dropped, and one in which nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.planned, self.plain = Chain(), Chain()

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        out: Tensor = self.plain(self.planned(x))
        return out


class Fixed(Session):
    """Drops the first tanh of the layers named."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__(Options(), name="engine")
        self.layers = layers

    def _make_plan(self, recorder: Recorder) -> None:
        assert self.graph is not None
        graph = self.graph
        dropped: set[int] = set()
        for layer in self.layers:
            ops = (op for op in graph.ops if op.phase is Phase.FORWARD and op.layer == layer and "tanh" in op.name)
            dropped |= set(next(ops).writes)
        footprint = replay(graph, dropped)
        only = Front(Point(frozenset(), replay(graph).peak, 0.0, "baseline"))
        made = plan(graph, max_overhead=0.0, front=only)
        extra = footprint.extra_seconds + engine_seconds(graph)(frozenset(dropped))
        self.plan = replace(made, dropped=frozenset(dropped), peak=footprint.peak, extra_seconds=extra)
        self.installed = install_plan(self, graph, dropped, recorder.nesting)
        self.phase = Stage.CHECK


def rows_for(seconds: float) -> int:
    """The batch with which an op of a chain takes so long on average, in forward."""
    rows = 256
    for _ in range(4):
        chain, x = Chain(), torch.randn(rows, WIDTH)
        taken = []
        for _ in range(7):
            chain(x).sum().backward()
            taken.append(chain.seconds)
        rows = max(1, round(rows * seconds / (statistics.median(taken) / OPS)))
    return rows


def settle(session: Session, model: nn.Module, step: Callable[[], Any]) -> None:
    """Watch, plan and check."""
    session.watch(model)
    for _ in range(12):
        if session.phase is Stage.STEADY:
            return
        step()
    raise RuntimeError(f"not settled: {session.phase}, {session.unhandled}")


def compare(layers: tuple[str, ...], rows: int, rounds: int, model_type: type[nn.Module] = Chain) -> dict[str, float]:
    """Seconds of steps and of forward passes, with a plan for these layers and as eager PyTorch, in turns."""
    torch.manual_seed(0)
    models = [model_type(), model_type()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(rows, WIDTH)

    def step(model: nn.Module) -> tuple[float, float]:
        model.zero_grad()
        gc.collect()
        begin = time.process_time()
        loss = model(x).sum()
        loss.backward()
        whole = time.process_time() - begin
        last = model.plain if isinstance(model, Pair) else model
        assert isinstance(last, Chain)
        return whole, last.seconds

    session = Fixed(layers)
    settle(session, models[1], lambda: step(models[1]))
    pairs = []
    for i in range(rounds):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        taken = {which: step(models[which]) for which in order}
        pairs.append((taken[0], taken[1]))
    session.close()
    eager_step, eager_forward = (statistics.median(a[j] for a, _ in pairs) for j in (0, 1))
    return {
        "op_us": 1e6 * eager_forward / OPS,
        "forward_ratio": statistics.median(b[1] / a[1] for a, b in pairs),
        "step_ratio": statistics.median(b[0] / a[0] for a, b in pairs),
        "forward_us_per_op": 1e6 * statistics.median(b[1] - a[1] for a, b in pairs) / OPS,
        "step_us_per_op": 1e6 * statistics.median(b[0] - a[0] for a, b in pairs) / OPS,
        "eager_step_us_per_op": 1e6 * eager_step / OPS,
    }


def main() -> None:
    """Command line: the number of rounds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    for microseconds in (70, 150):
        rows = rows_for(microseconds * 1e-6)
        out[f"planned, {microseconds} us"] = compare(("Chain",), rows, rounds)
    small = rows_for(10e-6)
    out["nothing dropped in it, 10 us"] = compare(("Pair.planned",), small, rounds, Pair)
    out["nothing dropped in the model, 10 us"] = compare((), small, rounds)
    json.dump(out, sys.stdout)
    print()


if __name__ == "__main__":
    main()
