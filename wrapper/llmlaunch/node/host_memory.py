"""Main memory of the whole node and of the job's cgroup, and the kernel's count of processes killed for want of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir.foreign_values import is_whole_number

if TYPE_CHECKING:
    from .files import Record

TOTAL = re.compile(rb"^MemTotal:\s+(\d+) kB", re.MULTILINE)
AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
UNLIMITED = 2**60  # version 1 says "no limit" with a number near 2**63


class HostMemory:
    """Peak use. The node's is MemTotal - MemAvailable of /proc/meminfo, as `free` counts it (what could be given back
    is not used), the maximum of the samples. The cgroup's is the kernel's own maximum, page cache included, and where
    the kernel keeps none the maximum of the samples, too."""

    def __init__(self, meminfo: str = "/proc/meminfo") -> None:
        self._meminfo = meminfo
        self._descriptor = -1
        self._total: int | None = None
        self._used_peak: int | None = None
        self._cgroup: Record = {}
        self._cgroup_peak: int | None = None

    def sample(self) -> None:
        """Sample the node (tens of microseconds); nothing where /proc does not say."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._meminfo, os.O_RDONLY | os.O_CLOEXEC)
            text = os.pread(self._descriptor, 4096, 0)
        except OSError:
            return
        total, available = TOTAL.search(text), AVAILABLE.search(text)
        if total is None or available is None:
            return
        self._total = int(total.group(1)) * 1024
        self._used_peak = max(self._total - int(available.group(1)) * 1024, self._used_peak or 0)

    def sample_cgroup(self) -> None:
        """Sample the job's cgroup (some small files)."""
        self._cgroup = memory_counters()
        peak = self._cgroup.get("peak_bytes")
        used = peak if peak is not None else memory_now_bytes()
        if used is not None:
            self._cgroup_peak = max(used, self._cgroup_peak or 0)

    def record(self) -> Record:
        return {
            "used_peak_bytes": self._used_peak,
            "total_bytes": self._total,
            "cgroup_peak_bytes": self._cgroup_peak,
            "cgroup_limit_bytes": self._cgroup.get("limit_bytes"),
        }


def memory_counters(root: Path = Path("/")) -> Record:
    """`{"oom_kills", "limit_bytes", "peak_bytes"}`; a count that cannot be read is None.

    `root` is the root file system, whose /proc and cgroup mounts are read.

    Version 2: `memory.events` (oom_kill), `memory.max`, `memory.peak` of cgroups(7). Version 1: `memory.oom_control`
    (oom_kill, Linux 4.13 on), `memory.limit_in_bytes`, `memory.max_usage_in_bytes`. Counted in this process's group
    and in those above it that belong to the same job (SLURM: .../job_7/step_0/user/task_0): the limit may lie there.
    A container may have only some of them, mounted at another place.
    """
    folders, version = _folders(root)
    names = (
        ("memory.events", "memory.max", "memory.peak")
        if version == 2
        else ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
    )
    kills = [_field(folder / names[0], "oom_kill") for folder in folders]
    limits = [_number(folder / names[1]) for folder in folders]
    finite = [limit for limit in limits if limit is not None and limit < UNLIMITED]
    counts = [count for count in kills if count is not None]
    return {
        "oom_kills": sum(counts) if counts else None,
        "limit_bytes": min(finite, default=None),
        "peak_bytes": _number(folders[0] / names[2]) if folders else None,
    }


def memory_now_bytes(root: Path = Path("/")) -> int | None:
    """Return what this process's group uses now: version 2 counts no maximum before Linux 5.19."""
    folders, version = _folders(root)
    return _number(folders[0] / ("memory.current" if version == 2 else "memory.usage_in_bytes")) if folders else None


def _folders(root: Path) -> tuple[list[Path], int]:
    """The folders to look at, the innermost first, and the version of cgroups that has the memory controller."""
    groups = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    groups = [fields for fields in groups if len(fields) == 3]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            return _job_folders(path, _mount(root, 1)), 1
    for number, controllers, path in groups:
        if number == "0" and not controllers:
            return _job_folders(path, _mount(root, 2)), 2
    return [], 2


def _mount(root: Path, version: int) -> tuple[str, Path]:
    """Which cgroup is mounted where, for the memory controller. proc_pid_mountinfo(5): fields 4 and 5 are what of the
    hierarchy is mounted and its place; after the dash, the file system's type and, last, the controllers."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) < 5 or len(kind) < 3:
            continue
        if (version == 2 and kind[0] == "cgroup2") or (kind[0] == "cgroup" and "memory" in kind[-1].split(",")):
            return mount[3], root / mount[4].lstrip("/")
    place = root / "sys/fs/cgroup"
    if version == 1:
        return "/", place / "memory"
    return "/", place / "unified" if (place / "unified").is_dir() else place


def _job_folders(path: str, mounted: tuple[str, Path]) -> list[Path]:
    """The group's folder and those above it, as far as they are of its job and mounted; where its own is not to be
    seen, the nearest above it that is."""
    top, place = mounted
    parts = [part for part in path.split("/") if part]
    top_parts = [part for part in top.split("/") if part]
    cuts = list(range(len(parts) + 1))
    if parts[: len(top_parts)] == top_parts:
        cuts.insert(0, len(top_parts))
    # the first guess is what the mount says of itself; another namespace may name the same group otherwise
    cut = next(cut for cut in cuts if place.joinpath(*parts[cut:]).is_dir() or cut == len(parts))
    folders: list[Path] = []
    for depth in range(len(parts), cut - 1, -1):
        if not folders or any("job_" in part for part in parts[:depth]):
            folders.append(place.joinpath(*parts[cut:depth]))
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _field(path: Path, name: str) -> int | None:
    counts = [line.split()[1] for line in _lines(path) if line.split()[:1] == [name] and len(line.split()) == 2]
    return int(counts[0]) if counts and is_whole_number(counts[0]) else None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if is_whole_number(text) else None
