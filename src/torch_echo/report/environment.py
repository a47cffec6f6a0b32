"""What a bug report needs to say of the machine and the installation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping

from torch_echo._version import __version__

__all__ = ["environment"]

_PACKAGES = ("numpy", "ortools", "transformers", "accelerate", "lightning", "peft")
_VARIABLES = ("TORCH_ECHO", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")


def environment(environ: Mapping[str, str] = os.environ, paths: bool = True) -> dict[str, str]:
    """Versions, devices, settings: name and value, in the order in which they are to be shown. Imports torch. Without `paths`,
    nothing that names a folder of this machine: for results that others are to see."""
    import torch

    from torch_echo.cost import cache_folder
    from torch_echo.options import device_memory

    found = {
        "torch-echo": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "memory": f"{device_memory(torch.device('cpu')) / 2**30:.1f} GiB",
    }
    for i in range(torch.cuda.device_count()):
        memory = device_memory(torch.device("cuda", i)) / 2**30
        found[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, {memory:.1f} GiB, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        found["cuda"] = "none"
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if paths:
        found["executable"] = sys.executable
        found["cost cache"] = str(cache_folder() or "off")
    for name in sorted(environ):
        if name in _VARIABLES or (paths and name.startswith("TORCH_ECHO_")):
            found[name] = environ[name]
    return found
