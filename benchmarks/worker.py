"""One case of one workload, in a process of its own: set up, measured, and then asked for steps in turn with others."""

from __future__ import annotations

import copy
import os
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.systems import BUDGETS, Case, Running, settle, start

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchmarks.measure import Seeded
    from benchmarks.workloads import Trainer
    from torch_echo.footprint import Footprint

__all__ = ["CHECKED", "Task", "serve"]

CHECKED = 3
"""Steps, from one state, whose losses are compared with eager's."""
LAYERS = 10
"""Rows of a composition that are told one by one."""


@dataclass(frozen=True)
class Task:
    """What a worker is to do."""

    workload: str
    preset: str
    case: Case
    device: str
    folder: Path
    """For caches, for what eager PyTorch left to compare with, and for what the process prints."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the workload's size that are others than the preset's."""

    @property
    def name(self) -> str:
        """Of the workload, in this size."""
        return "-".join([self.workload, *(f"{k}={v}" for k, v in self.changes.items())])


def serve(task: Task, pipe: Connection) -> None:
    """The process's main function. Sends the figures of the case; then for each number received, those of so many steps; ends at 0.

    Instead of figures it sends ``{"error": ...}`` or ``{"infeasible": ...}``, and ends.
    """
    log = os.open(task.folder / f"{task.name}-{task.case}.log".replace(" ", "_"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    caches = task.folder / "caches" / task.workload / task.case.caches
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TORCH_ECHO_CACHE": str(task.folder / "costs")}
    os.environ["TORCH_ECHO"] = ""
    warnings.filterwarnings("ignore")
    import torch

    from torch_echo import BudgetInfeasible
    from torch_echo.tape._heap import keep_heap

    if task.device == "cpu":
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each case has one core
        torch.set_num_threads(1)
        keep_heap()  # as torch-echo has it, so that it is not given credit for fewer page faults
    try:
        _serve(task, pipe)
    except BudgetInfeasible as error:
        pipe.send({"infeasible": str(error), "floor": error.floor})
    except Exception as error:  # told to the parent, which goes on with the other cases
        traceback.print_exc()
        text = " ".join(str(error).strip().splitlines()[:2])  # compilers name the cause in the second line
        pipe.send({"error": f"{type(error).__name__}: {text}"[:300]})


def _serve(task: Task, pipe: Connection) -> None:
    import torch

    from benchmarks.measure import Meter, Seeded, total_peak
    from benchmarks.workloads import Trainer, build
    from torch_echo import compat

    device = torch.device(task.device)
    workload = build(task.workload, task.preset, task.device, **task.changes)
    running = start(task.case, workload)
    trainer = Trainer(workload, running.call)
    step, meter = Seeded(trainer), Meter(device)
    began = time.perf_counter()
    steps = settle(running, step)
    meter.wait()
    if task.case.system in BUDGETS and not compat.graphs_compiled():
        pipe.send({"skipped": "torch.compile found nothing to compile: it is eager PyTorch"})
        return
    figures: dict[str, Any] = {"setup_seconds": time.perf_counter() - began, "setup_steps": steps}
    reference = task.folder / f"{task.name}.reference"
    if task.case.system == "eager":
        _leave(step, reference)
    if reference.exists():
        figures |= _compare(step, reference)
    figures |= {f"{name}_bytes": n for name, n in asdict(total_peak(step, device)).items() if n is not None}
    figures |= _told(running, task.case, trainer)
    figures["seconds"] = meter(step)["seconds"]
    trainer.clear()
    pipe.send(figures)
    while count := pipe.recv():
        found = meter(step, count)
        trainer.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # others take their turn now
        pipe.send(found)
    if running.session is not None:
        running.session.close()


def _tensors(step: Seeded) -> list[Any]:
    """Parameters and buffers, in an order that does not depend on how parts were wrapped."""
    return [*step.trainer.module.parameters(), *step.trainer.module.buffers()]


def _run(step: Seeded) -> tuple[list[float], list[Any]]:
    """Losses of the steps that are compared, and the gradients of the first."""
    losses, gradients = [], []
    step.done = 1000
    for i in range(CHECKED):
        losses.append(float(step()))
        if i == 0:
            gradients = [None if p.grad is None else p.grad.to("cpu", copy=True) for p in step.trainer.parameters]
    step.trainer.clear()
    return losses, gradients


def _leave(step: Seeded, reference: Path) -> None:
    """Write down a state, and what eager PyTorch makes of it."""
    import torch

    tensors = [t.detach().to("cpu", copy=True) for t in _tensors(step)]
    optimizer = step.trainer.optimizer.state_dict()
    torch.save({"tensors": tensors, "optimizer": optimizer}, reference)
    losses, gradients = _run(step)
    torch.save({"losses": losses, "gradients": gradients}, reference.with_suffix(".results"))


def _compare(step: Seeded, reference: Path) -> dict[str, Any]:
    """The same steps from the same state, compared with what eager PyTorch made of it (for eager itself: is it repeatable?)."""
    import torch

    from benchmarks.measure import distance

    state = torch.load(reference, mmap=True)
    with torch.no_grad():
        for mine, theirs in zip(_tensors(step), state["tensors"], strict=True):
            mine.copy_(theirs)
    step.trainer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    del state
    losses, gradients = _run(step)
    wanted = torch.load(reference.with_suffix(".results"), mmap=True)
    equal, apart = distance(gradients, wanted["gradients"])
    return {
        "losses": losses,
        "losses_equal": losses == wanted["losses"],
        "loss_distance": max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, wanted["losses"], strict=True)),
        "gradients_equal": equal,
        "gradient_distance": apart,
    }


def _told(running: Running, case: Case, trainer: Trainer) -> dict[str, Any]:
    """What torch-echo says of its plan."""
    if running.session is not None:
        found = running.session.explanation()
        if found is None or found.others:
            return {}
        return {
            "predicted_bytes": found.plan.peak,
            "predicted_eager_bytes": found.plan.base_peak,
            "floor_bytes": found.plan.floor,
            "estimated_ratio": 1 + found.plan.overhead,
            "before": _composition(found.before),
            "after": _composition(found.after),
        }
    if case.system in ("echo", "echo_eager"):
        from benchmarks.measure import optimizer_bytes
        from torch_echo.compile import plans

        told = {"graphs": len(plans), "estimated_ratio": 1 + sum(p.plan.overhead for p in plans)} if plans else {}
        if len(plans) == 1:  # the whole of forward and backward, in which the optimizer's states are there too
            told["predicted_bytes"] = plans[0].plan.peak + optimizer_bytes(trainer)
        return told
    return {}


def _composition(footprint: Footprint) -> Sequence[tuple[str, str, int]]:
    """(layer, kind, bytes) at the peak, largest first; small ones together."""
    rows = [(layer, kind.name.lower(), n) for (layer, kind), n in footprint.composition().items()]
    return [*rows[:LAYERS], *([("", "others", sum(n for *_, n in rows[LAYERS:]))] if rows[LAYERS:] else [])]
