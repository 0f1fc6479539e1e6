"""The best candidates that a search has priced so far, and with them what is still worth pricing.

A candidate whose lower bound of step time is beyond them cannot be among those that the ranking has to show exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.planner.points import Points

SLACK = 1e-9  # sums of floats do not come out the same in every order


@frozen
class Reach:
    """What a search is about, where it is not about all layouts: safe ones whose step takes at most `most_seconds`, the
    first of which has a ranking key of at most `most_key`."""

    most_seconds: float = np.inf
    most_key: float = np.inf

    @property
    def everything(self) -> bool:
        """Whether it leaves out nothing, and layouts that are not safe matter as well."""
        return bool(np.isinf(self.most_seconds))


ANYWHERE = Reach()


class Incumbents:
    """The ranking keys of the fastest safe candidates, as many as must be exact.

    `keys_of` returns the keys of points: their seconds of a step, or more, so that a lower bound of seconds is one of
    keys. As long as `whole` is true, everything is within reach, and every legal layout is priced. What is beyond
    `reach` is of no interest, whether a safe candidate is known or not. If `safe_alone`, nothing is asked about layouts
    that are not safe.
    """

    def __init__(
        self,
        exact: int,
        keys_of: Callable[[Points], FloatColumn],
        whole: bool = False,
        reach: Reach = ANYWHERE,
        safe_alone: bool = False,
    ) -> None:
        self.whole = whole
        self.reach = reach
        self.safe_alone = safe_alone
        # Whether any safe candidate is known, or only safe ones are of interest: the others need not be priced then.
        self.any_safe = not reach.everything
        self.first_safe: Points | None = None  # the first safe candidate
        self._keys_of = keys_of
        self._best = np.full(exact, np.inf)
        self._cap = reach.most_key * (1.0 + SLACK)

    @classmethod
    def of_whole(cls) -> Incumbents:
        """Return incumbents that put nothing out of reach."""
        return cls(1, lambda points: points.rows.step_seconds, whole=True)

    @property
    def key_to_beat(self) -> float:
        """The longest a candidate may take to be within reach."""
        return min(self._cap, float(self._best[-1]) * (1.0 + SLACK))

    @property
    def none(self) -> bool:
        """Whether too few safe candidates are known to put anything out of reach."""
        return bool(np.isinf(self.key_to_beat) and self.reach.everything)

    @property
    def unsafe_are_lost(self) -> bool:
        """Whether a candidate that cannot fit memory need not be priced: something safe is known, or nothing else is
        asked for."""
        return self.any_safe or self.safe_alone

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Let the points that are added meanwhile put others out of reach, though they are to be added once more. Those
        that are not safe are no points then."""
        best, safe_alone, self.safe_alone = self._best, self.safe_alone, True
        yield
        self._cap, self._best, self.safe_alone = self.key_to_beat, best, safe_alone

    def in_reach(self, least_seconds: FloatColumn) -> BoolColumn:
        """Whether candidates that take at least so long may still be among those that must be exact."""
        if self.whole:
            return np.ones(least_seconds.shape, dtype=np.bool_)
        return np.less_equal(least_seconds, self.key_to_beat)

    def in_time(self, least_seconds: FloatColumn) -> BoolColumn:
        """Whether steps of candidates that take at least so long may be within `reach`."""
        return np.less_equal(least_seconds, self.reach.most_seconds * (1.0 + SLACK))

    def add(self, safe: Points) -> None:
        """Add safe points that are priced. The keys of the few that can be among the best are asked for."""
        self.any_safe |= len(safe) > 0
        if len(safe) and self.first_safe is None:
            self.first_safe = safe.take(slice(0, 1)).compact
        near = safe.take(safe.rows.step_seconds <= self._best[-1])
        if len(near):
            keys = self._keys_of(near.compact)
            self._best = np.sort(np.concatenate([self._best, keys]))[: len(self._best)]
