"""Memory, processes, utilization and power of one GPU or one slice of it: peaks and means of the driver's answers.

NVML is asked with care: every call may be missing, refused, wrong or slow. Sources: nvml.h 13.4.92, nvidia-ml-py
13.615.71.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    from .files import Record
    from .process_tree import JobProcesses

    Skipped = Callable[[int, int], None]  # index, code


RISE_BYTES = 256 * 2**20  # memory grew by this much since the last process list: time for another one
A_TIME_OF_DAY = 1e9  # 2001
CLOCK_SECONDS = 60.0  # by which the clock may have been set back
MEAN_POWER_SECONDS = 1.0  # the energy counter moves every 10 to 100 ms: over less time it says little
# It will answer the same next time: do not ask that call again.
NEVER_AGAIN = frozenset(
    {
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
# The GPU fell off the bus or waits for a reset: go on with the others.
GONE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND})
ROOM = 64  # processes of one GPU; asked for more where there are more
NOT_AVAILABLE = 2**64 - 1


class Gpu:
    """The samples of one device. All numbers are of the time since the monitor began."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.utilization_percent: int | None = None  # by the last sample
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
                self.utilization_percent = int(rates.gpu)

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


def open_devices(skipped: Skipped) -> list[Device]:
    """Open every GPU this process may see, a GPU in MIG mode by its slices. `skipped(index, code)` is called for each
    it may not see, as under SLURM's cgroups.

    Raises pynvml.NVMLError where there is no library or no driver. NVML ignores CUDA_VISIBLE_DEVICES, and its
    order is neither CUDA's nor stable over reboots: the UUID is the name of a GPU.
    """
    pynvml.nvmlInit()
    devices: list[Device] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            whole = Device(index, pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            skipped(index, error.value)
            continue
        parts = _slices(whole, skipped) if _in_slices(whole) else [whole]
        if whole.lost is not None:
            skipped(index, whole.lost)
        else:
            devices += parts
    return devices


def driver_version() -> str | None:
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def shut_down() -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


class Device:
    """A GPU or a slice of one: its names, and its answers."""

    def __init__(self, index: int, handle: Any, parent: Device | None = None) -> None:
        self.index = index
        self.lost: int | None = None
        self.unavailable: dict[str, int] = {}
        self.handle = handle
        self.parent = parent.uuid if parent is not None else None  # of a slice
        self.pci: str | None = parent.pci if parent is not None else None
        self.uuid: str | None = None
        self.name: str | None = None
        self.identify()

    def identify(self) -> None:
        """Ask for the names that are not known yet."""
        self.uuid = self.uuid or _text(self.ask("uuid", pynvml.nvmlDeviceGetUUID))
        self.name = self.name or _text(self.ask("name", pynvml.nvmlDeviceGetName))
        if self.pci is None and self.parent is None:
            pci = self.ask("pci", pynvml.nvmlDeviceGetPciInfo)
            self.pci = _text(pci.busId) if pci is not None else None

    def ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer, or None; a call that will never answer is not made again."""
        if self.lost is not None or name in self.unavailable:
            return None
        try:
            return call(self.handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in GONE:
                self.lost = error.value
            elif error.value in NEVER_AGAIN:
                self.unavailable[name] = error.value
        except pynvml.NVMLLibraryMismatchError:  # a plain Exception: the binding is newer than the driver
            self.unavailable[name] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        return None


def running_processes(handle: Any, version: str) -> list[tuple[int, int | None]]:
    """Return pid and bytes of the processes on a device, by `nvmlDeviceGetComputeRunningProcesses_<version>`; None
    where the driver does not say. Raises pynvml.NVMLError.

    The binding's own function asks twice, first how many there are, and this call is the dear one: 4.5 ms under the
    driver's lock (MangoHud pull request 2104). Half as much memory again lies behind what the driver is told of: the
    R535 betas wrote entries of 32 bytes where 24 were meant.
    """
    function = getattr(pynvml.nvmlLib, "nvmlDeviceGetComputeRunningProcesses_" + version, None)
    if function is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    room = ROOM
    while True:
        buffer = (pynvml.c_nvmlProcessInfo_v2_t * (room + room // 2))()
        count = ctypes.c_uint(room)
        code = function(handle, ctypes.byref(count), buffer)
        if code == pynvml.NVML_SUCCESS:
            break
        if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE or room > 1000 * ROOM:
            raise pynvml.NVMLError(code)
        room = max(2 * room, count.value + ROOM)
    entries = buffer[: min(count.value, room)]
    return [(e.pid, None if e.usedGpuMemory == NOT_AVAILABLE else e.usedGpuMemory) for e in entries]


def _in_slices(whole: Device) -> bool:
    mode, _ = whole.ask("mig", pynvml.nvmlDeviceGetMigMode) or (0, 0)
    whole.unavailable.pop("mig", None)  # nothing is missing where there are no slices: before Ampere, before R450
    return bool(mode == pynvml.NVML_DEVICE_MIG_ENABLE)


def _slices(whole: Device, skipped: Skipped) -> list[Device]:
    """The MIG devices of a GPU. Asked whole, it answers with sums, and privileged callers alone (nvml.h)."""
    slices = []
    code = pynvml.NVML_ERROR_NOT_FOUND
    try:
        for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(whole.handle)):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole.handle, place)
            except pynvml.NVMLError as error:
                # places that are empty are NOT_FOUND; slices of other jobs are refused
                code = error.value if error.value != pynvml.NVML_ERROR_NOT_FOUND else code
                continue
            slices.append(Device(whole.index, handle, whole))
    except pynvml.NVMLError as error:
        code = error.value
    if not slices:
        skipped(whole.index, code)
    return slices


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
