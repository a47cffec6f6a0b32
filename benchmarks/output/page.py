"""The results pages of the documentation, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures import Measured, of
from benchmarks.output.sections import (
    Section,
    case_section,
    composition_section,
    predicted_sections,
    scale_sections,
    summary_sections,
)
from benchmarks.systems import SYSTEMS

__all__ = ["page", "predicted_page"]

HOW = """
Peaks are the allocator's, of a whole step with Adam, everything counted; *above state* is without parameters, buffers and optimizer
state. Every case has a process of its own; the processes take turns, and a time is the median over the rounds of its ratio to eager
PyTorch's in the same round, with its quartiles. *Set up* is the time until a case runs as it will: recording, planning, compiling;
settings of one compiler share its caches, so that only the first of them starts from nothing. Gradients and three losses are
compared with eager's from the same state: *equal* to the bit, or their relative distance. (Inductor draws other random numbers:
with dropout, other gradients.)
"""


PREDICTED = """
What `torch_echo.predict` says of training steps that are not run: peaks of whole steps with Adam, everything counted, by replay, of
eager PyTorch and of torch-echo's plans. *Extra time* is the plan's estimate, in times of a roofline model. Nothing of this is
measured; where the same case was, *off* says by how much the prediction misses it. `cuda` is a GPU that is not there: what
cuDNN's kernels allocate for themselves is an estimate. Settings with `reorder` may add in another order; all others
are equal to the bit.
"""


def page(results: dict[str, Any], picture: str) -> str:
    """The whole page. `picture`: where it finds the image."""
    records = results["records"]
    lines = ["# Results", "", *_how(results), "", f"![Peak memory against step time]({picture})", ""]
    for section in (*summary_sections(records), *scale_sections(results)):
        lines += [f"## {section.title}", "", *_markdown(section)]
    lines += ["## All cases", ""]
    for name, about in results["workloads"].items():
        mine = of(records, name)
        section = case_section(name, about, mine)
        lines += [f"### {section.title}", "", *_markdown(section)]
        if (held := composition_section(mine)) is not None:
            lines += _markdown(held)
    return "\n".join(lines).rstrip("\n") + "\n"


def predicted_page(results: dict[str, Any], measured: Measured) -> str:
    """The page of predicted peaks."""
    said = results["environment"]
    lines = [
        "# Predicted",
        "",
        "Made by `make results` from files that `torch-echo bench --predict` wrote; nothing here is typed.",
    ]
    lines += [f"torch-echo {results['torch_echo']}, torch {said['torch']}.", *PREDICTED.splitlines(), ""]
    for section in predicted_sections(results["records"], measured):
        lines += [f"## {section.title}", "", *_markdown(section)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _how(results: dict[str, Any]) -> Iterator[str]:
    said = results["environment"]
    preset, minutes = results["preset"], results["seconds"] / 60
    yield f"Made by `make results` from the file that `torch-echo bench --preset {preset}` wrote; nothing here is typed."
    yield f"torch-echo {results['torch_echo']}, torch {said['torch']}, {results['device']} ({said.get('cuda:0', said['cpu'])}),"
    yield f"{minutes:.0f} minutes."
    yield HOW
    yield from (f"- `{name}`: {what}" for name, what in SYSTEMS.items())


def _markdown(section: Section) -> Iterator[str]:
    yield from section.lines
    yield ""
    if section.rows:
        yield "| " + " | ".join(section.head) + " |"
        yield "| " + " | ".join("---" for _ in section.head) + " |"
        yield from ("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in section.rows)
    else:
        yield "None."
    yield ""
