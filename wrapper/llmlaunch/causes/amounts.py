"""The numbers in a message about memory that could not be had, in bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Numbers = dict[str, int | float]

__all__ = ["device_numbers", "host_numbers"]

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SIZE = r"([\d.]+)\s+(bytes|[KMGTP]iB)"

# torch 2.1 on, where it was "capacty" at first
_NOW = {
    "asked_bytes": rf"Tried to allocate\s+{_SIZE}",
    "total_bytes": rf"has a total capaci?ty of\s+{_SIZE}",
    "free_bytes": rf"of which\s+{_SIZE}\s+is free",
    "process_bytes": rf"Including non-PyTorch memory, this process has\s+{_SIZE}",
    "allowed_bytes": rf"{_SIZE}\s+allowed;",
    "allocated_bytes": rf"Of the allocated memory\s+{_SIZE}\s+is allocated by PyTorch",
    "private_pools_bytes": rf"with\s+{_SIZE}\s+allocated\s+in private pools",
    "unallocated_bytes": rf"and\s+{_SIZE}\s+is\s+reserved by PyTorch but unallocated",
}
# torch 1.0 to 2.0; before 1.4 the last was called "cached"
_ONCE = {
    "total_bytes": rf";\s+{_SIZE}\s+total capacity;",
    "allocated_bytes": rf"{_SIZE}\s+already allocated;",
    "free_bytes": rf"{_SIZE}\s+free;",
    "reserved_bytes": rf"{_SIZE}\s+(?:reserved in total by PyTorch|cached)",
}
_GPU = r"GPU (\d+)"
_OTHERS = rf"Process \d+ has\s+{_SIZE}\s+memory in use"
_HOST = r"(?:tried to allocate|Unable to allocate)\s+([\d.]+)\s+(bytes|[KMGTP]iB)"


def device_numbers(text: str) -> Numbers:
    """All that an allocator's message says; a number it leaves out is absent.

    `reserved_bytes` = allocated + unallocated, `non_torch_bytes` = what the process holds beyond that (CUDA context,
    NCCL, libraries). torch rounds each to two decimals of its unit, so they are exact to about 5 MiB in the GiB range.
    """
    found = _sizes(text, _NOW)
    for name, value in _sizes(text, _ONCE).items():
        found.setdefault(name, value)
    gpu = re.search(_GPU, text)
    if gpu is not None:
        found["gpu"] = int(gpu.group(1))
    others = [_bytes(match.group(1), match.group(2)) for match in re.finditer(_OTHERS, text)]
    if others:
        found["other_processes_bytes"] = sum(others)
    if "allocated_bytes" in found and "unallocated_bytes" in found:
        found.setdefault("reserved_bytes", found["allocated_bytes"] + found["unallocated_bytes"])
    if "process_bytes" in found and "reserved_bytes" in found:
        found["non_torch_bytes"] = max(0, found["process_bytes"] - found["reserved_bytes"])
    return found


def host_numbers(text: str) -> Numbers:
    """What was asked of main memory, where the message says so."""
    return _sizes(text, {"asked_bytes": _HOST})


def _sizes(text: str, expressions: dict[str, str]) -> Numbers:
    found: Numbers = {}
    for name, expression in expressions.items():
        match = re.search(expression, text)
        if match is not None:
            found[name] = _bytes(match.group(1), match.group(2))
    return found


def _bytes(number: str, unit: str) -> int:
    try:
        return int(float(number) * _UNITS[unit])
    except ValueError:
        return 0
