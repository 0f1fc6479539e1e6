"""What torch's allocator held at most, by rank and device, read from `attempts/<attempt>/memory/<node>.jsonl`.

The probes in the ranks append to that file (trainers/memory_probe.py, docs/memory-probe.md). Damaged lines are left out
and counted. Runs of earlier versions have one file per process, `<rank>.<pid>.json`; these are read as well.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .files import MOST_APPENDED_BYTES, bounded_lines, object_of
from .node_files import ProbedDevice, ProbeLine
from .regular_files import open_regular, read_bytes
from .schema import sound
from .values import bytes_within

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


VERSION = 1
_AFTER_PROCESS = b'"at": '  # the part of a line before it is the same in every line of a process


@dataclass(frozen=True)
class TorchPeaks:
    """One device of one rank over an attempt. A value is None if it is unknown. A rank may have had several processes:
    each number is the largest among them, `pid` is the process that reserved most, and `ended` means that all of them
    ended."""

    rank: int
    device: int  # CUDA's index, in that process
    uuid: str | None  # "GPU-..." or, of a slice, "MIG-..."
    node: str | None
    local_rank: int | None
    pid: int | None
    at: float | None  # unix seconds, of the last line
    ended: bool
    total_bytes: int | None
    allocated_peak_bytes: int | None
    active_peak_bytes: int | None
    reserved_peak_bytes: int | None
    reserved_bytes: int | None  # in the last line
    alloc_retries: int | None
    ooms: int | None
    device_used_bytes: int | None  # peak of total - free: all processes
    outside_bytes: int | None  # peak of device used - reserved, read together: context, NCCL, workspaces, others


class ProbeFile(NamedTuple):
    """The devices of the processes in one file. `damaged` is the number of records that could not be read, or not
    completely."""

    peaks: tuple[TorchPeaks, ...] = ()
    damaged: int = 0


def read_probe_file(path: Path) -> ProbeFile | None:
    """Return the content of a file, or None if the file has disappeared."""
    try:
        texts, damaged = ([read_bytes(path)], 0) if path.suffix == ".json" else _last_lines(path)
    except FileNotFoundError:
        return None
    except OSError:
        return ProbeFile(damaged=1)
    peaks: list[TorchPeaks] = []
    for text in texts:
        line, lost = _line(text)
        peaks += [_peaks(line, device) for device in line["devices"]] if line is not None else []
        damaged += lost
    return ProbeFile(tuple(peaks), damaged)


def _last_lines(path: Path) -> tuple[list[bytes], int]:
    """Return the last complete line of each process, and the number of torn lines. Peaks only rise, so earlier lines of
    a process add nothing and are not parsed. Raises OSError."""
    last: dict[bytes, bytes] = {}
    torn = 0
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_APPENDED_BYTES:
            raise OSError(errno.EFBIG, "Larger than any probe's file", str(path))
        for line in bounded_lines(file):
            if line.endswith(b"}\n"):
                last[line.partition(_AFTER_PROCESS)[0]] = line
            elif line != b"\n":
                torn += 1
    return list(last.values()), torn


def largest_peaks(files: Iterable[ProbeFile]) -> tuple[TorchPeaks, ...]:
    """Return the largest values in all files of an attempt, ordered by rank, then by device."""
    largest: dict[tuple[int, str], TorchPeaks] = {}
    for peaks in (peaks for file in files for peaks in file.peaks):
        key = (peaks.rank, peaks.uuid or f"cuda:{peaks.device}")
        largest[key] = _larger(largest[key], peaks) if key in largest else peaks
    return tuple(sorted(largest.values(), key=lambda peaks: (peaks.rank, peaks.device)))


def fullest_devices(every: Iterable[TorchPeaks]) -> dict[int, TorchPeaks]:
    """Return for each rank the device on which it reserved most. A stray tensor on another device is common."""
    fullest: dict[int, TorchPeaks] = {}
    for peaks in every:
        if peaks.rank not in fullest or _reserved(peaks) > _reserved(fullest[peaks.rank]):
            fullest[peaks.rank] = peaks
    return fullest


def _line(text: bytes) -> tuple[ProbeLine | None, bool]:
    """Return the record of a process, and whether part of it could not be read."""
    try:
        record = object_of(text)
    except ValueError:
        return None, True
    line = sound(ProbeLine, record)
    if line is None or line.get("v") != VERSION:
        return None, True
    return line, len(line["devices"]) < len(record["devices"])


def _peaks(line: ProbeLine, entry: ProbedDevice) -> TorchPeaks:
    total = entry.get("total_bytes")
    own: dict[str, Any] = {name: line.get(name) for name in ("rank", "node", "local_rank", "pid", "at")}
    sizes: dict[str, Any] = {name: bytes_within(total, entry.get(name)) for name in _BOUNDED}
    return TorchPeaks(
        device=entry["device"],
        uuid=entry.get("uuid") or None,
        ended=line.get("ended", False),
        total_bytes=total,
        alloc_retries=entry.get("alloc_retries"),
        ooms=entry.get("ooms"),
        **own,
        **sizes,
    )


_BOUNDED = (
    *("allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes", "reserved_bytes"),
    *("device_used_bytes", "outside_bytes"),
)
_LARGEST = {"at", "total_bytes", "alloc_retries", "ooms", *_BOUNDED} - {"reserved_bytes"}


def _larger(first: TorchPeaks, second: TorchPeaks) -> TorchPeaks:
    fuller = max(first, second, key=_reserved)
    largest: dict[str, Any] = {}
    for name in _LARGEST:
        values = (getattr(first, name), getattr(second, name))
        largest[name] = max((value for value in values if value is not None), default=None)
    return replace(fuller, ended=first.ended and second.ended, **largest)


def _reserved(peaks: TorchPeaks) -> int:
    return peaks.reserved_peak_bytes or 0
