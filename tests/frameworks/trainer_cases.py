"""Runs the shipped training script many times with its libraries imported once. Lives as long as its input.

in    {"folder": "/tmp/x", "cases": [...]} in a line; a case has a folder of its name there
out   {name: {"codes", "steps", "kept", "said"}} in a line that begins with RESULT: for each case the exit code of every
      rank, the loss and the norm of all gradients of every step as rank 0 has them, the files made sure of by every
      rank, and what all ranks printed

Every rank of every case is a fork of this process that calls the script's own main with the case's words, in a process
group of its own. A case has "name", "ranks", "files" (text by path) and "words", in which FOLDER stands for its folder.
Of a case that is "alone" rank 0 is started by itself, as rank_alone.py starts it; to rank 0 of a case that is "told" to
end SIGTERM is sent after three steps, to all ranks of one that is "pestered" again and again until they end. A case may
have an "environment". A "weighed" case answers with what rank 0 held (weigh), too; of a "saved" one
only a forward and backward pass is counted (saved_bytes.py), and instead of training, engines are for what is "counted"
(deepspeed_bytes.py). Of a case whose ranks are "refusing" these refuse after they have joined the others; one that is
"judged" is trained by TRL (trl_judge.py).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmlaunch.trainers import RANK_ALONE, TRAINER

sys.path.insert(0, str(RANK_ALONE.parent))
sys.path.insert(0, str(TRAINER.parent))
import datasets  # noqa: F401 (jobs with rows)
import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops  # noqa: F401 (every engine imports both)
import deepspeed_bytes
import peft  # noqa: F401
import rank_alone
import saved_bytes
import torch
import torch._inductor.compile_fx
import transformers.models.llama.modeling_llama  # noqa: F401
from deepspeed.runtime.sequence_parallel import ulysses_sp  # noqa: F401

import checkpoints
import group
import train

TOLD_AFTER = 3  # steps


def main() -> None:
    gc.collect()
    gc.freeze()  # weighing does not look through the libraries' own objects each time
    for line in sys.stdin:
        batch = json.loads(line)
        answers = {case["name"]: run(case, Path(batch["folder"]) / case["name"]) for case in batch["cases"]}
        print("RESULT " + json.dumps(answers), flush=True)


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    for name, text in case["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    words = [word.replace("FOLDER", str(folder)) for word in case["words"]]
    port = free_port()
    started = range(1 if case.get("alone") else case["ranks"])
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [start(rank, case, port, words, folder) for rank in started]
    if case.get("told"):
        tell(ranks[0], folder / "steps.0")
    if case.get("pestered"):
        pester(ranks, folder / "steps.0")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    said = "".join((folder / f"rank{rank}.txt").read_text() for rank in started)
    steps = [json.loads(line) for line in lines(folder / "steps.0")]
    kept = [name for rank in started for name in lines(folder / f"kept.{rank}")]
    return {"codes": codes, "steps": steps, "kept": kept, "said": said}


def tell(process: int, steps: Path) -> None:
    deadline = time.monotonic() + 120
    while len(lines(steps)) < TOLD_AFTER and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process, signal.SIGTERM)


def pester(ranks: list[int], steps: Path) -> None:
    """A rank that has ended is there until it is waited for."""
    tell(ranks[0], steps)
    while any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in ranks):
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.01)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(rank: int, case: dict[str, Any], port: int, words: list[str], folder: Path) -> int:
    """A process of one rank; returns its id."""
    ranks = case["ranks"]
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update(
        {name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", **case.get("environment", {})
    )
    watch(folder, rank, weighed=rank == 0 and case.get("weighed", False))
    if case.get("alone"):
        rank_alone.pretend_the_others()
    code = 1
    try:
        if case.get("saved"):
            print(json.dumps(saved_bytes.measured(words)))
            code = 0
        elif case.get("counted"):
            deepspeed_bytes.print_counts(case["counted"])
            code = 0
        elif case.get("judged"):
            import trl_judge

            trl_judge.main(case["judged"], folder)
            code = 0
        elif case.get("refusing"):
            refuse(rank, case["refusing"], case["meeting_seconds"])
            code = 0
        else:
            train.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(rank: int, refusing: list[int], seconds: int) -> None:
    """A rank that does not refuse stays longer than the others wait for it."""
    group.MEETING = timedelta(seconds=seconds)
    group.join()
    if rank in refusing:
        time.sleep(rank)
        group.refuse("the data has gone")
    time.sleep(4 * seconds)


def watch(folder: Path, rank: int, weighed: bool) -> None:
    """Keeps loss and gradient norm of every step in full, and which files of checkpoints are on the disk for sure."""
    step, flush = train.train_step, checkpoints.flush

    def watched_step(engine: Any, *rest: Any) -> Any:
        done: list[Any] = []
        weight = (
            weigh(engine, lambda: done.append(step(engine, *rest))) if weighed else done.append(step(engine, *rest))
        )
        norm = engine.get_global_grad_norm()
        said = {"loss": done[0][0], "norm": None if norm is None else float(norm), "weight": weight}
        record(folder / f"steps.{rank}", json.dumps(said))
        return done[0]

    def watched_flush(path: Path) -> None:
        flush(path)
        record(folder / f"kept.{rank}", path.name)

    train.train_step, checkpoints.flush = watched_step, watched_flush


def weigh(engine: Any, run: Callable[[], None]) -> dict[str, int]:
    """Bytes of a step: the parameters and states it leaves behind, and all tensors there are before, at most and after,
    but for what the library that communicates makes for itself."""
    before = deepspeed_bytes.held()
    most = before + deepspeed_bytes.most_added(run)
    states = [one for state in engine.basic_optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
    parts = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    return {
        "parameters": sum(part.numel() * part.element_size() for part in parts),
        "states": sum(one.numel() * one.element_size() for one in states),
        "before": before,
        "most": most,
        "after": deepspeed_bytes.held(),
    }


def record(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
