"""The order found is an order, never worse than SLURM's, and where there are few nodes none is better."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import job, small_jobs, two_levels, uneven

from llmlaunch.placement.search import EXACT_NODES, EXPONENTS, SmoothOrder, place
from llmlaunch.placement.traffic import inverse, order_seconds, path_seconds
from support.soak import examples

PLENTY_SECONDS = 60.0
Case = tuple[dict[str, Any], list[list[float]]]


def orders_priced() -> Callable[[], float]:
    """Return a clock that counts its calls: one for every order that is priced."""
    calls = itertools.count()
    return lambda: float(next(calls))


def score(terms: Any, order: Any, cost: Any) -> tuple[float, float]:
    """Seconds of the step, and of all paths together."""
    together = sum(path_seconds(path, order, cost) for term in terms.values() for path in term)
    return order_seconds(terms, order, cost), together


def best_seconds(terms: Any, cost: Any) -> float:
    """Of all orders, all at once: `order_seconds` of each."""
    orders, hop = np.array(list(itertools.permutations(range(len(cost))))), np.array(cost)
    seconds = np.zeros(len(orders))
    for term in terms.values():
        paths = [sum(size * hop[orders[:, a], orders[:, b]] for a, b, size in path) for path in term]
        seconds += np.max(paths, axis=0)
    return float(seconds.min())


@given(small_jobs(most_nodes=6))
@examples(50)
def test_few_nodes_get_the_best_of_all_orders(case: Case) -> None:
    """In as many orders as the proof may need after a short search: 6 nodes have 1,957 beginnings of an order."""
    terms, cost = case
    placed = place(terms, cost, 3000.0, clock=orders_priced())
    assert placed.proved
    assert placed.seconds == pytest.approx(best_seconds(terms, cost), rel=1e-8)
    assert placed.seconds == order_seconds(terms, placed.order, cost)


@given(small_jobs(most_nodes=14))
@examples(20)
def test_any_job_gets_an_order_that_is_never_worse_than_slurms(case: Case) -> None:
    terms, cost = case
    placed = place(terms, cost, budget_seconds=3000.0, clock=orders_priced())
    assert sorted(placed.order) == list(range(len(cost)))
    assert placed.seconds <= placed.before_seconds == order_seconds(terms, range(len(cost)), cost)
    if terms:
        before, after = (score(terms, order, cost) for order in (range(len(cost)), placed.order))
        assert placed.order == tuple(range(len(cost))) or after < before


@given(small_jobs(most_nodes=10), st.sampled_from(EXPONENTS))
@examples(20)
def test_an_exchange_is_priced_as_the_whole_order_would_be(case: Case, exponent: float) -> None:
    terms, cost = case
    if not terms:
        return
    state, whole = SmoothOrder(terms, cost), SmoothOrder(terms, cost)
    state.begin(range(len(cost)), exponent)
    for x, y in itertools.islice(itertools.combinations(range(len(cost)), 2), 20):
        before, order = state.seconds, list(state.order)
        taken = state.exchange_if_better(x, y)
        order[x], order[y] = order[y], order[x]
        whole.begin(order, exponent)
        assert taken == (state.order == order)
        assert (state.seconds < before) == taken
        assert (
            whole.seconds == pytest.approx(state.seconds, rel=1e-9) if taken else whole.seconds >= before * (1 - 1e-9)
        )


def test_a_large_exponent_is_the_slowest_path() -> None:
    terms, cost = job(16, 4), inverse(uneven(16, 1))
    state = SmoothOrder(terms, cost)
    state.begin(range(16), 4096.0)
    assert state.seconds == pytest.approx(order_seconds(terms, range(16), cost), rel=1e-2)


def test_the_same_network_gets_the_same_order_again() -> None:
    terms, cost = job(10, 5), inverse(uneven(10, 1))
    assert place(terms, cost, PLENTY_SECONDS) == place(terms, cost, PLENTY_SECONDS)


def test_a_network_that_is_the_same_everywhere_keeps_slurms_order() -> None:
    cost = inverse([[10e9] * 9 for _ in range(9)])
    assert place(job(9, 3), cost, PLENTY_SECONDS).order == tuple(range(9))


def test_nodes_under_two_switches_are_not_mixed_in_a_pipeline() -> None:
    """Two pipelines of eight stages, sixteen nodes under two switches in a mixed-up order: each gets a switch."""
    speeds = two_levels(16, 8, 3)
    placed = place(job(16, 8), inverse(speeds), PLENTY_SECONDS)
    for pipeline in (placed.order[0::2], placed.order[1::2]):
        assert all(speeds[a][b] > 15e9 for a, b in itertools.pairwise(pipeline))
    assert placed.seconds < 0.75 * placed.before_seconds


def test_a_budget_that_is_spent_still_gives_an_order() -> None:
    for nodes in (EXACT_NODES, 64):
        placed = place(job(nodes, 8), inverse(uneven(nodes, 2)), budget_seconds=0.0)
        assert sorted(placed.order) == list(range(nodes))
        assert placed.seconds <= placed.before_seconds
        assert not placed.proved


def test_the_clock_alone_ends_a_long_search() -> None:
    clock = orders_priced()
    placed = place(job(64, 8), inverse(uneven(64, 2)), 200.0, clock)
    assert placed.seconds < placed.before_seconds
    assert clock() < 400


def test_links_a_million_times_slower_than_others_are_searched_too() -> None:
    """A path's seconds to the power of 128 are more than a float holds."""
    speeds = [[20e9 if i // 6 == j // 6 else 2e4 for j in range(12)] for i in range(12)]
    best = place(job(12, 2), inverse(speeds), 1e4, clock=orders_priced())
    assert best.seconds <= best.before_seconds
