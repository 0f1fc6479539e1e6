"""What NVML knows of a GPU that makes it unfit for a training: memory errors, and memory that is not free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    from collections.abc import Callable

# The driver itself takes up to about 1 GiB; what goes beyond is another process's.
MOST_USED_BYTES = 3 * 2**30


def gpu_problems(visible: str | None) -> list[str]:
    """A sentence for each problem of this job's GPUs; none where NVML cannot be asked.

    `visible` is CUDA_VISIBLE_DEVICES: NVML itself knows all GPUs of a node that does not hide others' from a job. An
    error that a driver does not count (no ECC memory, an old GPU) is no problem.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return []
    problems = []
    for index in _ours(count, visible):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            problems.append(f"GPU {index} does not answer: {error}")
            continue
        problems += [f"GPU {index} {problem}" for problem in _problems(handle)]
    return problems


def _ours(count: int, visible: str | None) -> list[int]:
    """Indexes of NVML. Where fewer are there than the highest number named, the others are hidden and all are ours."""
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if not names or not all(name.isdigit() and int(name) < count for name in names):
        return list(range(count))
    return [int(name) for name in names]


def _problems(handle: Any) -> list[str]:
    found = []
    volatile = _ask(
        pynvml.nvmlDeviceGetTotalEccErrors,
        handle,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    )
    if volatile:
        found.append(f"has {volatile} uncorrectable ECC errors since the driver was loaded")
    if _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle) == pynvml.NVML_FEATURE_ENABLED:
        found.append("waits for a reset to retire memory pages")
    remapped = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    if remapped is not None:
        _, _, pending, failed = remapped
        found += ["waits for a reset to remap memory rows"] if pending else []
        found += ["could not remap a bad memory row"] if failed else []
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is not None and memory.total - memory.free > MOST_USED_BYTES:
        used = (memory.total - memory.free) / 2**30
        found.append(f"has {used:.1f} GiB in use before the training; another process holds them")
    return found


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where this driver has none."""
    try:
        return call(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None
