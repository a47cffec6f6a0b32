"""What a plan does and why, as one object: it prints as a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_echo.footprint import Footprint, replay
from torch_echo.graph import Phase, TrainingGraph
from torch_echo.planning import Plan, bound

if TYPE_CHECKING:
    from torch_echo.options import Options

__all__ = ["Explanation"]


MOST_OPS = 400
"""For which :meth:`Explanation.distance` tries."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """A training graph, a plan for it, and the footprint without and with the plan. ``str()`` gives the table."""

    graph: TrainingGraph
    """The training iteration that was recorded."""
    plan: Plan
    """What is dropped and rebuilt, with the reason for each decision."""
    before: Footprint
    """The replay with every feature map kept; of the graph as it was, where the plan is for a rewritten one."""
    after: Footprint
    """The replay under the plan."""
    kind: str = ""
    """The modules that this kind of iteration calls."""
    steps: int = 0
    """How many iterations of it there were."""
    others: tuple[Explanation, ...] = ()
    """Where the iterations of a run are of several kinds with plans of their own (a GAN's two), those of the others."""

    @classmethod
    def of(cls, graph: TrainingGraph, made: Plan, kind: str = "", steps: int = 0) -> Explanation:
        """A plan for a graph that is as it was recorded."""
        return cls(graph, made, replay(graph.plain), replay(graph, made.dropped), kind, steps)

    @classmethod
    def of_file(cls, path: str | Path, options: Options) -> Explanation:
        """Plan the graph in a file with these options. Raises GraphFileError, BudgetInfeasible or OptionError."""
        from torch_echo.graphio import load_graph
        from torch_echo.planning import plan

        graph = load_graph(path)
        made = plan(
            graph,
            budget=options.budget_for(_device_memory(graph)),
            max_overhead=options.max_overhead,
            policy=options.policy,
            on_infeasible=options.on_infeasible,
        )
        return cls.of(graph, made)

    def distance(self, time_limit: float = 60.0) -> str:
        """In words: how far the plan's time is from the least at its peak. `time_limit`: seconds for the solver."""
        from torch_echo.report.tables import format_seconds

        ops = sum(op.phase == Phase.FORWARD for op in self.graph.ops)
        if ops > MOST_OPS:
            return f"no bound: an integer program of {ops:,} forward ops would take hours; it is for {MOST_OPS} at most"
        found = bound(self.graph, self.plan.peak, time_limit=time_limit)
        mine = self.after.extra_seconds
        least = f"at this peak no plan that rebuilds values once takes less than {format_seconds(found.seconds)}"
        if mine <= found.seconds * 1.0005:
            return f"{least}: this one is optimal"
        near = f"this one takes {format_seconds(mine)}"
        return f"{least}{'' if found.optimal else ' (the optimum may be higher: it was not found in time)'}: {near}"

    def __str__(self) -> str:
        from torch_echo.report.tables import render_explanation

        parts = []
        for each in (self, *self.others):
            title = f"iterations of {each.kind} ({each.steps:,} so far)\n\n" if self.others else ""
            parts.append(title + render_explanation(each.plan, each.before, each.after).rstrip("\n"))
        return "\n\n\n".join(parts)

    def __repr__(self) -> str:
        peaks = f"peak {self.plan.peak} instead of {self.before.peak} bytes"
        return f"<{type(self).__name__}: {peaks}; print it for the table>"


def _device_memory(graph: TrainingGraph) -> int | None:
    """Memory of the device that the graph was recorded on, where the file says so."""
    text = graph.meta.get("device_memory", "")
    return int(text) if text.isdigit() else None
