"""Arguments of a person's own for a DeepSpeed job: of the shipped trainer, of Hugging Face's Trainer and scripts like
it, or of a script that nobody here knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Word, command_words, refuse_repeats
from llmlaunch.frameworks.classed_arguments import (
    DECIDES,
    NEUTRAL,
    OF_THE_SCRIPT,
    PRICED,
    UNKNOWN,
    ClassedArgument,
    ClassedArguments,
    FlagClass,
)
from llmlaunch.frameworks.deepspeed.own_settings import set_keys
from llmlaunch.frameworks.deepspeed.scripts import kind_of
from llmlaunch.frameworks.deepspeed.settings import setting_groups
from llmlaunch.frameworks.deepspeed.trainer_table import is_of_named_trainers, shipped_groups, trainer_group
from llmlaunch.frameworks.flag_classes import BY_WORD, NO_FLAG, class_arguments, flags_with_values, group_of
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.foreign_values import is_whole_number

# transformers/integrations/deepspeed.py deepspeed_optim_sched, 5.23
OPTIMIZER_OF_THE_FILE = FlagClass(NEUTRAL, "the Trainer takes the optimizer that ds_config.json names")
WEIGHT_FORMATS, NARROW = ("torch_dtype", "dtype"), (("bfloat16",), ("bf16",), ("float16",), ("fp16",))
# transformers/trainer.py, 5.23: without DeepSpeed nothing casts, and torch's AdamW has states in the weights' format
NARROW_STATES = FlagClass(
    UNKNOWN, "without DeepSpeed gradients and optimizer states are bf16 or fp16, too", effect=DECIDES
)
# transformers/training_args.py, 5.23: nothing is evaluated unless one of these is set
EVALUATION_SWITCHES = ("do_eval", "do_predict", "eval_on_start", "eval_strategy", "evaluation_strategy")
EVALUATION_BATCH = "per_device_eval_batch_size"
EVALUATION_SEQUENCES = 8  # its default


def classed_arguments(recipe: Recipe, layout: Layout) -> ClassedArguments:
    """Return the class of each argument of the person's own.

    Raises:
        UserError: one of them repeats a planned one, as rendering it would.
    """
    settings = tuple(_classed_settings(recipe))
    if not (recipe.backend.extra_args or recipe.backend.script_args):
        return ClassedArguments(settings)
    refuse_repeats(recipe, _planned_words(recipe, layout))
    kind = "shipped" if recipe.backend.script is None else recipe.backend.script_kind
    classed = class_arguments(recipe, lambda flag, values, of_script: _class_of(recipe, layout, kind, flag, values))
    return ClassedArguments((*classed.arguments, *settings))


def _classed_settings(recipe: Recipe) -> Iterator[ClassedArgument]:
    """Yield each key of `backend.ds_config` with its class."""
    for key, value in set_keys(recipe.backend.ds_config):
        shown = value if isinstance(value, str) else json.dumps(value)
        group = group_of(setting_groups(), key, (shown,))
        known = NO_FLAG if group is None else group.flag_class
        flag_class = BY_WORD if key in recipe.backend.neutral_args else known
        yield ClassedArgument(f"backend.ds_config.{key}", (shown,), flag_class)


def _planned_words(recipe: Recipe, layout: Layout) -> tuple[Word, ...]:
    """Return the words that would be rendered; none of a recipe that can only be priced, as rendering it would say."""
    try:
        return () if recipe.techniques.what_ifs else command_words(kind_of(recipe).arguments(recipe, layout))
    except UserError:
        return ()


def _class_of(recipe: Recipe, layout: Layout, kind: str, flag: str, values: tuple[str, ...]) -> FlagClass:
    """Return the class of a flag. What the recipe says too is priced as it says. A script of one's own may know nothing
    of the recipe: what a recipe key says of the job is said to it in its own words, so there such a flag is the
    script's."""
    name = flag.lstrip("-").replace("-", "_")
    group = group_of(shipped_groups(), name, values) if kind == "shipped" else trainer_group(name, values)
    if group is None:
        return NO_FLAG if kind == "shipped" else OF_THE_SCRIPT
    if kind in ("own", "pipeline") and (group.flag_class.key or is_of_named_trainers(group)):
        return OF_THE_SCRIPT
    if kind == "hugging-face" and _is_said(recipe, group.flag_class.key, values):
        return FlagClass(PRICED, "the recipe says it too", group.flag_class.key)
    if kind == "hugging-face" and name.startswith("optim") and "optimizer" in recipe.backend.ds_config:
        return OPTIMIZER_OF_THE_FILE
    if kind == "hugging-face" and name in WEIGHT_FORMATS and values[:1] in NARROW and _may_replicate(recipe, layout):
        return NARROW_STATES
    if kind == "hugging-face" and group.flag_class.key == "training.evaluation":
        return _validation_class(recipe, group.flag_class, layout)
    return group.flag_class


def _may_replicate(recipe: Recipe, layout: Layout) -> bool:
    """Return whether the recipe may have been read of a script that trains by torch's own data parallelism."""
    return layout.zero_stage == 0 and not recipe.backend.ds_config and recipe.techniques.adapters is None


def _validation_class(recipe: Recipe, flag_class: FlagClass, layout: Layout) -> FlagClass:
    """Return the class of a flag about validation: neutral without validation, else by how many sequences it validates
    at once."""
    values_of = {
        flag.lstrip("-").replace("-", "_"): values for flag, values in flags_with_values(recipe.backend.script_args)
    }
    switches = (trainer_group(name, values_of[name]) for name in EVALUATION_SWITCHES if name in values_of)
    if not any(group is not None and group.flag_class.key == flag_class.key for group in switches):
        return FlagClass(NEUTRAL, "nothing turns validation on")
    size = next(iter(values_of.get(EVALUATION_BATCH, ())), "")
    sequences = int(size) if is_whole_number(size) else EVALUATION_SEQUENCES
    if sequences <= layout.micro_batch_size:
        return FlagClass(NEUTRAL, "validation of no more sequences than a micro-batch keeps less than training on them")
    return replace(flag_class, times=sequences / layout.micro_batch_size)


def _is_said(recipe: Recipe, key: str, values: tuple[str, ...]) -> bool:
    """Return whether the recipe says of adapters or of the sequence's length what a flag of these keys says."""
    if key == "training.adapters":
        return recipe.techniques.adapters is not None
    return "training.sequence_length" in key and values == (str(recipe.workload.sequence_length),)
