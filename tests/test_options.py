"""The options: what they take, what they refuse and how they say so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torch_echo.errors import OptionError
from torch_echo.options import Options


class TestChecks:
    def test_defaults(self) -> None:
        assert Options() == Options(
            memory_budget=None,
            max_overhead=None,
            policy="echo",
            cost="measured",
            on_infeasible="raise",
            reorder=False,
            strict=False,
        )

    def test_is_frozen_and_keyword_only(self) -> None:
        with pytest.raises(TypeError):
            Options("8GiB")  # type: ignore[call-arg]
        with pytest.raises(AttributeError):
            Options().strict = True  # type: ignore[misc]

    @pytest.mark.parametrize("budget", ["8GiB", "512 MiB", 1 << 30, 0.5, "0.5"])
    def test_budgets(self, budget: int | float | str) -> None:
        assert Options(memory_budget=budget).memory_budget == budget

    @pytest.mark.parametrize("overhead", [0, 0.0, 0.03, 2])
    def test_overheads(self, overhead: float) -> None:
        assert Options(max_overhead=overhead).max_overhead == overhead

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"memory_budget": "lots"}, ["memory_budget", "'lots'"]),
            ({"memory_budget": "8 parsecs"}, ["memory_budget", "'8 parsecs'"]),
            ({"memory_budget": ""}, ["memory_budget", "''"]),
            ({"memory_budget": -1}, ["memory_budget", "-1"]),
            ({"memory_budget": 0}, ["memory_budget", "0"]),
            ({"memory_budget": -0.5}, ["memory_budget", "-0.5"]),
            ({"memory_budget": 1.5}, ["memory_budget", "1.5"]),
            ({"memory_budget": math.nan}, ["memory_budget", "nan"]),
            ({"memory_budget": True}, ["memory_budget", "True", "8GiB"]),
            ({"memory_budget": [1]}, ["memory_budget", "[1]", "8GiB"]),
            ({"max_overhead": -0.1}, ["max_overhead", "-0.1", "0 or more"]),
            ({"max_overhead": math.nan}, ["max_overhead", "nan", "0 or more"]),
            ({"max_overhead": math.inf}, ["max_overhead", "inf", "0 or more"]),
            ({"max_overhead": "0.1"}, ["max_overhead", "'0.1'", "0 or more"]),
            ({"max_overhead": False}, ["max_overhead", "False", "0 or more"]),
            (
                {"memory_budget": "8GiB", "max_overhead": 0.1},
                ["memory_budget='8GiB'", "max_overhead=0.1", "contradict"],
            ),
            ({"policy": "best"}, ["policy", "'best'", "'echo' or 'paper'"]),
            ({"policy": None}, ["policy", "None", "'echo' or 'paper'"]),
            ({"policy": ["echo"]}, ["policy", "['echo']", "'echo' or 'paper'"]),
            ({"cost": "guess"}, ["cost", "'guess'", "'measured' or 'analytic'"]),
            ({"on_infeasible": "ignore"}, ["on_infeasible", "'ignore'", "'raise' or 'least'"]),
            ({"strict": 1}, ["strict", "1", "True or False"]),
            ({"reorder": "yes"}, ["reorder", "'yes'", "True or False"]),
            ({"strict": "yes"}, ["strict", "'yes'", "True or False"]),
        ],
        ids=str,
    )
    def test_refused(self, given: dict[str, Any], named: list[str]) -> None:
        with pytest.raises(OptionError) as caught:
            Options(**given)
        message = str(caught.value)
        assert all(each in message for each in named), message
        assert "\n" not in message


class TestEnvironment:
    def test_nothing_set(self) -> None:
        assert Options.from_env({"TORCH_ECHO": "1", "TORCH_ECHO_POLICY": " ", "HOME": "/"}) == Options()

    def test_everything_set(self) -> None:
        env = {
            "TORCH_ECHO_MAX_OVERHEAD": "0.1",
            "TORCH_ECHO_POLICY": "paper",
            "TORCH_ECHO_COST": "analytic",
            "TORCH_ECHO_ON_INFEASIBLE": "least",
            "TORCH_ECHO_REORDER": "1",
            "TORCH_ECHO_STRICT": "yes",
        }
        options = Options(
            max_overhead=0.1, policy="paper", cost="analytic", on_infeasible="least", reorder=True, strict=True
        )
        assert Options.from_env(env) == options

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("MEMORY_BUDGET", "lots"),
            ("MAX_OVERHEAD", "much"),
            ("MAX_OVERHEAD", "-1"),
            ("POLICY", "x"),
            ("STRICT", "maybe"),
        ],
    )
    def test_refused(self, name: str, text: str) -> None:
        with pytest.raises(OptionError, match=f"{name.lower()}.*{text}"):
            Options.from_env({f"TORCH_ECHO_{name}": text})

    def test_contradiction(self) -> None:
        with pytest.raises(OptionError, match="contradict"):
            Options.from_env({"TORCH_ECHO_MEMORY_BUDGET": "8GiB", "TORCH_ECHO_MAX_OVERHEAD": "0.1"})

    def test_overrides_win_also_over_their_opposite(self) -> None:
        env = {"TORCH_ECHO_MEMORY_BUDGET": "8GiB", "TORCH_ECHO_POLICY": "paper", "TORCH_ECHO_STRICT": "1"}
        assert Options.from_env(env, max_overhead="0.2", policy="echo") == Options(max_overhead=0.2, strict=True)

    @pytest.mark.parametrize(
        "options",
        [
            Options(),
            Options(memory_budget="8GiB", reorder=True, strict=True),
            Options(max_overhead=0.25, policy="paper", cost="analytic", on_infeasible="least"),
        ],
    )
    def test_round_trip(self, options: Options) -> None:
        assert Options.from_env(options.to_env()) == options

    @pytest.mark.parametrize("budget", [1 << 30, 0.5])
    def test_numbers_come_back_with_their_meaning(self, budget: float) -> None:
        back = Options.from_env(Options(memory_budget=budget).to_env())
        assert back.budget_for(1 << 32) == Options(memory_budget=budget).budget_for(1 << 32)


class TestBudget:
    def test_none(self) -> None:
        assert Options().budget_for(1 << 30) is None
        assert Options().budget_for(None) is None

    def test_size_needs_no_device(self) -> None:
        assert Options(memory_budget="8GiB").budget_for(None) == 8 << 30

    def test_fraction(self) -> None:
        assert Options(memory_budget=0.5).budget_for(1 << 30) == 1 << 29
        with pytest.raises(OptionError, match=r"memory_budget=0\.5.*not known"):
            Options(memory_budget=0.5).budget_for(None)

    def test_device(self) -> None:
        torch = pytest.importorskip("torch")
        budget = Options(memory_budget=0.5).budget_bytes(torch.device("cpu"))
        assert budget is not None and 1 << 28 < budget < 1 << 50
