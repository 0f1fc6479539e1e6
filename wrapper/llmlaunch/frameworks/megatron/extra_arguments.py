"""Arguments of a person's own for Megatron-LM: their classes, and what the formula takes from those that it prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from llmlaunch.frameworks.argument import flag_groups
from llmlaunch.frameworks.classed_arguments import (
    NEUTRAL,
    NO_FLAG,
    OF_THE_SCRIPT,
    UNKNOWN,
    ClassedArguments,
    FlagClass,
    FlagGroup,
    class_arguments,
    flag_table,
    group_of,
    with_rows,
)
from llmlaunch.frameworks.megatron.arguments import decided_names, planned_arguments
from llmlaunch.frameworks.megatron.facts import MegatronOptions
from llmlaunch.frameworks.megatron.flags.table import column
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, ParserFlag, core_parser, rendered_version
from llmlaunch.frameworks.megatron.words import EARLIER_NEUTRAL
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.foreign_values import is_whole_number

FLAG_CLASSES = Path(__file__).with_name("flag_classes.json")
DEFAULT = FlagClass(NEUTRAL, "the parser's own default")
# megatron/core/transformer/dot_product_attention.py, core 0.19: nothing else reads them
OF_LOCAL_ATTENTION = ("masked_softmax_fusion", "attention_softmax_in_fp32")
UNPRICED_SOFTMAX = FlagClass(UNKNOWN, "what local attention keeps of its scores with it is not in the formula")


def classed_arguments(recipe: Recipe, layout: Layout) -> ClassedArguments:
    """Return the class of each argument of the person's own.

    Raises:
        UserError: one of them repeats or contradicts what is planned, as rendering it would.
    """
    if not recipe.techniques.what_ifs:  # those are priced, not rendered
        planned_arguments(recipe, layout)
    return class_arguments(recipe, lambda flag, values, of_script: _class_of(recipe, flag, values, of_script))


def _class_of(recipe: Recipe, flag: str, values: tuple[str, ...], of_script: bool) -> FlagClass | None:
    known = _flag(flag, rendered_version(recipe))
    if known is None and (earlier := EARLIER_NEUTRAL.get(flag.lstrip("-").replace("-", "_"))) is not None:
        return FlagClass(NEUTRAL, earlier)
    if known is None and of_script:
        return OF_THE_SCRIPT
    if known is not None and known.dest in decided_names(recipe):
        return None
    flag_class = megatron_flag_class(known, values)
    read = known is not None and known.dest in OF_LOCAL_ATTENTION and flag_class != DEFAULT
    return UNPRICED_SOFTMAX if read and _stated_values(recipe).get("transformer_impl") == "local" else flag_class


def _flag(name: str, version: str) -> ParserFlag | None:
    """Return a flag of this version's parser, or of another version's, which means the same; None for neither."""
    versions = (version, *(other for other in KNOWN_VERSIONS if other != version))
    return next((flags[name] for flags in (core_parser(each).flags for each in versions) if name in flags), None)


def megatron_flag_class(flag: ParserFlag | None, values: Sequence[str]) -> FlagClass:
    """Return the class of a flag of Megatron's parser with these values; None is a flag that it does not have."""
    if flag is None:
        return NO_FLAG
    if _is_default(flag, values):
        return DEFAULT
    group = group_of(megatron_groups(), flag.dest, values)
    return NO_FLAG if group is None else group.flag_class


@cache
def megatron_groups() -> tuple[FlagGroup, ...]:
    """Return the groups of flags with one class, those of the table of arguments among them."""
    groups = flag_table(FLAG_CLASSES)
    subjects = {
        dest: subject
        for dest, subject in column("subject").items()
        if dest not in column("decides") and group_of(groups, dest, ()) is None
    }
    return with_rows(groups, subjects)


def _is_default(flag: ParserFlag, values: Sequence[str]) -> bool:
    stated = flag.sets if flag.values == 0 else " ".join(values)
    if stated is None or flag.default is None:
        return False
    default = flag.default.rpartition(".")[2] if flag.choices and flag.default in flag.choices else flag.default
    try:
        return float(stated) == float(default)
    except ValueError:
        return stated == default


def with_extra_arguments(recipe: Recipe, options: MegatronOptions) -> MegatronOptions:
    """Return the options as the recipe's extra arguments change them: what the class `priced` stands for."""
    values = _stated_values(recipe)
    local = values.get("transformer_impl") == "local"
    changes: dict[str, object] = {}
    if local:
        changes |= {"transformer_engine": False}
    if local or values.get("attention_backend") == "unfused":
        changes |= {"unfused_attention": True}
    if values.get("gradient_accumulation_fusion") == "False":
        changes |= {"gradient_accumulation_fusion": False}
    if values.get("bias_swiglu_fusion") == "False":
        changes |= {"gated_activation_fused": False}
    if values.get("defer_embedding_wgrad_compute") == "True":
        changes |= {"deferred_head_gradients": _number(values, "wgrad_deferral_limit", 0) or ALL_MICRO_BATCHES}
    return replace(options, **changes, **_of_the_loader(values))  # type: ignore[arg-type]


def _of_the_loader(values: Mapping[str, str]) -> dict[str, object]:
    """Return what decides which masks the loader makes, and in how many processes."""
    changes: dict[str, object] = {}
    without = values.get("create_attention_mask_in_dataloader") == "False"
    if without or values.get("dataloader_inter_document_masking") == "True":
        changes |= {"attention_masks": False}
    if any(values.get(name) == "True" for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")):
        changes |= {"masks_by_sample": True}
    if "num_workers" in values:
        changes |= {"loader_workers": max(_number(values, "num_workers", 2), 1)}  # without one, the trainer loads
    return changes


ALL_MICRO_BATCHES = 2**31


def _stated_values(recipe: Recipe) -> Mapping[str, str]:
    """Return the values that the person's own arguments give the parser's names; of a switch, what it sets."""
    flags = core_parser(rendered_version(recipe)).flags
    stated = {}
    for group in flag_groups((*recipe.backend.script_args, *recipe.backend.extra_args)):
        first, *values = map(str, group)
        name, equals, value = first.partition("=")
        flag = flags.get(name)
        if flag is not None:
            words = [value, *values] if equals else values
            stated[flag.dest] = str(flag.sets) if flag.values == 0 else " ".join(words)
    return stated


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "")
    return int(text) if is_whole_number(text) else default
