"""The kinds of training script DeepSpeed is run with: what each accepts, what is searched for it, what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmlaunch.frameworks.argument import Argument
from llmlaunch.frameworks.base import StepTechniques, implies
from llmlaunch.frameworks.deepspeed.arguments import config_arguments, trainer_arguments
from llmlaunch.frameworks.deepspeed.rules import ANY_RULES, OWN_RULES, RULES, not_split
from llmlaunch.frameworks.deepspeed.trainer_table import ARGUMENTS
from llmlaunch.layout import RECOMPUTE_FULL, Layout, Rule
from llmlaunch.recipe.types import Recipe

ENGINE = "deepspeed/runtime/pipe/engine.py PipelineEngine.__init__, 0.19.8"


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        "pipeline-zero",
        "a pipeline runs with ZeRO 0 or 1: gradients and parameters stay whole on a stage",
        ENGINE,
        lambda s: np.less(s.layouts.zero_stage, 2),
        of_techniques=True,
    ),
    Rule(
        "pipeline-bf16",
        "bf16 with a pipeline needs zero_stage 1: at 0 another optimizer runs, whose memory is not counted",
        "deepspeed/runtime/engine.py _do_optimizer_sanity_check, 0.19.8",
        lambda s: implies(s.workload.precision == "bf16", np.equal(s.layouts.zero_stage, 1)),
        of_techniques=True,
    ),
    Rule(
        "pipeline-layers",
        "the layers must be divisible by pipeline",
        ENGINE,
        lambda s: np.equal(s.shape.num_layers % s.layouts.pipeline, 0),
    ),
    not_split("tensor", "tensor", "deepspeed/runtime/pipe/engine.py and AutoTP abort together, 0.19.8"),
    not_split("context", "context", ENGINE),
    *ANY_RULES,
)


HUGGING_FACE_RULES: tuple[Rule, ...] = (
    Rule(
        "trainer-context",
        "the Trainer takes sequence parallelism from a ParallelismConfig its script makes, not from its words: context "
        "must be 1",
        "transformers/training_args.py parallelism_config, 5.23",
        lambda s: np.equal(s.layouts.context, 1),
    ),
)


def hugging_face_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """What the plan says as TrainingArguments of transformers 5.23, as HfArgumentParser names them. ds_config.json says
    the same, which the Trainer checks (transformers/integrations/deepspeed.py trainer_config_process, 5.23), so nothing
    in it need be "auto"; where DeepSpeed works the total batch out, the Trainer does so too."""
    return tuple(each for row in ARGUMENTS for each in row.rendered(recipe, layout))


FULL_OR_NONE = (StepTechniques(), StepTechniques(recompute=RECOMPUTE_FULL))


@dataclass(frozen=True)
class ScriptKind:
    """`arguments` are those after the script's own. `searched` names the sizes a search may
    choose beside the data parallel one. `step_techniques` are those tried: of a script of one's own, none, because only
    the script knows what it recomputes and offloads. `loss_tiles` and `mlp_chunks` are the numbers of pieces tried of
    its loss and its MLPs. `most_zero` is the highest ZeRO stage it runs with."""

    rules: tuple[Rule, ...] = OWN_RULES
    arguments: Callable[[Recipe, Layout], tuple[Argument, ...]] = lambda recipe, layout: config_arguments()
    searched: tuple[str, ...] = ()
    step_techniques: tuple[StepTechniques, ...] = (StepTechniques(),)
    loss_tiles: tuple[int, ...] = ()
    mlp_chunks: tuple[int, ...] = ()
    most_zero: int = 3


SHIPPED = ScriptKind(
    rules=RULES,
    arguments=lambda recipe, layout: (*trainer_arguments(recipe, layout), *config_arguments()),
    searched=("tensor", "context"),
    step_techniques=(*FULL_OR_NONE, StepTechniques(recompute=RECOMPUTE_FULL, offload_checkpoints=True)),
    loss_tiles=(8, 32),
    mlp_chunks=(4, 16),
)
KINDS: dict[str, ScriptKind] = {
    "own": ScriptKind(),
    "hugging-face": ScriptKind(
        rules=(*RULES, *HUGGING_FACE_RULES),
        arguments=hugging_face_arguments,
        step_techniques=FULL_OR_NONE,
    ),
    "pipeline": ScriptKind(
        rules=PIPELINE_RULES,
        searched=("pipeline",),
        step_techniques=FULL_OR_NONE,
        most_zero=1,
    ),
}


def kind_of(recipe: Recipe) -> ScriptKind:
    """What the recipe's script is."""
    return SHIPPED if recipe.backend.script is None else KINDS[recipe.backend.script_kind]
