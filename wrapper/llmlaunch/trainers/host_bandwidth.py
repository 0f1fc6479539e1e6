"""Measures what the devices of this node copy to and from its memory, and lists its network adapters.

It stands alone: Python >= 3.8 and NVIDIA's driver (libcuda), neither torch nor llmlaunch. `llmlaunch doctor --host`
starts it. Each device copies from and to pinned memory of its own, as trainers do that keep optimizer states or
activations on the host: first alone, then all at once, each direction by itself. Of the repeats the median counts.
Where there is no driver or no device, `problem` says why, and only the adapters are told. One line is printed:

    {"node", "devices", "message_bytes", "repeats", "problem", "adapters": [{"name", "gigabits_per_second", "layer"}],
     "alone": {"to_device": [...], "to_host": [...]}, "together": {"to_device": [...], "to_host": [...]}}

with one number of bytes a second for each device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

DRIVER = "libcuda.so.1"
COPIES = 4  # of one message, one behind the other: the start of the first is a small part
PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
DIRECTIONS = ("to_device", "to_host")
ADAPTERS = "sys/class/infiniband"
RATE = re.compile(r"([\d.]+) Gb/sec")


class NoDevice(Exception):
    """Nothing can be measured here; the message says why."""


def main() -> None:
    options = arguments()
    answer = {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0],
        "message_bytes": options.message_bytes,
        "repeats": options.repeats,
        "adapters": adapters(Path(options.root)),
        "devices": 0,
        "problem": None,
    }
    try:
        answer.update(measured(options.message_bytes, options.repeats))
    except NoDevice as problem:
        answer["problem"] = str(problem)
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def adapters(root: Path) -> list[dict[str, Any]]:
    """Return the ports of network adapters that are up, in the order of their names."""
    ports = []
    for port in sorted((root / ADAPTERS).glob("*/ports/*")):
        rate = RATE.match(_text(port / "rate"))
        if rate is not None and "ACTIVE" in _text(port / "state"):
            speed, layer = float(rate[1]), _text(port / "link_layer")
            ports.append({"name": port.parents[1].name, "gigabits_per_second": speed, "layer": layer})
    return ports


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def measured(message_bytes: int, repeats: int) -> dict[str, Any]:
    """Return the rates of all devices. Raises NoDevice where there is none."""
    driver = Driver()
    copiers = [Copier(driver, index, message_bytes) for index in range(driver.devices)]
    return {
        "devices": len(copiers),
        "alone": {way: [together([copier], way, repeats)[0] for copier in copiers] for way in DIRECTIONS},
        "together": {way: together(copiers, way, repeats) for way in DIRECTIONS},
    }


class Driver:
    """libcuda, whose calls raise NoDevice with the driver's own word for what went wrong."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(DRIVER)
        except OSError as error:
            raise NoDevice(f"{DRIVER} cannot be loaded: there is no NVIDIA driver here ({error})") from None
        self.call("cuInit", 0)
        count = ctypes.c_int(0)
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.devices = count.value
        if not self.devices:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise NoDevice(f"the driver shows no GPU here (CUDA_VISIBLE_DEVICES is {visible or 'not set'})")

    def call(self, name: str, *values: Any) -> None:
        code = getattr(self._library, name)(*values)
        if code:
            raise NoDevice(f"{name}: {self._word(code)}")

    def _word(self, code: int) -> str:
        text = ctypes.c_char_p()
        named = not self._library.cuGetErrorName(code, ctypes.byref(text)) and text.value
        return text.value.decode() if named and text.value else f"error {code}"


class Copier:
    """One device with a message in its memory and one in the node's, and a stream to copy them on. Each is used by one
    thread at a time."""

    def __init__(self, driver: Driver, index: int, message_bytes: int) -> None:
        self._driver, self._bytes = driver, message_bytes
        device, self._context = ctypes.c_int(0), ctypes.c_void_p()
        self._near, self._far, self._stream = ctypes.c_uint64(0), ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuDeviceGet", ctypes.byref(device), index)
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        driver.call("cuCtxSetCurrent", self._context)
        size = ctypes.c_size_t(message_bytes)
        driver.call("cuMemAlloc_v2", ctypes.byref(self._near), size)
        driver.call("cuMemHostAlloc", ctypes.byref(self._far), size, PORTABLE)
        driver.call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    def seconds(self, way: str, wait: Callable[[], object]) -> float:
        """Return the seconds of COPIES messages, begun when `wait` returns."""
        self._driver.call("cuCtxSetCurrent", self._context)
        size = ctypes.c_size_t(self._bytes)
        wait()
        start = time.perf_counter()
        for _ in range(COPIES):
            if way == "to_device":
                self._driver.call("cuMemcpyHtoDAsync_v2", self._near, self._far, size, self._stream)
            else:
                self._driver.call("cuMemcpyDtoHAsync_v2", self._far, self._near, size, self._stream)
        self._driver.call("cuStreamSynchronize", self._stream)
        return time.perf_counter() - start

    @property
    def moved_bytes(self) -> int:
        return COPIES * self._bytes


def together(copiers: Sequence[Copier], way: str, repeats: int) -> list[float]:
    """Return the bytes a second of each device while all copy; the first time, which makes page tables, does not
    count. Raises NoDevice where a copy fails."""
    seconds: list[list[float]] = [[] for _ in copiers]
    failures: list[NoDevice] = []
    barrier = threading.Barrier(len(copiers))

    def copy(place: int) -> None:
        try:
            for _ in range(1 + repeats):
                seconds[place].append(copiers[place].seconds(way, barrier.wait))
        except NoDevice as failure:
            failures.append(failure)
            barrier.abort()
        except threading.BrokenBarrierError:  # another one failed, and says so
            return

    threads = [threading.Thread(target=copy, args=(place,)) for place in range(len(copiers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [
        copier.moved_bytes / statistics.median(times[1:])
        for copier, times in zip(copiers, seconds)  # noqa: B905
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--message-bytes", type=int, default=64 * 2**20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", default="/", help="folder that stands for / where adapters are looked for")
    return parser.parse_args()


if __name__ == "__main__":
    main()
