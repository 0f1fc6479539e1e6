"""Rendered scripts held against stored ones: one pair in full (`llama3-70b`), the others as their difference from it.

UPDATE_GOLDEN=1 (and no -n) rewrites tests/golden/, the full pair first; read the difference before committing it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "golden"
FULL = "llama3-70b"


def assert_golden(name: str, script: str, rendered: str) -> None:
    """The script `rendered` for the job `name` must be the stored one."""
    whole = FOLDER / f"{FULL}.{script}"
    if name in (FULL, "array"):
        stored, text = FOLDER / f"{name}.{script}", rendered
    else:
        stored, text = FOLDER / f"{name}.{script}.diff", _difference(whole.read_text(), rendered, name)
    if os.environ.get("UPDATE_GOLDEN"):
        stored.write_text(text)
    assert text == stored.read_text()


def _difference(whole: str, rendered: str, name: str) -> str:
    lines = difflib.unified_diff(whole.splitlines(keepends=True), rendered.splitlines(keepends=True), FULL, name, n=1)
    return "".join(lines)
