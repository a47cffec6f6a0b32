"""Sizes and budgets as people write them, and the errors that carry them."""

from __future__ import annotations

import pytest

from torch_echo.errors import BudgetInfeasible, OptionError, TorchEchoError
from torch_echo.graph import Kind
from torch_echo.units import format_bytes, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (355_572_122, "339.1 MiB"),
        (8 * 2**30, "8.0 GiB"),
        (5 * 2**40, "5120.0 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format(n: int, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("value", "n"),
    [
        (123, 123),
        ("123", 123),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("8G", 8 * 2**30),
        ("500MB", 500_000_000),
        ("1.5k", 1536),
        (".5MiB", 2**19),
        ("1TB", 10**12),
        ("7b", 7),
    ],
)
def test_parse(value: int | str, n: int) -> None:
    assert parse_bytes(value) == n


@pytest.mark.parametrize("value", ["", "GiB", "8 GiBs", "-1", "1e9", "8,5GiB", "²", -5, None, True, 1.5, "nan"])
def test_not_a_size(value: object) -> None:
    with pytest.raises(OptionError, match="give a number of bytes or a size such as") as caught:
        parse_bytes(value, "size")  # type: ignore[arg-type]
    assert f"size={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "n"),
    [("8GiB", 8 * 2**30), (0.5, 500), (1.0, 1000), ("0.8", 800), ("80%", 800), (".25", 250), ("1.0", 1000), (1, 1)],
)
def test_budget(value: float | str, n: int) -> None:
    assert parse_budget(value, 1000) == n


@pytest.mark.parametrize(
    "value", [0.0, 1.5, -0.1, float("nan"), float("inf"), 0, "0", "0%", "150%", "half", "1.2.3%", False]
)
def test_not_a_budget(value: float | str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_budget(value, 1000)
    assert f"memory_budget={value!r}" in str(caught.value)


def test_a_fraction_of_what() -> None:
    with pytest.raises(OptionError, match="the device's memory is not known"):
        parse_budget(0.5, None)
    assert parse_budget("1GiB", None) == 2**30


def test_option_errors_are_value_errors() -> None:
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, TorchEchoError)


def test_an_infeasible_budget_in_words() -> None:
    error = BudgetInfeasible(2**20, 3 * 2**20, [("head", Kind.FEATURE_MAP, 2 * 2**20), ("", Kind.PARAMETER, 2**20)])
    assert str(error) == (
        "memory_budget 1.0 MiB can't be met: the least reachable peak is 3.0 MiB "
        "(it holds 2.0 MiB feature map of head, 1.0 MiB parameter)"
    )
    assert str(BudgetInfeasible(1, 2)) == "memory_budget 1 B can't be met: the least reachable peak is 2 B"
