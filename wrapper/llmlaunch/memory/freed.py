"""Memory that columns free stays with the process, for the next ones."""

from __future__ import annotations

from functools import cache

import numpy as np

__all__ = ["keep_freed_memory"]

# The largest block glibc learns from, less what it puts around it (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX).
LEARNT_BYTES = 32 * 2**20 - 2**16


@cache
def keep_freed_memory() -> None:
    """Once a process. glibc hands freed memory at the end of the heap back to the system as soon as it is 128 KiB, and
    columns come and go there: new pages took half of the formula's time. Freeing one mapped block teaches it to keep
    twice that block's size (mallopt(3), M_MMAP_THRESHOLD, "dynamic"). The block is never written to, so it costs
    nothing; other allocators take no notice."""
    np.empty(LEARNT_BYTES, dtype=np.int8)
