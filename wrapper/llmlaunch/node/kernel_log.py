"""What the kernel said since a moment, where this user may read it: GPU faults and kills for want of memory."""

from __future__ import annotations

import os
import time

MOST_RECORDS = 200_000


def kernel_lines(since: float, path: str = "/dev/kmsg") -> list[str]:
    """Lines of the kernel's log from `since` (unix seconds) on; none where it may not be read (kernel.dmesg_restrict).

    Never waits: the descriptor does not block, and a reader that falls behind (EPIPE) goes on with the next record.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    found = []
    try:
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue
            if not record:
                break
            line = _line(record, since - booted)
            if line is not None:
                found.append(line)
    except OSError:
        pass  # EAGAIN: all of it was read
    finally:
        os.close(descriptor)
    return found


def _line(record: bytes, since_boot: float) -> str | None:
    """`6,1234,98765432,-;text`: priority, number, microseconds since boot (Documentation/ABI/testing/dev-kmsg)."""
    head, _, text = record.decode("utf-8", errors="replace").partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdigit() or int(fields[2]) / 1e6 < since_boot:
        return None
    return text.split("\n", 1)[0]
