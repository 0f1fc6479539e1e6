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

from .process_tree import JobProcesses
from .window_clock import WindowClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .files import Record
    from .gpu import Gpu
    from .gpu_pace import GpuPace

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
            from .gpu_pace import GpuPace

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
