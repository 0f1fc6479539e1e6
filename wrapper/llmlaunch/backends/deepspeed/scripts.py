"""The kinds of training script DeepSpeed is run with: what each accepts, what is searched for it, what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmlaunch.backends.argument import Argument
from llmlaunch.backends.base import RunningWords
from llmlaunch.backends.deepspeed.arguments import config_arguments, trainer_arguments
from llmlaunch.backends.deepspeed.config import ds_config
from llmlaunch.backends.deepspeed.hugging_face import HUGGING_FACE_RULES, hugging_face_arguments, hugging_face_config
from llmlaunch.backends.deepspeed.megatron_deepspeed import (
    MEGATRON_DEEPSPEED_RULES,
    megatron_deepspeed_arguments,
    megatron_deepspeed_config,
)
from llmlaunch.backends.deepspeed.pipeline import PIPELINE_RULES, pipeline_config
from llmlaunch.backends.deepspeed.rules import OWN_RULES, RULES
from llmlaunch.backends.deepspeed.splits import context_sizes, tensor_sizes
from llmlaunch.layout import RECOMPUTE_FULL, Layout, Rule
from llmlaunch.recipe.types import Recipe

__all__ = ["KINDS", "SHIPPED", "ScriptKind", "kind_of"]

Json = dict[str, Any]
Sizes = Callable[[Recipe], tuple[int, ...]]


def _one(recipe: Recipe) -> tuple[int, ...]:
    return (1,)


def _all_divisors(recipe: Recipe) -> tuple[int, ...]:
    return ()


def _as_said(recipe: Recipe) -> tuple[RunningWords, ...]:
    """Only the script knows what it recomputes and offloads; the recipe's own words say so."""
    return (RunningWords(),)


def _layers_again(recipe: Recipe) -> tuple[RunningWords, ...]:
    return (RunningWords(), RunningWords(RECOMPUTE_FULL))


def _layers_again_or_offloaded(recipe: Recipe) -> tuple[RunningWords, ...]:
    full = RunningWords(RECOMPUTE_FULL)
    offloaded = (replace(full, offload_checkpoints=True),) if recipe.cluster.accelerator.kind == "gpu" else ()
    return (RunningWords(), full, *offloaded)


def _only_the_config(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    return config_arguments()


def _shipped_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    return (*trainer_arguments(recipe, layout), *config_arguments())


@dataclass(frozen=True)
class ScriptKind:
    """`arguments` are the words after the script's own, `config` is ds_config.json. `tensor`, `context` and `pipeline`
    are the sizes searched (empty = all that divide), `running` the words for activations. `most_zero` is the highest
    ZeRO stage it runs with."""

    rules: tuple[Rule, ...] = OWN_RULES
    arguments: Callable[[Recipe, Layout], tuple[Argument, ...]] = _only_the_config
    config: Callable[[Recipe, Layout], Json] = ds_config
    tensor: Sizes = _one
    context: Sizes = _one
    pipeline: Sizes = _one
    running: Callable[[Recipe], tuple[RunningWords, ...]] = _as_said
    most_zero: int = 3


SHIPPED = ScriptKind(
    rules=RULES,
    arguments=_shipped_arguments,
    tensor=tensor_sizes,
    context=context_sizes,
    running=_layers_again_or_offloaded,
)
KINDS: dict[str, ScriptKind] = {
    "own": ScriptKind(),
    "hugging-face": ScriptKind(
        rules=(*RULES, *HUGGING_FACE_RULES),
        arguments=hugging_face_arguments,
        config=hugging_face_config,
        running=_layers_again,
    ),
    "pipeline": ScriptKind(
        rules=PIPELINE_RULES,
        config=pipeline_config,
        pipeline=_all_divisors,
        running=_layers_again,
        most_zero=1,
    ),
    "megatron-deepspeed": ScriptKind(
        rules=MEGATRON_DEEPSPEED_RULES,
        arguments=megatron_deepspeed_arguments,
        config=megatron_deepspeed_config,
        tensor=tensor_sizes,
        pipeline=_all_divisors,
        running=_layers_again,
        most_zero=1,  # what its memory is known for
    ),
}


def kind_of(recipe: Recipe) -> ScriptKind:
    """What the recipe's script is."""
    return SHIPPED if recipe.backend.script is None else KINDS[recipe.backend.script_kind]
