"""NVML, asked with care: one GPU's memory, whatever its driver can and cannot answer.

Every call may be missing, refused, wrong or slow. Sources: nvml.h 13.4.92, nvidia-ml-py 13.615.71.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    from .files import Record

RISE_BYTES = 256 * 2**20  # memory grew by this much since the last process list: time for another one

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


def open_gpus(skipped: Callable[[int, int], None]) -> list[Gpu]:
    """Every GPU this process may see; `skipped(index, code)` for each it may not, as under SLURM's cgroups.

    Raises pynvml.NVMLError where there is no library or no driver. NVML ignores CUDA_VISIBLE_DEVICES, and its
    order is neither CUDA's nor stable over reboots: the UUID is the name of a GPU.
    """
    pynvml.nvmlInit()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpus.append(Gpu(index, pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as error:
            skipped(index, error.value)
    return gpus


def driver_version() -> str | None:
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def shut_down() -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


class Gpu:
    """One device: what it holds, and the most it and each process on it held."""

    def __init__(self, index: int, handle: Any) -> None:
        self.index = index
        self.lost: int | None = None
        self._handle = handle
        self._unavailable: dict[str, int] = {}
        self._samples = 0
        self._total: int | None = None
        self._reserved: int | None = None
        self._used: int | None = None
        self._peak: int | None = None
        self._baseline: int | None = None
        self._used_at_list = 0
        self._process_peaks: dict[int, int] = {}
        self._accounting_peaks: dict[int, int] = {}
        self._uuid = _text(self._ask("uuid", pynvml.nvmlDeviceGetUUID))
        self._name = _text(self._ask("name", pynvml.nvmlDeviceGetName))
        pci = self._ask("pci", pynvml.nvmlDeviceGetPciInfo)
        self._pci = _text(pci.busId) if pci is not None else None
        # Switched on by the site (`nvidia-smi -am 1`) or not at all: it needs root, and is not ours to change.
        self._accounting = self._ask("accounting_mode", pynvml.nvmlDeviceGetAccountingMode) == 1

    def _ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None; a call that will never answer is not made again."""
        if self.lost is not None or name in self._unavailable:
            return None
        try:
            return call(self._handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in GONE:
                self.lost = error.value
            elif error.value in NEVER_AGAIN:
                self._unavailable[name] = error.value
        except pynvml.NVMLLibraryMismatchError:  # a plain Exception: the binding is newer than the driver
            self._unavailable[name] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        return None

    def sample_memory(self) -> None:
        """The cheap call, microseconds: device memory now.

        Used is total - free. The `used` field itself includes the driver's reserve in version 1 of the struct
        and leaves it out in version 2 (nvml.h 13.4.92).
        """
        memory = self._ask("memory_v2", pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
        if "memory_v2" in self._unavailable:
            memory = self._ask("memory", pynvml.nvmlDeviceGetMemoryInfo)
        elif memory is not None:
            self._reserved = int(memory.reserved)
        if memory is None or not 0 <= memory.free <= memory.total:  # interposed libraries have underflowed
            return
        self._samples += 1
        self._total = int(memory.total)
        self._used = used = self._total - int(memory.free)
        self._baseline = used if self._baseline is None else self._baseline
        self._peak = max(used, self._peak or 0)

    @property
    def risen(self) -> bool:
        """Whether the device holds over RISE_BYTES more than at the last process list."""
        return self._used is not None and self._used > self._used_at_list + RISE_BYTES

    def sample_processes(self, rank_pids: Iterable[int]) -> None:
        """The dear calls, milliseconds under the driver's lock: memory by process, and the driver's own peaks."""
        self._used_at_list = self._used or 0
        for process in self._processes():
            used = process.usedGpuMemory  # None inside some containers and MIG slices
            if used is not None and self._in_range(used) and _exists(process.pid):
                self._process_peaks[process.pid] = max(int(used), self._process_peaks.get(process.pid, 0))
        if self._accounting:
            for pid in {*rank_pids, *self._process_peaks}:
                stats = self._ask("accounting", pynvml.nvmlDeviceGetAccountingStats, pid)
                peak = stats.maxMemoryUsage if stats is not None else None
                if peak is not None and self._in_range(peak):
                    self._accounting_peaks[pid] = int(peak)

    def _processes(self) -> list[Any]:
        """The list by the newest call this driver answers sensibly.

        R535 drivers before release grew the third version's struct without telling: from the second entry on,
        pid and memory are shifted (nvitop issue 88). The second version of the same driver is right.
        """
        listed = self._ask("processes_v3", pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
        if listed is not None and not all(self._plausible(process) for process in listed):
            self._unavailable["processes_v3"] = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
            listed = None
        if "processes_v3" in self._unavailable:
            listed = self._ask("processes_v2", pynvml.nvmlDeviceGetComputeRunningProcesses_v2)
        return listed or []

    def _plausible(self, process: Any) -> bool:
        return process.pid > 0 and (process.usedGpuMemory is None or self._in_range(process.usedGpuMemory))

    def _in_range(self, amount: int) -> bool:
        return 0 <= amount <= (self._total or 0)

    def record(self) -> Record:
        return {
            "index": self.index,
            "uuid": self._uuid,
            "name": self._name,
            "pci": self._pci,
            "total_bytes": self._total,
            "reserved_bytes": self._reserved,
            "used_bytes": self._used,
            "device_peak_bytes": self._peak,
            "baseline_bytes": self._baseline,
            "process_peak_bytes": {str(pid): peak for pid, peak in self._process_peaks.items()},
            "accounting_peak_bytes": {str(pid): peak for pid, peak in self._accounting_peaks.items()},
            "samples": self._samples,
            "lost": self.lost,
            "unavailable": dict(self._unavailable),
        }


def _exists(pid: int) -> bool:
    """Whether `pid` names a process here: drivers have reported pids of other namespaces."""
    return Path(f"/proc/{pid}").exists()


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
