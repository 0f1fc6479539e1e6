"""The pace of one GPU over a window: its clock while it is busy, and what holds the clock down.

A GPU that waits in a collective is as busy as one that computes, by the driver's word, so that utilization names
nobody. Its clock does: where it is halved, every step of the job takes twice as long. Sources: nvml.h 13.4.92.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pynvml

from .gpu import RunningMean

if TYPE_CHECKING:
    from .files import Record
    from .gpu import Gpu


BUSY_PERCENT = 50
# What holds a clock down and may be a fault. A clock that is set lower (0x2, 0x100) shows in the clock itself, and
# with sync boost (0x10) another GPU is the cause.
REASONS = {
    0x04: "power_cap",  # software: the ordinary limit of a GPU that works
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}
IDLE = 0x01


class GpuPace:
    """Counts begin with the monitor; everything else is of the window since the last `window` call."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._device = gpu.device
        self._first_counts: dict[str, int] = {}
        self._restart()

    def _restart(self) -> None:
        self._samples = 0
        self._clock, self._watts = RunningMean(), RunningMean()
        self._celsius: int | None = None
        self._reasons = dict.fromkeys(REASONS, 0)

    def sample(self) -> None:
        """Sample clock, power, temperature and throttle reasons (up to half a millisecond), unless the GPU idles: then
        its clock says nothing."""
        ask = self._device.ask
        reasons = ask("clock_reasons", pynvml.nvmlDeviceGetCurrentClocksEventReasons)
        if "clock_reasons" in self._device.unavailable:  # before R535
            reasons = ask("throttle_reasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        clock = ask("sm_clock", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        idle = (self._gpu.utilization_percent or 0) < BUSY_PERCENT or (reasons or 0) & IDLE
        if idle or not clock:
            return
        self._samples += 1
        self._clock.add(clock)
        for bit in REASONS:
            self._reasons[bit] += bool((reasons or 0) & bit)
        milliwatts = ask("power", pynvml.nvmlDeviceGetPowerUsage)
        if milliwatts is not None:
            self._watts.add(milliwatts / 1000.0)
        celsius = ask("temperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        if celsius is not None:
            self._celsius = max(celsius, self._celsius or 0)

    def window(self) -> Record | None:
        """Return what the window showed, and begin the next; None where the GPU was busy in no sample."""
        samples = self._samples
        if not samples:
            return None
        record = {
            "index": self._device.index,
            "uuid": self._device.uuid,
            "name": self._device.name,
            "samples": samples,
            "clock_mhz": round(self._clock.mean or 0.0, 1),
            "watts": None if self._watts.mean is None else round(self._watts.mean, 1),
            "celsius": self._celsius,
            "reasons": {REASONS[bit]: round(count / samples, 2) for bit, count in self._reasons.items() if count},
            **self._new_errors(),
        }
        self._restart()
        return record

    def _new_errors(self) -> dict[str, int]:
        """Return how many errors were corrected, and rows of memory remapped, since the monitor began."""
        ask = self._device.ask
        ecc = ask(
            "corrected_ecc",
            pynvml.nvmlDeviceGetTotalEccErrors,
            pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )
        rows = ask("remapped_rows", pynvml.nvmlDeviceGetRemappedRows)
        counts = {"corrected_ecc": ecc, "remapped_rows": None if rows is None else rows[0] + rows[1]}
        known = {name: int(count) for name, count in counts.items() if count is not None}
        return {name: max(0, count - self._first_counts.setdefault(name, count)) for name, count in known.items()}
