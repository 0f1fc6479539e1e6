"""What `scontrol show topology` says of some nodes, as guessed bandwidths between them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Unit = tuple[int, frozenset[str]]  # level from the leaves up, the nodes below

_BRACKETS = re.compile(r"\[([^\]]*)\]")
_FIELD = re.compile(r"(\w+)=(\S+)")


def switch_levels(text: str, nodes: Sequence[str]) -> list[list[int]] | None:
    """For each pair of `nodes` the level of the lowest switch (or block) above both: 0 is a leaf switch. Pairs with
    none in common are one level above all. None where the text tells nothing that sets one pair apart from another.

    Reads the lines of topology/tree (`SwitchName= Level= ... Nodes=`) and topology/block (`BlockName=` 23.11 on,
    `AggregatedBlock=` 24.05 on; slurm src/plugins/topology/*/topology_*.c, 22.05 to 26.05).
    """
    wanted = set(nodes)
    units = sorted(_units(text, wanted), key=lambda unit: unit[0])
    top = 1 + max((level for level, _ in units), default=0)
    levels = [[0 if a == b else _level(units, a, b, top) for b in nodes] for a in nodes]
    apart = {level for i, row in enumerate(levels) for j, level in enumerate(row) if i != j}
    return levels if len(apart) > 1 else None


def guessed_bandwidth(levels: Sequence[Sequence[int]], leaf_bytes_per_second: float) -> list[list[float]]:
    """Each level up halves it: not measured, but nearer is always faster."""
    return [[leaf_bytes_per_second / 2**level for level in row] for row in levels]


def expand(expression: str) -> list[str]:
    """The names a SLURM host list stands for: `n[1-2,07]` is n1, n2, n07. Zeros in front are kept."""
    return [name for part in _split(expression) for name in _expand_one(part)]


def _units(text: str, wanted: set[str]) -> Iterator[Unit]:
    sizes: list[tuple[int, frozenset[str]]] = []
    for line in text.splitlines():
        fields: dict[str, str] = dict(_FIELD.findall(line))
        below = frozenset(expand(fields.get("Nodes", ""))) if "Nodes" in fields else frozenset()
        if "SwitchName" in fields and fields.get("Level", "").isdigit():
            yield int(fields["Level"]), below & wanted
        elif "BlockName" in fields:
            yield 0, below & wanted
        elif "AggregatedBlock" in fields:
            sizes.append((len(below), below & wanted))
    # aggregated blocks have no level of their own: the larger, the higher
    steps = sorted({size for size, _ in sizes})
    for size, below in sizes:
        yield 1 + steps.index(size), below


def _level(units: Sequence[Unit], a: str, b: str, top: int) -> int:
    return next((level for level, below in units if a in below and b in below), top)


def _split(expression: str) -> list[str]:
    """At the commas outside brackets."""
    return [part for part in re.split(r",(?![^\[]*\])", expression) if part]


def _expand_one(part: str) -> list[str]:
    found = _BRACKETS.search(part)
    if found is None:
        return [part]
    head, tails = part[: found.start()], _expand_one(part[found.end() :])
    return [head + number + tail for piece in found.group(1).split(",") for number in _numbers(piece) for tail in tails]


def _numbers(piece: str) -> Iterator[str]:
    first, dash, last = piece.partition("-")
    if not dash:
        yield first
        return
    for number in range(int(first), int(last) + 1):
        yield str(number).zfill(len(first))
