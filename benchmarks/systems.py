"""What is compared: ways to train a workload.

A *case* is a system with a setting. :func:`cases` lists them for a workload, those first that tell the most; :func:`start` puts
one in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.workloads import Workload
    from torch_echo.tape.session import Session

__all__ = ["ECHO", "PEERS", "SYSTEMS", "Case", "Running", "cases", "parse", "start"]

SYSTEMS = {
    "eager": "PyTorch as it is",
    "tape": "torch-echo on eager PyTorch; setting: max_overhead",
    "compile": "torch.compile, Inductor",
    "echo": "torch.compile with torch-echo's backend, Inductor; setting: max_overhead",
    "hand": "torch.utils.checkpoint placed by hand; setting: around what",
    "library": "gradient_checkpointing_enable of transformers",
    "budget": "torch.compile with activation_memory_budget; setting: the budget",
    "paper": "torch-echo on eager PyTorch with the rule of the Echo paper",
    "echo_eager": "torch.compile with torch-echo's backend and PyTorch's kernels; setting: max_overhead",
    "budget_eager": "torch.compile with activation_memory_budget and PyTorch's kernels; setting: the budget",
}
ECHO = ("tape", "echo")
"""torch-echo. (`paper` is a baseline. What ends in `_eager` runs PyTorch's kernels, and is measured only if it is asked for: it
tells partitions apart from code generation.)"""
PEERS = ("compile", "hand", "library", "budget")
"""Those that torch-echo is to be no worse than."""
BUDGETS = ("compile", "budget", "budget_eager")
COMPILED = (*BUDGETS, "echo", "echo_eager")

DEFAULT = 0.05
"""max_overhead where nothing is set."""
_QUICK: tuple[tuple[str, tuple[float, ...]], ...] = (("tape", (DEFAULT, 0.15)), ("hand", ()), ("library", ()))
_FIRST: tuple[tuple[str, tuple[float, ...]], ...] = (
    *_QUICK,
    ("tape", (0.5, 1.0, 0.3)),
    ("compile", ()),
    ("echo", (0.0, DEFAULT)),
)
_THEN: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("budget", (0.5,)),
    ("echo", (0.15,)),
    ("tape", (0.2,)),
    ("budget", (0.2,)),
    ("paper", ()),
    ("echo", (0.3,)),
    ("budget", (0.8,)),
    ("tape", (0.1,)),
)
_ASKED: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("echo_eager", (0.0, DEFAULT, 0.15, 0.3)),
    ("budget_eager", (0.8, 0.5, 0.2)),
)


@dataclass(frozen=True)
class Case:
    """A system with a setting; prints as ``system`` or ``system:setting``."""

    system: str
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.system}:{self.setting}" if self.setting else self.system

    @property
    def caches(self) -> str:
        """Cases of one name here share compilers' caches, so that only the first of them is set up from nothing."""
        return "compile" if self.system == "budget" else self.system


def parse(text: str) -> Case:
    """The case of a text such as ``tape:0.15`` or ``tape:memory_budget=2GiB``. Raises ValueError."""
    system, _, setting = text.partition(":")
    if system not in SYSTEMS:
        raise ValueError(f"{text!r}: no system is called {system!r}; there are {', '.join(SYSTEMS)}")
    if system in ("eager", "compile", "library", "paper") and setting:
        raise ValueError(f"{text!r}: {system} has no settings")
    if system in ("budget", "budget_eager") and setting:
        try:
            fits = 0 <= float(setting) <= 1
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"{text!r}: activation_memory_budget is a fraction from 0 to 1, as in budget:0.5")
    if system in ("tape", "echo", "echo_eager"):
        from torch_echo.options import Options

        try:
            Options(**_options(setting))
        except TypeError:
            names = ", ".join(field.name for field in fields(Options))
            raise ValueError(f"{text!r}: options are {names}") from None
    return Case(system, setting)


def cases(workload: Workload, *, quick: bool = False, every: bool = False) -> Iterator[Case]:
    """Those of a workload, eager first. `quick`: a few; `every`: also those that are measured only if they are asked for."""
    yield Case("eager")
    for system, settings in _QUICK if quick else (_FIRST + _THEN + _ASKED if every else _FIRST + _THEN):
        if system == "hand":
            yield from (Case("hand", place) for place in list(workload.places)[: 1 if quick else None])
        elif system == "library":
            yield from [Case("library")] if workload.checkpointing else []
        else:
            yield from ((Case(system, f"{x:g}") for x in settings) if settings else [Case(system)])


@dataclass
class Running:
    """A case in place."""

    call: Callable[..., Any] | None = None
    """What forward is called through, if not the module."""
    session: Session | None = None


SETTLE = 12
"""Steps within which a session must have planned and checked its plan."""


def start(case: Case, workload: Workload) -> Running:
    """Put a case in place. To be called before the first step; :func:`settle` then runs the first steps."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if case.system == "hand":
        if case.setting not in workload.places:
            raise ValueError(
                f"hand:{case.setting}: this workload can checkpoint {', '.join(workload.places) or 'nothing'}"
            )
        workload.places[case.setting](functools.partial(checkpoint, use_reentrant=False))
    elif case.system == "library":
        if workload.checkpointing is None:
            raise ValueError("library: this workload is not one of transformers")
        workload.checkpointing()
    elif case.system in COMPILED:
        if case.system in BUDGETS:
            import torch._functorch.config

            torch._functorch.config.activation_memory_budget = float(case.setting or 1)
            backend: Any = _eager_kernels() if case.system == "budget_eager" else "inductor"
            return Running(torch.compile(workload.module, backend=backend))
        return Running(torch.compile(workload.module, backend=case.system, options=_options(case.setting)))
    elif case.system in ("tape", "paper"):
        from torch_echo.options import Options
        from torch_echo.tape.session import Session

        options = Options(policy="paper") if case.system == "paper" else Options(**_options(case.setting))
        session = Session(options, name="benchmark")
        session.watch(workload.module)
        return Running(session=session)
    return Running()


def settle(running: Running, step: Callable[[], Any]) -> int:
    """Run steps until the case is as it will be; how many. Raises RuntimeError if a plan does not come into force."""
    session = running.session
    if session is None:
        for _ in range(2 if running.call is None else 3):
            step()
        return 2 if running.call is None else 3
    from torch_echo.tape.session import Phase

    for done in range(SETTLE):
        if session.phase is Phase.STEADY:
            return done
        off = session.phase is Phase.OFF
        step()  # raises what there is to raise, once it is off
        if off:
            break
    raise RuntimeError(f"no plan in force after {done + 1} steps: {session.phase.name.lower()}, {session.unhandled}")


def _eager_kernels() -> Callable[..., Any]:
    """A backend that has PyTorch's own partitioner and kernels."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from torch_echo import compat

    return compat.eager_kernels(min_cut_rematerialization_partition)


def _options(setting: str) -> dict[str, Any]:
    """Options of torch-echo: a number is max_overhead; else ``name=value``, several with commas."""
    if not setting:
        return {}
    if "=" not in setting:
        return {"max_overhead": float(setting)}
    given: dict[str, Any] = {}
    for part in setting.split(","):
        name, _, text = part.partition("=")
        given[name.strip()] = {"true": True, "false": False}.get(text, float(text) if name == "max_overhead" else text)
    return given
