"""NVML, asked with care: every call may be missing, refused, wrong or slow.

Sources: nvml.h 13.4.92, nvidia-ml-py 13.615.71.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    Skipped = Callable[[int, int], None]  # index, code

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
