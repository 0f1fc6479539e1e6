"""An order of the nodes with its seconds, and what exchanging two nodes would change: only the paths of those two are
priced again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .objective import path_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .objective import Matrix
    from .traffic import Path, Term

    Score = tuple[float, float]  # seconds of the step; of equal ones, the seconds of all paths together

# what counts as less, relative to the whole: far above rounding, far below any measurement
LESS = 1e-9


class State:
    """`order[rank]` is the node that holds node rank `rank`."""

    def __init__(self, terms: Mapping[str, Term], order: Sequence[int], seconds_per_byte: Matrix) -> None:
        self.order = list(order)
        self._cost = seconds_per_byte
        self._paths: list[Path] = [path for term in terms.values() for path in term]
        self._term_of: list[int] = [index for index, term in enumerate(terms.values()) for _ in term]
        self._touching = _paths_of_ranks(self._paths, len(self.order))
        self._count = len(terms)
        self.reset(order)

    def reset(self, order: Sequence[int]) -> None:
        """Start again from `order`."""
        self.order[:] = order
        self._seconds = [path_seconds(path, self.order, self._cost) for path in self._paths]
        self._rank_paths()

    def _rank_paths(self) -> None:
        self._slowest: list[list[int]] = [[] for _ in range(self._count)]
        for path in sorted(range(len(self._paths)), key=self._seconds.__getitem__, reverse=True):
            self._slowest[self._term_of[path]].append(path)
        self.score: Score = (sum(self._seconds[term[0]] for term in self._slowest), sum(self._seconds))

    def bottleneck(self) -> list[int]:
        """Node ranks on the slowest path of each term: no exchange that leaves them all in place helps."""
        ranks: dict[int, None] = {}
        for term in self._slowest:
            for a, b, _ in self._paths[term[0]]:
                ranks[a] = ranks[b] = None
        return list(ranks)

    def exchanged(self, x: int, y: int) -> Score:
        """The score with the nodes of ranks `x` and `y` exchanged; nothing is changed."""
        order, cost, held = self.order, self._cost, self._seconds
        order[x], order[y] = order[y], order[x]
        total = self.score[1]
        new: dict[int, float] = {}
        for rank in (x, y):
            for path in self._touching[rank]:
                if path not in new:
                    seconds = 0.0
                    for a, b, size in self._paths[path]:
                        seconds += size * cost[order[a]][order[b]]
                    new[path] = seconds
                    total += seconds - held[path]
        order[x], order[y] = order[y], order[x]
        return self._worst_of_terms(new), total

    def _worst_of_terms(self, new: Mapping[int, float]) -> float:
        worst = [0.0] * self._count
        for index, term in enumerate(self._slowest):
            for path in term:
                if path not in new:
                    worst[index] = self._seconds[path]
                    break
        for path, seconds in new.items():
            index = self._term_of[path]
            worst[index] = max(worst[index], seconds)
        return sum(worst)

    def exchange(self, x: int, y: int) -> None:
        """Exchange the nodes of ranks `x` and `y`."""
        self.order[x], self.order[y] = self.order[y], self.order[x]
        for path in {*self._touching[x], *self._touching[y]}:
            self._seconds[path] = path_seconds(self._paths[path], self.order, self._cost)
        self._rank_paths()


def less(a: Score, b: Score) -> bool:
    """Whether `a` is better by more than rounding, and never worse in the first."""
    if a[0] < b[0] * (1.0 - LESS):
        return True
    return a[0] <= b[0] and a[1] < b[1] * (1.0 - LESS)


def _paths_of_ranks(paths: Sequence[Path], ranks: int) -> list[list[int]]:
    touching: list[set[int]] = [set() for _ in range(ranks)]
    for index, path in enumerate(paths):
        for a, b, _ in path:
            touching[a].add(index)
            touching[b].add(index)
    return [sorted(found) for found in touching]
