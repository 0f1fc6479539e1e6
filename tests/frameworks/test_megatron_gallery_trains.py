"""Every Megatron-LM recipe of the gallery, shrunken, trains on this machine's CPU."""

from __future__ import annotations

import math

import pytest
from cpu_training import Trained, train_on_cpu
from gallery_shrunken import LAYOUTS, OBSTACLES, STEPS, gallery_jobs

from llmlaunch.assets import asset
from llmlaunch.recipe.load import load_recipe

pytestmark = pytest.mark.frameworks

GALLERY = sorted(path for path in asset("recipes").glob("*.yaml") if load_recipe(path).backend.name == "megatron-lm")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return train_on_cpu(gallery_jobs(GALLERY), tmp_path_factory.mktemp("gallery"))


def test_none_is_left_out() -> None:
    assert {path.stem for path in GALLERY} == {*LAYOUTS, *OBSTACLES}
    assert not LAYOUTS.keys() & OBSTACLES.keys()


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_it_trains(trained: dict[str, Trained], recipe: str) -> None:
    one = trained[recipe]
    assert set(one.codes) == {0}, one.complaint()
    assert [step.step for step in one.steps] == list(range(1, STEPS + 1))
    assert all(map(math.isfinite, one.losses))
    assert one.losses[-1] < one.losses[0]
