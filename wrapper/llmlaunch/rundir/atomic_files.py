"""Writes small files whole or not at all: a reader sees the old file or the new one, never half of it."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["create", "replace_bytes", "replace_json"]


def create(path: Path, text: str) -> bool:
    """Create `path` with `text`; False, and nothing changed, where it exists. Raises OSError."""
    temporary = _written(path, text.encode(), lasting=True)
    try:
        # link, unlike rename, fails where the name is taken; it is atomic on NFS too.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        _remove(temporary)
    return True


def replace_json(path: Path, record: Mapping[str, Any], lasting: bool = True) -> None:
    """Write `record` over whatever `path` is, whose folder is made where it is missing. Raises OSError.

    Not `lasting`: a power cut may lose it, and nobody waits for the disk.
    """
    replace_bytes(path, json.dumps(record, indent=1).encode() + b"\n", lasting)


def replace_bytes(path: Path, content: bytes, lasting: bool = True) -> None:
    """Write `content` in the same way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _written(path, content, lasting)
    try:
        temporary.replace(path)
    except OSError:
        _remove(temporary)
        raise


def _written(path: Path, content: bytes, lasting: bool) -> Path:
    """Return a hidden file beside `path` that holds `content`; none is left where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
    except OSError:
        _remove(temporary)
        raise
    return temporary


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
