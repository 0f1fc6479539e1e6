"""How many elements DeepSpeed's collectives and ZeRO 3 take at once, as rendered: what the recipe's own ds_config says,
else what llmlaunch chooses."""

from __future__ import annotations

from llmlaunch.frameworks.deepspeed.facts import OFFLOAD_GROUPS, SUB_GROUP_ELEMENTS
from llmlaunch.frameworks.deepspeed.own_settings import own_number
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

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
