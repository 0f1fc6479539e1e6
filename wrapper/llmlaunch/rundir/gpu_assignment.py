"""Which GPU of a node is which rank's. Pure: traces of ranks and a monitor's report in, one GPU for each rank out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .monitor_samples import GpuPeaks, NodePeaks

    Record = Mapping[str, Any]

__all__ = ["GivenGpu", "given_gpus", "peak_of_pids"]


@dataclass(frozen=True)
class GivenGpu:
    """A rank's GPU and how it was told (`source`). `alone`: nobody else is known to have used it meanwhile."""

    gpu: GpuPeaks
    source: str
    alone: bool


def given_gpus(
    ranks: Sequence[Record], uuids: Mapping[int, str], pids: Mapping[int, set[str]], node: NodePeaks, each: int
) -> dict[int, GivenGpu]:
    """A GPU for every rank that one can be told for. `ranks` are this node's rank records, `uuids` what torch called
    the ranks' GPUs, `pids` the numbers of their processes, `each` the devices that the job has on a node.

    First by torch's own word, then by the driver's process lists and accounting, where they name the rank's process.
    They do not where the driver hides memory by process, in a container with pids of its own, or where the trainer is
    a child of the rank's program; then by CUDA_VISIBLE_DEVICES, else by local rank in PCI order on a node that the job
    has for itself.
    """
    gpus = _countable(node)
    found: dict[int, tuple[GpuPeaks, str]] = {}
    for rank, uuid in uuids.items():
        named = [gpu for gpu in node.gpus.values() if _same_uuid(gpu.uuid, uuid)]
        if len(named) == 1:
            found[rank] = (named[0], "torch")
    for rank, own in pids.items():
        gpu = _by_process(own, gpus) or _by_process(own, list(node.gpus.values()))
        if rank not in found and gpu is not None:
            found[rank] = (gpu, "nvml process list")
    taken = {gpu.uuid for gpu, _ in found.values()}
    whole_node = len(gpus) == each == len(ranks)
    for record in ranks:
        if record["rank"] not in found:
            told = _by_place(record, gpus, whole_node)
            if told is not None and told[0].uuid not in taken:
                found[record["rank"]] = told
                taken.add(told[0].uuid)
    return {rank: GivenGpu(gpu, source, _is_alone(rank, gpu, found, pids)) for rank, (gpu, source) in found.items()}


def peak_of_pids(peaks: Mapping[str, int], pids: set[str]) -> int | None:
    return max((peaks[pid] for pid in pids if pid in peaks), default=None)


def _countable(node: NodePeaks) -> list[GpuPeaks]:
    """In PCI order, slices instead of the GPUs that are cut into them."""
    cut = {gpu.mig for gpu in node.gpus.values()}
    return sorted((gpu for gpu in node.gpus.values() if gpu.uuid not in cut), key=lambda gpu: (gpu.pci, gpu.index))


def _same_uuid(one: str, other: str) -> bool:
    """torch names a GPU by the bare UUID, and does not tell a slice from a whole GPU."""
    return one == other or one.partition("-")[2].lower() == other.partition("-")[2].lower() != ""


def _by_process(pids: set[str], gpus: Sequence[GpuPeaks]) -> GpuPeaks | None:
    """The GPU on which a rank's processes hold most: a stray context on another one is common."""

    def held(gpu: GpuPeaks) -> int:
        return max(peak_of_pids(gpu.process_peak_bytes, pids) or 0, peak_of_pids(gpu.accounting_peak_bytes, pids) or 0)

    most = max(gpus, key=held, default=None)
    return most if most is not None and held(most) else None


def _by_place(record: Record, gpus: Sequence[GpuPeaks], whole_node: bool) -> tuple[GpuPeaks, str] | None:
    local = record.get("local_rank")
    if type(local) is not int or local < 0:
        return None
    visible = record.get("visible_devices")
    if isinstance(visible, str) and visible.strip():
        words = [word.strip() for word in visible.split(",")]
        named = _named(words[local], gpus) if local < len(words) else None
        return None if named is None else (named, "CUDA_VISIBLE_DEVICES")
    return (gpus[local], "local rank, in PCI order") if whole_node and local < len(gpus) else None


def _named(word: str, gpus: Sequence[GpuPeaks]) -> GpuPeaks | None:
    """One word of CUDA_VISIBLE_DEVICES: an index in PCI order (jobs run with CUDA_DEVICE_ORDER=PCI_BUS_ID), or a
    UUID, which CUDA lets be shortened as long as one GPU alone begins with it."""
    if word.isascii() and word.isdigit():
        return gpus[int(word)] if int(word) < len(gpus) else None
    alike = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return alike[0] if len(alike) == 1 else None


def _is_alone(
    rank: int, gpu: GpuPeaks, found: Mapping[int, tuple[GpuPeaks, str]], pids: Mapping[int, set[str]]
) -> bool:
    """Where the driver names no process of the rank, those it names may be the rank's under other numbers."""
    if any(other != rank and theirs.uuid == gpu.uuid for other, (theirs, _) in found.items()):
        return False
    listed = {*gpu.process_peak_bytes, *gpu.accounting_peak_bytes}
    own = pids.get(rank, set())
    others = set().union(*(theirs for other, theirs in pids.items() if other != rank))
    return not listed & others and (not listed & own or listed <= own)
