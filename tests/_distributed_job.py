"""Run by test_distributed, by torchrun: trains small models in several ways of distribution, plainly and taped, and compares.

Arguments: a folder for the results (one JSON file per rank), then the names of cases.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_echo
from torch_echo.tape import session as tape_session
from torch_echo.tape._ranks import class_names
from torch_echo.tape._record import PeakMeter

STEPS = 7
VOCABULARY, WIDTH, BATCH, LENGTH = 64, 32, 8, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln2(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embedding(x) + self.position[: x.shape[1]])
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), x.flatten())


class PostNormBlock(nn.Module):
    """What it returns is made from its parameters, and is cheap to make again; but not from outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


class PostNorm(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[PostNormBlock() for _ in range(4)])


class Unused(Transformer):
    """Which parts take part changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embedding(x)
        for block in self.blocks if self.calls % 3 else self.blocks[:2]:
            x = block(x)
        return self.head(x).square().mean()


class Convolutions(nn.Module):
    """Buffers, which DDP broadcasts from rank 0 before each step."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for i in range(3):
            layers += [nn.Conv2d(4 if i else 1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.float().view(BATCH, 1, -1, 8)).square().mean()


class Recurrent(nn.Module):
    """nn.LSTM, then a loop over cells with additive attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.key, self.query, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, _ = self.encoder(self.embedding(x))
        keys = self.key(memory)
        h = c = memory.new_zeros(x.shape[0], WIDTH)
        loss = memory.new_zeros(())
        for _ in range(6):
            weights = self.score(torch.tanh(keys + self.query(h)[:, None])).softmax(1)
            h, c = self.cell((weights * memory).sum(1), (h, c))
            loss = loss + h.square().mean()
        return loss


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def plain_steps(net: nn.Module, step: Callable[[torch.Tensor], None]) -> None:
    for x in batches():
        step(x)


def batches(larger: bool = False) -> Iterator[torch.Tensor]:
    for _ in range(STEPS):
        yield torch.randint(VOCABULARY, (BATCH * (1 + (larger and dist.get_rank())), LENGTH))


def accumulating(net: nn.Module, step: Callable[..., None]) -> None:
    for x in batches():
        with net.no_sync():  # type: ignore[operator]
            step(x, last=False)
        step(x.flip(0))


def unsynchronised(net: nn.Module, step: Callable[..., None]) -> None:
    for x in batches():
        net.set_requires_gradient_sync(False)  # type: ignore[operator]
        step(x, last=False)
        net.set_requires_gradient_sync(True)  # type: ignore[operator]
        step(x.flip(0))


def joined(net: nn.Module, step: Callable[[torch.Tensor], None]) -> None:
    """Rank 1 has two batches more."""
    with Join([net]):  # type: ignore[list-item]
        for _ in range(STEPS + 2 * dist.get_rank()):
            step(torch.randint(VOCABULARY, (BATCH, LENGTH)))


def uneven(net: nn.Module, step: Callable[[torch.Tensor], None]) -> None:
    for x in batches(larger=True):
        step(x)


def outgrowing(net: nn.Module, step: Callable[[torch.Tensor], None]) -> None:
    """In the last steps, rank 1 has larger batches than those that were planned for."""
    for i, (small, large) in enumerate(zip(batches(), batches(larger=True), strict=True)):
        step(large if i > STEPS - 3 else small)


@dataclass
class Case:
    model: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module] = ddp
    steps: Callable[..., None] = plain_steps
    options: dict[str, Any] = field(default_factory=lambda: {"max_overhead": 0.3})


half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "ddp": Case(Transformer),
    "unused": Case(Unused, functools.partial(ddp, find_unused_parameters=True)),
    "static_graph": Case(Transformer, functools.partial(ddp, static_graph=True)),
    "bucket_view": Case(Transformer, functools.partial(ddp, gradient_as_bucket_view=True, bucket_cap_mb=1)),
    "no_sync": Case(Transformer, steps=accumulating),
    "buffers": Case(Convolutions),
    "recurrent": Case(Recurrent),
    "join": Case(Transformer, steps=joined),
    "uneven": Case(Transformer, steps=uneven),
    "outgrown": Case(Transformer, steps=outgrowing),
    "fsdp": Case(Transformer, sharded),
    "fsdp_half": Case(Transformer, functools.partial(sharded, mp_policy=half)),
    "fsdp_gathered": Case(Transformer, functools.partial(sharded, reshard_after_forward=False)),
    "fsdp_accumulating": Case(Transformer, sharded, unsynchronised),
    "fsdp_post_norm": Case(PostNorm, sharded, options={"memory_budget": 1, "on_infeasible": "least"}),
    "fsdp_budget": Case(Transformer, sharded, options={"memory_budget": 1, "on_infeasible": "least"}),
}


class Skewed:
    """Durations of ops that ranks do not agree on: what is cheap on the one is dear on the other."""

    def seconds(self, func: Any, spec: Any) -> float:
        return 2e-4 if len(str(func)) % 2 == dist.get_rank() % 2 else 2e-6

    def save(self) -> None:
        """Nothing to keep."""


def train(case: Case, taped: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net = case.wrap(case.model())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    peaks: list[int | None] = []
    done = 0

    def step(x: torch.Tensor, last: bool = True) -> None:
        nonlocal done
        done += 1
        measuring = not taped and done == STEPS and case.steps in (plain_steps, uneven)
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        meter = PeakMeter(torch.device("cpu"), gradients) if measuring else None
        del gradients
        net(x).backward()
        if meter is not None:
            peaks.append(meter.stop())
        if last:
            optimizer.step()
            optimizer.zero_grad()

    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(torch_echo.apply(net, **case.options)) if taped else None
        case.steps(net, step)
        found: dict[str, Any] = {
            "state": state_of(net),
            "rng": torch.get_rng_state(),
            "peak": peaks[-1] if peaks else None,
        }
        if handle is not None:
            session, summary = handle._session, handle.summary()
            assert session.graph is not None and session.plan is not None
            heaviest = session.kinds.heaviest
            assert heaviest is not None
            names = class_names(session.graph, heaviest.codes)
            graph, dropped = session.graph, session.plan.dropped
            makers = [graph.ops[graph.values[v].producer] for v in dropped]
            found |= {
                "dropped": sorted(f"{names[op.cls]} {op.instance}" for op in makers),
                "own": summary.plan_notes,
                "unhandled": summary.unhandled,
                "measured": summary.measured_peak,
                "replayed": session.plan.peak,
                "eager": session.plan.base_peak,
                "ranks": summary.ranks,
                "records": heaviest.records,
                "rank_peaks": summary.rank_peaks,
                "rebuilt": sorted({op.name for op in makers}),
            }
    return found


def state_of(net: nn.Module) -> list[torch.Tensor]:
    return [getattr(t, "_local_tensor", t).detach().clone() for t in (*net.parameters(), *net.buffers())]


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tape_session.get_cost_model = lambda *_: Skewed()  # type: ignore[assignment, attr-defined]
    results = {}
    for name in names:
        plain, taped = train(CASES[name], False), train(CASES[name], True)
        pairs = zip(plain.pop("state"), taped.pop("state"), strict=True)
        taped["equal"] = all(torch.equal(a, b) for a, b in pairs) and torch.equal(plain.pop("rng"), taped.pop("rng"))
        results[name] = {**taped, "plain": plain["peak"]}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
