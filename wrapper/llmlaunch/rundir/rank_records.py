"""`attempts/<attempt>/ranks/<rank>.json`, and its copy in status.json: each value of its kind, or None."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .identifiers import is_host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["sound_rank"]


def _whole(value: object) -> bool:
    return type(value) is int


def _size(value: object) -> bool:
    return isinstance(value, int) and type(value) is int and value >= 0


def _time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e11  # type: ignore[operator]


def _text(value: object) -> bool:
    return isinstance(value, str)


_KINDS: Mapping[str, Callable[[object], bool]] = {
    "local_rank": _size,
    "node": is_host,
    "pid": _size,
    "program_pid": _size,
    "started_at": _time,
    "ended_at": _time,
    "exit_code": _whole,
    "signal": _text,
    "resident_peak_bytes": _size,
    "visible_devices": _text,
}


def sound_rank(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for each value that is not of its kind; `rank` itself stays as it is."""
    return {name: value if name not in _KINDS or _KINDS[name](value) else None for name, value in record.items()}
