"""Memory, processes, utilization and power of one GPU or one slice of it: peaks and means of the driver's answers."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import pynvml

from .nvml import running_processes

if TYPE_CHECKING:
    from .files import Record
    from .nvml import Device
    from .process_tree import JobProcesses

RISE_BYTES = 256 * 2**20  # memory grew by this much since the last process list: time for another one
A_TIME_OF_DAY = 1e9  # 2001
CLOCK_SECONDS = 60.0  # by which the clock may have been set back
MEAN_POWER_SECONDS = 1.0  # the energy counter moves every 10 to 100 ms: over less time it says little


class Gpu:
    """The samples of one device. All numbers are of the time since the monitor began."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._began = time.time()
        self._samples = 0
        self._total: int | None = None
        self._reserved: int | None = None
        self._used: int | None = None
        self._peak: int | None = None
        self._baseline: int | None = None
        self._used_at_list = 0
        self._process_peaks: dict[int, int] = {}
        self._accounting_peaks: dict[int, int] = {}
        self._busy = RunningMean()
        self._power = Power()
        # Switched on by the site (`nvidia-smi -am 1`) or not at all: it needs root, and is not ours to change. No
        # slice has it.
        self._accounting = (
            device.parent is None and device.ask("accounting_mode", pynvml.nvmlDeviceGetAccountingMode) == 1
        )

    def sample_memory(self) -> None:
        """Sample device memory, the cheap call (microseconds).

        Used is total - free. The `used` field itself includes the driver's reserve in version 1 of the struct
        and leaves it out in version 2 (nvml.h 13.4.92).
        """
        ask = self.device.ask
        memory = ask("memory_v2", pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
        if "memory_v2" in self.device.unavailable:
            memory = ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        elif memory is not None:
            self._reserved = int(memory.reserved)
        if memory is None or not 0 <= memory.free <= memory.total:  # interposed libraries have underflowed
            return
        self._samples += 1
        self._total = int(memory.total)
        self._used = used = self._total - int(memory.free)
        self._baseline = used if self._baseline is None else self._baseline
        self._peak = max(used, self._peak or 0)

    def sample_utilization(self) -> None:
        """Sample the share of the last sixth of a second to second, by product, in which a kernel ran (microseconds).
        A GPU in MIG mode does not say."""
        if self.device.parent is None:
            rates = self.device.ask("utilization", pynvml.nvmlDeviceGetUtilizationRates)
            if rates is not None and rates.gpu <= 100:
                self._busy.add(rates.gpu)

    def sample_power(self) -> None:
        """Sample power and energy (up to half a millisecond). Watts are the mean of one second on Ampere (but GA100)
        and newer, of the moment before; energy since the driver was loaded comes from Volta on. A slice has neither."""
        if self.device.parent is None:
            milliwatts = self.device.ask("power", pynvml.nvmlDeviceGetPowerUsage)
            if milliwatts is not None:
                self._power.add_watts(milliwatts / 1000.0)
            millijoules = self.device.ask("energy", pynvml.nvmlDeviceGetTotalEnergyConsumption)
            if millijoules is not None:
                self._power.add_joules(millijoules / 1000.0, time.monotonic())

    @property
    def risen(self) -> bool:
        """Whether the device holds over RISE_BYTES more than at the last process list."""
        return self._used is not None and self._used > self._used_at_list + RISE_BYTES

    def sample_processes(self, rank_pids: Collection[int], job: JobProcesses) -> None:
        """Sample memory by process and the driver's own peaks, which it also keeps of processes that have ended. These
        calls are dear: milliseconds under the driver's lock."""
        self._used_at_list = self._used or 0
        self.device.identify()  # where a passing error kept it from us
        for pid, used in self._processes():  # None inside some containers and MIG slices
            if used is not None and self._in_range(used) and job.owns(pid, rank_pids):
                self._process_peaks[pid] = max(used, self._process_peaks.get(pid, 0))
        if self._accounting:
            for pid in {*rank_pids, *self._process_peaks}:
                stats = self.device.ask("accounting", pynvml.nvmlDeviceGetAccountingStats, pid)
                peak = stats.maxMemoryUsage if stats is not None and self._is_recent(stats.startTime) else None
                if peak is not None and self._in_range(peak):
                    self._accounting_peaks[pid] = max(int(peak), self._accounting_peaks.get(pid, 0))

    def _is_recent(self, start_microseconds: int) -> bool:
        """Whether that process began after us: the driver remembers some 4000, and the numbers come round. Microseconds
        since 1970, as DCGM takes them; what cannot be that is no reason to doubt."""
        started = start_microseconds / 1e6
        return started < A_TIME_OF_DAY or started > self._began - CLOCK_SECONDS

    def _processes(self) -> list[tuple[int, int | None]]:
        """Return the process list by the newest call this driver answers sensibly.

        R535 drivers before release grew the third version's struct without telling: from the second entry on,
        pid and memory are shifted (nvitop issue 88). The second version of the same driver is right.
        """
        device = self.device
        listed = device.ask("processes_v3", running_processes, "v3")
        if listed is not None and not all(self._plausible(pid, used) for pid, used in listed):
            device.unavailable["processes_v3"] = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
            listed = None
        if "processes_v3" in device.unavailable:
            listed = device.ask("processes_v2", running_processes, "v2")
        return listed or []

    def _plausible(self, pid: int, used: int | None) -> bool:
        return pid > 0 and (used is None or self._total is None or self._in_range(used))

    def _in_range(self, amount: int) -> bool:
        return 0 <= amount <= (self._total or 0)

    def record(self) -> Record:
        device = self.device
        return {
            "index": device.index,
            "uuid": device.uuid,
            "mig": device.parent,
            "name": device.name,
            "pci": device.pci,
            "total_bytes": self._total,
            "reserved_bytes": self._reserved,
            "used_bytes": self._used,
            "device_peak_bytes": self._peak,
            "baseline_bytes": self._baseline,
            "process_peak_bytes": {str(pid): peak for pid, peak in self._process_peaks.items()},
            "accounting_peak_bytes": {str(pid): peak for pid, peak in self._accounting_peaks.items()},
            "utilization_percent": _rounded(self._busy.mean),
            "power_watts": _rounded(self._power.mean),
            "power_source": self._power.source,
            "power_peak_watts": _rounded(self._power.peak),
            "samples": self._samples,
            "lost": device.lost,
            "unavailable": dict(device.unavailable),
        }


class RunningMean:
    """Arithmetic mean of all samples added so far, or None before the first."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._sum += value
        self._count += 1

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None


class Power:
    """Mean watts, from the energy counter over all time between its readings, else from the samples; and peak watts."""

    def __init__(self) -> None:
        self.peak: float | None = None
        self._samples = RunningMean()
        self._last: tuple[float, float] | None = None  # joules, seconds
        self._joules = self._seconds = 0.0

    def add_watts(self, watts: float) -> None:
        self._samples.add(watts)
        self.peak = max(watts, self.peak or 0.0)

    def add_joules(self, joules: float, at: float) -> None:
        """A counter that went backwards began anew, with its driver: that stretch is left out."""
        if self._last is not None and joules >= self._last[0]:
            self._joules += joules - self._last[0]
            self._seconds += at - self._last[1]
        self._last = joules, at

    @property
    def _by_energy(self) -> bool:
        return self._seconds >= MEAN_POWER_SECONDS and self._joules > 0

    @property
    def mean(self) -> float | None:
        return self._joules / self._seconds if self._by_energy else self._samples.mean

    @property
    def source(self) -> str | None:
        if self._by_energy:
            return "nvml energy counter"
        return None if self._samples.mean is None else "nvml power samples"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
