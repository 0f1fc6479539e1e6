"""The Pareto front: every safe layout that none beats in both step time and head-room, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.registry import backend_for
from llmlaunch.planner.search import pareto, search
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe


def test_every_safe_layout_is_beaten_or_on_the_front() -> None:
    recipe = load_recipe(asset("recipes", "llama3-8b.yaml"))
    found = search(setting_of(recipe, backend_for(recipe)))
    front = pareto(found)
    seconds, filled = np.round(found.step_seconds, 12), found.device_bytes
    assert np.all(np.diff(seconds[front]) > 0)
    assert np.all(np.diff(filled[front]) < 0)
    last = front[np.searchsorted(seconds[front], seconds[found.safe], side="right") - 1]  # the slowest no slower
    assert np.all(filled[last] <= filled[found.safe])


@pytest.mark.parametrize("name", ["llama2-7b-deepspeed", "quickstart"])
def test_the_front_is_the_one_found_by_comparing_all_pairs(name: str) -> None:
    recipe = load_recipe(asset("recipes", f"{name}.yaml"))
    found = search(setting_of(recipe, backend_for(recipe)))
    seconds, filled = np.round(found.step_seconds, 12), found.device_bytes
    pairs = np.unique(np.stack([seconds, filled], axis=1)[found.safe], axis=0)
    beaten = [np.any((pairs <= one).all(axis=1) & (pairs < one).any(axis=1)) for one in pairs]
    front = pareto(found)
    assert np.all(found.safe[front])
    assert [(seconds[i], filled[i]) for i in front] == [tuple(p) for p, b in zip(pairs, beaten, strict=True) if not b]
    assert seconds[front[0]] == seconds[found.first[0]]
    assert np.array_equal(front, pareto(found))


def test_where_nothing_is_safe_the_front_is_empty() -> None:
    recipe = load_recipe(asset("recipes", "llama3-70b.yaml"), ["model=llama3-405b", "nodes=1"])
    assert len(pareto(search(setting_of(recipe, backend_for(recipe))))) == 0
