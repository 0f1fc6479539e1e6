"""Every family trains for real with the shipped DeepSpeed script, shrunken, from the words we render."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_family_bytes import PRESETS, small

from llmlaunch.assets import asset
from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.base import Rendered
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.models.presets import load_preset
from llmlaunch.recipe.load import load_recipe

pytestmark = pytest.mark.frameworks

RUNNER = Path(__file__).with_name("trainer_cases.py")
STEPS = 6
SECONDS = 900
FAMILIES = [name for name in PRESETS if load_preset(name).mla is None]  # DeepSeek is refused from nothing
OVERRIDES = (
    "training.sequence_length=64",
    "training.global_batch_size=8",
    f"training.steps={STEPS}",
    "training.learning_rate=0.01",
)
SPLIT = Layout(data=2, micro_batch_size=2, zero_stage=3, recompute=RECOMPUTE_FULL)


def rendered(preset: str) -> Rendered:
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), OVERRIDES)
    return DeepSpeed().render(replace(recipe, model=small(preset, 2)), SPLIT)


def case(preset: str) -> dict[str, Any]:
    """The rendered files, and the rendered words but for where those files lie."""
    made = rendered(preset)
    words = [word for word in made.program[1:] if not isinstance(word, NodeVariable)]
    own = [word for word in words if word not in ("--model", "--deepspeed", "--deepspeed_config")]
    files = {
        key: json.loads(made.files[name])
        for key, name in (("model", "trainer/model.json"), ("settings", "ds_config.json"))
    }
    return {"name": preset, "ranks": 2, "words": own, **files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    answer = subprocess.run(
        [sys.executable, str(RUNNER), str(tmp_path_factory.mktemp("families"))],
        input=json.dumps([case(preset) for preset in FAMILIES]),
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert answer.returncode == 0, answer.stderr
    found: dict[str, dict[str, Any]] = json.loads(answer.stdout.rpartition("RESULT ")[2])
    return found


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_family_trains(trained: dict[str, dict[str, Any]], preset: str) -> None:
    run = trained[preset]
    assert run["codes"] == [0, 0], run["said"][-3000:]
    losses = [step["loss"] for step in run["steps"]]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.3, losses
