"""The learning rate of every step, and AdamW's other hyperparameters."""

from __future__ import annotations

import argparse
import math


def add_learning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="the highest")
    parser.add_argument("--minimum-learning-rate", type=float, default=0.0, help="at the end of its decay")
    parser.add_argument("--learning-rate-decay", choices=["cosine", "linear", "constant"], default="constant")
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--adam-betas", type=float, nargs=2, default=[0.9, 0.95], metavar="BETA")


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate of a step: linear warm-up to `--learning-rate`, then `--learning-rate-decay` over the
    steps that are left. Steps count from 0; one after the last would have the minimum."""
    if step < args.warmup_steps:
        return float(args.learning_rate * (step + 1) / (args.warmup_steps + 1))
    passed = (step - args.warmup_steps) / max(args.steps - args.warmup_steps, 1)
    left = {"constant": 1.0, "linear": 1.0 - passed, "cosine": 0.5 * (1.0 + math.cos(math.pi * passed))}
    share = left[args.learning_rate_decay]
    least = args.minimum_learning_rate if share < 1.0 else 0.0
    return float(least + (args.learning_rate - least) * share)
