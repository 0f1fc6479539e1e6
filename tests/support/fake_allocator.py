"""torch's CUDA allocator on a machine that has none: the C functions at the edge, below the real `torch.cuda`.

A trainer imports this, calls `install()` after its own `import torch`, and then moves memory with `hold` and `release`.
What the functions answer, and in which threads they were called, is as in torch 2.13's CUDA build. `driver()` loads the
stand-in of libcuda.so.1 beside it (fake_libcuda.c), as torch would have loaded the real one.
"""

from __future__ import annotations

import ctypes
import os
import threading
from types import SimpleNamespace
from typing import Any

GIB = 2**30
TOTAL_BYTES = 80 * GIB
KINDS = ("allocated_bytes", "active_bytes", "reserved_bytes")

current: list[dict[str, int]] = []  # per device, by kind
peak: list[dict[str, int]] = []
counts: list[dict[str, int]] = []
calls: list[tuple[str, str]] = []  # (function, thread) of everything that asks for or changes a thread's device
outside_bytes = 3 * GIB  # context and NCCL, of every device in use
_of_thread = threading.local()
_library: Any = None


def install(devices: int = 2, backend: str = "native") -> None:
    import torch

    for _ in range(devices):
        current.append(dict.fromkeys(KINDS, 0))
        peak.append(dict.fromkeys(KINDS, 0))
        counts.append({"num_alloc_retries": 0, "num_ooms": 0})

    def initialise() -> None:
        properties = SimpleNamespace(name="a stand-in", major=9, minor=0, total_memory=TOTAL_BYTES)
        torch.cuda._get_device_properties = lambda index: properties
        torch.cuda.default_generators = tuple(torch.Generator() for _ in range(devices))

    def note(name: str, answer: Any) -> Any:
        def called(*arguments: Any) -> Any:
            calls.append((name, threading.current_thread().name))
            return answer(*arguments)

        return called

    functions = {
        "_cuda_init": initialise,
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_getAllocatorBackend": lambda: backend,
        "_cuda_getDevice": note("_cuda_getDevice", lambda: getattr(_of_thread, "device", 0)),
        "_cuda_setDevice": note("_cuda_setDevice", lambda index: setattr(_of_thread, "device", index)),
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_synchronize": note("_cuda_synchronize", lambda: None),
        "_cuda_memoryStats": note("_cuda_memoryStats", stats),
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": reset_counts,
        "_accelerator_resetPeakStats": reset_peaks,
        "_accelerator_resetAccumulatedStats": reset_counts,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceIndex": lambda: getattr(_of_thread, "device", 0),
    }
    for name, function in functions.items():
        setattr(torch._C, name, function)
    torch.cuda._cudart = SimpleNamespace()


def stats(device: int) -> dict[str, Any]:
    """Nested as torch has it."""
    whole = {
        kind: {
            pool: {"current": now, "peak": peak[device][kind], "allocated": 0, "freed": 0}
            for pool in ("all", "large_pool", "small_pool")
        }
        for kind, now in current[device].items()
    }
    return {**whole, **counts[device], "max_split_size": -1}


def reset_peaks(device: int) -> None:
    peak[device].update(current[device])


def reset_counts(device: int) -> None:
    counts[device].update(num_alloc_retries=0, num_ooms=0)


def hold(allocated: int, device: int = 0, cached: int = GIB) -> None:
    """Allocate so much, and reserve `cached` more than that where the cache does not have it."""
    now = current[device]
    now["allocated_bytes"] += allocated
    now["active_bytes"] += allocated + allocated // 8
    now["reserved_bytes"] = max(now["reserved_bytes"], now["allocated_bytes"] + cached)
    for kind in KINDS:
        peak[device][kind] = max(peak[device][kind], now[kind])
    tell_driver(device)


def release(allocated: int, device: int = 0) -> None:
    """Into the cache."""
    current[device]["allocated_bytes"] -= allocated
    current[device]["active_bytes"] -= allocated + allocated // 8


def empty_cache(device: int = 0) -> None:
    current[device]["reserved_bytes"] = current[device]["allocated_bytes"]
    tell_driver(device)


def driver() -> Any:
    """The stand-in of the driver, loaded from $FAKE_LIBCUDA."""
    global _library
    _library = ctypes.CDLL(os.environ["FAKE_LIBCUDA"], mode=ctypes.RTLD_GLOBAL)
    return _library


def tell_driver(device: int) -> None:
    if _library is not None:
        used = current[device]["reserved_bytes"] + outside_bytes
        _library.fake_device(ctypes.c_int(device), ctypes.c_ulong(TOTAL_BYTES), ctypes.c_ulong(used))
