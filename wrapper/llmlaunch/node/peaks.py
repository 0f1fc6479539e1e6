"""`peaks/<node>.jsonl`: append-only, one writer a file, on a disk that may be full, slow or gone."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class PeaksFile:
    """Appends whole lines and never raises for the disk's sake.

    A torn line, ours or a killed predecessor's, is closed before the next one.
    """

    def __init__(self, path: Path, fsync_seconds: float = 10.0) -> None:
        self.path = path
        self._fsync_seconds = fsync_seconds
        self._synced_at = float("-inf")
        self._descriptor = -1

    def append(self, lines: bytes, sync: bool = False) -> bool:
        """Append `lines`, each with its end; `sync` asks for fsync now, else it happens every `fsync_seconds` at most.

        False where they could not be written whole.
        """
        try:
            if self._descriptor < 0:
                self._open()
            if os.write(self._descriptor, lines) != len(lines):
                raise OSError("short write: the disk is full")
            now = time.monotonic()
            if sync or now - self._synced_at >= self._fsync_seconds:
                os.fsync(self._descriptor)
                self._synced_at = now
        except OSError:
            self.close()
            return False
        return True

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def close(self) -> None:
        try:
            if self._descriptor >= 0:
                os.close(self._descriptor)
        except OSError:
            pass
        self._descriptor = -1
