"""The process group: joining it, leaving it, and speaking with one voice."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import NoReturn

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

MEETING = timedelta(seconds=10)
"""How long a rank that ends waits for the others to get there."""


def join() -> None:
    """Joins the process group torchrun described.

    On a CPU DeepSpeed would first compile its shared-memory all-reduce (about 45 s, needs g++ and ninja). Only
    inference calls that kernel (deepspeed/comm/torch.py, `inference_all_reduce`, 0.19.8), so it is switched off.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(verbose=False)


def leave() -> NoReturn:
    """Ends the process group together, then the process, with success.

    Not through the interpreter's own end: a torch thread that still wants Python while it is taken down aborts the
    process (SIGABRT, "terminate called without an active exception"; about 1 run in 15 on a CPU, torch 2.13).
    """
    dist.barrier()
    dist.destroy_process_group()
    _finish_curves()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _finish_curves() -> None:
    """Write out what Weights & Biases still holds, which it would do at the interpreter's own end. A run that cannot be
    finished is no failure of the training."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        try:
            wandb.finish()
        except Exception as error:
            print(f"Weights & Biases: the run was not finished: {error}", file=sys.stderr)


def refuse(message: str) -> NoReturn:
    """Ends this rank. Of all ranks that get here the first says why, be it the only one.

    They wait for each other: one that still connects to a rank already gone would end with a traceback of its own.
    """
    store, ranks = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    place = store.add("refused", 1)
    if place == 1:
        print(message, file=sys.stderr, flush=True)
    if place == ranks:
        store.set("all refused", "")
    elif dist.get_backend() != "fake":
        try:
            store.wait(["all refused"], MEETING)
        except RuntimeError:  # a rank of another opinion, or the one that keeps the store is gone
            if place == 1:
                where = f"rank {dist.get_rank()} on {socket.gethostname()}"
                print(f"Said by {where}; not all {ranks} ranks find it so", file=sys.stderr, flush=True)
    raise SystemExit(1)


def report(line: str) -> None:
    """One line from rank 0, written at once."""
    if dist.get_rank() == 0:
        print(line, flush=True)
