"""What each rank of an attempt used, according to every source, with the source of each number. Pure functions.

This is the one account of a peak: `collect`, the watch, reports and comparisons all take a rank's peak from here. The
sources of the memory of a rank's process, in order of precedence:

1. The driver's accounting, which is exact. It is passed over if a sample of the process or torch's reserved memory is
   larger, because then it belongs to an earlier process with the same id.
2. The largest of what is known to have been in use at some moment, the first of these if they are equal: the sample in
   the driver's process list; the peak of a GPU that the rank has to itself, less what it held before; torch's reserved
   peak with what the probe saw outside torch's allocator.

For torch's own peaks that is the probe, or the log if it printed more; for resident memory the kernel's maximum, or the
monitor's sample if that is larger. `at_least` names the peaks whose source was lost before the attempt ended.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .attempt_files import RankRecord
from .foreign_values import is_whole_number
from .monitor_samples import countable_gpus
from .probe_files import fullest_devices
from .run_file import RunFile, pipeline_rank_of
from .summary import NodeSummary, RankSummary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .monitor_samples import GpuPeaks, NodePeaks, PrintedPeaks
    from .probe_files import TorchPeaks


ACCOUNTING, PROBE = "nvml accounting", "torch probe"
KERNEL, RESIDENT = "ru_maxrss", "monitor, resident"


@dataclass
class MemoryEvidence:
    """Everything that was written about the memory of one attempt. `run` is the run.json of its layout, empty if it
    cannot be read. `ranks` are its rank records, and `nodes` what the monitors saw, by node."""

    run: RunFile = field(default_factory=RunFile)
    ranks: list[RankRecord] = field(default_factory=list)
    probes: Sequence[TorchPeaks] = ()
    nodes: dict[str, NodePeaks] = field(default_factory=dict)


def rank_summaries(evidence: MemoryEvidence) -> list[RankSummary]:
    """Return the summary of every rank that left any record, ordered by rank. `peak_bytes` is of the run's own kind:
    the memory of the process on its device, or its resident memory on a CPU."""
    resident = evidence.run.get("peak_kind") == "resident"
    return [_rank_summary(rank, resident) for rank in _ranks_with_evidence(evidence)]


def node_summary(node: NodePeaks) -> NodeSummary:
    """Return what a monitor saw of its node.

    For main memory it takes the smaller of two numbers that both include more than the job's own memory: the node's
    includes the operating system and other jobs, the cgroup's includes the file cache. A cgroup that was charged with
    less than a single rank held does not belong to the job.
    """
    used, cgroup = node.host_used_peak_bytes, node.cgroup_peak_bytes
    if cgroup is not None and cgroup < max(node.resident_peak_bytes.values(), default=0):
        cgroup = None
    peaks = [(used, "MemTotal - MemAvailable"), (cgroup, "cgroup")]
    host, source = min(((peak, name) for peak, name in peaks if peak is not None), default=(None, None))
    return NodeSummary(
        node=node.node,
        ended=node.ended,
        gpus=len(node.gpus),
        host_peak_bytes=host,
        host_peak_source=source,
        host_total_bytes=node.host_total_bytes,
        cgroup_peak_bytes=node.cgroup_peak_bytes,
        cgroup_limit_bytes=node.cgroup_limit_bytes,
        remarks=tuple(sorted(node.remarks, key=lambda remark: (node.remarks[remark], remark))),
    )


# --- the evidence of each rank ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RankEvidence:
    """What one global rank left: its record (empty if there is none), the values of torch's probe, the log and the
    monitor, and its GPU. `pids` are its processes as the driver lists them. `shares_device` means that the probe of
    another rank names the same GPU; `monitor` is what the monitor of its node saw."""

    rank: int
    node: str | None
    pipeline_rank: int | None
    record: RankRecord
    torch: TorchPeaks | None
    shares_device: bool
    monitor: NodePeaks | None
    logged: PrintedPeaks | None
    resident_seen_bytes: int | None
    pids: set[str]
    gpu: AssignedGpu | None


def _ranks_with_evidence(evidence: MemoryEvidence) -> list[_RankEvidence]:
    records = {record["rank"]: record for record in evidence.ranks}
    torch = fullest_devices(evidence.probes)
    logged = {rank: peaks for node in evidence.nodes.values() for rank, peaks in node.logged.items()}
    resident = _resident_peaks(evidence)
    nodes = _node_of_ranks(evidence, records, torch)
    pids = _pids_of_ranks(evidence, records, sorted({*records, *torch, *logged, *resident}))
    gpus = _gpus_of_ranks(evidence, nodes, torch, pids)
    uses = Counter((nodes.get(rank), peaks.uuid) for rank, peaks in torch.items())
    return [
        _RankEvidence(
            rank=rank,
            node=nodes.get(rank),
            pipeline_rank=pipeline_rank_of(evidence.run, rank),
            record=records.get(rank, RankRecord(rank=rank)),
            torch=torch.get(rank),
            shares_device=rank in torch and uses[nodes.get(rank), torch[rank].uuid] > 1,
            monitor=evidence.nodes.get(nodes.get(rank) or ""),
            logged=logged.get(rank),
            resident_seen_bytes=resident.get(rank),
            pids=own_pids,
            gpu=gpus.get(rank),
        )
        for rank, own_pids in pids.items()
    ]


def _resident_peaks(evidence: MemoryEvidence) -> dict[int, int]:
    peaks: dict[int, int] = {}
    for node in evidence.nodes.values():
        for rank, peak in node.resident_peak_bytes.items():
            peaks[rank] = max(peak, peaks.get(rank, 0))
    return peaks


def _node_of_ranks(
    evidence: MemoryEvidence, records: Mapping[int, RankRecord], torch: Mapping[int, TorchPeaks]
) -> dict[int, str]:
    """Return the node of each rank: from its own record, else from its probe, else from the monitor that saw it."""
    monitored = evidence.nodes.items()
    nodes = {rank: name for name, node in monitored for rank in (*node.logged, *node.resident_peak_bytes)}
    nodes.update({rank: peaks.node for rank, peaks in torch.items() if peaks.node})
    nodes.update({rank: node for rank, record in records.items() if (node := record.get("node"))})
    return nodes


def _pids_of_ranks(
    evidence: MemoryEvidence, records: Mapping[int, RankRecord], ranks: Sequence[int]
) -> dict[int, set[str]]:
    """Return the process ids of each rank, from its record, its probes and the monitors."""
    pids: dict[int, set[str]] = {rank: set() for rank in ranks}
    for rank, record in records.items():
        pids[rank] |= {str(pid) for pid in (record.get("program_pid"), record.get("pid")) if pid is not None}
    seen = [(peaks.rank, {str(peaks.pid)}) for peaks in evidence.probes if peaks.pid is not None]
    seen += [of_rank for node in evidence.nodes.values() for of_rank in node.rank_pids.items()]
    for rank, numbers in seen:
        if rank in pids:
            pids[rank] |= numbers
    return pids


def _gpus_of_ranks(
    evidence: MemoryEvidence, nodes: Mapping[int, str], torch: Mapping[int, TorchPeaks], pids: Mapping[int, set[str]]
) -> dict[int, AssignedGpu]:
    devices = evidence.run.get("devices_per_node") or 0
    records = {record["rank"]: record for record in evidence.ranks}
    here: dict[str | None, list[int]] = {}
    for rank in pids:
        here.setdefault(nodes.get(rank), []).append(rank)
    gpus: dict[int, AssignedGpu] = {}
    for name, node in evidence.nodes.items():
        ranks = here.get(name, [])
        uuids = {rank: torch[rank].uuid for rank in ranks if rank in torch}
        gpus.update(
            assigned_gpus(
                [records[rank] for rank in ranks if rank in records],
                {rank: uuid for rank, uuid in uuids.items() if uuid is not None},
                {rank: pids[rank] for rank in ranks},
                node,
                devices,
            )
        )
    return gpus


# --- which GPU of a node is which rank's ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssignedGpu:
    """The GPU of a rank, and how it was identified (`source`). `alone` means that nobody else is known to have used it
    meanwhile."""

    gpu: GpuPeaks
    source: str
    alone: bool


def assigned_gpus(
    ranks: Sequence[RankRecord], uuids: Mapping[int, str], pids: Mapping[int, set[str]], node: NodePeaks, devices: int
) -> dict[int, AssignedGpu]:
    """Return the GPU of every rank for which it can be identified. `ranks` are this node's rank records, `uuids` are
    torch's names of their GPUs, `pids` are their process ids, and `devices` is the number of GPUs that the job has on a
    node.

    A GPU is identified by torch's name first, then by the driver's process lists and accounting, if these name the
    rank's process. They do not if the driver hides memory by process, in a container with process ids of its own, or if
    the trainer is a child of the rank's program. Then CUDA_VISIBLE_DEVICES is used, or else the local rank in PCI order
    on a node that the job has to itself.
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


