"""Seconds of a step that depend on which node holds which node rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .traffic import Path, Term

    Matrix = Sequence[Sequence[float]]

# what counts as less, relative to the whole: far above rounding, far below any measurement
LESS = 1e-9


def term_seconds(terms: Mapping[str, Term], order: Sequence[int], seconds_per_byte: Matrix) -> dict[str, float]:
    """Return the seconds by term. `order[rank]` is the node, as an index of `seconds_per_byte` (row: sender), that gets
    that node rank. Of the paths of a term the slowest counts, as in Pipette (T_pp, T_dp): all pipelines wait for the
    slowest one, a ring runs at the pace of its slowest link. Terms follow each other and add up."""
    return {
        name: max((path_seconds(path, order, seconds_per_byte) for path in term), default=0.0)
        for name, term in terms.items()
    }


def order_seconds(terms: Mapping[str, Term], order: Sequence[int], seconds_per_byte: Matrix) -> float:
    """The sum of `term_seconds`."""
    return sum(term_seconds(terms, order, seconds_per_byte).values())


def path_seconds(path: Path, order: Sequence[int], seconds_per_byte: Matrix) -> float:
    seconds = 0.0
    for a, b, size in path:
        seconds += size * seconds_per_byte[order[a]][order[b]]
    return seconds


def inverse(bytes_per_second: Matrix) -> list[list[float]]:
    """Return the seconds per byte of each pair; the diagonal, which no path uses, is 0."""
    return [[0.0 if i == j else 1.0 / speed for j, speed in enumerate(row)] for i, row in enumerate(bytes_per_second)]
