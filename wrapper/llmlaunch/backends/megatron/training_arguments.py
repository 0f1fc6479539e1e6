"""Batch, schedule, optimizer, precision and log, in Megatron-LM's words (core 0.19)."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["training_arguments"]

MOST_WARMUP_STEPS = 2000


def training_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """How long it trains, on how much at once, in which numbers, and what it says of it."""
    return (*_batch(recipe, layout), *_optimizer(recipe), *_log(recipe), *_precision(recipe))


def _batch(recipe: Recipe, layout: Layout) -> list[Argument]:
    return [
        argument("--micro-batch-size", layout.micro_batch_size, of="layout.micro_batch_size"),
        argument("--global-batch-size", recipe.workload.global_batch_size, of="training.global_batch_size"),
        argument("--train-iters", recipe.training.steps, of=("training.steps", "training.tokens")),
    ]


def _optimizer(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    warmup = min(training.steps // 100, MOST_WARMUP_STEPS)
    usual = "as the Llama models were trained"
    return [
        argument("--lr", repr(training.learning_rate), of="training.learning_rate"),
        argument("--lr-decay-style", "cosine", why=usual),
        argument("--lr-warmup-iters", warmup, of=("training.steps", "training.tokens"), why="a hundredth of the steps"),
        argument("--clip-grad", "1.0", why=usual),
        argument("--weight-decay", "0.1", why=usual),
        argument("--adam-beta2", "0.95", why=usual),
        argument("--seed", training.seed, of="training.seed"),
    ]


def _log(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    divided = "no default in core 0.19, yet training.py divides by it"
    return [
        argument("--eval-iters", 0, why="no evaluation: the job is planned for training steps"),
        argument("--eval-interval", training.steps, why=divided),
        argument("--log-interval", training.log_interval, of="training.log_interval"),
        argument("--log-throughput", why="the monitor reads it"),
        argument("--log-device-memory-used", why="the monitor reads it"),
    ]


def _precision(recipe: Recipe) -> list[Argument]:
    precision = recipe.workload.precision
    return [argument(f"--{precision}", of="training.precision")] if precision != "fp32" else []