def _same_uuid(first: str, second: str) -> bool:
    """Whether two UUIDs are of the same GPU. torch gives the UUID without a prefix, and does not distinguish a MIG
    slice from a whole GPU."""
    return first == second or first.partition("-")[2].lower() == second.partition("-")[2].lower() != ""


def _by_process(pids: set[str], gpus: Sequence[GpuPeaks]) -> GpuPeaks | None:
    """Return the GPU on which a rank's processes hold most memory. A stray context on another GPU is common."""

    def held_bytes(gpu: GpuPeaks) -> int:
        return max(peak_of_pids(gpu.process_peak_bytes, pids) or 0, peak_of_pids(gpu.accounting_peak_bytes, pids) or 0)

    most = max(gpus, key=held_bytes, default=None)
    return most if most is not None and held_bytes(most) else None


def _by_place(record: RankRecord, gpus: Sequence[GpuPeaks], whole_node: bool) -> tuple[GpuPeaks, str] | None:
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
    """Return the GPU for one entry of CUDA_VISIBLE_DEVICES: an index in PCI order (jobs run with
    CUDA_DEVICE_ORDER=PCI_BUS_ID), or a UUID. CUDA accepts a shortened UUID if only one GPU's UUID begins with it."""
    if is_whole_number(entry):
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    matches = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _is_alone(
    rank: int, gpu: GpuPeaks, assigned: Mapping[int, tuple[GpuPeaks, str]], pids: Mapping[int, set[str]]
) -> bool:
    """Whether nobody else is known to have used the GPU. If the driver names no process of the rank, the processes that
    it names may be the rank's under other ids."""
    if any(other != rank and theirs.uuid == gpu.uuid for other, (theirs, _) in assigned.items()):
        return False
    listed = {*gpu.process_peak_bytes, *gpu.accounting_peak_bytes}
    own = pids.get(rank, set())
    others = set().union(*(theirs for other, theirs in pids.items() if other != rank))
    return not listed & others and (not listed & own or listed <= own)


