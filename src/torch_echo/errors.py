"""The errors that torch-echo raises on purpose. Anything else that it raises is a bug."""

from __future__ import annotations

from collections.abc import Iterable

from torch_echo.graph import Kind

__all__ = [
    "BudgetInfeasible",
    "CaptureError",
    "DifferenceFound",
    "GraphFileError",
    "OptionError",
    "TorchEchoError",
    "UnsupportedDevice",
]


class TorchEchoError(Exception):
    """Base of all errors of this package. The message is one line that a user can act on."""


class OptionError(TorchEchoError, ValueError):
    """An option has a value that it cannot have; the message names both and what is allowed."""


class GraphFileError(TorchEchoError):
    """A file is not a readable training graph."""


class DifferenceFound(TorchEchoError):
    """A step under the plan was not equal to one of plain PyTorch (the option `check`)."""


class CaptureError(TorchEchoError):
    """A training step could not be observed, or what was observed contradicts itself."""


class UnsupportedDevice(TorchEchoError):
    """The tensors live on a device that torch-echo does not handle."""


class BudgetInfeasible(TorchEchoError):
    """No plan fits into the memory budget."""

    def __init__(self, budget: int, floor: int, composition: Iterable[tuple[str, Kind, int]] = ()) -> None:
        self.budget = budget
        """Bytes asked for."""
        self.floor = floor
        """Least peak that a plan was found for."""
        self.composition = list(composition)
        """What holds the floor: (layer, kind, bytes), largest first."""
        super().__init__(budget, floor, self.composition)

    def __str__(self) -> str:
        from torch_echo.units import format_bytes  # that module imports this one

        text = (
            f"memory_budget {format_bytes(self.budget)} can't be met: "
            f"the least reachable peak is {format_bytes(self.floor)}"
        )
        held = ", ".join(
            f"{format_bytes(nbytes)} {kind.name.lower().replace('_', ' ')}{f' of {layer}' if layer else ''}"
            for layer, kind, nbytes in self.composition[:4]
        )
        return f"{text} (it holds {held})" if held else text
