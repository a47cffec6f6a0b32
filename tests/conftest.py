"""One thread: the machine is shared by the workers of pytest-xdist, and sums do not depend on the number of cores."""

from __future__ import annotations

import gc
import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector, and whoever looks through all objects, need not see it each time."""
    gc.collect()
    gc.freeze()
