"""The one thread that calls NVML. A call may hang for ever, so nobody waits for it.

The binding is loaded small: it is 8,000 lines in a zip file, whose compiling takes 15 MB that a process would keep.
"""

from __future__ import annotations

import marshal
import os
import sys
import threading
import time
import types
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import pynvml

from .gpu import RunningMean
from .process_tree import JobProcesses
from .window_clock import WindowClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .files import Record
    from .gpu import Gpu


PACE_SECONDS = 3.0  # between two samples of the pace


class NvmlSampler:
    """Samples in its own thread and publishes whole snapshots; the writer only ever reads attributes."""

    def __init__(self, interval_seconds: float, list_interval_seconds: float, window_seconds: float) -> None:
        self.ready = False  # NVML answered what there is, be it nothing
        self.driver: str | None = None
        self.gpus: list[Record] = []  # replaced, never changed
        self.rank_pids: tuple[int, ...] = ()  # set by the writer
        self._job = JobProcesses()
        self._list_soon = False  # set by the writer, taken back here
        self._interval = interval_seconds
        self._list_interval = list_interval_seconds
        self._window = WindowClock(window_seconds)
        self._paces: Sequence[GpuPace] = ()
        self._paced_at = float("-inf")
        self._events: SimpleQueue[Record] = SimpleQueue()
        self._reported_lost: list[Gpu] = []
        self._calling_since: float | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout_seconds: float) -> bool:
        """Ask for a last full sample; False where the driver kept us waiting longer."""
        self._done.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def list_soon(self) -> None:
        """Ask for processes with the next sample: one of them has just ended, and accounting knows what it held."""
        self._list_soon = True

    def events(self) -> list[Record]:
        """Return the events since the last call."""
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except Empty:
                return events

    def waiting_seconds(self) -> float:
        """Return how long the present call of the driver has taken; 0 between calls."""
        since = self._calling_since
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        # Whatever goes wrong here ends the sampling of GPUs and nothing else.
        try:
            from . import gpu as nvml

            self._calling_since = time.monotonic()
            gpus = [nvml.Gpu(device) for device in nvml.open_devices(self._skipped)]
            self._paces = [GpuPace(gpu) for gpu in gpus if gpu.device.parent is None]
            self.driver = nvml.driver_version()
            self._sample(gpus, everything=True)
            self.ready = True
            self._loop(gpus)
            self._sample(gpus, everything=True)
            nvml.shut_down()
        except Exception as error:
            why = str(error) or type(error).__name__
            self._events.put({"event": "no_nvml", "code": getattr(error, "value", None), "why": why})
        self._calling_since = None
        self.ready = True

    def _skipped(self, index: int, code: int) -> None:
        self._events.put({"event": "gpu_skipped", "index": index, "code": code})

    def _loop(self, gpus: list[Gpu]) -> None:
        tick = listed_at = time.monotonic()
        while True:
            tick = max(tick + self._interval, time.monotonic())  # after a slow call, never catch up in a burst
            self._calling_since = None
            if self._done.wait(max(0.0, tick - time.monotonic())):
                return
            everything = self._list_soon or time.monotonic() - listed_at >= self._list_interval
            if everything:
                self._list_soon = False
                listed_at = time.monotonic()
            self._sample(gpus, everything)
            self._sample_pace()

    def _sample_pace(self) -> None:
        """Sample every PACE_SECONDS, or a tenth of a shorter window; a window that has ended becomes an event."""
        number = self._window.ended()
        if number is not None:
            devices = [record for record in [pace.window() for pace in self._paces] if record is not None]
            if number >= 0 and devices:
                ended = {"window": number, "seconds": self._window.seconds, "devices": devices}
                self._events.put({"event": "pace", **ended})
        now = time.monotonic()
        if now - self._paced_at >= min(PACE_SECONDS, self._window.seconds / 10):
            self._paced_at = now
            for pace in self._paces:
                self._calling_since = time.monotonic()
                pace.sample()

    def _sample(self, gpus: list[Gpu], everything: bool) -> None:
        for gpu in gpus:
            self._calling_since = time.monotonic()
            gpu.sample_memory()
            gpu.sample_utilization()
            if everything or gpu.risen:
                self._publish(gpus)  # what the cheap calls saw is safe, should a dear one hang
                gpu.sample_power()
                gpu.sample_processes(self.rank_pids, self._job)
            if gpu.device.lost is not None and gpu not in self._reported_lost:
                self._reported_lost.append(gpu)
                self._events.put({"event": "gpu_lost", "gpu": gpu.record()})
        self._publish(gpus)

    def _publish(self, gpus: list[Gpu]) -> None:
        self.gpus = [gpu.record() for gpu in gpus]


def load_small(name: str) -> None:
    """Import `name` from the archive that this module came from, compiled by a child; nothing where it came from none.

    To be called before there are threads: it forks. Whatever it raises, an ordinary import may still succeed.
    """
    own = globals().get("__loader__")
    if name in sys.modules or not hasattr(own, "archive"):  # of node.pyz (rendering/node_archive.py)
        return
    code = marshal.loads(_compiled_by_a_child(own, name))
    module = types.ModuleType(name)
    sys.modules[name] = module  # it looks itself up
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise


def _compiled_by_a_child(loader: Any, name: str) -> bytes:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)  # else it would write for ever where the parent is killed
            with os.fdopen(theirs, "wb") as file:
                file.write(marshal.dumps(loader.get_code(name)))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        code = file.read()
    os.waitpid(child, 0)
    return code


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
