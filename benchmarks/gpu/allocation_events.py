"""Files of allocations and frees in order: those of a traced rank, or made up.

A file is xz-compressed text, one event a line: a number above 0 is a storage of so many blocks of 512 bytes that is
made; 0 and below lets go of one, the place of its birth counted back from the last one made.
"""

from __future__ import annotations

import lzma
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["BLOCK_BYTES", "made_up", "read_events", "write_events"]

BLOCK_BYTES = 512
MIB = 2**20

Event = tuple[int, int]  # (key, bytes) for a storage that is made, (key, 0) for one that is let go of


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Sizes are rounded up to whole blocks, as the allocator rounds them."""
    births: dict[int, int] = {}
    lines = []
    for key, size in events:
        if size:
            births[key] = len(births)
            lines.append(str(-(-size // BLOCK_BYTES)))
        else:
            lines.append(str(births[key] + 1 - len(births)))
    path.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))


def read_events(path: Path) -> Iterator[Event]:
    born = 0
    for line in lzma.decompress(path.read_bytes()).decode().split("\n"):
        number = int(line)
        if number > 0:
            yield born, number * BLOCK_BYTES
            born += 1
        else:
            yield born - 1 + number, 0


def made_up(seed: int, count: int = 20_000, most_bytes: int = 8 * 2**30) -> Iterator[Event]:
    """Storages of all classes of size the allocator knows (up to 1 MiB, to 10 MiB, larger), some alike, some not, that
    live short or long and let go of one another in no order; never more than `most_bytes` at once. All are let go of in
    the end."""
    chance = random.Random(seed)
    alike = [chance.randrange(1, 400 * MIB) for _ in range(6)]
    live: dict[int, int] = {}
    for key in range(count):
        size = chance.choice(alike) if chance.random() < 0.4 else _any_size(chance)
        while live and (sum(live.values()) + size > most_bytes or chance.random() < 0.45):
            gone = chance.choice(list(live)[-8:] if chance.random() < 0.7 else list(live))
            del live[gone]
            yield gone, 0
        live[key] = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        yield key, live[key]
    for key in list(live):
        yield key, 0


def _any_size(chance: random.Random) -> int:
    largest = chance.choice((4096, MIB, MIB + 4096, 10 * MIB, 10 * MIB + 4096, 20 * MIB, 300 * MIB))
    return chance.randrange(1, largest + 1)