# --- the account of one rank ------------------------------------------------------------------------------------------


class _Account:
    """Numbers by name, and the source of each. A number that is unknown is in neither, unless there is a reason for
    it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def put(self, name: str, value: Any, source: str) -> None:
        if value is not None:
            self.values[name], self.sources[name] = value, source


class _Sourced(NamedTuple):
    """A number of bytes, or None if it is unknown, and its source or the reason why there is none."""

    bytes: int | None
    source: str


def _rank_summary(rank: _RankEvidence, resident: bool) -> RankSummary:
    account = _Account()
    _add_torch(account, rank)
    _add_resident(account, rank)
    if resident:
        name = "resident_peak_bytes"
        account.put("peak_bytes", account.values.get(name), account.sources.get(name, ""))
    else:
        _add_device(account, rank)
        _add_totals(account, rank)
    record, torch = rank.record, rank.torch
    return RankSummary(
        rank=rank.rank,
        pipeline_rank=rank.pipeline_rank,
        node=rank.node,
        local_rank=record.get("local_rank", torch.local_rank if torch else None),
        pid=record.get("program_pid", torch.pid if torch else None),
        started_at=record.get("started_at"),
        peak_source=account.sources.get("peak_bytes"),
        at_least=_lower_bounds(account, rank) or None,
        sources=account.sources,
        **account.values,
    )


def _lower_bounds(account: _Account, rank: _RankEvidence) -> list[str]:
    peaks = (name for name in account.values if name.endswith("peak_bytes"))
    return [name for name in peaks if _was_lost(account.sources[name], rank)]


def _was_lost(source: str, rank: _RankEvidence) -> bool:
    """Whether a source of the rank's numbers was lost before the attempt ended; the kernel's is exact."""
    if source.startswith(PROBE):
        return rank.torch is not None and not rank.torch.ended
    monitor = rank.monitor
    seen = monitor is not None and monitor.ended and not (monitor.stalled_at_end and source.startswith("nvml"))
    return source != KERNEL and not seen


def _add_torch(account: _Account, rank: _RankEvidence) -> None:
    """Add the values of the probe, or those of the log if these are larger or there is no probe."""
    logged = rank.logged
    for name in ("allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes", "alloc_retries", "ooms"):
        account.put(name, getattr(rank.torch, name, None), PROBE)
    for name in ("allocated_peak_bytes", "reserved_peak_bytes"):
        printed = getattr(logged, name, None)
        if logged is not None and printed is not None and printed > account.values.get(name, -1):
            account.put(name, printed, logged.source)


def _add_resident(account: _Account, rank: _RankEvidence) -> None:
    """Add the larger of the kernel's own maximum, which is known once a rank has ended, and what the monitor saw."""
    kernel, sampled = rank.record.get("resident_peak_bytes"), rank.resident_seen_bytes
    if kernel and kernel >= (sampled or 0):
        account.put("resident_peak_bytes", kernel, KERNEL)
    else:
        account.put("resident_peak_bytes", sampled or None, RESIDENT)


