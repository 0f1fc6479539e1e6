"""How much a search for advice may cost, counted in candidates: the same recipe gets the same answer on every machine.

A plan is searched for as long as it takes. Advice on a plan, such as the smallest change that is safe, is worth seconds
and no more: its searches run within a budget, and whoever shows the advice says where the budget was used up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from llmlaunch.layout import Layout

Item = TypeVar("Item")


class BudgetSpent(Exception):
    """The searches within a budget have priced as many candidates as it allows. `safe_layout` is a safe one that the
    search knew by then."""

    safe_layout: Layout | None = None


# What looking at a layout costs, as a share of pricing one by itself: of a whole space many are priced together, and
# the rules judge far more at a time.
WHOLE_SHARE, SPLIT_SHARE = 1 / 8, 1 / 64


class PricingBudget:
    """A number of candidates that searches may still price."""

    def __init__(self, candidates: float) -> None:
        self.left = candidates

    @property
    def spent(self) -> bool:
        """Return whether nothing is left."""
        return self.left <= 0

    @contextlib.contextmanager
    def limiting(self) -> Iterator[None]:
        """Count what is searched meanwhile. Raises BudgetSpent within where more would be looked at than is left."""
        token = _limiting.set(self)
        try:
            yield
        finally:
            _limiting.reset(token)

    def count(self, candidates: float) -> None:
        """Take candidates off what is left. Raises BudgetSpent where nothing is left for them."""
        if self.left <= 0 or candidates > self.left:
            self.left = 0
            raise BudgetSpent
        self.left -= candidates


_limiting: ContextVar[PricingBudget | None] = ContextVar("limiting", default=None)


def within_budget(candidates: float, items: Iterable[Item]) -> tuple[list[Item], bool]:
    """Return those of `items`, which searches yield, that come before so many candidates are priced, and whether these
    are all."""
    some: list[Item] = []
    try:
        with PricingBudget(candidates).limiting():
            for item in items:
                some.append(item)  # those before the budget is spent stay
    except BudgetSpent:
        return some, False
    return some, True


def count_candidates(candidates: float) -> None:
    """Count candidates before they are looked at. Raises BudgetSpent where the caller's caller set a budget and it is
    used up; a search without one costs nothing more."""
    budget = _limiting.get()
    if budget is not None:
        budget.count(candidates)
