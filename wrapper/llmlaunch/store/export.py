"""Write records to a file, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from llmlaunch.errors import UserError

__all__ = ["write_lines"]


def write_lines(lines: Sequence[str], path: Path) -> None:
    """One line each, in place of what `path` held. Raises UserError where it cannot be written."""
    place = path.resolve()  # a link keeps pointing where it does
    if place.exists() and not place.is_file():
        _write(lines, place, path)  # a device or a pipe takes no rename
        return
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        _write(lines, temporary, path)
        temporary.replace(place)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write(lines: Sequence[str], where: Path, named: Path) -> None:
    try:
        with where.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise UserError(f"{named}: cannot be written: {error.strerror}") from None
