"""The process group: joining it, leaving it, and speaking with one voice."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def refuse(message: str) -> NoReturn:
    """Ends every rank; one of them says why."""
    raise SystemExit(message if dist.get_rank() == 0 else 1)


def report(line: str) -> None:
    """One line from rank 0, written at once."""
    if dist.get_rank() == 0:
        print(line, flush=True)
