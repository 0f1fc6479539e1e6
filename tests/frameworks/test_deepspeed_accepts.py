"""DeepSpeed's own configuration class takes every ds_config.json we render, and knows every key in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.deepspeed.config import ds_config
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe

pytestmark = pytest.mark.frameworks

JUDGE = Path(__file__).with_name("deepspeed_judge.py")
RECIPES = {"llama2-7b-deepspeed": ("bf16", "fp16", "fp32"), "quickstart": ("bf16", "fp32")}

# DeepSpeed ignores top-level keys it does not know (deepspeed/runtime/config.py, 0.19.8), so it cannot tell us.
TOP_LEVEL_KEYS = {
    "bf16",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_allow_untested_optimizer",
    "zero_optimization",
}


def cases() -> list[dict[str, Any]]:
    made = []
    for name, precisions in RECIPES.items():
        for precision in precisions:
            for data in (1, 2, 8):
                for stage in range(4):
                    overrides = (f"training.precision={precision}", "training.global_batch_size=16")
                    recipe = load_recipe(asset("recipes", f"{name}.yaml"), overrides)
                    layout = Layout(data=data, micro_batch_size=2, zero_stage=stage)
                    label = f"{name} {precision} ZeRO-{stage} on {data}"
                    made.append({"name": label, "world_size": data, "config": ds_config(recipe, layout)})
    return made


def judged(asked: list[dict[str, Any]]) -> dict[str, str | None]:
    answer = subprocess.run(
        [sys.executable, str(JUDGE)],
        input=json.dumps({"cases": asked}),
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr
    verdicts: dict[str, str | None] = json.loads(answer.stdout.splitlines()[-1])
    return verdicts


def test_every_rendered_config_is_accepted_and_a_wrong_one_is_not() -> None:
    good = cases()
    batch = {**good[0]["config"], "train_batch_size": 15}
    key = {**good[0]["config"], "zero_optimization": {"stage": 0, "reduce_buckets": 1}}
    bad = [
        {"name": "batch does not add up", "world_size": 1, "config": batch},
        {"name": "unknown key", "world_size": 1, "config": key},
    ]
    verdicts = judged([*good, *bad])
    refused = {name: why for name, why in verdicts.items() if why is not None}
    assert set(refused) == {"batch does not add up", "unknown key"}, refused


def test_every_top_level_key_is_one_deepspeed_reads() -> None:
    for case in cases():
        assert set(case["config"]) <= TOP_LEVEL_KEYS
