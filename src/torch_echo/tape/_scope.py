"""Where gathered parameters are there.

``fully_shard`` keeps a part of each parameter on each rank. When a module's call begins the parameters are gathered, into
storages that are emptied when it ends, and filled again while its nodes run backward. A recipe may read them without holding
their memory, but only there: what is rebuilt from a gathered parameter is dropped only for readers within the same call of the
module, or of one inside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from torch_echo import compat

__all__ = ["Gathered", "Scope", "gathered_keys"]


def gathered_keys(module: torch.nn.Module) -> frozenset[int]:
    """Keys of the storages into which a sharded module's parameters are gathered; none before its first call."""
    return frozenset(compat.storage_key(t) for t in compat.gathered(module))


class Scope:
    """One call of a sharded module."""

    __slots__ = ("_keys", "_module")

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._keys: frozenset[int] | None = None

    @property
    def keys(self) -> frozenset[int]:
        """See :func:`gathered_keys`."""
        if not self._keys:
            module = self._module()
            self._keys = gathered_keys(module) if module is not None else frozenset()
        return self._keys


class Gathered:
    """Keys of all storages into which some sharded modules gather their parameters."""

    def __init__(self, modules: Iterable[weakref.ref[torch.nn.Module]]) -> None:
        self._keys: set[int] = set()
        self._uncalled = list(modules)
        """Modules that have gathered nothing so far."""
        self._some = bool(self._uncalled)

    def __bool__(self) -> bool:
        return self._some

    def __contains__(self, key: int) -> bool:
        if self._uncalled:
            self._look()
        return key in self._keys

    def _look(self) -> None:
        modules = [(ref, module) for ref in self._uncalled if (module := ref()) is not None]
        self._uncalled = []
        for ref, module in modules:
            keys = gathered_keys(module)
            self._keys |= keys
            if not keys:
                self._uncalled.append(ref)
