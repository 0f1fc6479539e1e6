"""`attempts/<attempt>/stacks/<node>.txt` read back: where the Python threads of each rank were when they were asked.

The rank wrappers of a node append to its file (node/stacks.py), each time below a heading that names the rank. Runs of
llmlaunch before that have a file for each rank, `<rank>.txt`, without headings; these are read as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import file_names
from .files import read_tail

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["HEADING", "MOST_BYTES_OF_A_NODE", "ranks_stacks"]

HEADING = b"=== rank %d ==="
MOST_BYTES_OF_A_NODE = 4 * 2**20
_HEADINGS = re.compile(rb"^=== rank (\d{1,9}) ===\n", re.MULTILINE)
_MOST_BYTES = 64 * 1024  # of one rank, from its end


def ranks_stacks(attempt_folder: Path) -> dict[int, str]:
    """Return by rank the end of all that it wrote; a rank that wrote nothing is left out."""
    stacks: dict[int, str] = {}
    for path in sorted((attempt_folder / file_names.STACKS).glob("[!.]*.txt")):
        try:
            content = read_tail(path, MOST_BYTES_OF_A_NODE)
        except OSError:
            continue
        first, *parts = _HEADINGS.split(content)
        texts = list(zip(map(int, parts[::2]), parts[1::2]))
        if not parts and first and re.fullmatch(r"\d{1,9}", path.stem, re.ASCII):
            texts = [(int(path.stem), first)]
        for rank, text in texts:
            stacks[rank] = (stacks.get(rank, "") + text.decode(errors="replace"))[-_MOST_BYTES:]
    return stacks
