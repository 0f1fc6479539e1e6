"""The kernel's own count of processes it killed for want of memory, in the cgroup this process lives in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .files import Record

UNLIMITED = 2**60  # version 1 says "no limit" with a number near 2**63


def memory_counters(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Record:
    """`{"oom_kills", "limit_bytes", "peak_bytes"}`; a count that cannot be read is None.

    Version 2: `memory.events` (oom_kill), `memory.max`, `memory.peak` of cgroups(7). Version 1: `memory.oom_control`
    (oom_kill, Linux 4.13 on), `memory.limit_in_bytes`, `memory.max_usage_in_bytes`. Counted in this process's group
    and in those above it that belong to the same job (SLURM: .../job_7/step_0/user/task_0): the limit may lie there.
    """
    folders, version = _folders(proc, mount)
    names = (
        ("memory.events", "memory.max", "memory.peak")
        if version == 2
        else ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
    )
    kills = [_field(folder / names[0], "oom_kill") for folder in folders]
    limits = [_number(folder / names[1]) for folder in folders]
    known = [limit for limit in limits if limit is not None and limit < UNLIMITED]
    counted = [count for count in kills if count is not None]
    return {
        "oom_kills": sum(counted) if counted else None,
        "limit_bytes": min(known, default=None),
        "peak_bytes": _number(folders[0] / names[2]) if folders else None,
    }


def memory_now_bytes(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What this process's group holds: version 2 counts no maximum before Linux 5.19."""
    folders, version = _folders(proc, mount)
    return _number(folders[0] / ("memory.current" if version == 2 else "memory.usage_in_bytes")) if folders else None


def _folders(proc: Path, mount: Path) -> tuple[list[Path], int]:
    """The folders to look at, the innermost first, and the version of cgroups that has the memory controller."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return [], 2
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if "memory" in controllers.split(","):
            return _of_job(mount / "memory", path), 1
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if number == "0" and not controllers:
            root = mount / "unified" if (mount / "unified").is_dir() else mount
            return _of_job(root, path), 2
    return [], 2


def _of_job(root: Path, path: str) -> list[Path]:
    own = root / path.lstrip("/")
    if not own.is_dir():
        own = root  # in a container the path is the host's, the mount our own
    above = [folder for folder in own.parents if "job_" in folder.name or any("job_" in p.name for p in folder.parents)]
    return [own, *above]


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.split()[:1] == [name] and len(line.split()) == 2]
    return int(found[0]) if found and found[0].isdigit() else None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
