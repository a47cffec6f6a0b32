"""The state that a training step changes: taken, put back, compared."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torch_echo import compat
from torch_echo.report.comparison import Comparison
from torch_echo.tape._check import comparable, distance, random_states, restore, same

__all__ = ["TrainingState"]


class TrainingState:
    """Parameters, gradients and buffers of models, states of optimizers and random generators, as they are now."""

    def __init__(
        self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], device: torch.device | None
    ) -> None:
        self._device = device
        self._models = models
        self._optimizers = [(each, copy.deepcopy(each.state_dict())) for each in optimizers]
        self._random = random_states(device)
        self._parameters = [(p, p.detach().clone(), _clone(p.grad)) for p in _named(models, "parameters").values()]
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for model in models
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def restore(self) -> None:
        """Put all back."""
        with torch.no_grad():
            for p, content, gradient in self._parameters:
                p.copy_(content)
                p.grad = _clone(gradient)
            for module, name, buffer, content in self._buffers:
                buffer.copy_(content)
                setattr(module, name, buffer)
        for optimizer, state in self._optimizers:
            optimizer.load_state_dict(copy.deepcopy(state))  # it takes the tensors as they are
        restore(self._random, self._device)

    def after(self, returned: Any) -> Outcome:
        """The state as it is by now, after a step that returned something."""
        return Outcome(self._models, returned, self._device)


class Outcome:
    """What a training step led to: copies of it all."""

    def __init__(self, models: list[torch.nn.Module], returned: Any, device: torch.device | None) -> None:
        parameters = _named(models, "parameters")
        returned_tensors = enumerate(compat.tensors_of(returned))
        self._random = random_states(device)
        self._tensors: dict[str, dict[str, torch.Tensor]] = {
            "losses": {f"returned tensor {i}": t.detach().clone() for i, t in returned_tensors},
            "gradients": {f"gradient of {n}": p.grad.clone() for n, p in parameters.items() if p.grad is not None},
            "buffers": {f"buffer {n}": b.clone() for n, b in _named(models, "buffers").items()},
            "parameters": {f"parameter {n}": p.detach().clone() for n, p in parameters.items()},
        }

    def differences(self, other: Outcome) -> list[str]:
        """What is not the same in another outcome."""
        comparison = Comparison()
        self.compare(other, comparison)
        return comparison.differences

    def compare(self, other: Outcome, found: Comparison) -> None:
        """Note in `found` what was compared, and what of `other` is not as here."""
        for kind, mine in self._tensors.items():
            theirs = other._tensors[kind]
            if mine.keys() != theirs.keys():
                found.differences.append(f"{kind}: {sorted(mine.keys() ^ theirs.keys())} are there once, once not")
            pairs = [(what, t, theirs[what]) for what, t in mine.items() if what in theirs and comparable(t)]
            setattr(found, kind, len(pairs))
            for what, expected, got in pairs:
                if not same(expected, got, found.exact):
                    found.differences.append(f"{what}: {distance(expected, got)}")
        for kind in self._random.keys() & {"cpu", "cuda"}:
            found.random_states += 1
            if not torch.equal(self._random[kind], other._random[kind]):
                found.differences.append(f"random state ({kind}) after the step")


def _named(models: list[torch.nn.Module], kind: str) -> dict[str, torch.Tensor]:
    """Parameters or buffers of several models, by the model's class and their path."""
    found: dict[str, torch.Tensor] = {}
    for i, model in enumerate(models):
        name = type(model).__name__ + (f"#{i + 1}" if i else "")
        found.update({f"{name}.{path}": t for path, t in getattr(model, f"named_{kind}")()})
    return found


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
