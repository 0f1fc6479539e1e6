"""The NVIDIA GPUs of this machine: one that could hold a rank as the planned one would, and enough for a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from llmlaunch.cluster.profile import Accelerator
from llmlaunch.errors import UserError
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.run_file import read_run_file
from llmlaunch.rundir.values import counted
from llmlaunch.units import GIB

# What NVML calls the memory of a card is a little more or less than torch does: the driver keeps some of it.
NEARLY = 0.95


@dataclass(frozen=True)
class LocalGpu:
    """A GPU or a MIG slice of one; `memory_bytes` and `compute_capability` are None where the driver does not say."""

    name: str
    uuid: str
    memory_bytes: int | None
    compute_capability: str | None


def gpu_at_hand(planned: Accelerator) -> LocalGpu | None:
    """The first GPU here with as much memory as the planned one and of its compute capability; None where there is no
    such, or no driver that says so."""
    capability = None if planned.compute_capability is None else str(planned.compute_capability)
    for gpu in local_gpus():
        large_enough = gpu.memory_bytes is not None and gpu.memory_bytes >= NEARLY * planned.memory_bytes
        if large_enough and capability in (None, gpu.compute_capability):
            return gpu
    return None


def refuse_without_gpus_of(run_dir: Path) -> None:
    """Raise UserError if this machine lacks the GPUs that run.json says its run needs (docs/run-directory.md)."""
    run = read_run_file(run_dir)
    devices, planned = run.get("devices_per_node"), run.get("measurement")
    if run.get("accelerator_kind") in (None, "cpu") or not isinstance(devices, int) or not isinstance(planned, dict):
        return
    memory = planned.get("gpu_memory_bytes")
    refuse_missing_gpus(f"{run_dir}", str(planned.get("gpu")), devices, memory if isinstance(memory, int) else 0)


def refuse_missing_gpus(where: str, accelerator: str, devices: int, memory_bytes: int) -> None:
    """Raise UserError unless this machine shows a process `devices` GPUs of at least `memory_bytes`.

    `where` names what was planned so: a recipe or a run directory. CUDA_VISIBLE_DEVICES counts; a GPU whose driver
    does not say its memory (a unified one) is believed.
    """
    gpus = _visible(local_gpus())
    planned = f"{where}: the plan is for {devices} {accelerator} on one node"
    remedy = (
        "submit it where there is SLURM, run it on such a machine, or name a cluster like this one (cluster: a profile "
        "under slurm/clusters/, with devices_per_node)"
    )
    if len(gpus) < devices:
        count = "no GPU" if not gpus else f"only {counted(len(gpus), 'GPU')}"
        hidden = " that CUDA_VISIBLE_DEVICES shows" if os.environ.get("CUDA_VISIBLE_DEVICES") is not None else ""
        raise UserError(f"{planned}, and this machine has {count}{hidden}; {remedy}")
    small = [gpu for gpu in gpus[:devices] if gpu.memory_bytes is not None and gpu.memory_bytes < NEARLY * memory_bytes]
    if small:
        raise UserError(
            f"{planned}, with {memory_bytes / GIB:.1f} GiB each, and {small[0].name} ({small[0].uuid}) of this "
            f"machine has {(small[0].memory_bytes or 0) / GIB:.1f} GiB; {remedy}"
        )


def local_gpus() -> list[LocalGpu]:
    """Every GPU of this machine in the driver's order, a GPU in MIG mode by its slices. Empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _gpus_at(index)]
    except pynvml.NVMLError:
        return []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpus_at(index: int) -> Iterator[LocalGpu]:
    handle = _answer("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return
    capability = _answer("nvmlDeviceGetCudaComputeCapability", handle)
    shown = None if capability is None else f"{capability[0]}.{capability[1]}"
    in_slices, _ = _answer("nvmlDeviceGetMigMode", handle) or (0, 0)
    handles = _slices(handle) if in_slices == pynvml.NVML_DEVICE_MIG_ENABLE else iter((handle,))
    for device in handles:
        memory = _answer("nvmlDeviceGetMemoryInfo", device)
        name, uuid = _answer("nvmlDeviceGetName", device), _answer("nvmlDeviceGetUUID", device)
        yield LocalGpu(_text(name), _text(uuid), None if memory is None else int(memory.total), shown)


def _slices(handle: Any) -> Iterator[Any]:
    for place in range(_answer("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _answer("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if part is not None:
            yield part


def _answer(call: str, *arguments: Any) -> Any:
    """Return what the driver says, or None where it lacks the call, refuses it or has nothing there."""
    try:
        return getattr(pynvml, call)(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "a GPU")


def _visible(gpus: list[LocalGpu]) -> list[LocalGpu]:
    """Return those that CUDA shows a process. CUDA_VISIBLE_DEVICES names them by index in PCI order, which is NVML's,
    or by the beginning of a UUID, up to the first word that names none (CUDA C++ Programming Guide, environment
    variables).
    """
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return gpus
    shown: list[LocalGpu] = []
    for word in (word.strip() for word in words.split(",")):
        if is_whole_number(word):
            matches = gpus[int(word) : int(word) + 1]
        else:
            matches = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(matches) != 1:
            break
        shown += matches
    return shown
