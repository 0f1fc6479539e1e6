"""An order of the nodes, and what exchanging two nodes would change, with the slowest path of each term smoothed.

Of a maximum over hundreds of paths an exchange moves one or two; it seldom makes the step shorter, and a search that
looks at the maximum alone stops early. Here a term is the p-norm of its paths' seconds: slow paths count the more the
larger p is, and with growing p it becomes the maximum itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .objective import path_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .objective import Matrix
    from .traffic import Path, Term

# below this share of what a sum of powers began with, rounding would begin to show: it is summed anew
WORN = 1e-4


class SmoothOrder:
    """`order[rank]` is the node that holds node rank `rank`; `seconds` is the sum of the terms' norms."""

    def __init__(self, terms: Mapping[str, Term], seconds_per_byte: Matrix) -> None:
        self._cost = seconds_per_byte
        self._paths: list[Path] = [path for term in terms.values() for path in term]
        self._term_of: list[int] = [index for index, term in enumerate(terms.values()) for _ in term]
        self._touching = _paths_of_ranks(self._paths, len(seconds_per_byte))
        self._count = len(terms)

    def begin(self, order: Sequence[int], exponent: float) -> None:
        """Start from `order`, with paths counted by this power of their seconds."""
        self.order, self.exponent = list(order), exponent
        seconds = [path_seconds(path, self.order, self._cost) for path in self._paths]
        self._longest = [0.0] * self._count
        for term, value in zip(self._term_of, seconds):
            self._longest[term] = max(self._longest[term], value)
        self._powers = [(value / self._longest[term]) ** exponent for term, value in zip(self._term_of, seconds)]
        self._sums = [0.0] * self._count
        for term, power in zip(self._term_of, self._powers):
            self._sums[term] += power
        self.seconds = self._norms(self._sums)

    def exchange_if_better(self, x: int, y: int) -> bool:
        """Exchange the nodes of ranks `x` and `y` if that makes `seconds` less. Prices the paths of the two alone."""
        order, cost, paths = self.order, self._cost, self._paths
        order[x], order[y] = order[y], order[x]
        sums = list(self._sums)
        changed: list[tuple[int, float]] = []
        for path in self._touching[x] | self._touching[y]:
            seconds = 0.0
            for a, b, size in paths[path]:
                seconds += size * cost[order[a]][order[b]]
            term = self._term_of[path]
            power = _power(seconds / self._longest[term], self.exponent)
            changed.append((path, power))
            sums[term] += power - self._powers[path]
        norms = self._norms(sums)
        if norms >= self.seconds:
            order[x], order[y] = order[y], order[x]
            return False
        for path, power in changed:
            self._powers[path] = power
        self._sums, self.seconds = sums, norms
        if min(sums) < WORN:
            self.begin(order, self.exponent)
        return True

    def _norms(self, sums: Sequence[float]) -> float:
        root, norms = 1.0 / self.exponent, 0.0
        for longest, total in zip(self._longest, sums):
            norms += longest * float(max(total, 0.0) ** root)
        return norms


def _power(ratio: float, exponent: float) -> float:
    """Infinite where a path became so much longer that no float holds it: such an exchange is not taken."""
    try:
        return float(ratio**exponent)
    except OverflowError:
        return math.inf


def _paths_of_ranks(paths: Sequence[Path], ranks: int) -> list[set[int]]:
    touching: list[set[int]] = [set() for _ in range(ranks)]
    for index, path in enumerate(paths):
        for a, b, _ in path:
            touching[a].add(index)
            touching[b].add(index)
    return touching
