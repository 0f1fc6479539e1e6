"""What ended an attempt, for the job's last word: `llmlaunch.causes`, where it meets the node side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..causes import attempt as files
from .files import say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .files import Record

__all__ = ["cause_of"]


def cause_of(run_dir: Path, attempt: str, ranks: Sequence[Record], code: int) -> Record | None:
    """As `llmlaunch.causes.attempt.cause_of`. Whatever is wrong with a file, the job gets its verdict: then the cause
    is unknown."""
    try:
        return files.cause_of(run_dir, attempt, ranks, code)
    except Exception as error:
        say(f"what ended attempt {attempt} stays unknown: {type(error).__name__}: {error}")
        return None
