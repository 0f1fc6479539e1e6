"""Which peak belongs to which rank of a node. Pure: rank records and monitor reports in, one peak per rank out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.store.peaks import GpuPeaks, NodePeaks, byte_count

__all__ = ["RankPeak", "device_peaks", "resident_peaks"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RankPeak:
    """A rank's true peak and how it was seen (`source`); the GPU fields are None on a CPU."""

    rank: int
    peak_bytes: int
    source: str
    gpu_uuid: str | None = None
    gpu_name: str | None = None
    baseline_bytes: int | None = None


def resident_peaks(ranks: Sequence[Record], node: NodePeaks | None) -> dict[int, RankPeak]:
    """The larger of the kernel's own maximum, known once a rank has ended, and what the monitor saw."""
    seen = dict(node.resident_peak_bytes) if node else {}
    found = {rank: RankPeak(rank, peak, "monitor, resident") for rank, peak in seen.items()}
    for record in ranks:
        peak = byte_count(record.get("resident_peak_bytes"))
        if peak and peak >= seen.get(record["rank"], 0):
            found[record["rank"]] = RankPeak(record["rank"], peak, "ru_maxrss")
    return found


def device_peaks(ranks: Sequence[Record], node: NodePeaks | None, devices_per_node: int) -> dict[int, RankPeak]:
    """A GPU's peak for every rank that one can be told for.

    First by the driver's process lists and accounting, where they name the rank's process. They do not where the
    driver hides memory by process, in a container with pids of its own, or where the trainer is a child of the
    rank's program; then the whole device above its baseline counts, if the rank's GPU is known: by
    CUDA_VISIBLE_DEVICES, else by local rank in PCI order on a node that the job has for itself.
    """
    if node is None or not node.gpus:
        return {}
    gpus = sorted(node.gpus.values(), key=lambda gpu: (gpu.pci, gpu.index))
    found = {record["rank"]: peak for record in ranks if (peak := _by_process(record, node, gpus))}
    taken = {peak.gpu_uuid for peak in found.values()}
    whole_node = len(gpus) == devices_per_node == len(ranks)
    for record in ranks:
        if record["rank"] in found:
            continue
        gpu = _gpu_of(record, gpus, whole_node)
        if gpu is None or gpu.uuid in taken:
            continue
        peak = _above_baseline(record["rank"], gpu)
        if peak:
            found[record["rank"]] = peak
            taken.add(gpu.uuid)
    return found


def _by_process(record: Record, node: NodePeaks, gpus: Sequence[GpuPeaks]) -> RankPeak | None:
    """The GPU on which the rank's process holds most: a stray context on another one is common."""
    pids = {str(record[key]) for key in ("program_pid", "pid") if record.get(key) is not None}
    pids |= {node.rank_pids[record["rank"]]} if record["rank"] in node.rank_pids else set()
    best: RankPeak | None = None
    for gpu in gpus:
        sampled = max((gpu.process_peak_bytes.get(pid, 0) for pid in pids), default=0)
        accounted = max((gpu.accounting_peak_bytes.get(pid, 0) for pid in pids), default=0)
        # Accounting is the driver's own maximum; less than a sample of it means the pid was another process's.
        peak, source = (accounted, "nvml accounting") if accounted >= sampled else (sampled, "nvml process")
        if peak > (best.peak_bytes if best else 0):
            best = RankPeak(record["rank"], peak, source, gpu.uuid, gpu.name, gpu.baseline_bytes)
    return best


def _gpu_of(record: Record, gpus: Sequence[GpuPeaks], whole_node: bool) -> GpuPeaks | None:
    local = record.get("local_rank")
    if type(local) is not int or local < 0:
        return None
    visible = record.get("visible_devices")
    if isinstance(visible, str) and visible.strip():
        words = [word.strip() for word in visible.split(",")]
        return _named(words[local], gpus) if local < len(words) else None
    return gpus[local] if whole_node and local < len(gpus) else None


def _named(word: str, gpus: Sequence[GpuPeaks]) -> GpuPeaks | None:
    """One word of CUDA_VISIBLE_DEVICES: an index in PCI order (jobs run with CUDA_DEVICE_ORDER=PCI_BUS_ID), or a
    UUID, which CUDA lets be shortened as long as one GPU alone begins with it."""
    if word.isascii() and word.isdigit():
        return gpus[int(word)] if int(word) < len(gpus) else None
    alike = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return alike[0] if len(alike) == 1 else None


def _above_baseline(rank: int, gpu: GpuPeaks) -> RankPeak | None:
    whole = gpu.device_peak_bytes
    if whole is None:
        return None
    if gpu.baseline_bytes is not None:
        idle, source = gpu.baseline_bytes, "nvml device - baseline"
    elif gpu.reserved_bytes is not None:
        idle, source = gpu.reserved_bytes, "nvml device - reserved"
    else:
        idle, source = 0, "nvml device"
    if whole <= idle:
        return None
    return RankPeak(rank, whole - idle, source, gpu.uuid, gpu.name, gpu.baseline_bytes)
