from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torch_echo.cost import CostCache, cache_folder, device_key
from torch_echo.cost import _cache as module

KEY: dict[str, str | int] = {"device": "AMD EPYC (tm) 7/8", "torch": "2.13.0+cpu", "threads": 2}


def new_cache(**change: str | int) -> CostCache:
    return CostCache({**KEY, **change})


def stored(cache: CostCache) -> Path:
    assert cache.path is not None
    return cache.path


class TestPlace:
    def test_own_variable_first_then_xdg_then_home(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TORCH_ECHO_CACHE", str(tmp_path / "own"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_folder() == tmp_path / "own"
        monkeypatch.delenv("TORCH_ECHO_CACHE")
        assert cache_folder() == tmp_path / "xdg" / "torch-echo"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert cache_folder() == tmp_path / ".cache" / "torch-echo"

    def test_a_user_without_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("TORCH_ECHO_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
        assert cache_folder() is None
        cache = new_cache()
        cache.set("ops", "a", 1.0)
        cache.save()
        assert cache.get("ops", "a") == 1.0

    def test_one_file_for_each_device_torch_and_number_of_threads(self) -> None:
        caches = [new_cache(), new_cache(threads=1), new_cache(torch="2.12.0"), new_cache(device="other")]
        assert len({stored(c) for c in caches}) == 4
        assert stored(new_cache()).name == "amd-epyc-tm-7-8-2.13.0+cpu-2.json"

    def test_the_key_of_the_cpu(self) -> None:
        key = device_key(torch.device("cpu"))
        assert key["torch"] == torch.__version__
        assert key["threads"] == torch.get_num_threads()


class TestContent:
    def test_entries_survive(self, cache_folder: Path) -> None:
        cache = new_cache()
        cache.set("ops", "aten.tanh.default(float32[2]/[1]@cpu)", 1.5e-6)
        cache.set("rates", "launch", 2e-6)
        assert not cache_folder.exists()
        cache.save()
        again = new_cache()
        assert again.get("ops", "aten.tanh.default(float32[2]/[1]@cpu)") == 1.5e-6
        assert again.get("rates", "launch") == 2e-6
        assert again.get("ops", "launch") is None

    def test_nothing_new_writes_nothing(self, cache_folder: Path) -> None:
        new_cache().save()
        assert not cache_folder.exists()

    def test_a_write_keeps_what_others_wrote_since(self) -> None:
        one, other = new_cache(), new_cache()
        one.set("ops", "a", 1.0)
        other.set("ops", "b", 2.0)
        one.save()
        other.save()
        assert (new_cache().get("ops", "a"), new_cache().get("ops", "b")) == (1.0, 2.0)

    def test_deleted_between_reading_and_writing(self) -> None:
        cache = new_cache()
        cache.set("ops", "a", 1.0)
        cache.save()
        stored(cache).unlink()
        cache.set("ops", "b", 2.0)
        cache.save()
        assert new_cache().get("ops", "b") == 2.0
        assert cache.get("ops", "a") == 1.0

    def test_the_oldest_entries_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_ENTRIES", 3)
        for name in "abcda":
            cache = new_cache()
            cache.set("ops", name, 1.0)
            cache.save()
        assert [n for n in "abcd" if new_cache().get("ops", n)] == ["a", "c", "d"]

    def test_a_file_of_another_version_is_replaced_without_a_word(self, caplog: pytest.LogCaptureFixture) -> None:
        cache = new_cache()
        cache.set("ops", "a", 1.0)
        cache.save()
        stored(cache).write_text(json.dumps({"version": 999, "ops": "whatever"}))
        fresh = new_cache()
        assert fresh.get("ops", "a") is None
        fresh.set("ops", "b", 1.0)
        fresh.save()
        assert new_cache().get("ops", "b") == 1.0
        assert not caplog.records

    def test_values_that_are_no_durations_are_skipped(self) -> None:
        cache = new_cache()
        cache.set("ops", "good", 1.0)
        cache.save()
        content = json.loads(stored(cache).read_text())
        content["ops"].update({"nan": float("nan"), "negative": -1, "zero": 0, "text": "1", "true": True})
        stored(cache).write_text(json.dumps(content))
        again = new_cache()
        assert [k for k in content["ops"] if again.get("ops", k) is not None] == ["good"]


class TestDamage:
    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b'{"version": "1"}', b"[" * 100_000, None],
        ids=["empty", "cut off", "not text", "a list", "odd version", "deep", "no tables"],
    )
    def test_is_moved_aside_with_one_warning(self, content: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
        path = stored(new_cache())
        path.parent.mkdir()
        path.write_bytes(json.dumps({"version": module.VERSION, **KEY}).encode() if content is None else content)
        cache = new_cache()
        cache.set("ops", "a", 1.0)
        cache.save()
        assert new_cache().get("ops", "a") == 1.0
        assert [r.levelno for r in caplog.records] == [logging.WARNING]
        assert str(path) in caplog.text
        assert path.with_suffix(".corrupt").exists()

    def test_damage_that_cannot_be_moved(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = stored(new_cache())
        path.parent.mkdir()
        path.write_text("{")

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "replace", refuse)
        cache = new_cache()
        cache.set("ops", "a", 1.0)
        cache.save()
        assert cache.get("ops", "a") == 1.0
        assert len(caplog.records) == 1

    def test_a_folder_in_the_place_of_the_file(self, caplog: pytest.LogCaptureFixture) -> None:
        stored(new_cache()).mkdir(parents=True)
        cache = new_cache()
        cache.set("ops", "a", 1.0)
        cache.save()
        assert cache.get("ops", "a") == 1.0
        assert len(caplog.records) == 1


class TestUnwritable:
    def test_a_file_in_the_place_of_the_folder(self, cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        cache_folder.write_text("")
        cache = new_cache()
        for name in "ab":
            cache.set("ops", name, 1.0)
            cache.save()
        assert cache.get("ops", "a") == 1.0
        assert len(caplog.records) == 1
        assert str(cache_folder) in caplog.text

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_without_permission(self, cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        cache_folder.mkdir(mode=0o500)
        cache = new_cache()
        cache.set("ops", "a", 1.0)
        cache.save()
        assert cache.get("ops", "a") == 1.0
        assert len(caplog.records) == 1

    def test_a_full_disk(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        first = new_cache()
        first.set("ops", "a", 1.0)
        first.save()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        cache = new_cache()
        cache.set("ops", "b", 1.0)
        cache.save()
        assert "No space left" in caplog.text
        assert new_cache().get("ops", "a") == 1.0
        assert not list(stored(cache).parent.glob("*.tmp")) + list(stored(cache).parent.glob(".*.tmp"))


def _write_many(writer: int) -> None:
    for i in range(20):
        cache = new_cache()
        cache.set("ops", f"{writer}.{i}", 1.0)
        cache.save()


class TestManyProcesses:
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_writing_at_once_loses_nothing(self) -> None:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_write_many, args=(n,)) for n in range(3)]
        for p in processes:
            p.start()
        path = stored(new_cache())
        while any(p.is_alive() for p in processes):
            if path.exists():
                assert json.loads(path.read_text())["version"] == module.VERSION  # never half a file
            time.sleep(0.001)
        for p in processes:
            p.join()
            assert p.exitcode == 0
        cache = new_cache()
        assert all(cache.get("ops", f"{n}.{i}") for n in range(3) for i in range(20))

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_process_that_is_killed_leaves_no_broken_file(self, caplog: pytest.LogCaptureFixture) -> None:
        for milliseconds in range(1, 40, 3):
            process = multiprocessing.get_context("fork").Process(target=_write_many, args=(milliseconds,))
            process.start()
            time.sleep(milliseconds / 1000)
            process.kill()
            process.join()
            cache = new_cache()
            cache.set("ops", f"after {milliseconds}", 1.0)
            cache.save()
            assert new_cache().get("ops", f"after {milliseconds}") == 1.0
        assert not caplog.records
        assert not list(stored(cache).parent.glob("*.corrupt*"))

    def test_a_lock_that_is_never_released_delays_but_does_not_stop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
        first = new_cache()
        first.set("ops", "a", 1.0)
        first.save()
        lock = stored(first).with_suffix(".lock")
        code = f"import fcntl, time; f = open({str(lock)!r}); fcntl.flock(f, fcntl.LOCK_EX); "
        code += "print('held', flush=True); time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            second = new_cache()
            second.set("ops", "b", 1.0)
            second.save()
            holder.kill()
        assert new_cache().get("ops", "b") == 1.0
