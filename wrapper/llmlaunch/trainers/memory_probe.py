"""The memory probe: the peaks of torch's allocator by its own counters, written by the rank's own Python.

It is copied into a run directory as hook/llmlaunch_memory_probe.py and started there by hook/sitecustomize.py, once
CUDA is initialised. Python >= 3.8 and the standard library alone; it must never harm the trainer
(docs/memory-probe.md).

Counters are read by a thread every second, in the trainer's own thread before it resets them, and at its end. All
writing is that thread's: a full, slow or hanging disk costs the trainer five seconds at its end, and nothing before.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_SECONDS = 1.0
UNUSED_LOOKS = 10  # a device that torch has not used yet is looked at every so many times
BETWEEN_WRITES_SECONDS = 2.0  # and while a number rises by less than its 64th part:
SMALL_RISE_SECONDS = 30.0  # also after a failed write
DEVICE_LOOK_SECONDS = 10.0  # where what is reserved changed; else:
QUIET_DEVICE_LOOK_SECONDS = 60.0  # NCCL takes memory of its own
LOCK_SECONDS = 0.5
LAST_WORD_SECONDS = 5.0  # what the end of the trainer waits for at most

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW

# All that resets a counter of torch's, by whatever name it is called in Python (torch 2.6 to 2.13)
RESETS = (
    "_cuda_resetPeakMemoryStats",
    "_cuda_resetAccumulatedMemoryStats",
    "_accelerator_resetPeakStats",
    "_accelerator_resetAccumulatedStats",
)
PEAKS = (
    ("allocated_peak_bytes", "allocated_bytes"),
    ("active_peak_bytes", "active_bytes"),
    ("reserved_peak_bytes", "reserved_bytes"),
)
COUNTS = (("alloc_retries", "num_alloc_retries"), ("ooms", "num_ooms"))


def start(description: str) -> None:
    """Called as CUDA is initialised, in the thread that does it. `description`: JSON of `run` (the run directory),
    `attempt`, `node`, `rank`, `local_rank`."""
    MemoryProbe(json.loads(description), sys.modules["torch"]).begin()


class MemoryProbe:
    """The allocator counters of one process. A forked child has a copy, which writes nothing: its pid is another."""

    def __init__(self, place: dict[str, Any], torch: Any) -> None:
        self.torch = torch
        self.pid = os.getpid()
        self.device_count = torch._C._cuda_getDeviceCount()
        # Other allocators answer by calls into the driver: they are asked where the trainer itself would wait for them.
        self.may_be_asked_any_time = torch._C._cuda_getAllocatorBackend() == "native"
        self.lock = threading.RLock()  # a signal handler of the trainer's may come back in; held for microseconds
        self.devices: dict[int, dict[str, Any]] = {}
        self.last_counts: dict[tuple[int, str], int] = {}
        self.turns = 0
        self.file = File(place, self.pid)
        self.ending = False
        self.wake = threading.Event()
        self.thread = threading.Thread(target=self.run, name="llmlaunch-memory-probe", daemon=True)

    def begin(self) -> None:
        for name in RESETS:
            real = getattr(self.torch._C, name, None)
            if real is not None:
                setattr(self.torch._C, name, self.looking_first(real))
        atexit.register(self.end)
        os._exit = self.ending_first(os._exit)  # type: ignore[assignment]
        self.thread.start()

    # --- in the trainer's threads ---------------------------------------------------------------------------------

    def looking_first(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def reset(*arguments: Any, **options: Any) -> Any:
            with contextlib.suppress(Exception):
                if os.getpid() == self.pid:
                    self.look(arguments[0])
            return real(*arguments, **options)

        return reset

    def ending_first(self, real: Callable[[int], Any]) -> Callable[[int], Any]:
        @functools.wraps(real)
        def leave(status: int) -> Any:
            try:
                self.end()
            finally:
                real(status)

        return leave

    def end(self) -> None:
        """Read the counters a last time, and write them if the disk takes them in time. A signal's handler may come
        here again amid it, and waits as well."""
        if os.getpid() != self.pid:
            return
        with contextlib.suppress(Exception):
            self.look_at_all(unused=True)
        if not self.ending:
            self.ending = True  # after the look: the thread may wake by itself just now
            self.wake.set()
        self.thread.join(LAST_WORD_SECONDS)

    # --- the counters ---------------------------------------------------------------------------------------------

    def look_at_all(self, unused: bool) -> None:
        """Opens no context on a device that torch does not use: the counters are torch's own, in main memory."""
        if _cache_is_being_emptied():
            return
        for index in range(self.device_count):
            if unused or index in self.devices:
                self.look(index)

    def look(self, index: int) -> None:
        """Read one device's counters; nothing where the lock cannot be had: a handler that waits for this thread has
        interrupted its holder."""
        if not self.lock.acquire(timeout=LOCK_SECONDS):
            return
        try:  # over the reading, too: what is counted must not go back
            self.take(index, self.torch._C._cuda_memoryStats(index))
        finally:
            self.lock.release()

    def take(self, index: int, stats: dict[str, Any]) -> None:
        if not stats["reserved_bytes"]["all"]["peak"]:
            return
        entry = self.devices.setdefault(index, _new_entry(index))
        for name, of_torch in PEAKS:
            entry[name] = max(entry[name], stats[of_torch]["all"]["peak"])
        for name, of_torch in COUNTS:
            now, last = stats[of_torch], self.last_counts.get((index, name), 0)
            entry[name] += now - last if now >= last else now
            self.last_counts[index, name] = now
        entry["reserved_bytes"] = stats["reserved_bytes"]["all"]["current"]

    # --- in its own thread ----------------------------------------------------------------------------------------

    def run(self) -> None:
        devices = Devices(self.torch)
        while True:
            self.wake.wait(LOOK_SECONDS)
            ending = self.ending
            with contextlib.suppress(Exception):
                self.turn(devices, ending)
            if ending:
                return

    def turn(self, devices: Devices, ending: bool) -> None:
        if self.may_be_asked_any_time and not ending:
            self.look_at_all(unused=self.turns % UNUSED_LOOKS == 0)
        self.turns += 1
        for entry in list(self.devices.values()):
            with contextlib.suppress(Exception):
                devices.describe(entry)
                if not ending and devices.is_due(entry):
                    self.look_at_device(devices, entry)
        self.file.keep([dict(self.devices[index]) for index in sorted(self.devices)], ending)

    def look_at_device(self, devices: Devices, entry: dict[str, Any]) -> None:
        before = entry["reserved_bytes"]
        used = devices.used_bytes(entry)
        if used is None:
            return
        if self.may_be_asked_any_time:
            self.look(entry["device"])
        entry["device_used_bytes"] = max(used, entry["device_used_bytes"] or 0)
        if entry["reserved_bytes"] == before:  # else the two are not of one moment
            entry["outside_bytes"] = max(used - before, entry["outside_bytes"] or 0)


