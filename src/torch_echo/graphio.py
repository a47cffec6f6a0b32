"""Training graphs as files.

A file is a zip archive: ``header.json`` with the format's name, its version, the graph's scalars and its table of
texts, and one ``.npy`` per column (no pickled objects), so that large graphs load quickly and small ones can be looked
at with common tools.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_echo.errors import GraphFileError
from torch_echo.graph import (
    BackwardPass,
    CallSite,
    Fused,
    Kind,
    Op,
    OpClass,
    Phase,
    PlainFree,
    Save,
    Storage,
    TrainingGraph,
    Trait,
    Value,
)

__all__ = ["FORMAT", "VERSION", "load_graph", "save_graph"]

FORMAT = "torch-echo training graph"
VERSION = 4

_SCALARS = {
    "ticks": int, "base_bytes": int, "step_seconds": float, "rerun_overhead": float, "rebuilt_byte_seconds": float,
    "rng_state_bytes": int,
}  # fmt: skip
_STORAGE = {"nbytes": int, "kind": Kind, "layer": str, "alloc": int, "free": int, "held": int, "fused": Fused}
_COLUMNS: dict[str, tuple[type, dict[str, Any]]] = {
    "storages": (Storage, _STORAGE),
    "values": (Value, {"storage": int, "version": int, "producer": int, "keepable": bool}),
    "ops": (
        Op,
        {
            "name": str, "layer": str, "phase": Phase, "cls": int, "instance": int, "start": int, "end": int,
            "reads": tuple, "writes": tuple, "seconds": float, "flops": float, "bytes_moved": int, "reuse_seconds": float,
            "call": int, "workspace": int, "site": int, "turn": int, "traits": Trait,
        },
    ),
    "saves": (
        Save,
        {
            "value": int, "pack": int, "unpack": int, "release": int, "reader": int, "layer": str, "call": int,
            "site": int, "turn": int,
        },
    ),
    "classes": (OpClass, {"name": str, "layer": str, "site": tuple}),
    "sites": (CallSite, {"layer": str, "call": int, "place": tuple, "count": int}),
    "passes": (BackwardPass, {"start": int, "end": int, "keeps_graph": bool}),
    "plain_storages": (Storage, _STORAGE),
    "plain_frees": (PlainFree, {"storage": int, "tick": int}),
}  # fmt: skip


def save_graph(graph: TrainingGraph, path: str | os.PathLike[str]) -> None:
    """Write `graph` to `path`: either completely or not at all. Cost: linear."""
    texts: dict[str, int] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for table, (_, columns) in _COLUMNS.items():
        rows = getattr(graph, table)
        for column, kind in columns.items():
            cells = [getattr(row, column) for row in rows]
            key = f"{table}.{column}"
            if kind is str:
                arrays[key] = np.array([texts.setdefault(c, len(texts)) for c in cells], np.int64)
            elif kind is tuple:
                arrays[key] = np.array([x for cell in cells for x in cell], np.int64)
                arrays[f"{key}.ptr"] = np.cumsum([0] + [len(cell) for cell in cells], dtype=np.int64)
            else:
                arrays[key] = np.array(cells, {float: np.float64, bool: np.bool_}.get(kind, np.int64))
    header = {
        "format": FORMAT,
        "version": VERSION,
        "scalars": {name: getattr(graph, name) for name in _SCALARS},
        "meta": graph.meta,
        "texts": list(texts),
    }
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                archive.writestr("header.json", json.dumps(header, indent=1))
                for key, array in arrays.items():
                    buffer = io.BytesIO()
                    np.save(buffer, array, allow_pickle=False)
                    archive.writestr(f"{key}.npy", buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # as open() would have made it
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_graph(path: str | os.PathLike[str]) -> TrainingGraph:
    """Read a graph that :func:`save_graph` wrote, and check it. Raises GraphFileError; a file that is not there,
    OSError."""
    expected = f"expected a file written by torch-echo (format version {VERSION})"
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read("header.json"))
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise GraphFileError(f"{os.fspath(path)}: not a training graph; {expected}")
            if header.get("version") != VERSION:
                raise GraphFileError(
                    f"{os.fspath(path)}: format version {header.get('version')!r} is not supported; {expected}"
                )
            graph = _build(header, archive)
        graph.check()
    except GraphFileError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise GraphFileError(f"{os.fspath(path)}: cannot be read ({error}); {expected}") from error
    except Exception as error:  # a damaged file can fail in any way inside zipfile, zlib, json or numpy
        what = " ".join(str(error).split()) or type(error).__name__
        raise GraphFileError(f"{os.fspath(path)}: not a training graph or damaged ({what}); {expected}") from error
    return graph


def _build(header: dict[str, Any], archive: zipfile.ZipFile) -> TrainingGraph:
    def column(key: str) -> NDArray[Any]:
        array = np.load(io.BytesIO(archive.read(f"{key}.npy")), allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "ifb":
            raise ValueError(f"column {key} is not a list of numbers")
        return array

    texts = [str(text) for text in header["texts"]]
    graph = TrainingGraph(meta={str(k): str(v) for k, v in header["meta"].items()})
    for name, kind in _SCALARS.items():
        setattr(graph, name, kind(header["scalars"][name]))
    for table, (row, columns) in _COLUMNS.items():
        cells: list[list[Any]] = []
        for name, kind in columns.items():
            array: list[Any] = column(f"{table}.{name}").tolist()
            if kind is str:
                if array and min(array) < 0:
                    raise ValueError(f"column {table}.{name} has a negative text number")
                cells.append([texts[i] for i in array])
            elif kind is tuple:
                ptr = column(f"{table}.{name}.ptr").tolist()
                if not ptr or ptr[-1] != len(array):
                    raise ValueError(f"column {table}.{name} does not fit its row lengths")
                cells.append([tuple(array[a:b]) for a, b in itertools.pairwise(ptr)])
            else:
                cells.append([kind(x) for x in array])
        setattr(graph, table, [row(*c) for c in zip(*cells, strict=True)])
    return graph
