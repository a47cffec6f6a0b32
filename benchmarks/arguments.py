"""Options that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict

from benchmarks.workloads import size_of

__all__ = ["check_sizes", "sizes"]


def sizes(parser: argparse.ArgumentParser, given: Iterable[str]) -> dict[str, int]:
    """Fields of a size and their values, of texts as in ``batch=64``; others end the program."""
    changes = {}
    for text in given:
        name, _, value = text.partition("=")
        if not value.isdecimal() or int(value) < 1:
            parser.error(f"--size {text}: must be FIELD=N with a number from 1 on, as in batch=64")
        changes[name] = int(value)
    return changes


def check_sizes(
    parser: argparse.ArgumentParser, workloads: Iterable[str], preset: str, changes: dict[str, int]
) -> None:
    """End the program if a workload's size has no such field."""
    for name in workloads:
        fields = asdict(size_of(name, preset))
        if unknown := changes.keys() - fields.keys():
            parser.error(f"--size {', '.join(unknown)}: {name} has {', '.join(fields)}")
