"""Out of memory: with faults injected at allocations, under a simulated limit, and where the system really refuses memory."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torch_echo import BudgetInfeasible, compat
from torch_echo.memory import Counter, live_bytes
from torch_echo.options import Options
from torch_echo.rules import rule_of
from torch_echo.tape._recipe import Passes, Recipe
from torch_echo.tape._rescue import RescueTape, _droppable
from torch_echo.tape.session import Phase, Session

from .harness import CPU, Trace, check_same, leaked, train
from .models import CASES, MLP, classify_step, normal

PLENTY = "64GiB"
"""A limit that is never reached: the tape is ready to drop what it keeps, and that is all."""

STEPS = 3

plain = cache(lambda name: train(CASES[name], steps=STEPS))


def refused(nbytes: int) -> Exception:
    return compat.out_of_memory(nbytes, "As a test wants it.")


def can_free(tape: RescueTape, busy: set[int] | frozenset[int] = frozenset()) -> bool:
    """Is there anything that could be dropped?"""
    for ref in tape.savings:
        soft = ref()
        if soft is None or id(soft) in busy or soft.expired():
            continue
        if _droppable(soft) and tape._cost(soft) is not None:
            return True
    return False


class Faults:
    """Allocations that fail: in forward the ones with these numbers, in backward the rebuilds with these; each once, and only
    where dropping something can help."""

    def __init__(self, forward: set[int], rebuilds: set[int], nbytes: int = 1, seed: int = 0) -> None:
        self.forward, self.rebuilds, self.nbytes = forward, rebuilds, nbytes
        self.rng = random.Random(seed)
        self.ops = self.reruns = 0
        """How many there were."""
        self.failed = 0

    @contextmanager
    def injected(self) -> Iterator[Faults]:
        """Into all that runs within."""
        run, rerun, again = RescueTape.run, RescueTape.rerun, Recipe.again
        fail_next = False

        def faulty_run(tape: RescueTape, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            rule = rule_of(func)
            self.ops += 1
            if self.ops - 1 not in self.forward or not can_free(tape):
                return run(tape, func, args, kwargs)
            if rule.writes(args) and rule.rerun is None:
                return run(tape, func, args, kwargs)
            self.failed += 1
            if self.rng.random() < 0.5:
                run(tape, func, args, kwargs)  # it fails at its end, when it has drawn and written what it does
            raise refused(self.nbytes)

        def faulty_rerun(tape: RescueTape, recipe: Recipe, keep: bool, slot: object, later: list[Recipe]) -> None:
            nonlocal fail_next
            self.reruns += 1
            busy = {id(s) for r in (*later, recipe) for s in r.reads()} | {id(slot)}
            if self.reruns - 1 in self.rebuilds and recipe.repeatable(keep) and can_free(tape, busy):
                fail_next = True
            rerun(tape, recipe, keep, slot, later)  # type: ignore[arg-type]

        def faulty_again(recipe: Recipe, *call: object) -> object:
            nonlocal fail_next
            if fail_next:
                fail_next = False
                self.failed += 1
                raise refused(self.nbytes)
            return again(recipe, *call)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RescueTape, "run", faulty_run)
            patch.setattr(RescueTape, "rerun", faulty_rerun)
            patch.setattr(Recipe, "again", faulty_again)
            yield self


def ready(max_overhead: float = 0.1) -> Session:
    """A session whose tape can drop what it keeps, in all steps."""
    return Session(Options(memory_limit=PLENTY, cost="analytic", max_overhead=max_overhead))


def with_faults(name: str, faults: Faults, max_overhead: float = 0.1) -> tuple[Trace, Session]:
    session = ready(max_overhead)
    with faults.injected():
        return train(CASES[name], session, every=True, steps=STEPS), session


FEW = [
    "gru_lm",
    "decoder",
    "transformer_lm",
    "gpt2",
    "unet",
    "cnn",
    "function",
    "tied",
    "accumulation",
    "normed",
    "experts",
]


@pytest.mark.parametrize("name", FEW)
def test_faults(name: str) -> None:
    """A sample of allocations fails: every bit is as in plain PyTorch. In every second model all that can be dropped is."""
    nbytes = 1 << 30 * (FEW.index(name) % 2)
    rng = random.Random(f"{name} {nbytes}")
    faults = Faults(set(rng.sample(range(1500), 40)), set(rng.sample(range(100), 30)), nbytes, seed=1)
    trace, session = with_faults(name, faults)
    assert faults.failed
    assert session.phase is not Phase.WAIT, "the script saw an error"
    check_same(plain(name), trace)


def test_faults_among_unseen_writes() -> None:
    """There little can be dropped: a sample would miss it."""
    failed = 0
    for first in range(3):
        faults = Faults(set(range(first, 1500, 3)), set(range(first, 1500, 3)), 1 << 30, seed=first)
        trace, session = with_faults("unseen", faults)
        assert session.phase is not Phase.WAIT, "the script saw an error"
        check_same(plain("unseen"), trace)
        failed += faults.failed
    assert failed


@pytest.mark.long
@pytest.mark.parametrize("nbytes", [1, 1 << 30], ids=["one", "all"])
@pytest.mark.parametrize("name", CASES)
def test_every_fault(name: str, nbytes: int) -> None:
    """The k-th allocation fails, for every seventh k and each of seven beginnings."""
    count = Faults(set(), set())
    with_faults(name, count)
    for first in range(7):
        faults = Faults(set(range(first, count.ops, 7)), set(range(first, 10 * count.ops, 7)), nbytes, seed=first)
        trace, _ = with_faults(name, faults, 0.2 * (first % 2))
        check_same(plain(name), trace)


def test_nothing_is_left() -> None:
    """What was dropped, rebuilt and dropped again leaves no bytes behind."""
    torch.manual_seed(0)
    model = MLP(width=64, layers=6, dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = classify_step(64, 64)
    session = ready()
    session.watch(model)
    try:
        for i in range(3):
            step(model, optimizer, i)
        for p in model.parameters():
            p.grad = None

        def faulty() -> None:
            with Faults(set(range(0, 99, 5)), set(range(0, 99, 3)), 1 << 30).injected() as faults:
                step(model, optimizer, 7)
            assert faults.failed
            for p in model.parameters():
                p.grad = None

        assert leaked(faulty) == 0
    finally:
        session.close()


def test_notes_hold_nothing() -> None:
    """Being ready takes no memory: what eager lets go of is let go of."""
    peaks = []
    for options in (
        Options(max_overhead=0.0, cost="analytic"),
        Options(max_overhead=0.0, cost="analytic", memory_limit=PLENTY),
    ):
        session = Session(options)
        train(CASES["transformer_lm"], session, every=True, steps=6)
        peaks.append(session.measured_peak)
    assert peaks[0] == peaks[1]


# --- a limit of ours -------------------------------------------------------------------------------------------------


class Tower(nn.Module):
    """Layers wide enough for the limit to be about feature maps."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)) * torch.sigmoid(x))
        return x.square().mean()


