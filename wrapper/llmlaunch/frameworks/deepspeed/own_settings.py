"""`backend.ds_config`: keys of ds_config.json that the user sets in addition to those that the recipe decides, and in
place of those that llmlaunch chooses, such as bucket sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmlaunch.documents.nested import leaves, value_at
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Reason
from llmlaunch.frameworks.deepspeed.facts import OFFLOAD_GROUPS, SUB_GROUP_ELEMENTS
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

AUTO = "auto"  # for Hugging Face's Trainer, which fills it in
OWN_REASON = Reason(("backend.ds_config",), "as the recipe has it")


def own_number(recipe: Recipe, key: str, automatic: int) -> int | None:
    """Return a number in `backend.ds_config`, `automatic` if it is "auto", or None if it is absent.

    Raises UserError if it is not a whole number of at least 0.
    """
    value = value_at(recipe.backend.ds_config, key)
    if value is None or (value == AUTO and isinstance(value, str)):
        return None if value is None else automatic
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise UserError(f"{recipe.path}: backend.ds_config.{key}: must be a whole number, not {str(value)[:40]!a}")
    return int(value)


def set_keys(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a configuration that is not a section, with its value."""
    return ((key, value) for key, value in leaves(settings) if value != {})


# Elements in one collective. DeepSpeed's default is 5e8 (1 GB in bf16, and copies of it); 100 MB fill a link as well.
# Of a small model a tenth, because a bucket is allocated whole.
MOST_BUCKET = 50_000_000
LEAST_BUCKET = 1_000_000
LIVE_PARAMETERS = 1_000_000_000
PERSISTENT_PARAMETER = 100_000  # smaller tensors (norms) stay whole on every rank


def bucket_elements(recipe: Recipe) -> int:
    """Elements in one collective: an even number, which ZeRO 1 and 2 insist on (runtime/zero/stage_1_and_2.py
    `nccl_start_alignment_factor`, 0.19.8). What the recipe says itself may be odd. "auto" is the square of the hidden
    size (transformers/integrations/deepspeed.py trainer_config_finalize, 5.23)."""
    stated = own_number(recipe, "zero_optimization.reduce_bucket_size", recipe.model.hidden_size**2)
    return stated or min(MOST_BUCKET, max(_parameters(recipe) // 20 * 2, LEAST_BUCKET))


def live_parameters(recipe: Recipe) -> int:
    """Most parameters ZeRO 3 may keep gathered at once."""
    stated = own_number(recipe, "zero_optimization.stage3_max_live_parameters", LIVE_PARAMETERS)
    return min(LIVE_PARAMETERS if stated is None else stated, _parameters(recipe))


def sub_group_elements(recipe: Recipe, layout: Layout) -> int:
    """Elements of a rank's shard stepped together: fewer where a share of the groups goes to the host."""
    if recipe.techniques.offload_optimizer in (0.0, 1.0):
        return SUB_GROUP_ELEMENTS
    return max(_parameters(recipe) // layout.world_size // OFFLOAD_GROUPS, 1)


def _parameters(recipe: Recipe) -> int:
    return count_parameters(recipe.model).total
