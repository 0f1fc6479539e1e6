"""Main memory of the whole node, and of the job's cgroup: the most of each."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from .cgroup import memory_counters, memory_now_bytes

if TYPE_CHECKING:
    from .files import Record

TOTAL = re.compile(rb"^MemTotal:\s+(\d+) kB", re.MULTILINE)
AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


class HostMemory:
    """Used is MemTotal - MemAvailable of /proc/meminfo, as `free` counts it: what could be given back is not used. It
    is the most of the samples; the cgroup's is the kernel's own maximum, page cache included, and where it keeps none
    the most of the samples, too."""

    def __init__(self, meminfo: str = "/proc/meminfo") -> None:
        self._meminfo = meminfo
        self._descriptor = -1
        self._total: int | None = None
        self._used_peak: int | None = None
        self._cgroup: Record = {}
        self._cgroup_peak: int | None = None

    def sample(self) -> None:
        """The node, tens of microseconds; nothing where /proc does not say."""
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
        """The job, some small files."""
        self._cgroup = memory_counters()
        peak = self._cgroup.get("peak_bytes")
        seen = peak if peak is not None else memory_now_bytes()
        if seen is not None:
            self._cgroup_peak = max(seen, self._cgroup_peak or 0)

    def record(self) -> Record:
        return {
            "used_peak_bytes": self._used_peak,
            "total_bytes": self._total,
            "cgroup_peak_bytes": self._cgroup_peak,
            "cgroup_limit_bytes": self._cgroup.get("limit_bytes"),
        }
