"""What a session trains: root modules and their optimizers, and the tensors that these hold between steps."""

from __future__ import annotations

import weakref

import torch

from torch_echo import compat
from torch_echo.graph import Kind

__all__ = ["Trained"]


class Trained:
    """Root modules by name, and the optimizers that have stepped. Holds none of them."""

    def __init__(self) -> None:
        self._roots: dict[str, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add(self, model: torch.nn.Module) -> str:
        """Take a root module in. Its name: that of its class, with a number if another one is called so."""
        name = type(model).__name__
        number = 2
        while name in self._roots and self._roots[name]() is not None:
            name = f"{type(model).__name__}#{number}"
            number += 1
        self._roots[name] = weakref.ref(model)
        return name

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        self._optimizers.add(optimizer)

    def roots(self) -> dict[str, torch.nn.Module]:
        """The root modules that are there, by name."""
        return {name: model for name, ref in self._roots.items() if (model := ref()) is not None}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped."""
        return list(self._optimizers)

    def leaves(self) -> list[torch.Tensor]:
        """The parameters that get gradients."""
        return [p for m in self.roots().values() for p in m.parameters() if p.requires_grad and p.is_leaf]

    def gradients(self) -> list[torch.Tensor]:
        """Those that are there, of parameters."""
        return [
            part
            for m in self.roots().values()
            for p in m.parameters()
            if p.is_leaf and p.grad is not None
            for part in compat.parts_of(p.grad)
        ]

    def optimizer_states(self, device: torch.device | None) -> list[torch.Tensor]:
        """Those on a device."""
        return [
            part
            for optimizer in self.optimizers()
            for state in optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor) and t.device == device
            for part in compat.parts_of(t)
        ]

    def known(self, device: torch.device | None) -> dict[int, tuple[Kind, str]]:
        """Kind and layer of all these tensors' storages, by storage key."""
        known: dict[int, tuple[Kind, str]] = {}
        for name, model in self.roots().items():
            for path, p in model.named_parameters():
                layer = ".".join([name, *path.split(".")[:-1]])
                for kind, t in ((Kind.PARAMETER, p), (Kind.GRADIENT, p.grad if p.is_leaf else None)):
                    for part in compat.parts_of(t) if t is not None else ():
                        known[compat.storage_key(part)] = (kind, layer)
            for path, b in model.named_buffers():
                for part in compat.parts_of(b):
                    known[compat.storage_key(part)] = (Kind.BUFFER, ".".join([name, *path.split(".")[:-1]]))
        for t in self.optimizer_states(device):
            known[compat.storage_key(t)] = (Kind.OPTIMIZER_STATE, "")
        return known
