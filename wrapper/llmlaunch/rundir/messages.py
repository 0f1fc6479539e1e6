"""How counts, and commands for a person to type, are written in messages."""

from __future__ import annotations

import shlex
from pathlib import PurePath

__all__ = ["counted", "to_type"]


def counted(count: float, noun: str, form: str = "") -> str:
    """Return `1 sequence` or `2 sequences`; `form` is how the number is formatted, such as `,`."""
    plural = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:{form}} {noun}{plural}"


def to_type(*words: object) -> str:
    """Return the llmlaunch command of these words for a person to copy into a shell, each quoted where it needs to be.

    A path that begins with a dash gets `./` before it, so that it is not read as an option.
    """
    texts = [f"./{word}" if isinstance(word, PurePath) and str(word).startswith("-") else str(word) for word in words]
    return " ".join(["llmlaunch", *map(shlex.quote, texts)])
