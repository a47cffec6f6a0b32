"""Recurrent layers as ops: one op per layer and direction in a graph, whatever the length.

Dynamo refuses ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, and AOTAutograd unrolls them. For our own backends, Dynamo takes in those on
a CPU, and traces our functions (``_layers``; ``_packed`` for packed sequences) in place of PyTorch's. They are made of the ops in
``_ops``.
"""

from typing import Any

from torch import nn
from torch.nn.utils import rnn

from torch_echo.recurrent import _packed
from torch_echo.recurrent._layers import FUNCTIONS

__all__ = ["SUBSTITUTES", "handled"]

SUBSTITUTES: dict[Any, Any] = {
    **FUNCTIONS,
    **dict.fromkeys((nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward), _packed.forward),
    rnn.pack_padded_sequence: _packed.pack_padded_sequence,
    rnn.pad_packed_sequence: _packed.pad_packed_sequence,
}
"""What Dynamo traces, by the function of PyTorch's that it stands for."""


def handled(module: nn.Module) -> bool:
    """Is it a recurrent module that can be taken in?"""
    return isinstance(module, nn.RNNBase) and all(p.device.type == "cpu" for p in module.parameters())
