"""Branch and bound over all orders, for few nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .objective import LESS, order_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .objective import Matrix
    from .traffic import Term

    Link = tuple[int, int, float, int]  # from node rank, to node rank, bytes, path

EXACT_NODES = 8  # 40,320 orders before any is cut off: under a second in plain Python


def proved_best(
    terms: Mapping[str, Term], cost: Matrix, incumbent: Sequence[int], over: Callable[[], bool]
) -> tuple[list[int], bool]:
    """An order than which none is better by more than rounding, and True; the best so far and False where it was
    `over` before all were looked at. Node ranks are given nodes one by one; a partial order is cut off where its paths,
    each missing hop at the best speed there is, already take as long as the best order known."""
    return _Branching(terms, cost, incumbent, over).run()


class _Branching:
    def __init__(
        self, terms: Mapping[str, Term], cost: Matrix, incumbent: Sequence[int], over: Callable[[], bool]
    ) -> None:
        self.cost, self.over = cost, over
        self.best = list(incumbent)
        self.best_seconds = order_seconds(terms, incumbent, cost)
        self.terms_of_paths = [index for index, term in enumerate(terms.values()) for _ in term]
        paths = [path for term in terms.values() for path in term]
        self.least = min(c for i, row in enumerate(cost) for j, c in enumerate(row) if i != j)
        # hops that become known when their later rank gets its node
        self.completed: list[list[Link]] = [[] for _ in cost]
        for index, path in enumerate(paths):
            for a, b, size in path:
                self.completed[max(a, b)].append((a, b, size, index))
        self.bounds = [sum(size for _, _, size in path) * self.least for path in paths]
        self.count = len(terms)

    def run(self) -> tuple[list[int], bool]:
        return self.best, self._extend([], set(range(len(self.cost))), self.bounds)

    def _extend(self, order: list[int], left: set[int], bounds: list[float]) -> bool:
        """Try every node for the next rank; False where it was over before the end."""
        seconds = self._lower_bound(bounds)
        if seconds >= self.best_seconds * (1.0 - LESS):
            return True
        if not left:
            self.best[:], self.best_seconds = order, seconds
            return True
        if self.over():
            return False
        for node in sorted(left):
            order.append(node)
            known = list(bounds)
            for a, b, size, path in self.completed[len(order) - 1]:
                known[path] += size * (self.cost[order[a]][order[b]] - self.least)
            complete = self._extend(order, left - {node}, known)
            order.pop()
            if not complete:
                return False
        return True

    def _lower_bound(self, bounds: Sequence[float]) -> float:
        worst = [0.0] * self.count
        for term, seconds in zip(self.terms_of_paths, bounds):
            worst[term] = max(worst[term], seconds)
        return sum(worst)
