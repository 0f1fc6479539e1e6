"""A line of a log as it may be kept and shown: short, on one line, without secrets."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LINE_CHARACTERS", "harmless"]

LINE_CHARACTERS = 400
SHORTEST_SECRET = 8  # characters; less would hide ordinary words
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)


def harmless(line: str, environment: Mapping[str, str] | None = None) -> str:
    """`line` without what this environment names as a secret (HF_TOKEN, WANDB_API_KEY ...), which a message may quote,
    with a space for each character that a terminal would obey, and at most LINE_CHARACTERS long."""
    known = os.environ if environment is None else environment
    for name, value in known.items():
        if len(value) >= SHORTEST_SECRET and _SECRET.search(name):
            line = line.replace(value, "***")
    return "".join(c if c.isprintable() else " " for c in line).strip()[:LINE_CHARACTERS]
