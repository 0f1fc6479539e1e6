"""Measured records from a JSON-lines file, refused with file and line where they are none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.rundir.files import read_bytes

__all__ = ["problem", "read_records"]

SECTIONS = ("model", "parallelism", "optimizer", "recompute", "precision", "implementation")
NEEDED = (
    *("id", "family", "peak_kind", "peak_bytes", "backend", "gpu", "sequence_length", "micro_batch_size"),
    *SECTIONS,
)


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of `path`, in file order.

    Raises:
        UserError: the file cannot be read, or a line is not a measurement record.
    """
    try:
        lines = read_bytes(path, 2**30, follow=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        why = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {why}; give a file of measurement records, one JSON a line") from None
    records = [_record(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise UserError(f"{path}: holds no record; give a file of measurement records, one JSON object a line")
    return records


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as failure:
        raise UserError(f"{path}:{number}: is not JSON ({failure}); mend or remove the line") from None
    except RecursionError:
        raise UserError(f"{path}:{number}: is nested too deeply for a measurement record; remove the line") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}:{number}: is not a JSON object; a measurement record is one object a line")
    wrong = problem(record)
    if wrong is not None:
        raise UserError(f"{path}:{number}: {wrong}")
    return record


def problem(record: Mapping[str, Any]) -> str | None:
    """Why a JSON object is no measurement record; None where it is one."""
    missing = [name for name in NEEDED if name not in record]
    if missing:
        return f"lacks {', '.join(missing)}; null means not known, absent is refused"
    wrong = [name for name in SECTIONS if not isinstance(record[name], dict)]
    return f"{', '.join(wrong)} must be an object" if wrong else None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of a measurement")
