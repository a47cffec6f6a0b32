"""Bytes that a CPU's kernels allocate for themselves, which fake tensors know nothing of: they even declare the workspace that
oneDNN's LSTM returns as empty.

A call that is small enough is run once on made-up data, and what it took is remembered in the cost models' cache file. One that is
not is run with fewer samples (an LSTM: with fewer steps), twice, and what it takes grows along a line: kernels copy their arguments
into layouts that they prefer, and have buffers for each sample.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_echo import compat
from torch_echo.cost import OpSpec, TensorSpec, Workspaces, undisturbed, work_of
from torch_echo.recurrent._onednn import workspace_bytes

__all__ = ["CPUKernels"]

aten = torch.ops.aten

_LSTM, _LSTM_BACKWARD = "aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"

_LIMITS, _CONVOLUTION_LIMITS = (64 << 20, 2e9), (256 << 20, 5e10)
"""Bytes that a call which is run may read and write, and FLOPs that it may take. With few samples oneDNN may choose another layout
for a convolution, and with it other copies: a second or two are worth it."""

_WEIGHTS = {
    "convolution": (1, 2), "convolution_backward": (2,), "convolution_overrideable": (1, 2),
    "native_batch_norm": (1, 2, 3, 4), "_native_batch_norm_legit": (1, 2, 3, 4),
    "native_batch_norm_backward": (2, 3, 4, 5, 6), "native_group_norm": (1, 2), "native_group_norm_backward": (2, 3, 4),
}  # fmt: skip
"""Arguments by channel: there may be as many of these as samples. Not all of these kernels look whether there are enough."""

_STEPS = (16, 48)
"""Time steps of an LSTM that are run."""


class CPUKernels(Workspaces):
    """Knows what the kernels of a CPU take beyond their outputs, at any size."""

    def own_outputs(self, spec: OpSpec) -> dict[int, int]:
        """See :class:`torch_echo.dry._kernels.Kernels`."""
        if spec.op == _LSTM and torch.is_grad_enabled():
            x, w_hh = spec.args[0], spec.args[2]
            steps, batch, inputs = x.shape
            return {3: workspace_bytes(steps, batch, inputs, w_hh.shape[1], x.itemsize())}
        return {}

    def workspace(self, func: Any, spec: OpSpec) -> int:
        """See :class:`torch_echo.dry._kernels.Kernels`."""
        if spec.op in (_LSTM, _LSTM_BACKWARD):
            steps = spec.args[0].shape[0]
            return self._at(func, spec, steps, *_STEPS) if steps > _STEPS[1] else int(self._of(func, spec))
        work = work_of(func, spec)
        largest_bytes, longest = _CONVOLUTION_LIMITS if "convolution" in spec.op else _LIMITS
        share = min(1.0, largest_bytes / max(1, work.bytes_moved), longest / max(1.0, work.flops))
        largest = max(spec.tensors(), key=TensorSpec.numel)
        samples = largest.shape[0] if largest.shape else 1
        most = max(2, int(samples * share))
        if most >= samples:
            return self.nbytes(func, spec)
        if work_of(func, _with_samples(spec, samples, most)).bytes_moved > 2 * largest_bytes:
            return 0  # parameters alone are too large: a matrix product, which takes nothing
        return self._at(func, spec, samples, most // 2, most)

    def _at(self, func: Any, spec: OpSpec, samples: int, few: int, more: int) -> int:
        """What it takes for so many samples, by what it takes for few and for more of them."""
        low, high = (int(self._of(func, _with_samples(spec, samples, n))) for n in (few, more))
        return max(0, round(low + (high - low) / (more - few) * (samples - few)))

    def _run(self, func: Any, spec: OpSpec) -> float:
        if spec.op in (_LSTM, _LSTM_BACKWARD):
            return float(_run_lstm(spec))
        return super()._run(func, spec)


def _with_samples(spec: OpSpec, samples: int, fewer: int) -> OpSpec:
    """The call with the first dimension of its tensors, where that is `samples`, made smaller."""

    def node(a: Any) -> Any:
        if type(a) is TensorSpec:
            if not a.shape or a.shape[0] != samples or (len(a.shape) > 1 and a.stride[0] < max(a.stride)):
                return a
            return a._replace(shape=(fewer, *a.shape[1:]))
        if type(a) is tuple and all(type(part) is int for part in a):  # a shape
            return (fewer, *a[1:]) if len(a) > 2 and a[0] == samples else a
        return tuple([node(part) for part in a]) if type(a) is tuple else a

    weights = _WEIGHTS.get(spec.op.split(".")[1], ())
    return spec._replace(args=tuple([a if i in weights else node(a) for i, a in enumerate(spec.args)]))


def _run_lstm(spec: OpSpec) -> int:
    """What a layer takes in its forward pass, or in its backward pass on what forward leaves: made-up data would not do."""
    backward = spec.op == _LSTM_BACKWARD
    reverse = spec.args[13 if backward else 7].text == "True"
    cpu = torch.device("cpu")
    with undisturbed(cpu):
        given = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in spec.args[:7]]
        sizes = (2, spec.args[2].shape[1], 1, True)

        def forward() -> Any:
            return aten.mkldnn_rnn_layer(*given, reverse, [], *sizes, False, False, True)

        *made, workspace = forward()
        grads = [None if a is None else torch.zeros_like(t) for t, a in zip(made, spec.args[10:13], strict=True)]

        def back() -> Any:
            last: tuple[Any, ...] = (*sizes, True, False, [], False, workspace)
            return aten.mkldnn_rnn_layer_backward(*given, *made, *grads, reverse, *last)

        run = back if backward else forward
        run()
        profile = compat.MemoryProfile()
        profile.start()
        try:
            result = run()
        finally:
            profile.stop()
        del result
    most, left = profile.rise(cpu)
    return most - left
