"""`attempts/<attempt>/stacks/<node>.txt` read back: where the Python threads of each rank were when they were asked.

Each node appends to its file (node/stacks.py), each time below a heading that names the rank. Runs of
llmlaunch before that have a file for each rank, `<rank>.txt`, without headings; these are read as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import file_names
from .files import read_tail

if TYPE_CHECKING:
    from pathlib import Path


HEADING = b"=== rank %d ==="
MOST_BYTES_OF_A_NODE = 4 * 2**20
_HEADINGS = re.compile(rb"^=== rank (\d{1,9}) ===\n", re.MULTILINE)
_MOST_BYTES = 64 * 1024  # of one rank, from its end


def ranks_stacks(attempt_folder: Path) -> dict[int, str]:
    """Return by rank the end of all that it wrote; a rank that wrote nothing is left out."""
    return {rank: text.decode(errors="replace") for rank, text in _texts(attempt_folder).items()}


def ranks_that_wrote(attempt_folder: Path) -> set[int] | None:
    """Return the ranks that wrote stacks; None where a file is too long to say so, since only its end is read."""
    if any(_is_longer(path) for path in _paths(attempt_folder)):
        return None
    return set(_texts(attempt_folder, most_bytes_of_a_rank=0))


def _texts(attempt_folder: Path, most_bytes_of_a_rank: int = _MOST_BYTES) -> dict[int, bytes]:
    """Return by rank the last bytes that it wrote, in time that grows with the files: a file may have a heading in
    every other line, all of one rank."""
    parts: dict[int, list[bytes]] = {}
    sizes: dict[int, int] = {}
    for path in _paths(attempt_folder):
        for rank, text in _of_node(path):
            mine = parts.setdefault(rank, [])
            if most_bytes_of_a_rank:
                mine.append(text)
                sizes[rank] = sizes.get(rank, 0) + len(text)
                if sizes[rank] > 2 * most_bytes_of_a_rank:  # so that each byte is joined twice at most
                    mine[:] = [b"".join(mine)[-most_bytes_of_a_rank:]]
                    sizes[rank] = len(mine[0])
    return {rank: b"".join(texts)[-_MOST_BYTES:] for rank, texts in parts.items()}


def _of_node(path: Path) -> list[tuple[int, bytes]]:
    """Return what the file of a node has, each part with its rank, oldest first."""
    try:
        content = read_tail(path, MOST_BYTES_OF_A_NODE)
    except OSError:
        return []
    first, *parts = _HEADINGS.split(content)
    if not parts and first and re.fullmatch(r"\d{1,9}", path.stem, re.ASCII):
        return [(int(path.stem), first)]
    return list(zip(map(int, parts[::2]), parts[1::2]))


def _is_longer(path: Path) -> bool:
    try:
        return path.stat().st_size > MOST_BYTES_OF_A_NODE
    except OSError:
        return False


def _paths(attempt_folder: Path) -> list[Path]:
    return sorted((attempt_folder / file_names.STACKS).glob("[!.]*.txt"))
