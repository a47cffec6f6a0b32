"""Cases in processes of their own, each on one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "environment", "run"]

ROOT = Path(__file__).resolve().parents[1]


def environment(**given: str) -> dict[str, str]:
    """Of a process on one thread, with these variables beside this process's own."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **given}


def run(module: str, *args: str, environment: Mapping[str, str]) -> Any:
    """What ``python -m module args…`` prints in its last line, which is JSON. Raises CalledProcessError."""
    command = [sys.executable, "-m", module, *args]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])
