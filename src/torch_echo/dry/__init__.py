"""Training steps without kernels: what a step would allocate, and when, without its computing anything.

===================  ======================================================
``_run``             the context in which kernels are not called
``_calls``           what is done in place of each op
``_workspace``       bytes that kernels allocate for themselves
===================  ======================================================
"""

from torch_echo.dry._run import DryRun

__all__ = ["DryRun"]
