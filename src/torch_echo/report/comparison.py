"""What a comparison of a training step with plain PyTorch found, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Comparison"]


@dataclass(kw_only=True)
class Comparison:
    """One training step under the plan, compared with plain PyTorch. Prints as a few lines."""

    iteration: int = 0
    """Which training step it was, from 1."""
    exact: bool = True
    """Were the bits compared? With the option `reorder`, what is within rounding counts as equal."""
    losses: int = 0
    """Tensors that the step returned (:func:`torch_echo.check` only)."""
    outputs: int = 0
    """Tensors that models returned."""
    values: int = 0
    """Dropped values that were rebuilt, each compared with what the forward pass made."""
    gradients: int = 0
    """Gradients of parameters."""
    buffers: int = 0
    """Buffers of the models after their forward pass (after the step in :func:`torch_echo.check`)."""
    parameters: int = 0
    """Parameters after the optimizer's step (:func:`torch_echo.check` only)."""
    random_states: int = 0
    """States of random generators."""
    differences: list[str] = field(default_factory=list)
    """What was not equal, in the order of the forward pass: the first is where a difference arises."""
    skipped: list[str] = field(default_factory=list)
    """What could not be compared, and why."""

    @property
    def equal(self) -> bool:
        """Was all that was compared equal?"""
        return not self.differences

    @property
    def counts(self) -> str:
        """How many tensors of each kind were compared."""
        kinds = ("losses", "outputs", "values", "gradients", "buffers", "parameters", "random_states")
        names = {"losses": "loss", "values": "rebuilt value", "random_states": "random state"}
        found = []
        for kind in kinds:
            count = getattr(self, kind)
            name = names.get(kind, kind.removesuffix("s"))
            plural = "losses" if kind == "losses" else f"{name}s"
            if count:
                found.append(f"{count:,} {name if count == 1 else plural}")
        return ", ".join(found) or "nothing"

    def __str__(self) -> str:
        verdict = "to the bit" if self.exact else "up to rounding"
        if self.equal:
            lines = [f"training step {self.iteration} equals plain PyTorch {verdict}: {self.counts} compared"]
        else:
            lines = [f"training step {self.iteration} differs from plain PyTorch ({self.counts} compared)"]
            lines += [f"  {difference}" for difference in self.differences]
        return "\n".join([*lines, *(f"  not compared: {each}" for each in self.skipped)])
