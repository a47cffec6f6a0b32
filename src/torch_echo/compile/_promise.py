"""What was promised of a compiled graph, for runs that find it in the compiler's caches and plan nothing.

AOTAutograd's cache skips the partitioner. So a promise is written into a file beside that cache, by the graph as Dynamo made it, by
what it is given, and by what else decides over its plan.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torch_echo import compat
from torch_echo.planning import Plan

__all__ = ["Promise", "place_of", "promised"]


@dataclass(frozen=True)
class Promise:
    """What one compiled graph takes."""

    peak: int
    """Bytes, with all that was alive when it was planned."""
    base_peak: int
    """Bytes, with everything kept, as replayed."""
    extra_seconds: float
    """What its plan adds to a step."""
    step_seconds: float

    @classmethod
    def of(cls, plan: Plan) -> Promise:
        """That of a plan."""
        return cls(plan.peak, plan.base_peak, plan.extra_seconds, plan.step_seconds)

    def write(self, path: Path) -> None:
        """Leave it for later runs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Promise | None:
        """One of an earlier run; None if there is none, or none that can be read."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


def place_of(module: fx.GraphModule, inputs: Sequence[Any], key: str) -> Path:
    """Where the promise of a graph is. To be called before it is compiled: that changes it."""
    given = [
        (str(t.dtype), str(t.device), str(tuple(t.shape)), str(t.stride()), t.requires_grad)
        if isinstance(t, torch.Tensor)
        else str(t)
        for t in inputs
    ]
    parts = [m.print_readable(print_output=False) for m in module.modules() if isinstance(m, fx.GraphModule)]
    text = repr((parts, given, key, compat.sources_key(), torch.__version__))
    return compat.inductor_cache() / "torch_echo" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


promised: list[Promise] = []
"""Of the graphs that were compiled in this process, or found in the caches, in order."""
