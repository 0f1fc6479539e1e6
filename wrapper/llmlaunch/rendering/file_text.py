"""Values as the bytes of a run directory's files."""

from __future__ import annotations

import json
from collections.abc import Mapping

__all__ = ["as_json", "as_text"]


def as_text(text: str) -> bytes:
    """Text that came from a file goes back as it was, undecodable bytes too."""
    return text.encode("utf-8", "surrogateescape")


def as_json(value: Mapping[str, object]) -> bytes:
    """Readable, and the same bytes for the same value."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