def _add_device(account: _Account, rank: _RankEvidence) -> None:
    if rank.gpu is not None:
        _add_gpu(account, rank.gpu, rank.pids)
    if rank.torch is not None:
        for name, value in (
            ("gpu_uuid", rank.torch.uuid),
            ("device_total_bytes", rank.torch.total_bytes),
            ("device_peak_bytes", rank.torch.device_used_bytes),
        ):
            if name not in account.values:
                account.put(name, value, PROBE)
    if "device_peak_bytes" not in account.values and rank.logged is not None:
        account.put("device_peak_bytes", rank.logged.device_bytes, rank.logged.source)


def _add_gpu(account: _Account, assigned: AssignedGpu, pids: set[str]) -> None:
    gpu = assigned.gpu
    account.put("gpu_uuid", gpu.uuid, assigned.source)
    account.put("gpu_name", gpu.name, "nvml")
    account.put("device_total_bytes", gpu.total_bytes, "nvml")
    account.put("device_peak_bytes", gpu.device_peak_bytes, "nvml device")
    account.put("baseline_bytes", gpu.baseline_bytes, "nvml device, before the trainer")
    account.put("process_peak_bytes", peak_of_pids(gpu.process_peak_bytes, pids), "nvml process")
    account.put("accounting_peak_bytes", peak_of_pids(gpu.accounting_peak_bytes, pids), ACCOUNTING)
    for name in ("utilization_percent", "power_watts", "power_peak_watts"):
        account.put(name, getattr(gpu, name), "nvml")


def _add_totals(account: _Account, rank: _RankEvidence) -> None:
    """Add the memory of the process, and the part of it outside torch's allocator."""
    name = "reserved_peak_bytes"
    reserved = _Sourced(account.values.get(name), account.sources.get(name, "nobody told"))
    outside = _outside_by_probe(rank)
    total = _process_total(rank, reserved, outside)
    account.put("peak_bytes", total.bytes, total.source)
    outside_torch = _outside_torch(total, reserved, outside, rank.torch)
    account.put("outside_torch_bytes", outside_torch.bytes, outside_torch.source)
    account.sources.setdefault("outside_torch_bytes", outside_torch.source)  # why there is none


def _process_total(rank: _RankEvidence, reserved: _Sourced, outside: _Sourced) -> _Sourced:
    """Return the peak memory of the process, by the precedence above. `reserved` is torch's exact peak; `outside` is
    what the probe saw outside torch's allocator."""
    torch = _Sourced(reserved.bytes, reserved.source + ", reserved")
    if reserved.bytes is not None and outside.bytes is not None:
        torch = _Sourced(reserved.bytes + outside.bytes, reserved.source + ", reserved + outside")
    if rank.gpu is None:
        return torch
    accounted = _Sourced(peak_of_pids(rank.gpu.gpu.accounting_peak_bytes, rank.pids), ACCOUNTING)
    listed = _Sourced(peak_of_pids(rank.gpu.gpu.process_peak_bytes, rank.pids), "nvml process")
    if accounted.bytes and accounted.bytes >= max(listed.bytes or 0, reserved.bytes or 0):
        return accounted
    return max(listed, _above_baseline(rank.gpu), torch, key=lambda sourced: sourced.bytes or 0)


