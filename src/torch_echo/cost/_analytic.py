"""Durations of ops without running them: a roofline, calibrated once per device.

    seconds = max(FLOPs / peak, bytes moved / bandwidth, elements * seconds per element) + fresh pages + launch

The peak is that of a square matrix product in the op's dtype. Bandwidth depends on size: copies of four sizes are
timed and the time of others is interpolated, so caches are in it. The third term is for ops that are bound by
arithmetic although they have next to no FLOPs (``tanh``, ``exp``, pooling, drawing random numbers, on a CPU above
all): a table assigns such ops to a measured representative. Fresh pages: on a CPU, glibc gives a block of 32 MiB or
more back to the system when it is freed, and each page of the next one costs a fault, which takes longer than to write
it.

What it does not know: small or narrow matrix products that stay far below the peak, kernels that read in an
unfavourable order, algorithms that a library picks for a convolution. An op may be off by a factor of 2, seldom by
more than 5. Calibration takes well below a second and is stored in the cache file.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch

from torch_echo.cost._flops import Work, is_view, work_of
from torch_echo.cost._measured import measure, scrubber
from torch_echo.cost._spec import OpSpec, spec_of

__all__ = ["AnalyticCost", "Rates"]

_COPY_BYTES = (1 << 18, 1 << 20, 1 << 23, 1 << 25)
"""Bytes moved (read and written) by the copies that are timed."""

_FRESH_BYTES = 1 << 25
"""A block of this size is taken afresh from the system each time."""

_RATE_ELEMENTS = 1 << 17
_GEMM_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_GEMM_SECONDS = 0.003
"""A matrix product that takes this long is large enough to tell the peak."""

_BUDGET = 0.01
"""Seconds for one op, unless three runs take longer."""

_DEFAULT_PEAK = 1e11

_REPRESENTATIVES: dict[str, Any] = {
    "tanh": torch.ops.aten.tanh.default,
    "exp": torch.ops.aten.exp.default,
    "sigmoid": torch.ops.aten.sigmoid.default,
    "gelu": torch.ops.aten.gelu.default,
    "log": torch.ops.aten.log.default,
    "softmax": torch.ops.aten._softmax.default,
    "pow": torch.ops.aten.pow.Tensor_Tensor,
    "bernoulli": torch.ops.aten.bernoulli.p,
    "dropout": torch.ops.aten.native_dropout.default,
    "normal": torch.ops.aten.randn_like.default,
    "batch_norm": torch.ops.aten.native_batch_norm.default,
    "max_pool": torch.ops.aten.max_pool2d_with_indices.default,
}
"""Ops whose seconds per element are measured."""

_EXTRA_ARGS: dict[str, tuple[Any, ...]] = {
    "softmax": (-1, False),
    "bernoulli": (0.5,),
    "dropout": (0.5, True),
    "batch_norm": (None, None, None, None, True, 0.1, 1e-5),
    "max_pool": ([2, 2], [2, 2]),
}
_SHAPES = {"batch_norm": (2, 16, 64, 64), "max_pool": (2, 16, 64, 64)}

_SLOW: dict[str, tuple[str, ...]] = {
    "tanh": ("tanh", "atanh", "asinh", "acosh", "sinh", "cosh", "tan", "mish"),
    "exp": ("exp", "exp2", "expm1", "sin", "cos", "logit", "log_sigmoid_forward", "elu", "celu", "selu"),
    "sigmoid": ("sigmoid", "silu", "silu_backward", "glu", "softplus"),
    "gelu": ("gelu", "gelu_backward", "erf", "erfc", "erfinv", "mish_backward"),
    "log": ("log", "log2", "log10", "log1p", "logaddexp", "binary_cross_entropy", "xlogy"),
    "softmax": ("_softmax", "_log_softmax", "logsumexp", "_safe_softmax", "cumsum", "logcumsumexp",
                "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    "pow": ("pow", "lgamma", "digamma", "atan2"),
    "bernoulli": ("bernoulli", "uniform", "rand", "rand_like", "random", "randint", "randint_like", "rrelu_with_noise"),
    "dropout": ("native_dropout", "_fused_dropout"),
    "normal": ("normal", "randn", "randn_like", "exponential", "log_normal", "cauchy", "geometric", "multinomial",
               "poisson", "normal_functional"),
    "batch_norm": ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "native_group_norm"),
    "max_pool": ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d",
                 "_adaptive_avg_pool2d", "adaptive_max_pool2d"),
}  # fmt: skip

_CLASS_OF = {name: representative for representative, names in _SLOW.items() for name in names}


class Rates(Protocol):
    """Where the rates of a device are found and put: its cache file."""

    def get(self, section: str, key: str) -> float | None:
        """One of them, or None."""
        ...

    def set(self, section: str, key: str, value: float) -> None:
        """A new one."""
        ...

    def save(self) -> None:
        """Keep the new ones."""
        ...


class AnalyticCost:
    """The roofline of one device. Calibrates what an op needs when it is first needed."""

    def __init__(self, cache: Rates, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._scrub: torch.Tensor | None = None
        self._work: dict[OpSpec, float] = {}

    def seconds(self, func: Any, spec: OpSpec) -> float:
        """Estimated duration of one call. Cost: that of `work_of` for a new description, else a few microseconds."""
        known = self._work.get(spec)
        if known is None:
            known = self._work[spec] = self._estimate(func, spec)
        return known

    def save(self) -> None:
        """Write the calibration to the cache file, and let go of the memory used for measuring."""
        self._cache.save()
        self._scrub = None

    def _estimate(self, func: Any, spec: OpSpec) -> float:
        if is_view(func):
            return self.launch()
        work = work_of(func, spec)
        fresh = work.bytes_written * self.fresh() if work.largest_write >= _FRESH_BYTES else 0.0
        busy = max(self._compute(work), self.copy_seconds(work.bytes_moved), self._slow(spec, work))
        return self.launch() + busy + fresh

    def _compute(self, work: Work) -> float:
        return work.flops / self.peak(work.dtype) if work.flops else 0.0

    def _slow(self, spec: OpSpec, work: Work) -> float:
        name = spec.op.removeprefix("aten.").partition(".")[0]
        name = name if name.startswith("_foreach") else name.rstrip("_")
        representative = _CLASS_OF.get(name)
        return work.elements * self.rate(representative) if representative else 0.0

    def launch(self) -> float:
        """Seconds that the smallest op takes."""
        return self._calibrated("launch", lambda: self._time(torch.ops.aten.add.Tensor, self._zeros(1), self._zeros(1)))

    def peak(self, dtype: str) -> float:
        """FLOPs per second of a large matrix product."""
        return self._calibrated(f"peak {dtype}", lambda: self._measure_peak(dtype))

    def rate(self, representative: str) -> float:
        """Seconds per element of an op that is bound by arithmetic."""
        return self._calibrated(f"per element {representative}", lambda: self._measure_rate(representative))

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds to move so many bytes, launch not included. Grows with `nbytes`."""
        points = [(0, 0.0)]
        for size in _COPY_BYTES:
            points.append((size, max(self._copy(size), points[-1][1])))
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if nbytes <= x1:
                return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)
        return points[-1][1] * nbytes / points[-1][0]

    def fresh(self) -> float:
        """Seconds per byte that writing into memory fresh from the system costs more."""
        if self._device.type != "cpu":
            return 0.0

        def run() -> float:
            copy = self._time(torch.ops.aten.clone.default, self._zeros(_FRESH_BYTES // 4))
            return max(copy - self.copy_seconds(2 * _FRESH_BYTES), 1e-9) / _FRESH_BYTES

        return self._calibrated("per fresh byte", run)

    def _copy(self, nbytes: int) -> float:
        def run() -> float:
            return max(self._time(torch.ops.aten.clone.default, self._zeros(nbytes // 8)) - self.launch(), 1e-9)

        return self._calibrated(f"copy {nbytes}", run)

    def _measure_rate(self, representative: str) -> float:
        x = self._zeros(*_SHAPES.get(representative, (_RATE_ELEMENTS // 512, 512)))
        extra = (x,) if representative == "pow" else _EXTRA_ARGS.get(representative, ())
        seconds = self._time(_REPRESENTATIVES[representative], x, *extra)
        return max(seconds - self.launch(), 1e-9) / _RATE_ELEMENTS

    def _measure_peak(self, dtype: str) -> float:
        best = 0.0
        for n in _GEMM_SIZES:
            x = torch.empty((n, n), dtype=getattr(torch, dtype), device="meta")
            try:
                seconds = self._time(torch.ops.aten.mm.default, x, x)
            except RuntimeError:  # no matrix product in this dtype here
                return best or (_DEFAULT_PEAK if dtype == "float32" else self.peak("float32"))
            best = max(best, 2.0 * n**3 / seconds)
            if seconds > _GEMM_SECONDS:
                break
        return best

    def _calibrated(self, name: str, run: Any) -> float:
        known = self._cache.get("rates", name)
        if known is None:
            known = float(run())
            self._cache.set("rates", name, known)
        return known

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    def _time(self, func: Any, *args: Any) -> float:
        spec = spec_of(func, args)
        on_device = tuple(a._replace(device=str(self._device)) if hasattr(a, "shape") else a for a in spec.args)
        if self._scrub is None:
            self._scrub = scrubber(self._device)
        return measure(func, spec._replace(args=on_device), budget=_BUDGET, pick=min, scrub=self._scrub)
