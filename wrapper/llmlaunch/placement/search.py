"""The order of the nodes in which a step communicates for the fewest seconds: proved best where there are few nodes,
found by a repeatable local search within a time budget where there are many."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .traffic import LESS, order_seconds, path_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .traffic import Matrix, Path, Term

    Link = tuple[int, int, float, int]  # from node rank, to node rank, bytes, path

EXPONENTS = (8.0, 32.0, 128.0)  # of one climb after the other; the last is all but the maximum
VAIN_EXCHANGES = 20  # for each node, after which a climb ends
VAIN_KICKS = 12  # for each node, after which a search ends
PROOFLESS = 0.3  # of the budget, for the search that comes before a proof
# below this share of what a sum of powers began with, rounding would begin to show: it is summed anew
WORN = 1e-4


@dataclass(frozen=True)
class Placement:
    """An order of the nodes: `order[rank]` is the node that gets node rank `rank`. `before_seconds` is the time of
    SLURM's order, 0, 1, 2 ...; `proved` means that no order takes less."""

    order: tuple[int, ...]
    before_seconds: float
    seconds: float
    proved: bool


def place(
    terms: Mapping[str, Term],
    seconds_per_byte: Matrix,
    budget_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Placement:
    """Return the best order found for as many nodes as the matrix has rows. It is never worse than SLURM's order, which
    stays where nothing is better. Of orders that take as long, it is the one whose paths take less in sum: where most
    links of a network are equal it crosses fewer of the slow ones. The same input gives the same order unless the
    budget runs out first. `clock` is called once for every order that is priced, so a clock that counts its calls makes
    the budget a number of orders."""
    unchanged = range(len(seconds_per_byte))
    before = order_seconds(terms, unchanged, seconds_per_byte)
    if before == 0.0:
        return Placement(tuple(unchanged), before, before, True)
    begin, few = clock(), len(unchanged) <= EXACT_NODES
    search = _Search(terms, seconds_per_byte, clock, begin, begin + budget_seconds * (PROOFLESS if few else 1.0))
    search.run()
    best, proved = search.best, False
    if few:
        end = begin + budget_seconds
        best, proved = _Branching(terms, seconds_per_byte, best, lambda: clock() >= end).run()
    return Placement(tuple(best), before, order_seconds(terms, best, seconds_per_byte), proved)


class _Search:
    """A local search. It climbs with growing exponents from every start, the best first; then it perturbs the best
    order and climbs again."""

    def __init__(
        self, terms: Mapping[str, Term], cost: Matrix, clock: Callable[[], float], begin: float, end: float
    ) -> None:
        self.terms, self.cost, self.clock, self.begin, self.end = terms, cost, clock, begin, end
        self.chance = random.Random(0)
        self.state = SmoothOrder(terms, cost)
        self.best = list(range(len(cost)))
        self.score = self._score(self.best)

    def run(self) -> None:
        ordered = sorted(starts(self.terms, self.cost), key=lambda start: order_seconds(self.terms, start, self.cost))
        # where one climb takes all the time there is, each exponent gets its share
        share = (self.end - self.begin) / len(EXPONENTS)
        for number, start in enumerate(ordered):
            ends = [self.begin + share * (n + 1) if number == 0 else self.end for n in range(len(EXPONENTS))]
            self._keep(self._climb(start, EXPONENTS, ends))
        vain = 0
        while vain < VAIN_KICKS * len(self.cost) and self.clock() < self.end:
            vain = 0 if self._keep(self._climb(self._kicked(), EXPONENTS[1:], [self.end] * 2)) else vain + 1

    def _climb(self, start: Sequence[int], exponents: Sequence[float], ends: Sequence[float]) -> list[int]:
        """Exchange two nodes as long as that helps, with one exponent after the other."""
        order, nodes = list(start), len(self.cost)
        for exponent, end in zip(exponents, ends):
            self.state.begin(order, exponent)
            vain = 0
            while vain < VAIN_EXCHANGES * nodes and self.clock() < end:
                x, y = int(self.chance.random() * nodes), int(self.chance.random() * nodes)
                vain = 0 if x != y and self.state.exchange_if_better(x, y) else vain + 1
            order = list(self.state.order)
            self._keep(order)
        return order

    def _kicked(self) -> list[int]:
        """Return the best order with three random exchanges."""
        order, nodes = list(self.best), len(self.cost)
        for _ in range(3):
            x, y = self.chance.randrange(nodes), self.chance.randrange(nodes)
            order[x], order[y] = order[y], order[x]
        return order

    def _keep(self, order: list[int]) -> bool:
        """Keep `order` if it is better than the best by more than rounding, and never worse in seconds."""
        seconds, together = score = self._score(order)
        better = seconds < self.score[0] * (1.0 - LESS)
        if not better and (seconds > self.score[0] or together >= self.score[1] * (1.0 - LESS)):
            return False
        self.best, self.score = list(order), score
        return True

    def _score(self, order: Sequence[int]) -> tuple[float, float]:
        """Return the seconds of the step and, to break ties, the seconds of all paths together."""
        paths = (path for term in self.terms.values() for path in term)
        together = sum(path_seconds(path, order, self.cost) for path in paths)
        return order_seconds(self.terms, order, self.cost), together


class SmoothOrder:
    """An order of the nodes, and what exchanging two nodes would change, with the slowest path of each term smoothed.
    `order[rank]` is the node that holds node rank `rank`; `seconds` is the sum of the terms' norms.

    Of a maximum over hundreds of paths an exchange moves one or two; it seldom makes the step shorter, and a search
    that looks at the maximum alone stops early. Here a term is the p-norm of its paths' seconds: slow paths count the
    more the larger p is, and with growing p it becomes the maximum itself.
    """

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


def starts(terms: Mapping[str, Term], cost: Matrix) -> Iterator[list[int]]:
    """Yield orders to start from: SLURM's order; then for each term, heaviest first, an order that gives its neighbours
    near nodes: ranks in the order in which the term's paths pass through them, nodes once as SLURM sorts them and once
    along a chain of nearest neighbours."""
    nodes = len(cost)
    yield list(range(nodes))
    chain = nearest_neighbours(cost)
    for name in sorted(terms, key=lambda name: -_heaviest(terms[name])):
        passed = _passed(terms[name], nodes)
        for sequence in (list(range(nodes)), chain):
            order = [0] * nodes
            for rank, node in zip(passed, sequence):
                order[rank] = node
            yield order


def _heaviest(term: Term) -> float:
    return max(sum(size for _, _, size in path) for path in term)


def _passed(term: Term, ranks: int) -> list[int]:
    """Return node ranks in the order a walk along the term's links visits them; unvisited ranks come last."""
    follows: dict[int, list[int]] = {}
    for path in term:
        for a, b, _ in path:
            follows.setdefault(a, []).append(b)
    visited: dict[int, None] = {}
    for first in range(ranks):
        waiting = [first]
        while waiting:
            rank = waiting.pop()
            if rank not in visited:
                visited[rank] = None
                waiting += reversed(follows.get(rank, []))
    return list(visited)


def nearest_neighbours(cost: Matrix) -> list[int]:
    """Return a chain from node 0, always on to the nearest unvisited node, both directions counted."""
    left = set(range(1, len(cost)))
    chain = [0]
    while left:
        last = chain[-1]
        chain.append(min(left, key=lambda node: (cost[last][node] + cost[node][last], node)))
        left.remove(chain[-1])
    return chain


EXACT_NODES = 8  # 40,320 orders before any is cut off: under a second in plain Python


class _Branching:
    """Node ranks are given nodes one by one; a partial order is cut off where its paths, each missing hop at the best
    speed there is, already take as long as the best order known."""

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
        """Return an order than which none is better by more than rounding, and True; the best so far and False where it
        was `over` before all were looked at."""
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
