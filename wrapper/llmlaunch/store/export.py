"""Write records to a file, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.store.record_csv import rows, text_of_row

__all__ = ["csv_lines", "write_lines"]


def csv_lines(contents: Sequence[str]) -> Iterator[str]:
    """Records, given as JSON text, as the lines of a table; none where there are none."""
    if contents:
        yield from map(text_of_row, rows(json.loads(content) for content in contents))


def write_lines(lines: Iterable[str], path: Path) -> None:
    """One line each, in place of what `path` held. A new file is for its owner alone, as the store is; one that was
    there keeps its permissions. Raises UserError where it cannot be written."""
    place = path.resolve()  # a link keeps pointing where it does
    if place.exists() and not place.is_file():
        _write(lines, place, path, None)  # a device or a pipe takes no rename
        return
    mode = stat.S_IMODE(place.stat().st_mode) if place.exists() else 0o600
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        _write(lines, temporary, path, mode)
        temporary.replace(place)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write(lines: Iterable[str], where: Path, named: Path, mode: int | None) -> None:
    def private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    try:
        with open(where, "w", encoding="utf-8", newline="\n", opener=private) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise UserError(f"{named}: cannot be written: {error.strerror}") from None
