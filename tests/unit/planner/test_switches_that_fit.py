"""Where only a switch makes the best layout fit, the search chooses what pricing every combination chooses.

Recipes are drawn at random, with nothing pinned, and memory is lowered to what a fast layout with a switch needs;
`make soak` tries three hundred.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from llmlaunch.errors import UserError
from llmlaunch.planner.changes import judge_layouts
from llmlaunch.planner.plan import as_planned
from llmlaunch.planner.search import EXACT, SearchResult, search
from llmlaunch.planner.search_space import Candidate
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.load import load_recipe
from llmlaunch.techniques import NO_TECHNIQUES, SPARING_SWITCHES, Techniques
from support.plans import setting_for
from support.recipes import SMALL
from support.soak import SOAK

SEEDS = range(300) if SOAK else (2, 5)  # of recipes that are quickly searched
DRAWS = 100  # at most, until a switch decides
PLENTY = 2**60  # bytes: nothing is short of memory
MODELS = {
    "megatron-lm": ("llama3-8b", "llama3.2-1b", "qwen3-8b", "gpt-oss-20b", "qwen2.5-7b", "lfm2-1.2b", "mixtral-8x7b"),
    "deepspeed": ("llama3-8b", "llama3.2-1b", "qwen3-8b", "gemma2-9b", "mistral-7b", "qwen2.5-7b"),
}
VALUES = {
    "cluster": ("a100-40gb-x8", "h100-80gb-x8", "h100-94gb-sxm-x4", "h200-141gb-x8", "rtx-4090-x8"),
    "nodes": ("1", "2", "4"),
    "training.sequence_length": ("4096", "16384", "65536", "131072"),
    "training.global_batch_size": ("8", "16", "64", "96", "256"),
}


def open_recipes(chance: random.Random) -> Iterator[Setting]:
    """Yield settings of random recipes that leave the whole layout to the search."""
    for _ in range(DRAWS):
        backend = chance.choice(sorted(MODELS))
        drawn = {"backend": backend, "model": chance.choice(MODELS[backend])}
        drawn |= {key: chance.choice(values) for key, values in VALUES.items()}
        try:
            setting = setting_for(load_recipe(SMALL, [f"{key}={value}" for key, value in drawn.items()]))
            setting.backend.rules(setting.recipe)
        except UserError:
            continue  # no layout could do it
        yield setting


def switched_on(techniques: Techniques) -> dict[str, object]:
    """Return the switches that may spare memory and are on, with the values that turn them off."""
    return {name: getattr(NO_TECHNIQUES, name) for name in SPARING_SWITCHES if techniques.uses(name)}


def with_limit(setting: Setting, limit_bytes: float) -> Setting:
    return replace(setting, limit=replace(setting.limit, limit_bytes=int(limit_bytes), fits_bytes=None))


def needs_its_switch(setting: Setting, chosen: Candidate) -> bool:
    """Whether the chosen layout overfills the devices without the switches that may spare memory."""
    off = switched_on(chosen.techniques)
    if not off:
        return False
    planned = as_planned(setting.recipe, chosen)
    without = replace(planned, techniques=replace(planned.techniques, **off))
    (verdict,) = judge_layouts(setting.with_recipe(without), [chosen.layout])
    return verdict.device_bytes is not None and verdict.device_bytes > setting.limit.limit_bytes


def where_a_switch_decides(seed: int) -> tuple[Setting, SearchResult]:
    """Return a random recipe whose best layout fits with a switch alone, and what pricing every combination finds."""
    chance = random.Random(seed)
    for setting in open_recipes(chance):
        limit_bytes = bytes_of_a_fast_switch(setting, chance)
        short = with_limit(setting, limit_bytes)
        whole = search(short, whole=True)
        if np.any(whole.safe) and needs_its_switch(short, whole.candidate(short.recipe, 0)):
            return short, whole
    raise AssertionError(f"in no draw of seed {seed} a switch decides")


def bytes_of_a_fast_switch(setting: Setting, chance: random.Random) -> float:
    """Return the device bytes of a layout with a switch that no layout beats in both time and memory; 0 without one."""
    roomy = search(with_limit(setting, PLENTY), whole=True)
    by_time = np.lexsort((roomy.device_bytes, roomy.step_seconds))
    least = np.minimum.accumulate(roomy.device_bytes[by_time])
    unbeaten = by_time[np.r_[True, least[1:] < least[:-1]]]
    rows = [row for row in unbeaten.tolist() if switched_on(roomy.at(setting.recipe, row).techniques)]
    return float(roomy.device_bytes[chance.choice(rows)]) if rows else 0.0


def first(setting: Setting, result: SearchResult) -> list[Candidate]:
    return [result.candidate(setting.recipe, place) for place in range(min(EXACT, len(result.first)))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_choice_is_that_of_pricing_every_combination(seed: int) -> None:
    setting, whole = where_a_switch_decides(seed)
    assert first(setting, search(setting)) == first(setting, whole)
