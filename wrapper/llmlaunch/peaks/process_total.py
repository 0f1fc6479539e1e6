"""What one rank's process held on its device, from all who saw it, and what of that torch's allocator did not hold.
Pure.

True, not sampled, are the driver's accounting and torch's own peaks. A true number wins, but never a smaller one that
another contradicts: pids are used again, and samples miss what lives between two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .attribution import peak_of_pids

if TYPE_CHECKING:
    from .attribution import GivenGpu
    from .probe_files import TorchPeaks

__all__ = ["Sourced", "left_over", "outside_seen", "process_total"]

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
