"""Batch, schedule, optimizer, precision and log, in Megatron-LM's words (core 0.19)."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument, number
from llmlaunch.backends.megatron.number_arguments import number_arguments
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["training_arguments"]

MOST_WARMUP_STEPS = 2000
MEGATRON_FIRST_BETA = 0.9  # --adam-beta1's default


def training_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """How long it trains, on how much at once, in which numbers, and what it says of it."""
    return (*_batch(recipe, layout), *_optimizer(recipe), *_log(recipe), *number_arguments(recipe, layout))


def _batch(recipe: Recipe, layout: Layout) -> list[Argument]:
    return [
        argument("--micro-batch-size", layout.micro_batch_size, of="layout.micro_batch_size"),
        argument("--global-batch-size", recipe.workload.global_batch_size, of="training.global_batch_size"),
        argument("--train-iters", recipe.training.steps, of=("training.steps", "training.tokens")),
    ]


def _optimizer(recipe: Recipe) -> list[Argument]:
    training, said = recipe.training, recipe.training.schedule
    made = [
        argument("--lr", repr(training.learning_rate), of="training.learning_rate"),
        argument("--lr-decay-style", said.decay or "cosine", of="training.learning_rate_decay", why=_usual(said.decay)),
        _warmup(recipe),
        argument("--clip-grad", said.clipping, of="training.gradient_clipping"),
        argument("--weight-decay", said.weight_decay, of="training.weight_decay"),
    ]
    if said.minimum_learning_rate:
        made += [argument("--min-lr", repr(said.minimum_learning_rate), of="training.minimum_learning_rate")]
    first, second = said.adam_betas
    if first != MEGATRON_FIRST_BETA:
        made += [argument("--adam-beta1", number(first), of="training.adam_betas")]
    made += [argument("--adam-beta2", number(second), of="training.adam_betas")]
    return [*made, argument("--seed", training.seed, of="training.seed")]


def _usual(said: object) -> str:
    return "as the Llama models were trained" if said is None else ""


def _warmup(recipe: Recipe) -> Argument:
    flag, said, steps = "--lr-warmup-iters", recipe.training.schedule.warmup_steps, recipe.training.steps
    if said is not None:
        return argument(flag, said, of="training.warmup_steps")
    warmup = min(steps // 100, MOST_WARMUP_STEPS)
    return argument(flag, warmup, of=("training.steps", "training.tokens"), why="a hundredth of the steps")


def _log(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    divided = "no default in core 0.19, yet training.py divides by it"
    board = training.tensorboard
    return [
        argument("--eval-iters", 0, why="no evaluation: the job is planned for training steps"),
        argument("--eval-interval", training.steps, why=divided),
        argument("--log-interval", training.log_interval, of="training.log_interval"),
        argument("--log-throughput", why="for whoever reads the log"),
        argument("--log-device-memory-used", why="for whoever reads the log, beside what the monitor measures"),
        *([] if board is None else [argument("--tensorboard-dir", board, of="training.tensorboard")]),
    ]
