"""The Pareto front: every safe layout that none beats in both step time and head-room, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from llmlaunch.planner.search import pareto, search
from support.plans import gallery_setting


def test_every_safe_layout_is_beaten_or_on_the_front() -> None:
    result = search(gallery_setting("llama3-8b"))
    front = pareto(result)
    seconds, filled = np.round(result.step_seconds, 12), result.device_bytes
    assert np.all(np.diff(seconds[front]) > 0)
    assert np.all(np.diff(filled[front]) < 0)
    last = front[np.searchsorted(seconds[front], seconds[result.safe], side="right") - 1]  # the slowest no slower
    assert np.all(filled[last] <= filled[result.safe])


@pytest.mark.parametrize("name", ["llama2-7b-deepspeed", "quickstart"])
def test_the_front_is_the_one_found_by_comparing_all_pairs(name: str) -> None:
    result = search(gallery_setting(name))
    seconds, filled = np.round(result.step_seconds, 12), result.device_bytes
    pairs = np.unique(np.stack([seconds, filled], axis=1)[result.safe], axis=0)
    beaten = [np.any((pairs <= pair).all(axis=1) & (pairs < pair).any(axis=1)) for pair in pairs]
    front = pareto(result)
    assert np.all(result.safe[front])
    assert [(seconds[i], filled[i]) for i in front] == [tuple(p) for p, b in zip(pairs, beaten, strict=True) if not b]
    assert seconds[front[0]] == seconds[result.first[0]]
    assert np.array_equal(front, pareto(result))


def test_where_nothing_is_safe_the_front_is_empty() -> None:
    assert len(pareto(search(gallery_setting("llama3-70b", "model=llama3-405b", "nodes=1")))) == 0
