"""Windows of wall-clock time, in which the pace of all GPUs of a job is compared."""

from __future__ import annotations

import time

WINDOW_SECONDS = 30.0


class WindowClock:
    """Numbers windows of wall-clock time, the same on all nodes: unix seconds divided by their length."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self.seconds = seconds
        self._number: int | None = None
        self._whole = False  # seen from its start

    def ended(self) -> int | None:
        """Return the number of the window that has ended since the last call, -1 where it was not seen whole, as the
        first, and None where none has ended."""
        number, before = int(time.time() // self.seconds), self._number
        if number == before:
            return None
        self._number = number
        consecutive = before is not None and number == before + 1
        whole, self._whole = self._whole and consecutive, consecutive
        return before if before is not None and whole else -1
