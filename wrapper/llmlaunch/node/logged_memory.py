"""Memory that trainers write into their logs.

True since the framework last reset its counters, and up to the moment it printed: Megatron-LM never resets, DeepSpeed
does at every line. The largest of all that was printed is kept.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    Record = dict[str, Any]

__all__ = ["DEEPSPEED_LOG", "MEGATRON_LOG", "LoggedPeaks"]

MEGATRON_LOG, DEEPSPEED_LOG = "megatron log", "deepspeed log"
MIB, GIB = 2**20, 2**30  # what they call MB and GB
NUMBER = rb"([0-9]+(?:\.[0-9]+)?)"
# report_memory of megatron/training/utils, the same from 0.5 to 0.19 and in Megatron-DeepSpeed: after the second step,
# around checkpoints, and every --log-memory-interval. The last word with --log-device-memory-used alone; it counts
# every process on the device.
MEGATRON = re.compile(
    rb"\[Rank ([0-9]+)\] [^|\[\n]*memory \(MB\) \| allocated: "
    + rb" \| ".join((NUMBER, rb"max allocated: " + NUMBER, rb"reserved: " + NUMBER, rb"max reserved: " + NUMBER))
    + rb"(?: \| (?:total device memory used|device usage): "
    + NUMBER
    + rb")?"
)
# see_memory_usage of deepspeed/runtime/utils.py (0.6 to 0.18), by rank 0 alone. Max_CA is rounded to whole GB.
DEEPSPEED = re.compile(rb"\bMA %b GB\s+Max_MA %b GB\s+CA %b GB\s+Max_CA %b GB" % ((NUMBER,) * 4))


class LoggedPeaks:
    """The most that each rank's lines said."""

    def __init__(self) -> None:
        self._peaks: dict[tuple[int, str], dict[str, int | None]] = {}

    def take(self, lines: Iterable[bytes]) -> None:
        """Lines of a log; one that says nothing of memory costs two searches for a word.

        The ranks of a node share a log, so that one line may run into another: a line may hold several.
        """
        for line in lines:
            if b"memory (MB)" in line:
                for found in MEGATRON.finditer(line):
                    rank, _, allocated, _, reserved, device = found.groups()
                    self._rise(int(rank), MEGATRON_LOG, "allocated_peak_bytes", float(allocated) * MIB)
                    self._rise(int(rank), MEGATRON_LOG, "reserved_peak_bytes", float(reserved) * MIB)
                    self._rise(int(rank), MEGATRON_LOG, "device_bytes", float(device or 0) * MIB)
            elif b"Max_MA" in line:
                for found in DEEPSPEED.finditer(line):
                    _, allocated, cached, most_cached = found.groups()
                    # as much was held for certain, whichever way Max_CA was rounded
                    reserved = max(float(cached), float(most_cached) - 0.5)
                    self._rise(0, DEEPSPEED_LOG, "allocated_peak_bytes", float(allocated) * GIB)
                    self._rise(0, DEEPSPEED_LOG, "reserved_peak_bytes", reserved * GIB)

    def records(self) -> list[Record]:
        """`[{"rank", "allocated_peak_bytes", "reserved_peak_bytes", "device_bytes", "source"}]`; null is not said."""
        return [{"rank": rank, **peaks, "source": source} for (rank, source), peaks in sorted(self._peaks.items())]

    def _rise(self, rank: int, source: str, name: str, amount: float) -> None:
        empty: dict[str, int | None] = {"allocated_peak_bytes": None, "reserved_peak_bytes": None, "device_bytes": None}
        peaks = self._peaks.setdefault((rank, source), empty)
        if amount > 0:
            peaks[name] = max(int(amount), peaks[name] or 0)
