"""A script of the person's own around Hugging Face's Trainer: `backend.script_kind: hugging-face`.

Its TrainingArguments are told on the command line what the plan says, as HfArgumentParser names it; ds_config.json says
the same, which the Trainer checks (transformers/integrations/deepspeed.py trainer_config_process, 5.23). So nothing in
it need be "auto".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from llmlaunch.backends.argument import Argument, NodeVariable, argument
from llmlaunch.backends.deepspeed.arguments import CONFIG_FILE, MOST_WARMUP_STEPS, RUN_DIR
from llmlaunch.backends.deepspeed.config import ds_config
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, Layout, Rule
from llmlaunch.recipe.types import Recipe

__all__ = ["HUGGING_FACE_RULES", "hugging_face_arguments", "hugging_face_config"]

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


def hugging_face_config(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """As for every script: where DeepSpeed works the total batch out, the Trainer does so too."""
    return ds_config(recipe, layout)


def hugging_face_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """TrainingArguments of transformers 5.23."""
    config = argument("--deepspeed", NodeVariable(RUN_DIR, f"/{CONFIG_FILE}"), of="backend", why="ds_config.json")
    return (*_batch(recipe, layout), *_schedule(recipe), *_numbers(recipe, layout), *_saving(recipe), config)


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
        _warmup(recipe),
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


def _warmup(recipe: Recipe) -> Argument:
    stated, steps = recipe.training.warmup_steps, recipe.training.steps
    if stated is not None:
        return argument("--warmup_steps", stated, of="training.warmup_steps")
    why = f"a tenth of the steps, at most {MOST_WARMUP_STEPS}"
    return argument("--warmup_steps", min(steps // 10, MOST_WARMUP_STEPS), of="training.steps", why=why)


def _numbers(recipe: Recipe, layout: Layout) -> list[Argument]:
    precision, arguments = recipe.workload.precision, []
    if precision != "fp32":
        arguments += [argument(f"--{precision}", "True", of="training.precision")]
    if layout.recompute == RECOMPUTE_FULL:
        arguments += [argument("--gradient_checkpointing", "True", of="layout.recompute")]
    return arguments


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
    ]
