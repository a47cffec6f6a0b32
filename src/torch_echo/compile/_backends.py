"""Backends of ``torch.compile``: ``backend="echo_eager"``."""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_echo import compat
from torch_echo.compile._partition import Partitioner
from torch_echo.errors import OptionError
from torch_echo.options import Options

__all__ = ["echo_eager"]


def echo_eager(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
    """PyTorch's own kernels, called one after the other, with forward and backward split by torch-echo's plan.

    ``torch.compile(model, backend="echo_eager", options={"max_overhead": 0.1})``; options as for :func:`torch_echo.apply`.
    """
    from torch._dynamo.backends.common import aot_autograd

    options = parse(kwargs.pop("options", None))
    if kwargs:
        raise OptionError(f'{", ".join(kwargs)}: the backend "echo_eager" takes nothing but options')
    compiler = aot_autograd(
        fw_compiler=compat.boxed_compiler,
        bw_compiler=compat.boxed_compiler,
        partition_fn=Partitioner(options),
        keep_inference_input_mutations=True,
    )
    return compiler(module, example_inputs)


def parse(given: dict[str, Any] | None) -> Options:
    """Options of a backend. Raises OptionError."""
    known = set(Options.__dataclass_fields__)
    unknown = set(given or {}) - known
    if unknown:
        raise OptionError(f"options {sorted(unknown)}: must be among {sorted(known)}")
    return Options(**(given or {}))