class Devices:
    """The driver's answers about devices, for one thread: it may hang here, and holds no lock of the interpreter
    then."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.contexts: dict[int, ctypes.c_void_p] = {}
        self.looked: dict[int, tuple[float, int]] = {}  # when, and what was reserved
        self.driver: Any = None
        with contextlib.suppress(OSError, AttributeError):
            loaded = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # the trainer's, or none
            # While another thread captures a CUDA graph, this one's calls would end the capture in any other mode.
            relaxed = ctypes.c_int(2)
            if loaded.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed)) == 0:
                self.driver = loaded

    def describe(self, entry: dict[str, Any]) -> None:
        if entry["total_bytes"] is None:
            entry["uuid"] = self.uuid(entry["device"])
            entry["total_bytes"] = int(self.torch.cuda.get_device_properties(entry["device"]).total_memory)

    def uuid(self, index: int) -> str | None:
        """Return the UUID as NVML writes it: a slice's own, where the device is one; None where the driver does not
        say."""
        if self.driver is None:
            return None
        whole, own = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
        device = ctypes.c_int()
        if self.driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)) != 0:
            return None
        if self.driver.cuDeviceGetUuid_v2(ctypes.byref(own), device) != 0:
            return None
        has_whole = self.driver.cuDeviceGetUuid(ctypes.byref(whole), device) == 0
        by_variable = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        sliced = by_variable or (has_whole and bytes(whole) != bytes(own))
        text = bytes(own).hex()
        parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
        return ("MIG-" if sliced else "GPU-") + "-".join(parts)

    def is_due(self, entry: dict[str, Any]) -> bool:
        at, reserved = self.looked.get(entry["device"], (float("-inf"), None))
        changed = entry["reserved_bytes"] != reserved
        return time.monotonic() - at >= (DEVICE_LOOK_SECONDS if changed else QUIET_DEVICE_LOOK_SECONDS)

    def used_bytes(self, entry: dict[str, Any]) -> int | None:
        """Return total - free as cudaMemGetInfo has them. No context is opened: torch has one where it reserves
        memory."""
        self.looked[entry["device"]] = (time.monotonic(), entry["reserved_bytes"])
        context = self.context(entry["device"])
        if context is None or self.driver.cuCtxPushCurrent_v2(context) != 0:
            return None
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        try:
            code = self.driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return total.value - free.value if code == 0 else None

    def context(self, index: int) -> ctypes.c_void_p | None:
        """Torch's own, the primary one of the device."""
        if self.driver is None:
            return None
        if index not in self.contexts:
            device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
            primary = ctypes.c_void_p()
            if self.driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)) != 0:
                return None
            self.driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            if not active.value or self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), device) != 0:
                return None
            self.contexts[index] = primary
        return self.contexts[index]


