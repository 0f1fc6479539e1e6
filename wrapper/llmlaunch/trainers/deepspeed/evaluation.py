"""The loss on validation data, worked out every so many steps: forward passes alone, on the same samples every time."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

from data import Batches, make_batches
from group import report
from model import micro_batch_loss
from parallel import RankSplit

TRAINING, VALIDATION = 0, 1  # places in --split
# Samples of validation are drawn by numbers of their own, so that made-up ones are not those of the training.
OTHER_SEED = 7919


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--validation-data", nargs="+", help="as --data; without it, a share of that")
    parser.add_argument("--split", help="shares of --data for training, validation and test, such as 99,1,0")
    parser.add_argument("--evaluation-interval", type=int, default=0, help="steps between evaluations")
    parser.add_argument("--evaluation-iterations", type=int, default=1, help="batches of each")


def training_share(split: str | None) -> tuple[float, float]:
    """Where the training's part of the data begins and ends, as shares of all of it."""
    return share_of(split, TRAINING)


def share_of(split: str | None, place: int) -> tuple[float, float]:
    if split is None:
        return 0.0, 1.0
    shares = [float(share) for share in split.split(",")]
    return sum(shares[:place]) / sum(shares), sum(shares[: place + 1]) / sum(shares)


class Evaluator:
    """Evaluates every `--evaluation-interval` steps and after the last; never without that argument."""

    def __init__(
        self, args: argparse.Namespace, vocabulary: int, micro_batch_size: int, split: RankSplit, losses: float
    ) -> None:
        self.args, self.split, self.losses = args, split, losses
        self.batches: Batches | None = None
        if args.evaluation_interval:
            share = (0.0, 1.0) if args.validation_data else share_of(args.split, VALIDATION)
            data, seed = args.validation_data or args.data, args.seed + OTHER_SEED
            mine = argparse.Namespace(**{**vars(args), "data": data, "seed": seed})
            self.batches = make_batches(mine, vocabulary, micro_batch_size, split, share)

    def evaluate_if_due(self, engine: Any, finished: int) -> None:
        """Prints the loss where it is time to. All ranks get here together."""
        args = self.args
        if self.batches is None or (finished % args.evaluation_interval and finished != args.steps):
            return
        report(f"evaluating at step {finished}")
        began = time.perf_counter()
        loss = self.loss(engine)
        seconds = time.perf_counter() - began
        report(f"validation at step {finished}/{args.steps} | validation loss {loss:.4f} | {seconds:.2f} s")

    def loss(self, engine: Any) -> float:
        assert self.batches is not None
        count = self.args.evaluation_iterations * engine.gradient_accumulation_steps()
        total = torch.zeros((), device=engine.device)
        engine.eval()  # dropout is off, and layers are not recomputed
        with torch.no_grad():
            for index in range(count):
                total += micro_batch_loss(engine, self.batches(index).to(engine.device), self.split) / count
        engine.train()
        dist.all_reduce(total)
        return float(total) / self.losses
