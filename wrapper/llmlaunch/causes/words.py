"""A cause in words for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["in_words", "sentence"]

_WORDS = {
    "gpu_lost": "a GPU was lost",
    "ecc": "memory of a GPU is damaged (ECC)",
    "xid": "a GPU failed",
    "nvlink": "NVLink failed",
    "driver": "the GPU driver is not in order",
    "preflight": "the preflight found a node unfit",
    "oom": "out of GPU memory",
    "host_oom": "out of main memory",
    "shm_full": "no space left in /dev/shm",
    "disk_full": "no space left on a disk",
    "file_system": "a file system failed on the node",
    "checkpoint": "the checkpoint cannot be used",
    "open_files": "too many open files",
    "node_fail": "the node failed",
    "bad_arguments": "wrong arguments",
    "container": "the container does not start",
    "container_busy": "the container did not start this time",
    "port_taken": "a port was taken",
    "name_resolution": "a host name could not be resolved",
    "hub": "the Hugging Face hub did not answer",
    "nccl": "the network between ranks failed",
    "crash": "crashed",
    "preempted": "preempted",
    "time_limit": "out of time",
    "cancelled": "cancelled",
    "hung": "hung",
}


def in_words(kind: str) -> str:
    """`out of GPU memory` of `oom`."""
    return _WORDS.get(kind, kind)


def sentence(cause: Mapping[str, Any]) -> str:
    """`out of GPU memory (rank 3 on n2): CUDA out of memory. Tried to allocate ...`, and what to do if known."""
    kind, node, rank = str(cause.get("kind")), cause.get("node"), cause.get("rank")
    place = " on ".join(str(part) for part in ((f"rank {rank}" if rank is not None else None), node) if part)
    line = str(cause.get("line") or "")
    mend = _mend(kind, cause.get("numbers") or {})
    return (
        in_words(kind)
        + (f" ({place})" if place else "")
        + (f": {line}" if line else "")
        + (f"; {mend}" if mend else "")
    )


def _mend(kind: str, numbers: Mapping[str, Any]) -> str:
    if kind == "shm_full":
        size = numbers.get("shm_bytes")
        holds = "" if size is None else f"/dev/shm holds {size / 2**30:.1f} GiB there: "
        return f"{holds}use fewer DataLoader workers, or a larger /dev/shm (the node's tmpfs, a container's --shm-size)"
    if kind == "open_files":
        return "raise the limit of open files (ulimit -Hn) on the nodes: LimitNOFILE of slurmd, PropagateResourceLimits"
    return ""
