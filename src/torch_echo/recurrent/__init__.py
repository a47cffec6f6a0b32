"""Recurrent layers as ops: one op per layer and direction in a graph, whatever the length.

Dynamo refuses ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, and AOTAutograd unrolls them. For our own backends, Dynamo traces the
functions of ``_layers`` where these modules call into PyTorch; they are made of the ops in ``_ops``.
"""

from torch_echo.recurrent._layers import SUBSTITUTES

__all__ = ["SUBSTITUTES"]
