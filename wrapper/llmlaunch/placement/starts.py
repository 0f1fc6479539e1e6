"""Orders to start the search from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .objective import Matrix
    from .traffic import Term


def starts(terms: Mapping[str, Term], cost: Matrix) -> Iterator[list[int]]:
    """SLURM's order; then for each term, heaviest first, an order that gives its neighbours near nodes: ranks in the
    order in which the term's paths pass through them, nodes once as SLURM sorts them and once along a chain of nearest
    neighbours."""
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
    """Node ranks in the order a walk along the term's links meets them; the ranks it leaves out come last."""
    follows: dict[int, list[int]] = {}
    for path in term:
        for a, b, _ in path:
            follows.setdefault(a, []).append(b)
    seen: dict[int, None] = {}
    for first in range(ranks):
        waiting = [first]
        while waiting:
            rank = waiting.pop()
            if rank not in seen:
                seen[rank] = None
                waiting += reversed(follows.get(rank, []))
    return list(seen)


def nearest_neighbours(cost: Matrix) -> list[int]:
    """From node 0 always on to the nearest node not yet met, both directions counted."""
    left = set(range(1, len(cost)))
    chain = [0]
    while left:
        last = chain[-1]
        chain.append(min(left, key=lambda node: (cost[last][node] + cost[node][last], node)))
        left.remove(chain[-1])
    return chain
