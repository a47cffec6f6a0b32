"""Graphs survive a file exactly, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from planning.graphs import examples, random_graphs, transformer
from torch_echo.errors import GraphFileError
from torch_echo.graph import Kind, TrainingGraph, Trait
from torch_echo.graphio import VERSION, load_graph, save_graph


@examples(100)
@given(random_graphs(keeps_graph=True))
def test_round_trip(graph: TrainingGraph) -> None:
    import tempfile

    graph.meta = {"device": "cpu", "ünï": "cödé\n"}
    with tempfile.TemporaryDirectory() as folder:
        save_graph(graph, Path(folder) / "graph.echo")
        assert load_graph(Path(folder) / "graph.echo") == graph


def test_types_and_exact_seconds(tmp_path: Path) -> None:
    graph = transformer(1)
    graph.ops[0].seconds = 0.1 + 0.2
    save_graph(graph, str(tmp_path / "g"))
    loaded = load_graph(str(tmp_path / "g"))
    assert loaded == graph
    assert isinstance(loaded.storages[0].kind, Kind)
    assert isinstance(loaded.ops[0].traits, Trait)
    assert type(loaded.ops[0].reads) is tuple
    assert type(loaded.values[0].keepable) is bool


def test_empty_graph(tmp_path: Path) -> None:
    save_graph(TrainingGraph(), tmp_path / "g")
    assert load_graph(tmp_path / "g") == TrainingGraph()


def test_written_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g"
    save_graph(transformer(1), path)
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_graph(transformer(2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["g"]


class TestNotAGraph:
    @pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + b"\0" * 50, b'{"format": 1}'])
    def test_other_files(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "g.echo"
        path.write_bytes(content)
        with pytest.raises(GraphFileError) as caught:
            load_graph(path)
        assert str(caught.value).startswith(f"{path}: not a training graph")
        assert "expected a file written by torch-echo" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_other_archives(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "g.npz", x=np.zeros(3))
        with pytest.raises(GraphFileError, match="not a training graph"):
            load_graph(tmp_path / "g.npz")

    def test_another_version(self, tmp_path: Path) -> None:
        rewrite(tmp_path / "g", lambda name, data: header(data, version=VERSION + 1) if name == "header.json" else data)
        with pytest.raises(GraphFileError, match=f"format version {VERSION + 1} is not supported"):
            load_graph(tmp_path / "g")

    def test_a_missing_column(self, tmp_path: Path) -> None:
        rewrite(tmp_path / "g", lambda name, data: None if name == "ops.reads.npy" else data)
        with pytest.raises(GraphFileError, match=r"ops\.reads\.npy"):
            load_graph(tmp_path / "g")

    def test_pickled_objects_are_refused(self, tmp_path: Path) -> None:
        import io

        buffer = io.BytesIO()
        np.save(buffer, np.array([{"a": 1}], object), allow_pickle=True)
        rewrite(tmp_path / "g", lambda name, data: buffer.getvalue() if name == "ops.seconds.npy" else data)
        with pytest.raises(GraphFileError):
            load_graph(tmp_path / "g")

    def test_an_inconsistent_graph(self, tmp_path: Path) -> None:
        graph = transformer(1)
        graph.values[-1].storage = 10**6
        save_graph(graph, tmp_path / "g")
        with pytest.raises(GraphFileError, match="storage 1000000 does not exist"):
            load_graph(tmp_path / "g")

    @pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
    def test_cut_short(self, tmp_path: Path, part: float) -> None:
        path = tmp_path / "g"
        save_graph(transformer(2), path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * part)])
        with pytest.raises(GraphFileError):
            load_graph(path)

    @pytest.mark.parametrize("place", range(0, 100, 7))
    def test_flipped_bytes(self, tmp_path: Path, place: int) -> None:
        path = tmp_path / "g"
        graph = transformer(2)
        save_graph(graph, path)
        whole = bytearray(path.read_bytes())
        whole[len(whole) * place // 100] ^= 0xFF
        path.write_bytes(whole)
        try:
            loaded = load_graph(path)
        except GraphFileError:
            return
        assert loaded == graph  # a byte that does not matter

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            load_graph(tmp_path / "none")


def header(data: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(data), **changes}).encode()


def rewrite(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    """Save a graph, and change the members of its archive; None drops one."""
    save_graph(transformer(1), path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            changed = change(name, data)
            if changed is not None:
                archive.writestr(name, changed)
