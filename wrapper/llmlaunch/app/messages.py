"""Messages for a person while something is planned, submitted or collected."""

from __future__ import annotations

from collections.abc import Callable

Notify = Callable[[str], None]
"""Called with one line for a person: a warning ("warning: ..."), or what was done on the way."""


def ignore(message: str) -> None:
    """Drop a message."""
