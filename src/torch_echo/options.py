"""The options of torch-echo, checked in one place for the API, the command line and the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from torch_echo.errors import OptionError
from torch_echo.units import parse_budget

if TYPE_CHECKING:
    import torch

__all__ = ["Cost", "OnInfeasible", "Options", "Policy", "device_memory", "refuse_check"]

Policy = Literal["echo", "paper"]
Cost = Literal["measured", "analytic"]
OnInfeasible = Literal["raise", "least"]

_PREFIX = "TORCH_ECHO_"
_FLAGS = ("check", "reorder", "strict")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asks for. Raises :class:`OptionError`, naming the option, the value and what is allowed."""

    memory_budget: int | float | str | None = None
    """Peak to stay under in each process, everything on the device included: bytes, "8GiB", or a fraction of the device's
    memory (on CPU, of this process's part of the machine's). The plan with the least extra time that fits is taken."""
    memory_limit: int | float | str | None = None
    """Have allocations fail beyond this, as if the device had no more: given as `memory_budget` is. For tests, on a CPU above
    all, where PyTorch's allocator knows no limit. It is checked after each op of a taped forward pass, and in backward whenever
    a saved tensor is read. Of the tape engine."""
    max_overhead: float | None = None
    """Fraction of a step's time that rebuilding may add, at least 0. The plan with the least memory is taken.
    0.05 where neither this nor a budget is set."""
    policy: Policy = "echo"
    """"echo": minimum cuts and a search judged by the replayed footprint. "paper": the rule of the Echo paper."""
    cost: Cost = "measured"
    """Where the durations of ops come from: "measured" on this device, or an "analytic" estimate."""
    on_infeasible: OnInfeasible = "raise"
    """A budget below the least reachable peak: "raise" BudgetInfeasible, or take the plan with the "least" peak."""
    reorder: bool = False
    """Also allow what computes the same sums in another order: results are then equal up to rounding, not to the bit."""
    check: bool = False
    """Compare one step under the plan with plain PyTorch, to the bit; a model that differs is left to plain PyTorch."""
    strict: bool = False
    """Make an error of what can't be handled, instead of running it as plain PyTorch with a warning."""

    def __post_init__(self) -> None:
        for name in ("memory_budget", "memory_limit"):
            if getattr(self, name) is not None:
                _check_budget(name, getattr(self, name))
        if self.max_overhead is not None:
            _check_overhead(self.max_overhead)
        if self.memory_budget is not None and self.max_overhead is not None:
            raise OptionError(
                f"memory_budget={self.memory_budget!r} and max_overhead={self.max_overhead!r} contradict each other: "
                "set one of them"
            )
        _check_choice("policy", self.policy, get_args(Policy))
        _check_choice("cost", self.cost, get_args(Cost))
        _check_choice("on_infeasible", self.on_infeasible, get_args(OnInfeasible))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                _reject(name, getattr(self, name), "True or False")

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **overrides: Any) -> Options:
        """Options from ``TORCH_ECHO_MEMORY_BUDGET``, ``TORCH_ECHO_MAX_OVERHEAD`` and so on; empty means not set.

        `overrides` (values, or text as on a command line) win over the environment; an overhead given there also wins
        over a budget in the environment, and the other way round.
        """
        given: dict[str, Any] = {}
        for name in _NAMES:
            text = environ.get(_PREFIX + name.upper(), "").strip()
            if text:
                given[name] = text
        if overrides.keys() & {"memory_budget", "max_overhead"}:
            given.pop("memory_budget", None)
            given.pop("max_overhead", None)
        given.update(overrides)
        if isinstance(given.get("max_overhead"), str):
            given["max_overhead"] = _number("max_overhead", given["max_overhead"])
        for name in _FLAGS:
            if isinstance(given.get(name), str):
                given[name] = _truth(name, given[name])
        return cls(**given)

    def budget_bytes(self, device: torch.device) -> int | None:
        """The memory budget in bytes on `device`; None without one."""
        return self.budget_for(device_memory(device) if self.memory_budget is not None else None)

    def limit_bytes(self, device: torch.device) -> int | None:
        """The simulated limit in bytes on `device`; None without one."""
        return (
            None
            if self.memory_limit is None
            else parse_budget(self.memory_limit, device_memory(device), "memory_limit")
        )

    def budget_for(self, device_memory: int | None) -> int | None:
        """The memory budget in bytes on a device with so much memory (None: not known); None without a budget."""
        return None if self.memory_budget is None else parse_budget(self.memory_budget, device_memory)

    def to_env(self) -> dict[str, str]:
        """The environment variables that stand for these options; `from_env` reads them back. Defaults are left out."""
        env = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                env[_PREFIX + field.name.upper()] = ("1" if value else "0") if field.name in _FLAGS else str(value)
        return env


_NAMES = tuple(field.name for field in fields(Options))

spawned_together = 1
"""Processes that ``torch.multiprocessing`` has spawned together with this one."""


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Processes of a distributed run on this machine: as torchrun says, or as they were spawned."""
    told = environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(told) if told.isdecimal() else 1, spawned_together)


def device_memory(device: torch.device) -> int:
    """Bytes of the device's memory. For the CPU, of the machine's, of which each process of a distributed run has its part."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks()


def refuse_check(options: Options) -> None:
    """For engines that can't compare a step with plain PyTorch. Raises OptionError where that is asked for."""
    if options.check:
        raise OptionError("check=True: only the tape engine compares a step with plain PyTorch, torch.compile does not")


def _reject(option: str, value: object, allowed: str) -> NoReturn:
    raise OptionError(f"{option}={value!r}: must be {allowed}")


def _check_choice(option: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _reject(option, value, " or ".join(repr(each) for each in allowed))


def _check_overhead(value: object) -> None:
    allowed = "a fraction of the step's time, 0 or more (0.05 is 5%)"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _reject("max_overhead", value, allowed)
    if not 0 <= value < math.inf:  # also refuses nan
        _reject("max_overhead", value, allowed)


def _check_budget(option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        _reject(option, value, 'bytes, a size as in "8GiB", or a fraction of the device\'s memory between 0 and 1')
    parse_budget(value, 1 << 40, option)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        _reject(option, text, "a number, 0 or more (0.05 is 5%)")


def _truth(option: str, text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        _reject(option, text, f"one of {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE
