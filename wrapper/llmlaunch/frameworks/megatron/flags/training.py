"""The training: batch, schedule, optimizer, evaluation, log and tracking."""

from __future__ import annotations

import re
from typing import Any

from llmlaunch.frameworks.argument import RUN_DIR, NodeVariable, number
from llmlaunch.frameworks.megatron.flags.row import (
    PARSED,
    Explained,
    Flag,
    PlannedJob,
    Space,
    alias,
    chosen,
    flag,
)
from llmlaunch.recipe.sections import NO_TRACKING
from llmlaunch.recipe.training import default_schedule
from llmlaunch.recipe.types import Recipe

ADAM, LOGGER = "optimizer", "logger"  # sections of Bridge
BATCH = "training.global_batch_size"
STEPS = ("training.steps", "training.tokens")
MEGATRON_FIRST_BETA = 0.9  # --adam-beta1's default
DECAYS = ("linear", "constant")  # and cosine, the recipe's own
DEFAULT_BETAS = [0.9, 0.95]
MOST = 10**9


def _truthy(dest: str) -> Any:
    return lambda space: space.get(dest) or None


BATCH_ROWS: tuple[Flag, ...] = (
    flag("--micro-batch-size", "layout.micro_batch_size", "train", read=_truthy("micro_batch_size"), subject="batch"),
    flag(
        "--global-batch-size",
        BATCH,
        "train",
        write=lambda job: job.recipe.workload.global_batch_size,
        read=_truthy("global_batch_size"),
        subject="batch",
    ),
    flag("--train-iters", STEPS, "train", read=_truthy("train_iters"), subject="length of the training"),
    alias("--train-samples", "training.steps", decides="training.steps"),
    alias("--batch-size", "layout.micro_batch_size", subject="batch"),
    alias("--eval-micro-batch-size", "layout.micro_batch_size"),
    alias("--eval-global-batch-size", BATCH, decides=BATCH),
)


def _schedule(recipe: Recipe) -> Any:
    return default_schedule(recipe.backend.name, recipe.backend.script_kind, recipe.training.steps)


def _decay(job: PlannedJob) -> object:
    """Without a word of the recipe's, the person's own extra argument decides, such as Megatron's WSD."""
    stated = job.training.learning_rate_decay
    if stated is None and any(word.split("=", 1)[0] == DECAY for word in job.recipe.backend.extra_args):
        return None
    return stated or Explained(_schedule(job.recipe).decay, why="as the Llama models were trained")


DECAY = "--lr-decay-style"


def warmup_steps(recipe: Recipe) -> int:
    """Return the steps over which the learning rate rises: the recipe's, or what is usual."""
    stated = recipe.training.warmup_steps
    return _schedule(recipe).warmup_steps if stated is None else stated


def _warmup(job: PlannedJob) -> object:
    if job.training.warmup_steps is not None:
        return warmup_steps(job.recipe)
    return Explained(warmup_steps(job.recipe), STEPS, "a hundredth of the steps")


def read_warmup(space: Space) -> int:
    """Return the steps of a warm-up, of which a recipe leaves one at least."""
    warmup, steps = space.get("lr_warmup_iters") or 0, space.get("train_iters") or 0
    return steps - 1 if steps and warmup >= steps else warmup


def _least(space: Space) -> object:
    rate = space.get("min_lr")
    return rate if rate and space.get("lr_decay_style") != "constant" else None


def _betas(space: Space) -> object:
    betas = [space.get("adam_beta1"), space.get("adam_beta2")]
    return betas if betas != DEFAULT_BETAS else None


OPTIMIZER_ROWS: tuple[Flag, ...] = (
    flag(
        "--lr",
        "training.learning_rate",
        ADAM,
        form=repr,
        keeps_default=True,
        added="training.learning_rate has a default",
    ),
    flag(
        DECAY,
        "training.learning_rate_decay",
        "scheduler",
        write=_decay,
        read=lambda space: space["lr_decay_style"] if space.get("lr_decay_style") in DECAYS else None,
    ),
    flag(
        "--lr-warmup-iters",
        "training.warmup_steps",
        "scheduler",
        write=_warmup,
        read=read_warmup,
        unread="a recipe leaves at least one step after the warm-up",
    ),
    flag("--clip-grad", "training.gradient_clipping", ADAM, form=str, subject="numbers of the optimizer"),
    flag(
        "--weight-decay",
        "training.weight_decay",
        (
            (f"{ADAM}.weight_decay", PARSED),
            ("scheduler.start_weight_decay", PARSED),
            ("scheduler.end_weight_decay", PARSED),
        ),
        form=str,
    ),
    flag(
        "--min-lr", "training.minimum_learning_rate", ADAM, form=lambda rate: repr(rate) if rate else None, read=_least
    ),
    flag(
        "--adam-beta1",
        "training.adam_betas",
        ADAM,
        form=lambda betas: number(betas[0]) if betas[0] != MEGATRON_FIRST_BETA else None,
        read=_betas,
        subject="numbers of the optimizer",
    ),
    flag(
        "--adam-beta2",
        "training.adam_betas",
        ADAM,
        form=lambda betas: number(betas[1]),
        reads={},
        subject="numbers of the optimizer",
    ),
    flag(
        "--seed",
        "training.seed",
        (("rng.seed", PARSED), ("dataset.random_seed", PARSED), ("model.inference_sampling_seed", PARSED)),
        subject="initial values",
    ),
    *(alias(name, "training.warmup_steps") for name in ("--lr-warmup-samples", "--lr-warmup-fraction", "--warmup")),
)
NOTHING_EVALUATED = "a recipe without training.evaluation evaluates nothing"


def is_weight(word: str) -> bool:
    """Return whether a word is a positive weight of a dataset, or a share of one."""
    return re.fullmatch(r"\d{1,12}(\.\d+)?|\.\d+|\d(\.\d+)?e-?\d{1,2}", word) is not None and float(word) > 0


def evaluates(space: Space) -> bool:
    """Return whether there is something to evaluate, and data that it is evaluated on."""
    if not (space.get("eval_interval") or 0) > 0 or not (space.get("eval_iters") or 0) > 0:
        return False
    if space["eval_interval"] > MOST or space["eval_iters"] > MOST:
        return False
    shares = str(space.get("split") or "").split(",")
    apart = bool(space.get("valid_data_path")) or len(shares) < 2 or is_weight(shares[1])
    return bool(space.get("mock_data")) or apart


def _iterations(job: PlannedJob) -> object:
    evaluation = job.training.evaluation
    return Explained(0, (), "the recipe has no training.evaluation") if evaluation is None else evaluation.iterations


def _interval(job: PlannedJob) -> object:
    """Megatron's core 0.19 has no default for it."""
    evaluation = job.training.evaluation
    if evaluation is not None:
        return evaluation.interval
    return Explained(job.training.steps, (), "no default in core 0.19, yet training.py divides by it")


EVALUATION = "training.evaluation"

LOG_ROWS: tuple[Flag, ...] = (
    flag(
        "--eval-iters",
        EVALUATION,
        "validation",
        write=_iterations,
        reads={f"{EVALUATION}.iterations": lambda space: space["eval_iters"] if evaluates(space) else None},
        added=NOTHING_EVALUATED,
        unread=NOTHING_EVALUATED,
        subject="validation",
    ),
    flag(
        "--eval-interval",
        EVALUATION,
        "validation",
        write=_interval,
        reads={f"{EVALUATION}.interval": lambda space: space["eval_interval"] if evaluates(space) else None},
        added="no default, and training.py divides by it",
        unread=NOTHING_EVALUATED,
        subject="validation",
    ),
    flag("--log-interval", "training.log_interval", LOGGER),
    chosen("--log-throughput", bridge=LOGGER, why="for whoever reads the log", added="more in the log"),
    chosen(
        "--log-device-memory-used",
        bridge=LOGGER,
        why="for whoever reads the log, beside what the monitor measures",
        added="more in the log",
    ),
)


def _curves(job: PlannedJob) -> object:
    folder = job.recipe.tensorboard
    key = "training.tensorboard" if job.training.tensorboard else "tracking.tensorboard"
    return None if folder is None else Explained(folder, (key,))


def _curves_of_run(job: PlannedJob) -> bool:
    """Megatron logs to W&B only what it logs to TensorBoard, and only where that has a folder (training_log, training/
    training.py, core 0.16 and 0.19). The id of the run and that it goes on come from the environment."""
    return _has_run(job) and job.recipe.tensorboard is None


def _has_run(job: PlannedJob) -> bool:
    return job.recipe.tracking.wandb is not None


def _folder(job: PlannedJob) -> object:
    run = job.recipe.tracking.wandb
    return None if run is None else run.save_dir or NodeVariable(RUN_DIR)


def _wandb(name: str) -> Any:
    """Return a reader of a name of a run of Weights & Biases, which there is where all names are such."""

    def read(space: Space) -> object:
        run = {key: space.get(f"wandb_{dest}") for key, dest in WANDB_NAMES.items()}
        named = {key: str(value) for key, value in run.items() if value}
        good = "project" in named and all(WANDB_NAME.fullmatch(named.get(key, "x")) for key in ("project", "entity"))
        return named.get(name) if good else None

    return read


WANDB_NAME = re.compile(r"[^/\\#?%:,]{1,128}")
WANDB_NAMES = {"project": "project", "entity": "entity", "name": "exp_name", "save_dir": "save_dir"}

TRACKING_ROWS: tuple[Flag, ...] = (
    flag("--tensorboard-dir", "training.tensorboard", LOGGER, write=_curves),
    chosen(
        "--log-timers-to-tensorboard",
        lambda job: job.recipe.tracking != NO_TRACKING,
        LOGGER,
        keys="tracking",
        why="seconds and throughput of a step are among the curves",
        added=True,
    ),
    chosen(
        "--log-memory-to-tensorboard",
        lambda job: job.recipe.tracking != NO_TRACKING and job.recipe.cluster.accelerator.kind == "gpu",
        LOGGER,
        keys="tracking",
        why="the device's memory is among the curves",
        added=True,
    ),
    chosen(
        "--tensorboard-dir",
        NodeVariable(RUN_DIR, "/tensorboard"),
        LOGGER,
        keys="tracking.wandb",
        why="Megatron logs to W&B only what it writes for TensorBoard, too",
        when=_curves_of_run,
    ),
    flag("--wandb-project", "tracking.wandb.project", LOGGER, read=_wandb("project")),
    flag("--wandb-entity", "tracking.wandb.entity", LOGGER, read=_wandb("entity")),
    flag(
        "--wandb-exp-name",
        "tracking.wandb.name",
        LOGGER,
        write=lambda job: NodeVariable("WANDB_NAME"),
        when=_has_run,
        read=_wandb("name"),
    ),
    flag(
        "--wandb-save-dir",
        "tracking.wandb.save_dir",
        LOGGER,
        write=_folder,
        read=_wandb("save_dir"),
        why="its default is below --save",
    ),
)

TRAINING_FLAGS: tuple[Flag, ...] = (*BATCH_ROWS, *OPTIMIZER_ROWS)
LOG_FLAGS: tuple[Flag, ...] = (*LOG_ROWS, *TRACKING_ROWS)
