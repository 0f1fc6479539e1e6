"""Which GPU of a node is which rank's. Pure: traces of ranks and a monitor's report in, one GPU for each rank out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .monitor_samples import GpuPeaks, NodePeaks

    Record = dict[str, Any]

__all__ = ["AssignedGpu", "assigned_gpus", "countable_gpus", "peak_of_pids"]


@dataclass(frozen=True)
class AssignedGpu:
    """A rank's GPU, and by what it is known (`source`). `alone`: nobody else is known to have used it meanwhile."""

    gpu: GpuPeaks
    source: str
    alone: bool


def assigned_gpus(
    ranks: Sequence[Record], uuids: Mapping[int, str], pids: Mapping[int, set[str]], node: NodePeaks, devices: int
) -> dict[int, AssignedGpu]:
    """Return a GPU for every rank whose own can be told. `ranks` are this node's rank records, `uuids` what torch
    called the ranks' GPUs, `pids` the numbers of their processes, `devices` how many the job has on a node.

    First by torch's own word, then by the driver's process lists and accounting, where they name the rank's process.
    They do not where the driver hides memory by process, in a container with pids of its own, or where the trainer is
    a child of the rank's program; then by CUDA_VISIBLE_DEVICES, else by local rank in PCI order on a node that the job
    has for itself.
    """
    gpus = countable_gpus(node)
    assigned: dict[int, tuple[GpuPeaks, str]] = {}
    for rank, uuid in uuids.items():
        named = [gpu for gpu in node.gpus.values() if _same_uuid(gpu.uuid, uuid)]
        if len(named) == 1:
            assigned[rank] = (named[0], "torch")
    for rank, own in pids.items():
        gpu = _by_process(own, gpus) or _by_process(own, list(node.gpus.values()))
        if rank not in assigned and gpu is not None:
            assigned[rank] = (gpu, "nvml process list")
    uuids_in_use = {gpu.uuid for gpu, _ in assigned.values()}
    whole_node = len(gpus) == devices == len(ranks)
    for record in ranks:
        if record["rank"] not in assigned:
            place = _by_place(record, gpus, whole_node)
            if place is not None and place[0].uuid not in uuids_in_use:
                assigned[record["rank"]] = place
                uuids_in_use.add(place[0].uuid)
    return {
        rank: AssignedGpu(gpu, source, _is_alone(rank, gpu, assigned, pids)) for rank, (gpu, source) in assigned.items()
    }


def peak_of_pids(peaks: Mapping[str, int], pids: set[str]) -> int | None:
    return max((peaks[pid] for pid in pids if pid in peaks), default=None)


def countable_gpus(node: NodePeaks) -> list[GpuPeaks]:
    """Return the GPUs of a node in PCI order, MIG slices instead of the GPUs that are cut into them."""
    cut = {gpu.mig for gpu in node.gpus.values()}
    return sorted((gpu for gpu in node.gpus.values() if gpu.uuid not in cut), key=lambda gpu: (gpu.pci, gpu.index))


def _same_uuid(first: str, second: str) -> bool:
    """torch names a GPU by the bare UUID, and does not tell a slice from a whole GPU."""
    return first == second or first.partition("-")[2].lower() == second.partition("-")[2].lower() != ""


def _by_process(pids: set[str], gpus: Sequence[GpuPeaks]) -> GpuPeaks | None:
    """The GPU on which a rank's processes hold most: a stray context on another one is common."""

    def held_bytes(gpu: GpuPeaks) -> int:
        return max(peak_of_pids(gpu.process_peak_bytes, pids) or 0, peak_of_pids(gpu.accounting_peak_bytes, pids) or 0)

    most = max(gpus, key=held_bytes, default=None)
    return most if most is not None and held_bytes(most) else None


def _by_place(record: Record, gpus: Sequence[GpuPeaks], whole_node: bool) -> tuple[GpuPeaks, str] | None:
    local = record.get("local_rank")
    if type(local) is not int or local < 0:
        return None
    visible = record.get("visible_devices")
    if isinstance(visible, str) and visible.strip():
        entries = [entry.strip() for entry in visible.split(",")]
        named = _named(entries[local], gpus) if local < len(entries) else None
        return None if named is None else (named, "CUDA_VISIBLE_DEVICES")
    return (gpus[local], "local rank, in PCI order") if whole_node and local < len(gpus) else None


def _named(entry: str, gpus: Sequence[GpuPeaks]) -> GpuPeaks | None:
    """One entry of CUDA_VISIBLE_DEVICES: an index in PCI order (jobs run with CUDA_DEVICE_ORDER=PCI_BUS_ID), or a
    UUID, which CUDA lets be shortened as long as one GPU alone begins with it."""
    if entry.isascii() and entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    matches = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _is_alone(
    rank: int, gpu: GpuPeaks, assigned: Mapping[int, tuple[GpuPeaks, str]], pids: Mapping[int, set[str]]
) -> bool:
    """Where the driver names no process of the rank, those it names may be the rank's under other numbers."""
    if any(other != rank and theirs.uuid == gpu.uuid for other, (theirs, _) in assigned.items()):
        return False
    listed = {*gpu.process_peak_bytes, *gpu.accounting_peak_bytes}
    own = pids.get(rank, set())
    others = set().union(*(theirs for other, theirs in pids.items() if other != rank))
    return not listed & others and (not listed & own or listed <= own)
