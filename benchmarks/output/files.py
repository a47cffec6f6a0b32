"""The JSON file of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_echo.errors import TorchEchoError

__all__ = ["FORMAT", "ResultsError", "head", "joined", "predictions", "read", "write"]

FORMAT = 1
"""Version of the layout. `records` holds one object for each case; those that were measured have `peak_bytes` (everything on the
device), `state_bytes` (parameters, buffers, optimizer state), `seconds` (median of a step), `seconds_ratio` (to eager's, in the
same rounds), their quartiles (`_spread`), `setup_seconds`, and how losses and gradients compare with eager's; others have `error`,
`infeasible` or `skipped`. In predictions (`predicted` is true): `preset`, `device`, `size`, and `peak_bytes` or `error`."""


class ResultsError(TorchEchoError):
    """A file does not hold the results of a run that this version can read."""


def head() -> dict[str, Any]:
    """What a file of results begins with."""
    from torch_echo._version import __version__
    from torch_echo.report.environment import environment

    return {"format": FORMAT, "torch_echo": __version__, "environment": environment(paths=False)}


def read(path: Path, predicted: bool = False) -> dict[str, Any]:
    """The results in a file: measured ones, or `predicted` ones. Raises ResultsError."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ResultsError(f"can't read the results in {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{str(path)!r} holds no results: {error}") from error
    if not isinstance(found, dict) or "records" not in found or found.get("format") != FORMAT:
        given = found.get("format") if isinstance(found, dict) else None
        raise ResultsError(f"{str(path)!r} has format {given!r}: this version reads results of format {FORMAT}")
    if bool(found.get("predicted")) != predicted:
        kinds = ("predicted", "measured") if predicted else ("measured", "predicted")
        raise ResultsError(f"{str(path)!r} holds {kinds[1]} results: {kinds[0]} ones are read here")
    return found


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of several runs of one preset on one device: what a later run has of a workload (its cases; what fits under a limit)
    takes the place of what an earlier one has. Raises ResultsError."""
    whole, *others = parts
    for part in others:
        for name in ("preset", "device", "torch_echo"):
            if part[name] != whole[name]:
                raise ResultsError(f"results with {name} {whole[name]!r} and {part[name]!r} are not put together")
        for rows in ("records", "scale", "throughput"):
            new = {r["workload"] for r in part[rows]}
            whole[rows] = [r for r in whole[rows] if r["workload"] not in new] + part[rows]
        whole["workloads"] |= part["workloads"]
        whole["seconds"] += part["seconds"]
    return whole


def predictions(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Predictions of several runs, all of them. Raises ResultsError."""
    whole, *others = parts
    for part in others:
        if part["torch_echo"] != whole["torch_echo"]:
            raise ResultsError(
                f"predictions of torch-echo {whole['torch_echo']} and {part['torch_echo']} are not put together"
            )
        whole["records"] += part["records"]
    return whole


def write(results: dict[str, Any], path: Path) -> None:
    """Write results."""
    path.write_text(json.dumps(results, indent=1) + "\n")
