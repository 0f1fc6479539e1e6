"""A GPU of this machine that could hold a rank as the planned one would."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pynvml

from llmlaunch.cluster.profile import Accelerator

__all__ = ["LocalGpu", "gpu_at_hand"]

# What NVML calls the memory of a card is a little more or less than torch does: the driver keeps some of it.
NEARLY = 0.95


@dataclass(frozen=True)
class LocalGpu:
    name: str
    memory_bytes: int
    compute_capability: str


def gpu_at_hand(planned: Accelerator) -> LocalGpu | None:
    """The first GPU here with as much memory as the planned one and of its compute capability; None where there is no
    such, or no driver that says so."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        found = (_looked_at(index) for index in range(pynvml.nvmlDeviceGetCount()))
        return next((gpu for gpu in found if gpu is not None and _like(gpu, planned)), None)
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _looked_at(index: int) -> LocalGpu | None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return None
    return LocalGpu(name if isinstance(name, str) else name.decode("utf-8", "replace"), memory, f"{major}.{minor}")


def _like(gpu: LocalGpu, planned: Accelerator) -> bool:
    same = planned.compute_capability is None or str(planned.compute_capability) == gpu.compute_capability
    return same and gpu.memory_bytes >= NEARLY * planned.memory_bytes
