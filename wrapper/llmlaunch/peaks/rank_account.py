"""The account of one rank from all who saw it, each number with its source. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .attribution import peak_of_pids
from .process_total import Sourced, left_over, outside_seen, process_total
from .summary import RankSummary
from .values import byte_count, time_or_none

if TYPE_CHECKING:
    from .attribution import GivenGpu
    from .traces import Traces

__all__ = ["rank_account"]

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
