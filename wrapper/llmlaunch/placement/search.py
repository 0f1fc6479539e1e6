"""The order of the nodes in which a step communicates for the fewest seconds: proved best where there are few nodes,
found by a repeatable local search within a time budget where there are many."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .exact import EXACT_NODES, proved_best
from .objective import order_seconds
from .starts import starts
from .state import State, less

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .objective import Matrix
    from .traffic import Term

# kicks without success after which a search ends, for each node
PATIENCE = 6


@dataclass(frozen=True)
class Placement:
    """`order[rank]` is the node that gets node rank `rank`. `before_seconds` is SLURM's order, 0, 1, 2 ...; `proved`:
    no order takes less."""

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
    """The best order found for as many nodes as the matrix has rows. Never worse than SLURM's order, which stays where
    nothing is better; of orders that take as long, the one whose paths take less altogether: where most links of a
    network are alike it crosses fewer of the slow ones. The same input gives the same order unless the budget runs out
    first; `clock` is looked at once for every order that is priced, so that one that counts makes the budget a number
    of orders."""
    nodes = len(seconds_per_byte)
    unchanged = tuple(range(nodes))
    before = order_seconds(terms, unchanged, seconds_per_byte)
    if not terms or before == 0.0:
        return Placement(unchanged, before, before, True)
    end = clock() + budget_seconds
    found = _search(terms, seconds_per_byte, lambda: clock() >= end)
    proved = False
    if nodes <= EXACT_NODES:
        found, proved = proved_best(terms, seconds_per_byte, found, lambda: clock() >= end)
    return Placement(tuple(found), before, order_seconds(terms, found, seconds_per_byte), proved)


def _search(terms: Mapping[str, Term], cost: Matrix, over: Callable[[], bool]) -> list[int]:
    """Every start descended to where no exchange helps, the best first; then the best is kicked and descended again
    and again."""
    state = State(terms, range(len(cost)), cost)
    best, best_score = list(state.order), state.score
    for start in sorted(starts(terms, cost), key=lambda start: order_seconds(terms, start, cost)):
        state.reset(start)
        _descend(state, over)
        if less(state.score, best_score):
            best, best_score = list(state.order), state.score
    chance = random.Random(0)
    failures = 0
    while failures < PATIENCE * len(cost) and not over():
        state.reset(best)
        _kick(state, chance)
        _descend(state, over)
        if less(state.score, best_score):
            best, best_score, failures = list(state.order), state.score, 0
        else:
            failures += 1
    return best


def _descend(state: State, over: Callable[[], bool]) -> None:
    """Exchange while it helps. Only exchanges that move a node of a slowest path can make the step shorter."""
    improved = True
    while improved:
        improved = False
        for x, y in _exchanges(state):
            if over():
                return
            if less(state.exchanged(x, y), state.score):
                state.exchange(x, y)
                improved = True
                break


def _exchanges(state: State) -> Iterator[tuple[int, int]]:
    for x in state.bottleneck():
        for y in range(len(state.order)):
            if y != x:
                yield x, y


def _kick(state: State, chance: random.Random) -> None:
    """Three random exchanges, the first of which moves a bottleneck."""
    x = chance.choice(state.bottleneck())
    for _ in range(3):
        y = chance.randrange(len(state.order))
        if y != x:
            state.exchange(x, y)
        x = chance.randrange(len(state.order))
