"""Where the ranks of a training that hangs stand, told from their stacks: those few that stand elsewhere are why."""

from __future__ import annotations

import re
from pathlib import Path

THREAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):\n", re.MULTILINE)
FRAME = re.compile(r'  File "(?P<file>[^"\n]*)", line (?P<line>\d+) in (?P<function>.*)')
MOST_BYTES = 64 * 1024  # of one rank's file, from its end
MOST_PLACES = 3
MOST_NAMED = 4  # ranks


def where_they_stand(stacks: Path) -> str:
    """`rank 1 in hangs_here (train.py line 19), ranks 0, 2 in all_reduce (...)`: the places where fewest ranks stand
    first. Empty where nothing is known."""
    places: dict[str, list[int]] = {}
    for path in sorted(stacks.glob("*.txt")):
        place = _place(path) if path.stem.isdigit() else None
        if place is not None:
            places.setdefault(place, []).append(int(path.stem))
    fewest_first = sorted(places.items(), key=lambda item: (len(item[1]), min(item[1])))
    parts = [f"{_named(ranks)} in {place}" for place, ranks in fewest_first[:MOST_PLACES]]
    if len(fewest_first) > MOST_PLACES:
        parts.append(f"others in {len(fewest_first) - MOST_PLACES} more places")
    return ", ".join(parts)


def _place(path: Path) -> str | None:
    """The innermost frame of the main thread, which the handler writes last."""
    try:
        text = path.read_bytes()[-MOST_BYTES:].decode(errors="replace")
    except OSError:
        return None
    threads = list(THREAD.finditer(text))
    frame = FRAME.match(text, threads[-1].end()) if threads else None
    if frame is None:
        return None
    return f"{frame['function']} ({Path(frame['file']).name} line {frame['line']})"


def _named(ranks: list[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
