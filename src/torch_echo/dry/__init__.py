"""Training steps without kernels: what a step would allocate, and when, without its computing anything.

===================  ======================================================
``_run``             the context in which kernels are not called
``_calls``           what is done in place of each op
``_kernels``         what is known of kernels beyond what fake tensors tell
``_cpu``, ``_cuda``  those of a CPU, and of a GPU
===================  ======================================================
"""

from torch_echo.dry._cuda import CUBLAS_WORKSPACE, GRANULE
from torch_echo.dry._run import DryRun

__all__ = ["CUBLAS_WORKSPACE", "GRANULE", "DryRun"]
