"""Whatever is rendered for Hugging Face's Trainer is read back as the same training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.command_line import read_deepspeed
from llmlaunch.frameworks.megatron.differences import pinned_layout
from llmlaunch.recipe.load import recipe_from
from llmlaunch.recipe.types import Recipe

MODEL = ["--model_name_or_path", "meta-llama/Llama-3.2-1B"]
LENGTH = ["--block_size", "1024"]


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Recipes of a script with the Trainer's arguments, every size of the split pinned."""
    stage = draw(st.integers(0, 3))
    decay = draw(st.sampled_from(["cosine", "linear", "constant"]))
    training = {
        "sequence_length": 1024,
        "global_batch_size": 8 * draw(st.integers(1, 4)) * (micro := draw(st.integers(1, 4))),
        "steps": draw(st.integers(2, 10**6)), "precision": draw(st.sampled_from(["bf16", "fp16"])),
        "learning_rate": draw(st.floats(1e-7, 1.0)), "learning_rate_decay": decay,
        "warmup_steps": draw(st.integers(0, 1)), "weight_decay": draw(st.floats(0, 1)),
        "adam_betas": [draw(st.floats(0, 0.99)), draw(st.floats(0, 0.99))],
        "gradient_clipping": draw(st.floats(0, 10)), "seed": draw(st.integers(0, 2**31 - 1)),
        "log_interval": draw(st.integers(1, 1000)),
    }  # fmt: skip
    if draw(st.booleans()):
        training |= {"save_interval": draw(st.integers(1, 1000)), "checkpoint_path": "/checkpoints/here"}
    return {
        "schema": 1,
        "name": "random",
        "model": "llama3.2-1b",
        "backend": {
            "name": "deepspeed",
            "script": "/code/run_clm.py",
            "script_kind": "hugging-face",
            "script_args": [*MODEL, *LENGTH],
        },
        "cluster": "h100-80gb-x8",
        "nodes": 1,
        "training": training,
        "data": {"mock": True},
        "layout": {
            "micro_batch_size": micro,
            "zero_stage": stage,
            "recompute": draw(st.sampled_from(["none", "full"])),
            "offload_optimizer": float(draw(st.booleans()) and stage > 0),
            "offload_parameters": draw(st.booleans()) and stage == 3,
        },
    }


def recipe_of(document: dict[str, Any]) -> Recipe:
    return recipe_from(parse_document(yaml.safe_dump(document, sort_keys=False), "recipe"))


def rendered(recipe: Recipe) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the script's words and its ds_config.json."""
    result = DeepSpeed().render(recipe, pinned_layout(recipe))
    words = tuple(word if isinstance(word, str) else f"/run{word.suffix}" for word in result.program)
    return words, json.loads(result.files["ds_config.json"])


@settings(max_examples=25, deadline=None)
@given(documents())
def test_a_rendered_job_is_read_back_as_it_was(document: dict[str, Any]) -> None:
    recipe = recipe_of(document)
    words, config = rendered(recipe)
    command = TrainerCommand(
        words[0],
        words[1:],
        nodes=1,
        devices_per_node=8,
        files={"/run/ds_config.json": json.dumps(config)},
        folder=Path("/nowhere"),
    )
    reading = read_deepspeed(command)
    assert reading.missing == ()
    again = dict(reading.document)
    for key in ("model", "nodes", "data"):
        assert again[key] == document[key]
    assert again["training"] == document["training"]
    assert {**document["layout"], **again["layout"]} == document["layout"]
    words_again, config_again = rendered(recipe_of({**again, "cluster": document["cluster"], "name": "random"}))
    assert (words_again, config_again) == (words, config)
