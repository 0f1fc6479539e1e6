"""Small files that several processes may look for: written whole or not at all (read: rundir/files.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["create", "replace"]


def create(path: Path, text: str) -> bool:
    """Create `path` with `text`; False, and nothing changed, where it exists. Readers never see half of it."""
    temporary = _written(path, text)
    try:
        # link, unlike rename, fails where the name is taken; it is atomic on NFS too.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def replace(path: Path, record: Mapping[str, Any], lasting: bool = True) -> None:
    """Write `record` as JSON over whatever `path` is. Readers see the old or the new. Not `lasting`: a power cut may
    lose it, and nobody waits for the disk."""
    temporary = _written(path, json.dumps(record, indent=1) + "\n", lasting)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _written(path: Path, text: str, lasting: bool = True) -> Path:
    """A file beside `path` that holds `text` and nobody knows; none is left where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
