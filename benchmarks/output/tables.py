"""The terminal: results, and what goes on while they are measured."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchmarks.figures import Measured, of
from benchmarks.output.sections import Section, case_section, predicted_sections, scale_sections, summary_sections
from benchmarks.systems import Case

__all__ = ["Progress", "show", "show_predictions", "show_section", "show_summary"]


class Progress:
    """What goes on: on a terminal, a table of the workload that is measured; elsewhere, a line for each thing that happens."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.began = time.monotonic()
        self.rows: dict[str, str] = {}
        self.names: list[str] = []
        self.live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def __call__(self, workload: str, case: Case, what: str) -> None:
        """Something happened."""
        if workload not in self.names:
            self.names.append(workload)
            self.rows = {}
        self.rows[str(case)] = what
        seconds = time.monotonic() - self.began
        if self.live is None:
            if what != "…":
                line = f"{seconds:5.0f} s  {workload:16} {case!s:24} {what}"
                self.console.print(line, soft_wrap=True, markup=False)
            return
        table = Table(title=f"{workload}, {len(self.names)} of {self.total}; {seconds:.0f} s", box=None)
        for _ in range(2):
            table.add_column(no_wrap=True)
        for name, said in self.rows.items():
            table.add_row(name, Text(said))
        self.live.update(table, refresh=True)


def show(results: dict[str, Any], console: Console) -> None:
    """Everything."""
    said = f"torch-echo {results['torch_echo']}, torch {results['environment']['torch']}, {results['device']}"
    console.print(said, markup=False)
    for name, about in results["workloads"].items():
        show_section(case_section(name, about, of(results["records"], name)), console)
    show_summary(results, console)


def show_summary(results: dict[str, Any], console: Console) -> None:
    """What is told of all workloads together."""
    for section in (*summary_sections(results["records"]), *scale_sections(results)):
        show_section(section, console)
    console.print(f"measured in {results['seconds'] / 60:.1f} minutes")


def show_predictions(results: dict[str, Any], measured: Measured, console: Console) -> None:
    """Predicted peaks."""
    console.print("Predicted, not measured")
    for section in predicted_sections(results["records"], measured):
        show_section(section, console)


def show_section(section: Section, console: Console) -> None:
    """Heading, sentences, table."""
    console.print()
    console.print(Text(section.title, "bold"))
    for line in section.lines:
        console.print(Text(line, "dim"))
    if not section.rows:
        console.print("none")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for i, name in enumerate(section.head):
        numbers = all(row[i][:1] in "0123456789+-" for row in section.rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
