"""Arguments of Hugging Face's Trainer that llmlaunch writes or reads: one row each, in the order in which they are
rendered (transformers/training_args.py, 5.23).

Rendering, reading, defaults, classes, versions and the tables of the documentation are loops over ARGUMENTS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llmlaunch.command_lines.recipe_draft import ScriptOptions
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import RUN_DIR, Argument, NodeVariable, argument
from llmlaunch.frameworks.classed_arguments import UNKNOWN, FlagGroup, group_of
from llmlaunch.frameworks.deepspeed.arguments import CONFIG_FILE, warmup_argument
from llmlaunch.frameworks.deepspeed.setting_row import ABSENT, DeepSpeedRow, deepspeed_groups
from llmlaunch.frozen import frozen
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.recipe.types import Recipe

OFF = "switched off"
OFF_VALUES = ("false", "no", "none", "null", "0", "0.0")
SCHEDULES = {None: "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
"""The recipe's decay, and transformers' name of the schedule that is rendered for it."""
LEAST = "cosine_with_min_lr"
DECAYS = {name: decay for decay, name in SCHEDULES.items() if decay} | {"constant": "constant", LEAST: "cosine"}
"""Transformers' names of a schedule, and the recipe's decay."""


@frozen
class TrainerArgument(DeepSpeedRow):
    """One field of TrainingArguments.

    Attributes:
        write: Returns the rendered value as that of any row, a tuple of several words, or an Argument with a reason of
            its own.
        default: What stands for the Trainer's own default where a command says nothing.
        read: Returns the value of the recipe key that it is read into; None where a function of hugging_face.py reads
            it, because the value is no function of one option alone.
        handed_on: Whether a script's own words stay with the script although rendering may write the argument.
    """

    default: Any = ABSENT
    read: Callable[[ScriptOptions, str], Any] | None = None
    handed_on: bool = False
    since: str = "4.0"  # any

    def rendered(self, recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
        """Return the argument as HfArgumentParser takes it; nothing where the recipe leaves it out."""
        value = self.value(recipe, layout)
        if value is ABSENT:
            return ()
        if isinstance(value, Argument):
            return (value,)
        values = value if isinstance(value, tuple) else (value,)
        return (argument(f"--{self.key}", *values, of=self.keys, why=self.why),)


def _decay(recipe: Recipe, layout: Layout) -> str:
    """Raises UserError for a decay that the Trainer stops at no minimum (transformers/optimization.py, 5.23)."""
    training = recipe.training
    if not training.minimum_learning_rate:
        return SCHEDULES[training.learning_rate_decay]
    if training.learning_rate_decay != "cosine":
        raise UserError(
            f"{recipe.path}: training.minimum_learning_rate: Hugging Face's Trainer knows a minimum of cosine decay "
            f"alone, not of {training.learning_rate_decay}; remove it or set training.learning_rate_decay: cosine"
        )
    return LEAST


def _least_rate(recipe: Recipe, layout: Layout) -> Any:
    least = recipe.training.minimum_learning_rate
    return json.dumps({"min_lr": least}) if least else ABSENT


def _in(precision: str) -> Callable[[Recipe, Layout], Any]:
    return lambda recipe, layout: "True" if recipe.workload.precision == precision else ABSENT


def _saves(recipe: Recipe) -> bool:
    return recipe.training.checkpoint_path is not None and recipe.training.save_interval is not None


def _folder(recipe: Recipe, layout: Layout) -> Any:
    if _saves(recipe):
        return recipe.training.checkpoint_path
    why = "nothing is saved, but it wants a folder"
    return argument("--output_dir", NodeVariable(RUN_DIR, "/trainer"), why=why)


def _saving(value: Callable[[Recipe], Any]) -> Callable[[Recipe, Layout], Any]:
    """Return a writer of a value that is rendered where checkpoints are saved."""

    def write(recipe: Recipe, layout: Layout) -> Any:
        stated = value(recipe) if _saves(recipe) else None
        return ABSENT if stated is None else stated

    return write


def _evaluating(value: Callable[[Recipe, Layout], Any]) -> Callable[[Recipe, Layout], Any]:
    """Return a writer of a value that is rendered where the recipe evaluates. The Trainer goes through all validation
    data each time; its own batch would be 8, whatever fits."""
    return lambda recipe, layout: ABSENT if recipe.training.evaluation is None else value(recipe, layout)


def _interval(recipe: Recipe, layout: Layout) -> Any:
    assert recipe.training.evaluation is not None
    return recipe.training.evaluation.interval


def _reported(recipe: Recipe, layout: Layout) -> Any:
    """Return what the Trainer reports to. Project, folder and id of the run are in the environment
    (transformers/integrations/integration_utils.py WandbCallback, TensorBoardCallback, 5.23)."""
    run, folder = recipe.tracking.wandb, recipe.tensorboard
    names = (*(("wandb",) if run else ()), *(("tensorboard",) if folder else ()))
    return names or ABSENT


ARGUMENTS = (
    TrainerArgument(
        "per_device_train_batch_size",
        subject="batch and length",
        write="layout.micro_batch_size",
        default=8,
        reads="layout.micro_batch_size",
    ),
    TrainerArgument("per_gpu_train_batch_size", reads="layout.micro_batch_size", until="5.0"),
    TrainerArgument(
        "gradient_accumulation_steps",
        subject="batch and length",
        of=("training.global_batch_size", "layout.micro_batch_size", "layout.data"),
        write=lambda recipe, layout: layout.num_microbatches(recipe.workload.global_batch_size),
        default=1,
        reads="training.global_batch_size",
    ),
    TrainerArgument(
        "max_steps",
        subject="numbers of the schedule and the optimizer",
        of=("training.steps", "training.tokens"),
        write="training.steps",
        reads="training.steps",
    ),
    TrainerArgument(
        "learning_rate",
        subject="numbers of the schedule and the optimizer",
        write=lambda recipe, layout: repr(recipe.training.learning_rate),
        default=5.0e-5,
        reads="training.learning_rate",
        read=ScriptOptions.number,
    ),
    TrainerArgument(
        "lr_scheduler_type", write=_decay, default="linear", reads="training.learning_rate_decay", since="4.2"
    ),
    TrainerArgument("lr_scheduler_kwargs", write=_least_rate, reads="training.minimum_learning_rate", since="4.36"),
    TrainerArgument(
        "warmup_steps",
        of="training.steps",
        write=lambda recipe, layout: warmup_argument("--warmup_steps", recipe, of="training.steps"),
        reads="training.warmup_steps",
    ),
    TrainerArgument("warmup_ratio", reads="training.warmup_steps", since="4.4", until="5.15"),
    TrainerArgument(
        "weight_decay",
        subject="numbers of the schedule and the optimizer",
        write="training.weight_decay",
        default=0.0,
        reads="training.weight_decay",
        read=ScriptOptions.number,
    ),
    TrainerArgument(
        "adam_beta1",
        write=lambda recipe, layout: recipe.training.adam_betas[0],
        default=0.9,
        reads="training.adam_betas",
    ),
    TrainerArgument(
        "adam_beta2",
        write=lambda recipe, layout: recipe.training.adam_betas[1],
        default=0.999,
        reads="training.adam_betas",
    ),
    TrainerArgument(
        "max_grad_norm",
        subject="numbers of the schedule and the optimizer",
        write="training.gradient_clipping",
        default=1.0,
        reads="training.gradient_clipping",
        read=ScriptOptions.number,
    ),
    TrainerArgument(
        "seed",
        subject="seeds and data",
        write="training.seed",
        default=42,
        reads="training.seed",
        read=ScriptOptions.whole,
    ),
    TrainerArgument("logging_steps", write="training.log_interval", default=500, reads="training.log_interval"),
    TrainerArgument(
        "bf16", subject="precision", write=_in("bf16"), default=False, reads="training.precision", since="4.13"
    ),
    TrainerArgument("fp16", subject="precision", write=_in("fp16"), reads="training.precision"),
    TrainerArgument(
        "gradient_checkpointing",
        subject="recomputed activations",
        of="layout.recompute",
        write=lambda recipe, layout: "True" if layout.recompute == RECOMPUTE_FULL else ABSENT,
        default=False,
        reads="layout.recompute",
        since="4.11",
    ),
    TrainerArgument("output_dir", subject="logs, reports and names", write=_folder, reads="training.checkpoint_path"),
    TrainerArgument(
        "save_strategy",
        write=lambda recipe, layout: "steps" if _saves(recipe) else "no",
        reads="training.save_interval",
        since="4.4",
    ),
    TrainerArgument(
        "save_steps",
        write=_saving(lambda recipe: recipe.training.save_interval),
        default=500,
        reads="training.save_interval",
    ),
    TrainerArgument(
        "save_total_limit",
        of="training.keep_checkpoints",
        write=_saving(lambda recipe: recipe.training.keep_checkpoints),
        handed_on=True,
    ),
    TrainerArgument(
        "eval_strategy",
        subject="validation",
        of="training.evaluation",
        write=_evaluating(lambda recipe, layout: "steps"),
        handed_on=True,
        since="4.41",
    ),
    TrainerArgument(
        "eval_steps",
        subject="when it validates",
        of="training.evaluation",
        write=_evaluating(_interval),
        handed_on=True,
    ),
    TrainerArgument(
        "per_device_eval_batch_size",
        subject="validation",
        of="layout.micro_batch_size",
        write=_evaluating(lambda recipe, layout: layout.micro_batch_size),
        handed_on=True,
    ),
    TrainerArgument(
        "report_to", subject="logs, reports and names", of="tracking", write=_reported, handed_on=True, since="4.3"
    ),
    TrainerArgument(
        "run_name",
        subject="logs, reports and names",
        of="tracking.wandb.name",
        write=lambda recipe, layout: NodeVariable("WANDB_NAME") if recipe.tracking.wandb else ABSENT,
        handed_on=True,
    ),
    TrainerArgument(
        "deepspeed",
        subject="configuration of DeepSpeed",
        of="backend",
        why="ds_config.json",
        write=lambda recipe, layout: NodeVariable(RUN_DIR, f"/{CONFIG_FILE}"),
        since="4.2",
    ),
)

RENDERED_AGAIN = tuple(row.key for row in ARGUMENTS if not row.handed_on)
"""Options of a script that rendering says again, so that they are not handed on to it."""


@cache
def trainer_groups() -> tuple[FlagGroup, ...]:
    """Return the classes of a script's own arguments."""
    return deepspeed_groups(("trainer", "named trainers"), ARGUMENTS)


def trainer_group(name: str, values: Sequence[str]) -> FlagGroup | None:
    """Return the group of an argument of a script with these values, None where it is of none. An argument whose memory
    is not known, and that is switched off, is of the group of those."""
    group = group_of(trainer_groups(), name, values)
    off = " ".join(values).lower() in OFF_VALUES and bool(values)
    if group is None or not off or group.flag_class.kind != UNKNOWN or group.holds(name, values):
        return group
    return next(each for each in trainer_groups() if each.title == OFF)


def is_of_named_trainers(group: FlagGroup) -> bool:
    """Return whether a group is of trainers that are known by name: in any other script such a word may mean
    anything."""
    return any(group.title == each.title for each in deepspeed_groups(("named trainers",)))


@cache
def shipped_groups() -> tuple[FlagGroup, ...]:
    """Return the classes of the shipped trainer's arguments."""
    return deepspeed_groups(("shipped",))