ROWS = 4096
MAP = ROWS * 64 * 4
"""Bytes of one feature map."""


def tower_step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    for p in model.parameters():
        p.grad = None
    model(x).backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def tower() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return Tower(), normal(0, ROWS, 64)


def test_counter() -> None:
    """The count of the C library follows the tensors."""
    counter = Counter(CPU)
    before = counter.live()
    held = [torch.empty(1 << 18) for _ in range(4)]
    assert abs(counter.live() - before - (4 << 20)) < 1 << 16
    del held
    assert abs(counter.live() - before) < 1 << 16


@pytest.mark.parametrize("maps", [40, 24, 18])
def test_first_step_under_a_limit(maps: int) -> None:
    """The first step already stays under it, by dropping; it keeps some 70 feature maps otherwise."""
    model, x = tower()
    eager = tower_step(model, x)
    for p in model.parameters():
        p.grad = None
    gc.collect()
    limit = live_bytes(CPU) + maps * MAP
    session = Session(Options(memory_limit=limit, cost="analytic"))
    session.watch(model)
    try:
        for _ in range(3):
            taped = tower_step(model, x)
            assert all(torch.equal(eager[k], taped[k]) for k in eager)
        assert session.plan is not None
        assert session.plan.peak <= limit
        assert session.measured_peak is not None
        assert session.measured_peak <= limit
    finally:
        session.close()


def test_infeasible_budget_is_said_before_the_second_step() -> None:
    model, x = tower()
    gc.collect()
    live = live_bytes(CPU)
    session = Session(Options(memory_budget=live + 12 * MAP, memory_limit=live + 16 * MAP, cost="analytic"))
    session.watch(model)
    try:
        tower_step(model, x)
        with pytest.raises(BudgetInfeasible, match="the least reachable peak"):
            tower_step(model, x)
    finally:
        session.close()