class File:
    """`memory/<node>.jsonl` of the attempt, to which the processes of a node append. It stays open: a line costs the
    server of a shared file system no call but the write. What cannot be written waits in the counters: the next line
    has it, too."""

    def __init__(self, place: dict[str, Any], pid: int) -> None:
        self.pid = pid
        self.about = {"v": 1, **{name: place[name] for name in ("rank", "local_rank", "node")}, "pid": pid}
        self.run_directory = Path(place["run"])
        self.relative = Path("attempts", place["attempt"], "memory", f"{place['node']}.jsonl")
        self.descriptor = -1
        self.written: list[dict[str, Any]] = []
        self.not_before = float("-inf")  # of the monotonic clock, as the next
        self.small_rise_at = float("-inf")

    def keep(self, devices: list[dict[str, Any]], ended: bool) -> None:
        """Write `devices` where they say more than what was written last, yet not at every rise."""
        now = time.monotonic()
        if not devices or not (ended or self.is_due(devices, now)):
            return
        record = {**self.about, "at": time.time(), "ended": ended, "devices": devices}
        text = json.dumps(record).encode() + b"\n"
        if self.put(text):
            self.written = devices
            self.not_before = time.monotonic() + BETWEEN_WRITES_SECONDS
        else:
            self.not_before = time.monotonic() + SMALL_RISE_SECONDS
        self.small_rise_at = time.monotonic() + SMALL_RISE_SECONDS

    def is_due(self, devices: list[dict[str, Any]], now: float) -> bool:
        if now < self.not_before:
            return False
        before = {entry["device"]: entry for entry in self.written}
        rises = [
            (value, before.get(entry["device"], {}).get(name) or 0)
            for entry in devices
            for name, value in entry.items()
            if name not in ("device", "uuid", "total_bytes", "reserved_bytes") and value
        ]
        if any(value > last + last // 64 for value, last in rises):
            return True
        return now >= self.small_rise_at and any(value > last for value, last in rises)

    def put(self, text: bytes) -> bool:
        for _ in range(2):  # a file that its server has forgotten is opened anew
            with contextlib.suppress(OSError):
                self.append(text)
                return True
        return False

    def append(self, text: bytes) -> None:
        """A line end goes before the line, for one that a full disk has torn. Raises OSError."""
        try:
            if self.descriptor < 0:
                self.descriptor = self.open()
            _write(self.descriptor, b"\n" + text)
        except OSError:
            if self.descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(self.descriptor)
            self.descriptor = -1
            raise

    def open(self) -> int:
        path = self.run_directory / self.relative
        try:
            return os.open(path, APPEND, 0o600)
        except FileNotFoundError:
            self.run_directory.stat()  # one that is gone, or not mounted, is not made anew
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, APPEND, 0o600)


def _write(file: int, text: bytes) -> None:
    if os.write(file, text) != len(text):
        raise OSError("short write: the disk is full")
    os.fsync(file)


def _new_entry(index: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"device": index, "uuid": None, "total_bytes": None}
    entry.update(dict.fromkeys((*(name for name, _ in PEAKS), "reserved_bytes", *(name for name, _ in COUNTS)), 0))
    return {**entry, "device_used_bytes": None, "outside_bytes": None}


def _cache_is_being_emptied() -> bool:
    """By some thread of the trainer's: it keeps the allocator's lock while it waits for the device. Who asks for the
    counters then waits as long, and holds up every thread of the interpreter."""
    return any(frame.f_code.co_name == "empty_cache" for frame in sys._current_frames().values())
