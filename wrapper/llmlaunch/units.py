"""Units of memory and time, and how people read them."""

from __future__ import annotations

MIB, GIB = 2**20, 2**30
GB = 10**9
MINUTE, HOUR, DAY = 60, 3600, 86400  # in seconds
_LONGEST_SECONDS = 1e10  # 300 years: longer than any run


def gib(size_bytes: float) -> str:
    """Return bytes as a number of GiB with as many digits as matter: 0.43, 7.21, 63.3."""
    value = size_bytes / GIB
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Return a time as `45 s`, `12 min`, `3 h 20 min` or `2 d 4 h`, and as `?` if no run can last so long."""
    if not abs(seconds) < _LONGEST_SECONDS:
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / MINUTE)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24:,} d {hours % 24} h"
