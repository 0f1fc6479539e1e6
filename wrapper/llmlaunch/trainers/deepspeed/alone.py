"""One rank without its peers (rank_alone.py): whether it is the rank it was to be, and took the memory a job would.

What peers would have sent is made up. Values that overflow for it make DeepSpeed skip a step without a word, and with
the first one the optimizer's states: a peak without them is no peak.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from group import refuse, report
from parallel import RankSplit

MOMENTS = 2  # of AdamW, for each element it trains


def check_place(ranks: int) -> None:
    """Ends a process that is not rank 0 of so many that do not exist."""
    if dist.get_backend() != "fake" or dist.get_world_size() != ranks:
        refuse(
            f"--alone {ranks}: this is a group of {dist.get_world_size()} ranks over {dist.get_backend()}; start it "
            f"with WORLD_SIZE={ranks} RANK=0 LOCAL_RANK=0 python rank_alone.py train.py ..., without torchrun"
        )


def spare_the_vote(engine: Any) -> None:
    """Before its first pass AutoTP's ranks count how many of them were given the same tokens, and there is one alone
    (runtime/engine.py `check_dataloader_inputs_same_across_ranks`, 0.19.8)."""
    vote = getattr(engine, "first_dataloader_check", None)
    if vote is not None:
        vote.remove()


def check_work(engine: Any, steps: int, split: RankSplit) -> None:
    """Ends the process with one sentence where it did less than a rank of the job would; says so where it did all."""
    micro_batches = steps * engine.gradient_accumulation_steps()
    present, least = moments(engine), least_moments(engine, split)
    wrong = None
    if engine.micro_steps != micro_batches:
        wrong = f"{engine.micro_steps} of {micro_batches} micro-batches ran"
    elif engine.skipped_steps:
        wrong = f"{engine.skipped_steps} of {steps} steps were skipped, because gradients overflowed"
    elif present < least:
        wrong = f"the optimizer holds {present} of {least} elements of its states"
    if wrong:
        refuse(f"--alone: {wrong}: what this rank took is not what a rank of the job takes")
    report(
        f"alone as rank 0 of {split.ranks}: {steps} steps, {micro_batches} micro-batches, none skipped; "
        f"{present} elements of optimizer states"
    )


def moments(engine: Any) -> int:
    """Elements of all states the optimizer holds, on the device and on the host."""
    values = [value for state in engine.basic_optimizer.state.values() for value in state.values()]
    return sum(value.numel() for value in values if torch.is_tensor(value) and value.dim())


def least_moments(engine: Any, split: RankSplit) -> int:
    """Elements of a rank's part: of all that is trained, or shared out by ZeRO over the ranks that differ in data or in
    their part of a sequence."""
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters() if p.requires_grad)
    sharing = split.data * split.sequence if engine.zero_optimization() else 1
    return int(MOMENTS * trained // sharing)
