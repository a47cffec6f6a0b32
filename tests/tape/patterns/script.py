"""Training programs of any shape, run plainly and taped, compared bit for bit and at the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torch_echo.memory import live_bytes
from torch_echo.options import Options
from torch_echo.tape._recipe import Passes
from torch_echo.tape._record import PeakMeter
from torch_echo.tape.session import Session

from ..harness import CPU, ForcedSession, bits, everything

__all__ = ["Make", "Script", "compare"]

MEASURED = 5
"""Steps at the end of a run whose peaks are measured."""


@dataclass
class Script:
    """A training program: its modules, and a step of it that returns the losses and whatever else is to be the same."""

    modules: Sequence[nn.Module]
    step: Callable[[int], Any]


Make = Callable[[], Script]


@dataclass
class _Run:
    """What a program did, step by step. Nothing in it is a tensor, so that keeping it changes no peak."""

    states: list[dict[str, NDArray[np.uint8]]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Of each of the last steps, above the bytes alive when it began."""
    reruns: list[int] = field(default_factory=list)
    """Ops re-run in each step."""


def _run(make: Make, session: Session | None, steps: int, apply: bool, measure: bool) -> _Run:
    torch.manual_seed(7)
    script = make()
    run = _Run()
    if session is not None:
        if apply:
            session.watch(script.modules[0])
        else:
            session.watch_all()
    try:
        for i in range(steps):
            meter = base = None
            if measure and i >= steps - MEASURED:
                gc.collect()
                base = live_bytes(CPU)
                meter = PeakMeter(CPU, _gradients(script))
            before = Passes.rerun
            out = script.step(i)
            if meter is not None and base is not None:
                peak = meter.stop()
                assert peak is not None
                run.peaks.append(peak - base)
            run.reruns.append(Passes.rerun - before)
            run.states.append(_state(script, out))
            del out
    finally:
        if session is not None:
            session.close()
    del script
    gc.collect()
    return run


def _gradients(script: Script) -> list[Tensor]:
    found = [p.grad for module in script.modules for p in module.parameters() if p.grad is not None]
    return [part for g in found for part in ((g._indices(), g._values()) if g.is_sparse else (g,))]


def _state(script: Script, out: Any) -> dict[str, NDArray[np.uint8]]:
    found = {"the generator": torch.get_rng_state().numpy().copy()}
    for j, tensor in enumerate(out if isinstance(out, (list, tuple)) else [out]):
        found[f"output {j}"] = bits(tensor)
    for j, module in enumerate(script.modules):
        for name, p in module.named_parameters():
            found[f"{j}.{name}"] = bits(p)
            if p.grad is not None:
                found[f"{j}.{name}.grad"] = bits(p.grad)
        found |= {f"{j}.{name}": bits(b) for name, b in module.named_buffers()}
    return found


def _check_same(plain: _Run, taped: _Run) -> None:
    for i, (a, b) in enumerate(zip(plain.states, taped.states, strict=True)):
        assert a.keys() == b.keys(), f"step {i}"
        differ = [name for name in a if not np.array_equal(a[name], b[name])]
        assert not differ, f"step {i}: {differ[:8]} differ ({len(differ)} of {len(a)})"


def compare(
    make: Make, *, steps: int = 12, drops: bool = True, lower: bool = True, kinds: int = 1, apply: bool = False
) -> Session:
    """Run the program plainly, under the plans that save the most memory, and under plans that drop whatever may be dropped.

    Every bit is the same in each step; no measured peak of the last steps is above eager's. `drops`: something is dropped in
    each of them; `lower`: and the peak is below eager's. `kinds`: how many kinds of iteration have plans. Returns the planned
    session, closed.
    """
    plain = _run(make, None, steps, apply, measure=True)
    session = Session(Options(max_overhead=100.0, cost="analytic"))
    taped = _run(make, session, steps, apply, measure=True)
    _check_same(plain, taped)
    _check_same(plain, _run(make, ForcedSession(everything), steps, apply, measure=False))
    planned = len(session.kinds.planned)
    assert planned == kinds, f"{planned} kinds of iteration are planned, {session.unhandled}"
    for before, after in zip(plain.peaks, taped.peaks, strict=True):
        assert after <= before, f"peaks {taped.peaks}, eager's: {plain.peaks}"
        assert after < before or not (drops and lower), f"peaks {taped.peaks}, eager's: {plain.peaks}"
    assert not drops or all(taped.reruns[-MEASURED:]), f"{taped.reruns} ops re-run in the steps"
    return session
