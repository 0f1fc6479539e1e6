"""Trains several Megatron jobs on the CPU, one after the other; each rank is a process, as torchrun would start it.

    echo '{"name": "pair", "processes": 2, "words": ["--num-layers", "4", ...], "environment": {}, "told_after": 0,
        "script": ""}' |
        .venv-frameworks/bin/python train_jobs.py --logs FOLDER

`script` is a person's own trainer, in place of train.py.
One job a line in, one line out as each is done: {"name", "codes", "logs"}: exit code and log file of each rank, whose
place the environment of a job may override. A rank's log ends with what it did: {"forward", "backward",
"optimizer_steps", "states"}. The frameworks are imported once, and so is torch's compiler, which every
optimizer imports; Megatron's parser is built once. A rank is a fork of that process, which saves seconds for each.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import runpy
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train

# isort: split
import torch._dynamo  # noqa: F401 (every optimizer imports it, which takes a second)
from megatron.core.pipeline_parallel import schedules
from megatron.training import arguments as megatron_arguments
from torch.optim.optimizer import register_optimizer_step_post_hook

Job = dict[str, Any]
COUNTS: Counter[str] = Counter()


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def count(*arguments: Any, **options: Any) -> Any:
        COUNTS[name] += 1
        return function(*arguments, **options)

    return count


def _count_step(optimizer: Any, *_: Any) -> None:
    COUNTS["optimizer_steps"] += 1
    COUNTS["states"] = len(optimizer.state)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_rank(job: Job, rank: int, port: int, log: Path) -> None:
    """In the forked process; never returns."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(job["processes"])}
    os.environ.update(meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | job["environment"])
    del sys.modules["__main__"].__file__  # or what a checkpoint's writer spawns would import all of this once more
    code = 1
    try:
        if job["script"]:
            sys.argv = [job["script"], *job["words"]]
            runpy.run_path(job["script"], run_name="__main__")
        else:
            train.train(job["words"])
            print(json.dumps(COUNTS))
        code = 0
    except SystemExit as end:  # Megatron's parser exits where it refuses an argument, its signal handler where it saved
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _wait(ranks: dict[int, int], seconds: float) -> list[int]:
    """Exit codes by rank (`ranks`: process to rank). When one fails, or it takes too long, the others are killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(ranks):
        for pid, rank in ranks.items():
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    _kill_group(pid)  # what it started
        if any(codes.values()) or time.monotonic() > deadline:
            time.sleep(1.0 if any(codes.values()) else 0.0)  # for the others to say why they fail
            for pid in ranks:
                _kill_group(pid)
        time.sleep(0.02)
    return [codes[rank] for rank in sorted(codes)]


def _tell(process: int, log: Path, step: int, seconds: float) -> None:
    """SIGTERM once the log, which is the last rank's, has the line of that step."""
    line, deadline = re.compile(rb"iteration +%d/" % step), time.monotonic() + seconds
    while not (log.exists() and line.search(log.read_bytes())) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process, signal.SIGTERM)


def _train(job: Job, logs: Path, seconds: float) -> Job:
    name = re.sub(r"[^\w.=-]+", "-", job["name"])[:100]
    files = [logs / f"{name}-{rank}.log" for rank in range(job["processes"])]
    port, ranks = _free_port(), {}
    for rank, log in enumerate(files):
        pid = os.fork()
        if pid == 0:
            _run_rank(job, rank, port, log)
        ranks[pid] = rank
    if job["told_after"]:
        _tell(next(iter(ranks)), files[-1], job["told_after"], seconds)
    return {"name": job["name"], "codes": _wait(ranks, seconds), "logs": [str(log) for log in files]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="for one job, at most")
    options = parser.parse_args()
    megatron_parser = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    megatron_arguments.add_megatron_arguments = lambda parser: megatron_parser
    schedules.forward_step = _counted("forward", schedules.forward_step)
    schedules.backward_step = _counted("backward", schedules.backward_step)
    register_optimizer_step_post_hook(_count_step)
    gc.freeze()  # what is imported stays shared between the ranks
    for line in sys.stdin:
        if line.strip():
            print(json.dumps(_train(json.loads(line), options.logs, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
