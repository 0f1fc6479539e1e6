"""The kinds of training script DeepSpeed is run with: what each accepts, what is searched for it, what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.argument import Argument
from llmlaunch.backends.base import StepTechniques
from llmlaunch.backends.deepspeed.arguments import config_arguments, trainer_arguments
from llmlaunch.backends.deepspeed.config import ds_config
from llmlaunch.backends.deepspeed.hugging_face import HUGGING_FACE_RULES, hugging_face_arguments, hugging_face_config
from llmlaunch.backends.deepspeed.megatron_deepspeed import (
    MEGATRON_DEEPSPEED_RULES,
    megatron_deepspeed_arguments,
    megatron_deepspeed_config,
)
from llmlaunch.backends.deepspeed.rules import ANY_RULES, OWN_RULES, RULES, context_sizes, not_split, tensor_sizes
from llmlaunch.layout import RECOMPUTE_FULL, Layout, Rule, Situation
from llmlaunch.recipe.types import Recipe

__all__ = ["KINDS", "PIPELINE_RULES", "SHIPPED", "ScriptKind", "kind_of", "pipeline_config"]


Json = dict[str, Any]
Sizes = Callable[[Recipe], tuple[int, ...]]


def _one(recipe: Recipe) -> tuple[int, ...]:
    return (1,)


def _all_divisors(recipe: Recipe) -> tuple[int, ...]:
    return ()


def _no_techniques(recipe: Recipe) -> tuple[StepTechniques, ...]:
    """Only the script knows what it recomputes and offloads; the recipe's own words say so."""
    return (StepTechniques(),)


def _full_recompute(recipe: Recipe) -> tuple[StepTechniques, ...]:
    return (StepTechniques(), StepTechniques(RECOMPUTE_FULL))


def _full_recompute_or_offload(recipe: Recipe) -> tuple[StepTechniques, ...]:
    full = StepTechniques(RECOMPUTE_FULL)
    offloaded = (replace(full, offload_checkpoints=True),) if recipe.cluster.accelerator.kind == "gpu" else ()
    return (StepTechniques(), full, *offloaded)


def _config_arguments_only(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    return config_arguments()


def _shipped_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    return (*trainer_arguments(recipe, layout), *config_arguments())


ENGINE = "deepspeed/runtime/pipe/engine.py PipelineEngine.__init__, 0.19.8"


def pipeline_config(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """Return the configuration of a script of stages: their number, and whether every layer is recomputed.

    How it shares out its layers is an argument of PipelineModule; the plan has equally many decoder layers a stage.
    """
    recomputed = 1 if layout.recompute == RECOMPUTE_FULL else 0
    section = {"stages": layout.pipeline, "activation_checkpoint_interval": recomputed}
    return ds_config(recipe, layout) | {"pipeline": section}


def _low_zero(s: Situation) -> NDArray[np.bool_]:
    return np.less(s.layouts.zero_stage, 2)


def _sharded_bf16(s: Situation) -> NDArray[np.bool_]:
    narrow = s.workload.precision == "bf16"
    passes: NDArray[np.bool_] = np.equal(s.layouts.zero_stage, 1) | (not narrow)
    return passes


def _even(s: Situation) -> NDArray[np.bool_]:
    return np.equal(s.shape.num_layers % s.layouts.pipeline, 0)


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        "pipeline-zero",
        "a pipeline runs with ZeRO 0 or 1: gradients and parameters stay whole on a stage",
        ENGINE,
        _low_zero,
        of_techniques=True,
    ),
    Rule(
        "pipeline-bf16",
        "bf16 with a pipeline needs zero_stage 1: at 0 another optimizer runs, whose memory is not counted",
        "deepspeed/runtime/engine.py _do_optimizer_sanity_check, 0.19.8",
        _sharded_bf16,
        of_techniques=True,
    ),
    Rule("pipeline-layers", "the layers must be divisible by pipeline", ENGINE, _even),
    not_split("tensor", "tensor", "deepspeed/runtime/pipe/engine.py and AutoTP abort together, 0.19.8"),
    not_split("context", "context", ENGINE),
    *ANY_RULES,
)


@dataclass(frozen=True)
class ScriptKind:
    """`arguments` are the words after the script's own, `config` is ds_config.json. `tensor`, `context` and `pipeline`
    are the sizes searched (empty = all that divide), `running` the words for activations. `most_zero` is the highest
    ZeRO stage it runs with."""

    rules: tuple[Rule, ...] = OWN_RULES
    arguments: Callable[[Recipe, Layout], tuple[Argument, ...]] = _config_arguments_only
    config: Callable[[Recipe, Layout], Json] = ds_config
    tensor: Sizes = _one
    context: Sizes = _one
    pipeline: Sizes = _one
    step_techniques: Callable[[Recipe], tuple[StepTechniques, ...]] = _no_techniques
    most_zero: int = 3


SHIPPED = ScriptKind(
    rules=RULES,
    arguments=_shipped_arguments,
    tensor=tensor_sizes,
    context=context_sizes,
    step_techniques=_full_recompute_or_offload,
)
KINDS: dict[str, ScriptKind] = {
    "own": ScriptKind(),
    "hugging-face": ScriptKind(
        rules=(*RULES, *HUGGING_FACE_RULES),
        arguments=hugging_face_arguments,
        config=hugging_face_config,
        step_techniques=_full_recompute,
    ),
    "pipeline": ScriptKind(
        rules=PIPELINE_RULES,
        config=pipeline_config,
        pipeline=_all_divisors,
        step_techniques=_full_recompute,
        most_zero=1,
    ),
    "megatron-deepspeed": ScriptKind(
        rules=MEGATRON_DEEPSPEED_RULES,
        arguments=megatron_deepspeed_arguments,
        config=megatron_deepspeed_config,
        tensor=tensor_sizes,
        pipeline=_all_divisors,
        step_techniques=_full_recompute,
        most_zero=1,  # what its memory is known for
    ),
}


def kind_of(recipe: Recipe) -> ScriptKind:
    """What the recipe's script is."""
    return SHIPPED if recipe.backend.script is None else KINDS[recipe.backend.script_kind]