def test_a_limit_that_cannot_be_kept_reaches_the_script() -> None:
    """Where nothing is left to drop the script gets PyTorch's error, with a word on what is to come."""
    model, x = tower()
    gc.collect()
    session = Session(Options(memory_limit=live_bytes(CPU) + 3 * MAP, cost="analytic"))
    session.watch(model)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="memory_limit") as caught:
            tower_step(model, x)
        (note,) = caught.value.__notes__
        assert note.startswith("torch-echo: out of memory in the ")
        assert "allocated" in note and "at least" in note
    finally:
        session.close()


# --- errors that reach the script ------------------------------------------------------------------------------------


class FailsOnce(torch.autograd.Function):
    """A node whose backward finds no memory, once."""

    armed = False

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        if FailsOnce.armed:
            FailsOnce.armed = False
            raise refused(1 << 20)
        return grad.clone()


class Failing(Tower):
    """A tower with such a node at its end."""

    def forward(self, x: Tensor) -> Tensor:
        return FailsOnce.apply(super().forward(x))


@pytest.mark.parametrize("when", [0, 2, 4])
def test_failed_backward_then_on(when: int) -> None:
    """A script that skips the batch goes on with a tighter plan: in the first step, while recorded, and with a plan."""
    torch.manual_seed(3)
    model, x = Failing(), normal(0, ROWS, 64)
    eager = tower_step(model, x)
    said: list[str] = []
    session = Session(Options(max_overhead=0.0, cost="analytic"), on_event=said.append)
    session.watch(model)
    try:
        for i in range(when + 4):
            FailsOnce.armed = i == when
            try:
                taped = tower_step(model, x)
            except torch.OutOfMemoryError as error:
                assert i == when
                (note,) = error.__notes__
                assert "backward" in note and "recorded and planned for" in note
                continue
            assert i != when
            assert all(torch.equal(eager[k], taped[k]) for k in eager)
        assert sum(s.startswith("out of memory in the backward pass") for s in said) == 1
        assert session._lean()
        assert session.plan is not None
        assert session._limit is not None and session._limit.plannable is not None
        assert session.plan.peak <= session._limit.plannable or session.plan.peak == session.plan.floor
        assert isinstance(session._local.tape, RescueTape)
        assert Passes.rescue is None
    finally:
        session.close()


# --- the real thing ----------------------------------------------------------------------------------------------------

REAL = """
import resource, sys
import torch
from torch_echo.options import Options
from torch_echo.tape.session import Session

torch.set_num_threads(1)
torch.manual_seed(0)
ROWS, WIDTH, LAYERS = 140_000, 64, 14  # blocks of more than 32 MiB: each has pages of its own, so that there are no pieces
how, file = sys.argv[1:]


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def step(model, x):
    for p in model.parameters():
        p.grad = None
    model(x).backward()
    return [p.grad.clone() for p in model.parameters()]


model, x = Tower(), torch.randn(ROWS, WIDTH)
if how == "free":
    torch.save(step(model, x), file)
    sys.exit()
step(model, x[:64])
if how == "echo":
    session = Session(Options(memory_budget="8GiB", cost="analytic"))
    session.watch(model)


def data():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


before = data()
room = 12 * ROWS * WIDTH * 4  # of 28 blocks; the program takes some of it for what are no tensors
resource.setrlimit(resource.RLIMIT_DATA, (before + room, resource.getrlimit(resource.RLIMIT_DATA)[1]))
try:
    real = step(model, x)
except RuntimeError as error:
    freed = session._local.tape.freed if how == "echo" else 0
    print(f"refused: {str(error)[:150]} (dropped {freed} for {room}, {data() - before} taken)")
    sys.exit(3)
assert all(torch.equal(a, b) for a, b in zip(torch.load(file), real))
print("dropped", session._local.tape.freed if how == "echo" else 0)
"""


def run_real(how: str, file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", REAL, how, str(file)], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
def test_system_refuses_memory(tmp_path: Path) -> None:
    """Under RLIMIT_DATA PyTorch's own allocator fails: without torch-echo that ends the step, with it the step is done."""
    gradients = tmp_path / "gradients.pt"
    free = run_real("free", gradients)
    assert free.returncode == 0, free.stderr
    alone = run_real("alone", gradients)
    assert alone.returncode == 3, alone.stdout + alone.stderr
    assert "not enough memory" in alone.stdout or "can't allocate memory" in alone.stdout
    rescued = run_real("echo", gradients)
    assert rescued.returncode == 0, rescued.stdout + rescued.stderr
    assert int(rescued.stdout.split()[-1]) > 0
