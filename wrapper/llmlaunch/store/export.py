"""Write records to a file, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llmlaunch.documents.writing import replacing
from llmlaunch.errors import UserError
from llmlaunch.store.record_csv import rows, text_of_row

__all__ = ["csv_lines", "write_lines"]


def csv_lines(contents: Sequence[str]) -> Iterator[str]:
    """Records, given as JSON text, as the lines of a table; none where there are none."""
    if contents:
        yield from map(text_of_row, rows(json.loads(content) for content in contents))


def write_lines(lines: Iterable[str], path: Path) -> None:
    """Write one line each in place of what `path` held. A new file is for its owner alone, as the store is; one that
    was there keeps its permissions. Raises UserError where it cannot be written and where it is a link to a file."""
    if path.exists() and not path.is_file() and not path.is_dir():
        try:
            with path.open("w", encoding="utf-8", newline="\n") as device:  # a device or a pipe takes no rename
                device.writelines(line + "\n" for line in lines)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        return
    with replacing(path, 0o600) as file:
        file.writelines(line + "\n" for line in lines)
