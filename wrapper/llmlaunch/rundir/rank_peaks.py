"""What one rank's process held on its device, from all who saw it, and what of that torch's allocator did not hold.
Pure.

True, not sampled, are the driver's accounting and torch's own peaks. A true number wins, but never a smaller one that
another contradicts: pids are used again, and samples miss what lives between two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .gpu_assignment import peak_of_pids

if TYPE_CHECKING:
    from .gpu_assignment import GivenGpu
    from .probe_files import TorchPeaks
from typing import TYPE_CHECKING, Any

from .summary import RankSummary
from .values import byte_count, time_or_none

if TYPE_CHECKING:
    from .gpu_assignment import GivenGpu
    from .traces import Traces

__all__ = ["Sourced", "left_over", "outside_seen", "process_total", "rank_account"]

ACCOUNTING = "nvml accounting"


class Sourced(NamedTuple):
    """A number of bytes, None where nobody knows it, and where it is from, or why there is none."""

    bytes: int | None
    source: str


def process_total(given: GivenGpu | None, pids: set[str], reserved: Sourced, outside: Sourced) -> Sourced:
    """`reserved` is torch's true peak, `outside` what was held beside it (`outside_seen`)."""
    seen = Sourced(None, "nobody saw it") if given is None else _seen_by_driver(given, pids)
    if reserved.bytes is None or (seen.source == ACCOUNTING and (seen.bytes or 0) >= reserved.bytes):
        return seen
    least = Sourced(reserved.bytes, reserved.source + ", reserved")
    if outside.bytes is not None:
        least = Sourced(reserved.bytes + outside.bytes, reserved.source + ", reserved + outside")
    return seen if (seen.bytes or 0) >= (least.bytes or 0) else least


def _seen_by_driver(given: GivenGpu, pids: set[str]) -> Sourced:
    """The driver's own maximum, unless a sample is larger: then it is another process's under the same number. Among
    samples the largest: the whole device's come once a second, process lists more rarely."""
    gpu = given.gpu
    accounted = Sourced(peak_of_pids(gpu.accounting_peak_bytes, pids), ACCOUNTING)
    sampled = Sourced(peak_of_pids(gpu.process_peak_bytes, pids), "nvml process")
    if accounted.bytes and accounted.bytes >= (sampled.bytes or 0):
        return accounted
    return max(sampled, _above_baseline(given), key=lambda one: one.bytes or 0)


def _above_baseline(given: GivenGpu) -> Sourced:
    """Of a GPU that the rank has alone."""
    gpu = given.gpu
    if gpu.device_peak_bytes is None or not given.alone:
        return Sourced(None, "nvml device")
    idle, source = 0, "nvml device"
    if gpu.baseline_bytes is not None:
        idle, source = gpu.baseline_bytes, "nvml device - baseline"
    elif gpu.reserved_bytes is not None:
        idle, source = gpu.reserved_bytes, "nvml device - reserved"
    return Sourced(gpu.device_peak_bytes - idle if gpu.device_peak_bytes > idle else None, source)


def outside_seen(given: GivenGpu | None, torch: TorchPeaks | None, shared: bool) -> Sourced:
    """What the probe saw held beside torch's allocator at one look, on a device that the rank has alone: context, NCCL,
    workspaces. `shared`: another rank's probe names the same device.

    The probe sees the device as cudaMemGetInfo has it, which leaves out the driver's own reserve that NVML counts;
    what else the device held before the trainer is not the rank's.
    """
    if torch is None or torch.outside_bytes is None:
        return Sourced(None, "no probe saw it")
    if shared or (given is not None and not given.alone):
        return Sourced(None, "others used the device, too")
    return Sourced(max(torch.outside_bytes - _held_before(given, torch), 0), "torch probe, device - reserved")


def _held_before(given: GivenGpu | None, torch: TorchPeaks) -> int:
    """Of the device as cudaMemGetInfo has it, what it held before the trainer."""
    baseline = None if given is None else given.gpu.baseline_bytes
    if given is None or baseline is None:
        return 0
    gpu, reserve = given.gpu, given.gpu.reserved_bytes
    if reserve is None:  # an old driver: what NVML's total has more than CUDA's
        reserve = max((gpu.total_bytes or 0) - (torch.total_bytes or gpu.total_bytes or 0), 0)
    return max(baseline - reserve, 0)


def left_over(total: Sourced, reserved: Sourced, outside: Sourced, torch: TorchPeaks | None) -> Sourced:
    """What the process held beside torch's allocator: its total less the reserved peak, where both are of the same
    moment. They need not be once the allocator has given memory back; then what the probe saw at one look counts."""
    why = _unsound(total, reserved, torch)
    if why is None and total.bytes is not None and reserved.bytes is not None:
        if total.bytes == reserved.bytes + (outside.bytes or 0) and outside.bytes is not None:
            return outside
        return Sourced(total.bytes - reserved.bytes, total.source + " - reserved")
    if outside.bytes is not None:
        return outside
    return Sourced(None, "left out: " + (why or outside.source))


