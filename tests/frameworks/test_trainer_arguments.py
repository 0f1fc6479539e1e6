"""Hugging Face's own TrainingArguments take the words and the ds_config.json of a script of the Trainer's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from judges import DeepSpeedJudge

from llmlaunch.assets import asset
from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.recipe.load import load_recipe

pytestmark = pytest.mark.frameworks

KIND = "backend={name: deepspeed, script: train.py, script_kind: hugging-face}"
LEAST = ("training.minimum_learning_rate=1.0e-5", "training.learning_rate_decay=cosine")
# One process, as the Trainer counts them; `use_cpu` because there is no GPU.
PROGRAM = """
import json, sys
from types import SimpleNamespace
from transformers import HfArgumentParser, TrainingArguments
(taken,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*json.loads(sys.argv[1]), "--use_cpu"])
config = taken.hf_deepspeed_config
config.trainer_config_finalize(taken, SimpleNamespace(config=None), taken.max_steps)
print("TAKEN " + json.dumps({
    "config": config.config,
    "bf16": taken.bf16,
    "warmup": taken.get_warmup_steps(taken.max_steps),
    "checkpointing": taken.gradient_checkpointing,
    "decay": taken.weight_decay,
    "kwargs": taken.lr_scheduler_kwargs,
}))
"""


def test_the_trainer_takes_words_and_config(tmp_path: Path, deepspeed: DeepSpeedJudge) -> None:
    """Equal values everywhere: the Trainer compares the file with its own arguments and refuses what differs."""
    saving = ("training.save_interval=5", f"training.checkpoint_path={tmp_path / 'ckpt'}")
    overrides = (KIND, "training.precision=bf16", "training.gradient_clipping=0.5", *LEAST, *saving)
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), overrides)
    layout = Layout(data=1, micro_batch_size=2, zero_stage=3, recompute=RECOMPUTE_FULL)
    result = DeepSpeed().render(replace(recipe, path="mine.yaml"), layout)
    rendered = result.files["ds_config.json"]
    (tmp_path / "ds_config.json").write_bytes(rendered)
    words = [f"{tmp_path}{word.suffix}" if isinstance(word, NodeVariable) else word for word in result.program[1:]]
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(words)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith("TAKEN ")]
    assert lines, answer.stderr[-3000:]
    taken = json.loads(lines[0].removeprefix("TAKEN "))
    taken["config"]["steps_per_print"] = recipe.training.log_interval  # accelerate prints steps itself
    assert taken["config"] == json.loads(rendered)
    assert (taken["bf16"], taken["checkpointing"], taken["decay"]) == (True, True, 0.1)
    assert (taken["warmup"], taken["kwargs"]) == (4, {"min_lr": 1e-5})
    assert deepspeed(config=taken["config"], data=1) is None
