"""The best split of layers over stages, against every split there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.planner.stage_search import balance_alike, balance_kinds

Split = tuple[int, ...]


def every_split(layers: int, stages: int) -> Iterator[Split]:
    """All ways to cut so many layers into so many stages, none of them empty."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))


def judged(split: Split, seconds: Sequence[int], first: int, last: int) -> tuple[int, int, Split]:
    """What the best split has the least of: the slowest rank, the squares of all, then the split itself."""
    ends = [sum(split[: i + 1]) for i in range(len(split))]
    stages = [sum(seconds[end - count : end]) for count, end in zip(split, ends, strict=True)]
    stages[0] += first
    stages[-1] += last
    return max(stages), sum(s * s for s in stages), split


@given(
    layers=st.integers(1, 9),
    pipeline=st.integers(1, 5),
    layer=st.integers(1, 5),
    first=st.integers(0, 12),
    last=st.integers(0, 12),
    caps=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_alike_layers_are_split_as_the_best_of_all_splits(
    layers: int, pipeline: int, layer: int, first: int, last: int, caps: list[int]
) -> None:
    allowed = [s for s in every_split(layers, pipeline) if all(n <= c for n, c in zip(s, caps, strict=False))]
    best = min((judged(s, [layer] * layers, first, last) for s in allowed), default=None)
    columns = (np.array([float(value)]) for value in (layer, first, last))
    table, feasible = balance_alike(*columns, np.array([pipeline]), layers, np.array([caps]))
    assert feasible[0] == (best is not None)
    expected = () if best is None else best[2]
    assert tuple(table[0]) == (*expected, *(0,) * (5 - len(expected)))


@given(data=st.data(), rows=st.integers(1, 20))
def test_a_row_among_others_is_split_as_it_is_alone(data: st.DataObject, rows: int) -> None:
    number = st.integers(1, 8)
    columns = [np.array([float(data.draw(number)) for _ in range(rows)]) for _ in range(3)]
    pipeline = np.array([data.draw(number) for _ in range(rows)])
    caps = np.array([[data.draw(st.integers(1, 16)) for _ in range(8)] for _ in range(rows)])
    together, feasible = balance_alike(*columns, pipeline, 16, caps)
    for row in range(rows):
        one = slice(row, row + 1)
        alone, possible = balance_alike(*(c[one] for c in columns), pipeline[one], 16, caps[one])
        assert feasible[row] == possible[0]
        assert list(together[row]) == list(alone[0])


@given(
    kinds=st.one_of(
        st.lists(st.integers(1, 6), min_size=1, max_size=9),
        st.integers(1, 9).map(lambda n: [2, 5] * (n // 2) + [2] * (n % 2)),  # dense and mixture in turn
        st.integers(1, 6).map(lambda n: [2] * 3 + [5] * n),  # the first three dense
    ),
    pipeline=st.integers(1, 5),
    first=st.integers(0, 12),
    last=st.integers(0, 12),
    heaviest=st.lists(st.integers(3, 30), min_size=5, max_size=5),
)
def test_layers_of_any_kinds_are_split_as_the_best_of_all_splits(
    kinds: list[int], pipeline: int, first: int, last: int, heaviest: list[int]
) -> None:
    """Memory here goes by the kind of layer too, and binds some ranks earlier than others."""
    before = np.concatenate([[0], np.cumsum(kinds)])
    fits = np.array([before[None, :] - before[:, None] <= most for most in heaviest[:pipeline]])

    def allowed(split: Split) -> bool:
        ends = np.cumsum(split)
        return all(fits[r, ends[r] - split[r], ends[r]] for r in range(pipeline))

    splits = [judged(s, kinds, first, last) for s in every_split(len(kinds), pipeline) if allowed(s)]
    best = min(splits, default=None)
    assert balance_kinds(kinds, first, last, pipeline, fits) == (None if best is None else best[2])
