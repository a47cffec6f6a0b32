from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path / "cost-cache"
    monkeypatch.setenv("TORCH_ECHO_CACHE", str(folder))
    return folder
