"""`attempts/<attempt>/memory/<rank>.<pid>.json` read back: what torch's allocator held at most, by rank and device.

Written by the probe in the rank's Python (trainers/memory_probe.py, docs/monitor.md), whole by rename; what is damaged
all the same is left out and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .files import parse_json, read_bytes
from .values import byte_count, time_or_none

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["FOLDER", "ProbeReport", "TorchPeaks", "probe_paths", "read_probe_files"]

FOLDER = "memory"  # of an attempt's folder
VERSION = 1


@dataclass(frozen=True)
class TorchPeaks:
    """One device of one rank over an attempt; None is what nobody saw. A rank may have had several processes: each
    number is the largest of theirs, `pid` is of the one that reserved most, `ended` says that all of them did."""

    rank: int
    device: int  # CUDA's index, in that process
    uuid: str | None  # "GPU-..." or, of a slice, "MIG-..."
    node: str | None
    local_rank: int | None
    pid: int | None
    at: float | None  # unix seconds, of the last word
    ended: bool
    total_bytes: int | None
    allocated_peak_bytes: int | None
    active_peak_bytes: int | None
    reserved_peak_bytes: int | None
    reserved_bytes: int | None  # at the last word
    alloc_retries: int | None
    ooms: int | None
    device_used_bytes: int | None  # most of total - free: all processes
    outside_bytes: int | None  # most of device used - reserved at one look: context, NCCL, workspaces, neighbours


@dataclass(frozen=True)
class ProbeReport:
    """`damaged`: the files that held no account, or an account with devices that could not be read."""

    peaks: tuple[TorchPeaks, ...] = ()  # by rank, then by device
    damaged: tuple[Path, ...] = ()

    def of_rank(self, rank: int) -> TorchPeaks | None:
        """The device on which the rank reserved most: a stray tensor on another one is common."""
        return max((one for one in self.peaks if one.rank == rank), key=_reserved, default=None)


def probe_paths(run_directory: Path, attempt: str) -> list[Path]:
    """The probes' files of an attempt, in a steady order."""
    return sorted((run_directory / "attempts" / attempt / FOLDER).glob("[0-9]*.json"))


def read_probe_files(paths: Iterable[Path]) -> ProbeReport:
    """The largest of everything, by rank and device. A file that went away meanwhile is no file."""
    found: dict[tuple[int, str], TorchPeaks] = {}
    damaged = []
    for path in paths:
        try:
            text = read_bytes(path)
        except FileNotFoundError:
            continue
        except OSError:
            damaged.append(path)
            continue
        account = _account(text)
        if account is None:
            damaged.append(path)
            continue
        entries = account["devices"]
        read = [one for one in (_device(account, entry) for entry in entries) if one is not None]
        if len(read) < len(entries):
            damaged.append(path)
        for one in read:
            key = (one.rank, one.uuid or f"cuda:{one.device}")
            found[key] = _larger(found[key], one) if key in found else one
    return ProbeReport(tuple(sorted(found.values(), key=lambda one: (one.rank, one.device))), tuple(damaged))


def _account(text: bytes) -> Mapping[str, Any] | None:
    try:
        value = parse_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("v") != VERSION or not isinstance(value.get("devices"), list):
        return None
    return value if _whole(value.get("rank")) is not None else None


def _device(account: Mapping[str, Any], entry: Any) -> TorchPeaks | None:
    if not isinstance(entry, dict) or _whole(entry.get("device")) is None:
        return None
    total = byte_count(entry.get("total_bytes"))
    uuid, node = entry.get("uuid"), account.get("node")

    def within(name: str) -> int | None:
        """More than the device has is no measurement."""
        count = byte_count(entry.get(name))
        return None if count is None or (total and count > total) else count

    return TorchPeaks(
        rank=account["rank"],
        device=entry["device"],
        uuid=uuid if isinstance(uuid, str) else None,
        node=node if isinstance(node, str) else None,
        local_rank=_whole(account.get("local_rank")),
        pid=_whole(account.get("pid")),
        at=time_or_none(account.get("at")),
        ended=account.get("ended") is True,
        total_bytes=total,
        allocated_peak_bytes=within("allocated_peak_bytes"),
        active_peak_bytes=within("active_peak_bytes"),
        reserved_peak_bytes=within("reserved_peak_bytes"),
        reserved_bytes=within("reserved_bytes"),
        alloc_retries=_whole(entry.get("alloc_retries")),
        ooms=_whole(entry.get("ooms")),
        device_used_bytes=within("device_used_bytes"),
        outside_bytes=within("outside_bytes"),
    )


_LARGEST = (
    "at", "total_bytes", "allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes", "alloc_retries", "ooms",
    "device_used_bytes", "outside_bytes",
)  # fmt: skip


def _larger(one: TorchPeaks, other: TorchPeaks) -> TorchPeaks:
    kept = max(one, other, key=_reserved)
    largest: dict[str, Any] = {}
    for name in _LARGEST:
        largest[name] = max(_given(getattr(one, name), getattr(other, name)), default=None)
    return replace(kept, ended=one.ended and other.ended, **largest)


def _given(*values: Any) -> Iterator[Any]:
    return (value for value in values if value is not None)


def _reserved(one: TorchPeaks) -> int:
    return one.reserved_peak_bytes or 0


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
