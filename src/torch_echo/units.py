"""Bytes as people write and read them."""

from __future__ import annotations

import re

from torch_echo.errors import OptionError

__all__ = ["format_bytes", "parse_budget", "parse_bytes"]

_FACTORS = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*\Z", re.ASCII)
_ALLOWED = 'a number of bytes or a size such as "8GiB", "500MB" or "1.5g"'


def format_bytes(n: int) -> str:
    """A size in binary units: "512 B", "1.5 KiB", "339.1 MiB", "8.0 GiB"."""
    size = float(n)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def parse_bytes(value: int | str, option: str = "size") -> int:
    """Bytes of an int or of a text such as "8GiB" (2**30), "500MB" (10**6) or "4k" (2**10). Raises OptionError."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise OptionError(f"{option}={value!r} is negative; give {_ALLOWED}")
        return value
    if not isinstance(value, str):
        raise OptionError(f"{option}={value!r} is not a size; give {_ALLOWED}")
    match = _NUMBER.match(value)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise OptionError(f"{option}={value!r} is not a size; give {_ALLOWED}")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_budget(value: float | str, device_bytes: int | None, option: str = "memory_budget") -> int:
    """Bytes of a memory budget: a size as in :func:`parse_bytes`, or a fraction (0 < f <= 1, a float) of the device's
    memory.

    A text such as "0.8" or "80%" is a fraction too. Raises OptionError.
    """
    fraction = None
    if isinstance(value, float):
        fraction = value
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9.]+)\s*%\s*|\s*(0?\.[0-9]+|1\.0*)\s*", value)):
        try:
            fraction = float(match[1]) / 100 if match[1] else float(match[2])
        except ValueError:
            fraction = None
    if fraction is None:
        nbytes = parse_bytes(value, option)  # type: ignore[arg-type]
    else:
        if not 0 < fraction <= 1:
            raise OptionError(
                f"{option}={value!r} is not a fraction of the device's memory (0 < f <= 1); "
                f'for bytes give an int or a size such as "8GiB"'
            )
        if device_bytes is None:
            raise OptionError(f"{option}={value!r} is a fraction, but the device's memory is not known; give a size")
        nbytes = int(fraction * device_bytes)
    if nbytes <= 0:
        raise OptionError(f"{option}={value!r} leaves no memory at all; give {_ALLOWED}, or a fraction such as 0.8")
    return nbytes
