"""A spread of op calls as training programs make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
randn = torch.randn
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Record(TorchDispatchMode):
    """The op calls of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def record(block: Callable[[], Any]) -> list[Call]:
    """The op calls that `block` makes."""
    mode = Record()
    with mode:
        block()
    return mode.calls


def lstm_calls() -> list[Call]:
    """What nn.LSTM dispatches."""
    layer = torch.nn.LSTM(8, 16, num_layers=2)
    return record(lambda: layer(randn(5, 3, 8)))


def calls() -> dict[str, Call]:
    """By name."""
    image = randn(2, 4, 8, 8)
    logits = randn(6, 10)
    target = torch.randint(0, 10, (6,))
    plain: dict[str, tuple[Any, ...]] = {
        "addmm": (aten.addmm.default, randn(5), randn(3, 4), randn(4, 5)),
        "addmm of a transposed weight": (aten.addmm.default, randn(5), randn(3, 4), randn(5, 4).t()),
        "bmm": (aten.bmm.default, randn(2, 3, 4), randn(2, 4, 5)),
        "add of an expanded tensor": (aten.add.Tensor, randn(2, 3, 4), randn(2, 1, 4).expand(2, 3, 4)),
        "mul of a slice": (aten.mul.Tensor, randn(7, 5)[1:, 1:3], 2.0),
        "embedding": (aten.embedding.default, randn(50, 4), torch.randint(0, 50, (3, 7))),
        "native_dropout": (aten.native_dropout.default, randn(8, 8), 0.5, True),
        "bernoulli_": (aten.bernoulli_.float, randn(8, 8), 0.5),
        "bernoulli of probabilities": (aten.bernoulli.default, torch.rand(8, 8)),
        "native_layer_norm": (aten.native_layer_norm.default, randn(3, 8), [8], randn(8), randn(8), 1e-5),
        "convolution": (
            aten.convolution.default, image, randn(6, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
        ),
        "channels_last convolution": (
            aten.convolution.default, image.to(memory_format=torch.channels_last), randn(6, 4, 3, 3), randn(6),
            [2, 2], [1, 1], [1, 1], False, [0, 0], 1,
        ),
        "max_pool2d_with_indices": (aten.max_pool2d_with_indices.default, image, [2, 2], [2, 2]),
        "native_batch_norm": (
            aten.native_batch_norm.default, image, randn(4), randn(4), torch.zeros(4), torch.ones(4), True, 0.1, 1e-5,
        ),
        "index": (aten.index.Tensor, randn(9, 5), [None, torch.randint(0, 5, (3,))]),
        "index by a mask": (aten.index.Tensor, randn(9, 5), [randn(9, 5) > 0]),
        "index_put_": (aten.index_put_.default, randn(9, 5), [torch.randint(0, 9, (3,))], randn(3, 5), True),
        "gather": (aten.gather.default, randn(4, 6), 1, torch.randint(0, 6, (4, 2))),
        "scatter_add_": (aten.scatter_add_.default, randn(4, 6), 1, torch.randint(0, 6, (4, 2)), randn(4, 2)),
        "_log_softmax": (aten._log_softmax.default, logits, 1, False),
        "nll_loss_forward": (aten.nll_loss_forward.default, logits, target, None, 1, -100),
        "cat": (aten.cat.default, [randn(2, 3), randn(4, 3)]),
        "pow": (aten.pow.Tensor_Scalar, randn(3), 2),
        "bfloat16 mm": (aten.mm.default, randn(3, 4).bfloat16(), randn(4, 5).bfloat16()),
        "bool and": (aten.bitwise_and.Tensor, randn(4) > 0, randn(4) > 0),
        "empty tensor": (aten.add.Tensor, randn(0, 3), randn(0, 3)),
        "scalar tensor": (aten.mul.Tensor, randn(3), torch.tensor(2.0)),
        "view": (aten.view.default, randn(4, 6), [6, 4]),
        "complex": (aten.mul.Tensor, torch.complex(randn(3), randn(3)), 1j),
    }  # fmt: skip
    found: dict[str, Call] = {name: (call[0], call[1:], {}) for name, call in plain.items()}
    found["div with rounding"] = (
        aten.div.Tensor_mode,
        (torch.arange(4), torch.arange(1, 5)),
        {"rounding_mode": "floor"},
    )
    found["_to_copy"] = (aten._to_copy.default, (randn(4, 6),), {"dtype": torch.float64})
    found["clone"] = (aten.clone.default, (randn(2, 3, 4, 5),), {"memory_format": torch.channels_last})
    found["full"] = (aten.full.default, ([2, 3], 1.5), {"device": torch.device("cpu"), "pin_memory": False})
    found["a generator"] = (aten.normal_.default, (randn(4),), {"generator": torch.Generator()})
    found["mkldnn_rnn_layer"] = next(c for c in lstm_calls() if "mkldnn_rnn_layer" in str(c[0]))
    return found
