"""What a run of the tape engine did, as plain data: the engine fills it in, the reporters read it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch_echo.graph import TrainingGraph
from torch_echo.report.comparison import Comparison

__all__ = ["KindSummary", "Summary", "rebuilt_by_layer"]


@dataclass(kw_only=True)
class KindSummary:
    """One kind of iteration, where a run has several with plans; as in :class:`Summary`."""

    name: str
    """The modules that it calls."""
    steps: int
    measured_peak: int | None
    eager_peak: int
    predicted_peak: int
    extra_seconds: float
    step_seconds: float


@dataclass(kw_only=True)
class Summary:
    """One run over its whole life; sizes in bytes, durations in seconds per step."""

    steps: int = 0
    """Training steps seen."""
    measured_peak: int | None = None
    """The allocator's highest peak of a step under the plan: the whole device. None where no step was measured."""
    eager_peak: int | None = None
    """What that peak would have been with every feature map kept."""
    predicted_peak: int | None = None
    """What the plan said that the peak would be."""
    base_bytes: int = 0
    """Bytes under every peak that no plan can change: parameters and optimizer state."""
    extra_seconds: float | None = None
    """Estimated time that rebuilding adds to a step."""
    step_seconds: float | None = None
    """Duration of a step without rebuilding."""
    loss_bytes: int = 0
    """Bytes by which cross-entropies in one block lower the peak, before anything is rebuilt."""
    rebuilt: list[tuple[str, int, int]] = field(default_factory=list)
    """(layer, bytes, values) dropped and rebuilt in a step."""
    unhandled: list[tuple[str, str, str]] = field(default_factory=list)
    """(what, why, where) was left to plain PyTorch; `where` is "file:line", or "" where no line is to blame."""
    comparison: Comparison | None = None
    """What a comparison with plain PyTorch found, if there was one."""
    compiled_graphs: int = 0
    """How many graphs of ``torch.compile`` were planned; 0 with the tape. Peaks are then the largest graph's."""
    planned_together: bool = False
    """Were they planned together? Peaks are then the whole step's."""
    rank: int = 0
    """Whose summary it is, in a distributed run."""
    ranks: int = 1
    """Processes of that run."""
    rank_peaks: dict[int, int] = field(default_factory=dict)
    """On rank 0: the measured peaks of all ranks that told theirs."""
    kinds: list[KindSummary] = field(default_factory=list)
    """Where iterations of several kinds have plans (a GAN's two), each of them. Peaks above are then the highest of all, times are
    means over steps, and what is rebuilt is that of one iteration of each kind."""
    plan_notes: list[str] = field(default_factory=list)
    """Remarks of the planner, one line each."""


def rebuilt_by_layer(plans: Iterable[tuple[TrainingGraph, Collection[int]]]) -> list[tuple[str, int, int]]:
    """What plans drop and rebuild, as :attr:`Summary.rebuilt`, the most first."""
    by_layer: dict[str, tuple[int, int]] = {}
    for graph, dropped in plans:
        for v in dropped:
            layer = graph.ops[graph.values[v].producer].layer
            size, count = by_layer.get(layer, (0, 0))
            by_layer[layer] = (size + graph.nbytes(v), count + 1)
    return sorted(((k, b, n) for k, (b, n) in by_layer.items()), key=lambda r: -r[1])
