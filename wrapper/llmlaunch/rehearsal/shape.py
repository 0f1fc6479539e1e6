"""The shape of a rehearsal: all that the memory of a rank depends on, and a key that is equal where all of it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from llmlaunch.backends.base import Rendered
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.run_json import measurement_template

__all__ = ["OF_SHAPE", "shape_key", "shape_of"]

OF_SHAPE = ("shape", "recipe", "recipe_digest", "nodes", "layout", "techniques", "gradient_dtype")  # keys of `shape_of`

# Sections of a measurement record as they are. The machine's number of devices and the batch are in the split and in
# the micro-batches; how far a card may be filled is for the plan to say, not for the rank.
SECTIONS = (
    *("backend", "gpu", "sequence_length", "micro_batch_size", "parallelism", "optimizer", "recompute"),
    *("precision", "implementation", "techniques"),
)
# Of a pipeline of p ranks no schedule keeps more than its first 4 p micro-batches apart (llmlaunch.memory.schedule).
TURNS = 4


def shape_of(recipe: Recipe, plan: Plan, rendered: Rendered) -> dict[str, Any]:
    """What a record, or the run.json of a rank that runs alone, says of the job it stands for: which recipe, which
    layout with which words, and the key of its shape. `recipe` is as planned, with the words llmlaunch chose."""
    return {
        "shape": shape_key(measurement_template(recipe, plan, rendered), recipe),
        "recipe": recipe.name,
        "recipe_digest": recipe.digest,
        "nodes": recipe.nodes,
        "layout": plan.layout.as_json(),
        "techniques": plan.chosen.techniques.as_json(),
        "gradient_dtype": plan.chosen.gradient_dtype,
    }


def shape_key(template: Mapping[str, Any], recipe: Recipe) -> str:
    """16 hexadecimal digits. `template` is the recipe's measurement record without a peak. A model's name makes no
    difference; words that go to the framework as they are might make one."""
    said: dict[str, Any] = {name: template.get(name) for name in SECTIONS}
    said["model"] = {name: value for name, value in template["model"].items() if name != "name"}
    said["in_flight"] = min(int(template["num_microbatches"]), TURNS * int(template["parallelism"]["pipeline"]))
    words = recipe.backend
    said["own_words"] = [words.script_kind, words.script, list(words.script_args), list(words.extra_args)]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]
