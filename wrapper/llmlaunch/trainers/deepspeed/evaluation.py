"""The loss on validation data, worked out every so many steps: forward passes alone, on the same samples every time."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from data import VALIDATION, WHOLE, Batches, make_batches, share_of
from group import report
from model import micro_batch_loss
from parallel import RankSplit

# Samples of validation are drawn by numbers of their own, so that made-up ones are not those of the training.
OTHER_SEED = 7919


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--validation-data", nargs="+", help="as --data; without it, a share of that")
    parser.add_argument("--split", help="shares of --data for training, validation and test, such as 99,1,0")
    parser.add_argument("--evaluation-interval", type=int, default=0, help="steps between evaluations")
    parser.add_argument("--evaluation-iterations", type=int, default=1, help="batches of each")
    parser.add_argument(
        "--patience", type=int, default=0, help="end after so many evaluations in a row without a lower loss"
    )
    parser.add_argument("--keep-best", action="store_true", help="name the checkpoint of the lowest loss in SAVE/best")


def validation_batches(
    args: argparse.Namespace, vocabulary: int, micro_batch_size: int, split: RankSplit
) -> Batches | None:
    """Of plain text."""
    if not args.evaluation_interval:
        return None
    share = WHOLE if args.validation_data else share_of(args.split, VALIDATION)
    data, seed = args.validation_data or args.data, args.seed + OTHER_SEED
    mine = argparse.Namespace(**{**vars(args), "data": data, "seed": seed})
    return make_batches(mine, vocabulary, micro_batch_size, split, share)


class Evaluator:
    """Evaluates every `--evaluation-interval` steps and after the last; never without `batches`. `count` micro-batches
    of each rank are an evaluation."""

    def __init__(
        self, args: argparse.Namespace, batches: Batches | None, count: int, split: RankSplit, losses: float
    ) -> None:
        self.args, self.batches, self.count, self.split, self.losses = args, batches, count, split, losses
        self.best, self.best_step, self.waited = math.inf, 0, 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the evaluations so far."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def go_on_from(self, state: dict[str, Any]) -> None:
        for name in self.state():
            setattr(self, name, state.get(name, getattr(self, name)))

    @property
    def exhausted(self) -> bool:
        """Whether the loss has not been lower for as long as the job is told to wait."""
        return bool(0 < self.args.patience <= self.waited)

    def evaluate_if_due(self, engine: Any, finished: int) -> None:
        """Prints the loss where it is time to. All ranks get here together, and have the same loss."""
        args = self.args
        if self.batches is None or (finished % args.evaluation_interval and finished != args.steps):
            return
        report(f"evaluating at step {finished}")
        began = time.perf_counter()
        loss = self.loss(engine)
        seconds = time.perf_counter() - began
        report(f"validation at step {finished}/{args.steps} | validation loss {loss:.4f} | {seconds:.2f} s")
        self.waited += 1
        if loss < self.best:
            self.best, self.best_step, self.waited = loss, finished, 0

    def loss(self, engine: Any) -> float:
        assert self.batches is not None
        total = torch.zeros((), device=engine.device)
        engine.eval()  # dropout is off, and layers are not recomputed
        with torch.no_grad():
            for index in range(self.count):
                total += micro_batch_loss(engine, self.batches(index).to(engine.device), self.split) / self.count
        engine.train()
        dist.all_reduce(total)
        dist.broadcast(total, 0)  # ranks that add up in another order would not agree on which loss is lower
        return float(total) / self.losses