def idle_bytes(baseline_bytes: int | None, reserved_bytes: int | None) -> int:
    """Return what a device held before the trainer started: at least what the driver reserves for itself."""
    return (reserved_bytes or 0) if baseline_bytes is None else baseline_bytes


def _above_baseline(assigned: AssignedGpu) -> _Sourced:
    """Return the peak of a GPU that the rank has to itself, less what the device held before."""
    gpu, source = assigned.gpu, "nvml device"
    if gpu.device_peak_bytes is None or not assigned.alone:
        return _Sourced(None, source)
    if gpu.baseline_bytes is not None:
        source = "nvml device - baseline"
    elif gpu.reserved_bytes is not None:
        source = "nvml device - reserved"
    idle = idle_bytes(gpu.baseline_bytes, gpu.reserved_bytes)
    return _Sourced(gpu.device_peak_bytes - idle if gpu.device_peak_bytes > idle else None, source)


def _outside_by_probe(rank: _RankEvidence) -> _Sourced:
    """Return what the probe saw outside torch's allocator at one moment, on a device that the rank has to itself:
    context, NCCL, workspaces.

    The probe sees the device through cudaMemGetInfo, which leaves out the driver's own reserve that NVML includes.
    Anything else that the device held before the trainer started is not the rank's.
    """
    if rank.torch is None or rank.torch.outside_bytes is None:
        return _Sourced(None, "no probe saw it")
    if rank.shares_device or (rank.gpu is not None and not rank.gpu.alone):
        return _Sourced(None, "others used the device, too")
    return _Sourced(
        max(rank.torch.outside_bytes - _held_before(rank.gpu, rank.torch), 0), "torch probe, device - reserved"
    )


def _held_before(assigned: AssignedGpu | None, torch: TorchPeaks) -> int:
    """Return what the device held before the trainer started, as cudaMemGetInfo counts it."""
    baseline = None if assigned is None else assigned.gpu.baseline_bytes
    if assigned is None or baseline is None:
        return 0
    gpu, reserve = assigned.gpu, assigned.gpu.reserved_bytes
    if reserve is None:  # an old driver: the excess of NVML's total over CUDA's
        reserve = max((gpu.total_bytes or 0) - (torch.total_bytes or gpu.total_bytes or 0), 0)
    return max(baseline - reserve, 0)


def _outside_torch(total: _Sourced, reserved: _Sourced, outside: _Sourced, torch: TorchPeaks | None) -> _Sourced:
    """Return what the process held outside torch's allocator: its total less the reserved peak, if both are of the same
    moment. They may not be once the allocator has released memory; then what the probe saw at one moment counts."""
    why = _why_not_subtracted(total, reserved, torch)
    if why is None and total.bytes is not None and reserved.bytes is not None:
        if total.bytes == reserved.bytes + (outside.bytes or 0) and outside.bytes is not None:
            return outside
        return _Sourced(total.bytes - reserved.bytes, total.source + " - reserved")
    if outside.bytes is not None:
        return outside
    return _Sourced(None, "left out: " + (why or outside.source))


def _why_not_subtracted(total: _Sourced, reserved: _Sourced, torch: TorchPeaks | None) -> str | None:
    if total.bytes is None:
        return "the process's memory is not known"
    if reserved.bytes is None:
        return "what torch reserved is not known"
    if torch is None or torch.alloc_retries is None:
        return f"whether the allocator gave memory back is not known ({reserved.source})"
    if torch.alloc_retries:
        return f"the allocator gave memory back ({torch.alloc_retries} retries)"
    if torch.reserved_bytes is None or torch.reserved_bytes < reserved.bytes:
        return "the allocator held less at the end than at its peak"
    if total.bytes <= reserved.bytes:
        return "no more than torch's own memory was seen"
    return None
