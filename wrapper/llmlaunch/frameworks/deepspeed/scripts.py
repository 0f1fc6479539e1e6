"""The kinds of training script DeepSpeed is run with: what each accepts, what is searched for it, what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import RUN_DIR, Argument, NodeVariable, argument, optional
from llmlaunch.frameworks.base import StepTechniques, implies
from llmlaunch.frameworks.deepspeed.arguments import CONFIG_FILE, config_arguments, trainer_arguments, warmup_argument
from llmlaunch.frameworks.deepspeed.rules import ANY_RULES, OWN_RULES, RULES, not_split
from llmlaunch.layout import RECOMPUTE_FULL, Layout, Rule
from llmlaunch.recipe.types import Recipe

__all__ = ["HUGGING_FACE_RULES", "KINDS", "PIPELINE_RULES", "ScriptKind", "kind_of"]


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


DECAYS = {None: "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}

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
    config = argument("--deepspeed", NodeVariable(RUN_DIR, f"/{CONFIG_FILE}"), of="backend", why="ds_config.json")
    tracked = _tracking(recipe)
    planned = (*_batch(recipe, layout), *_schedule(recipe), *_numbers(recipe, layout), *_saving(recipe))
    return (*planned, *_evaluation(recipe, layout), *tracked, config)


def _tracking(recipe: Recipe) -> list[Argument]:
    """Return what the Trainer reports to. Project, folder and id of the run are in the environment
    (transformers/integrations/integration_utils.py WandbCallback, TensorBoardCallback, 5.23)."""
    run, folder = recipe.tracking.wandb, recipe.tensorboard
    names = [*(["wandb"] if run else []), *(["tensorboard"] if folder else [])]
    if not names:
        return []
    reported = argument("--report_to", *names, of="tracking")
    return [reported, *optional("--run_name", NodeVariable("WANDB_NAME") if run else None, of="tracking.wandb.name")]


def _batch(recipe: Recipe, layout: Layout) -> list[Argument]:
    accumulated = layout.num_microbatches(recipe.workload.global_batch_size)
    sizes = ("training.global_batch_size", "layout.micro_batch_size", "layout.data")
    length = ("training.steps", "training.tokens")
    return [
        argument("--per_device_train_batch_size", layout.micro_batch_size, of="layout.micro_batch_size"),
        argument("--gradient_accumulation_steps", accumulated, of=sizes),
        argument("--max_steps", recipe.training.steps, of=length),
    ]


def _schedule(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    first, second = training.adam_betas
    return [
        argument("--learning_rate", repr(training.learning_rate), of="training.learning_rate"),
        *_decay(recipe),
        warmup_argument("--warmup_steps", recipe, of="training.steps"),
        argument("--weight_decay", training.weight_decay, of="training.weight_decay"),
        argument("--adam_beta1", first, of="training.adam_betas"),
        argument("--adam_beta2", second, of="training.adam_betas"),
        argument("--max_grad_norm", training.gradient_clipping, of="training.gradient_clipping"),
        argument("--seed", training.seed, of="training.seed"),
        argument("--logging_steps", training.log_interval, of="training.log_interval"),
    ]


def _decay(recipe: Recipe) -> list[Argument]:
    """Raises UserError for a decay the Trainer stops at no minimum (transformers/optimization.py, 5.23)."""
    training, key = recipe.training, "training.learning_rate_decay"
    least = training.minimum_learning_rate
    if not least:
        return [argument("--lr_scheduler_type", DECAYS[training.learning_rate_decay], of=key)]
    if training.learning_rate_decay != "cosine":
        raise UserError(
            f"{recipe.path}: training.minimum_learning_rate: Hugging Face's Trainer knows a minimum of cosine decay "
            f"alone, not of {training.learning_rate_decay}; remove it or set training.learning_rate_decay: cosine"
        )
    return [
        argument("--lr_scheduler_type", "cosine_with_min_lr", of=key),
        argument("--lr_scheduler_kwargs", json.dumps({"min_lr": least}), of="training.minimum_learning_rate"),
    ]


def _numbers(recipe: Recipe, layout: Layout) -> list[Argument]:
    precision = recipe.workload.precision
    recomputed = "True" if layout.recompute == RECOMPUTE_FULL else None
    return [
        *optional(f"--{precision}", "True" if precision != "fp32" else None, of="training.precision"),
        *optional("--gradient_checkpointing", recomputed, of="layout.recompute"),
    ]


def _saving(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    if training.checkpoint_path is None or training.save_interval is None:
        here = argument(
            "--output_dir", NodeVariable(RUN_DIR, "/trainer"), why="nothing is saved, but it wants a folder"
        )
        return [here, argument("--save_strategy", "no", of="training.save_interval")]
    return [
        argument("--output_dir", training.checkpoint_path, of="training.checkpoint_path"),
        argument("--save_strategy", "steps", of="training.save_interval"),
        argument("--save_steps", training.save_interval, of="training.save_interval"),
        *optional("--save_total_limit", training.keep_checkpoints, of="training.keep_checkpoints"),
    ]


def _evaluation(recipe: Recipe, layout: Layout) -> list[Argument]:
    """The Trainer goes through all validation data each time; its own batch would be 8, whatever fits."""
    evaluation, key = recipe.training.evaluation, "training.evaluation"
    if evaluation is None:
        return []
    return [
        argument("--eval_strategy", "steps", of=key),
        argument("--eval_steps", evaluation.interval, of=key),
        argument("--per_device_eval_batch_size", layout.micro_batch_size, of="layout.micro_batch_size"),
    ]


FULL_OR_NONE = (StepTechniques(), StepTechniques(RECOMPUTE_FULL))


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
    step_techniques=(*FULL_OR_NONE, StepTechniques(RECOMPUTE_FULL, offload_checkpoints=True)),
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