def _unsound(total: Sourced, reserved: Sourced, torch: TorchPeaks | None) -> str | None:
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


PROBE = "torch probe"


class _Account:
    """Numbers by name, and where each is from; one that nobody knows is in neither, unless it is said why."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def put(self, name: str, value: Any, source: str) -> None:
        if value is not None:
            self.values[name], self.sources[name] = value, source

    def put_or_why(self, name: str, sourced: Sourced) -> None:
        self.put(name, sourced.bytes, sourced.source)
        self.sources.setdefault(name, sourced.source)


def rank_account(traces: Traces, resident: bool) -> RankSummary:
    """`resident`: the run's own kind of peak is the process's main memory, not its device's."""
    account = _Account()
    _add_torch(account, traces)
    _add_resident(account, traces)
    if resident:
        name = "resident_peak_bytes"
        account.put("peak_bytes", account.values.get(name), account.sources.get(name, ""))
    else:
        _add_device(account, traces)
        _add_totals(account, traces)
    record, torch = traces.record, traces.torch
    return RankSummary(
        rank=traces.rank,
        pipeline_rank=traces.pipeline_rank,
        node=traces.node,
        local_rank=byte_count(record.get("local_rank", torch.local_rank if torch else None)),
        pid=byte_count(record.get("program_pid", torch.pid if torch else None)),
        started_at=time_or_none(record.get("started_at")),
        peak_source=account.sources.get("peak_bytes"),
        sources=account.sources,
        **account.values,
    )


def _add_torch(account: _Account, traces: Traces) -> None:
    """The probe's word; the log's where it tells of more, or where there is no probe."""
    torch, logged = traces.torch, traces.logged
    for name in ("allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes", "alloc_retries", "ooms"):
        account.put(name, getattr(torch, name, None), PROBE)
    for name in ("allocated_peak_bytes", "reserved_peak_bytes"):
        printed = getattr(logged, name, None)
        if logged is not None and printed is not None and printed > account.values.get(name, -1):
            account.put(name, printed, logged.source)


def _add_resident(account: _Account, traces: Traces) -> None:
    """The larger of the kernel's own maximum, known once a rank has ended, and what the monitor saw."""
    kernel, seen = byte_count(traces.record.get("resident_peak_bytes")), traces.resident_seen_bytes
    if kernel and kernel >= (seen or 0):
        account.put("resident_peak_bytes", kernel, "ru_maxrss")
    else:
        account.put("resident_peak_bytes", seen or None, "monitor, resident")


def _add_device(account: _Account, traces: Traces) -> None:
    given, torch = traces.given, traces.torch
    if given is not None:
        _add_gpu(account, given, traces.pids)
    if torch is not None:
        for name, value in (
            ("gpu_uuid", torch.uuid),
            ("device_total_bytes", torch.total_bytes),
            ("device_peak_bytes", torch.device_used_bytes),
        ):
            if name not in account.values:
                account.put(name, value, PROBE)
    if "device_peak_bytes" not in account.values and traces.logged is not None:
        account.put("device_peak_bytes", traces.logged.device_bytes, traces.logged.source)


def _add_gpu(account: _Account, given: GivenGpu, pids: set[str]) -> None:
    gpu = given.gpu
    account.put("gpu_uuid", gpu.uuid, given.source)
    account.put("gpu_name", gpu.name, "nvml")
    account.put("device_total_bytes", gpu.total_bytes, "nvml")
    account.put("device_peak_bytes", gpu.device_peak_bytes, "nvml device")
    account.put("baseline_bytes", gpu.baseline_bytes, "nvml device, before the trainer")
    account.put("process_peak_bytes", peak_of_pids(gpu.process_peak_bytes, pids), "nvml process")
    account.put("accounting_peak_bytes", peak_of_pids(gpu.accounting_peak_bytes, pids), "nvml accounting")
    for name in ("utilization_percent", "power_watts", "power_peak_watts"):
        account.put(name, getattr(gpu, name), "nvml")


def _add_totals(account: _Account, traces: Traces) -> None:
    """The process's memory, and what of it torch's allocator did not hold."""
    name = "reserved_peak_bytes"
    reserved = Sourced(account.values.get(name), account.sources.get(name, "nobody told"))
    outside = outside_seen(traces.given, traces.torch, traces.shared)
    total = process_total(traces.given, traces.pids, reserved, outside)
    account.put("peak_bytes", total.bytes, total.source)
    account.put_or_why("outside_torch_bytes", left_over(total, reserved, outside, traces.torch))
