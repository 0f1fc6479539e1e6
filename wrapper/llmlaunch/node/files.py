"""The small files of a run directory: replace one in a single step (read: rundir/files.py), say a line."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Record = dict[str, Any]


def attempt_directory(run_directory: Path, attempt: str) -> Path:
    return run_directory / "attempts" / attempt


def replace_json(path: Path, record: Record) -> None:
    """Write `record` so that a reader sees the old file or the whole new one. Raises OSError."""
    replace_bytes(path, json.dumps(record, indent=1).encode() + b"\n")


def replace_bytes(path: Path, content: bytes) -> None:
    """The same with what `content` holds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()  # a predecessor's of the same number, or a link that somebody else put there
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def say(message: str) -> None:
    """One line on stderr; where even that cannot be written, nothing."""
    with contextlib.suppress(OSError):
        os.write(2, f"llmlaunch: {message}\n".encode())
