"""Megatron core's own rerun state machine on a CPU. Runs jobs with its libraries imported once, a line for a line:

stdin   {"error": "transient" | "persistent" | "application", "state": FILE, "node": NAME, "log": FILE}
stdout  the job's exit code

The first job of a folder meets an infinite loss in its third iteration, and leaves its state there where the machine
asks for a checkpoint; the next one goes on from it. What needs CUDA or several ranks stands in: the index of the
device, its random state, and the reduction over ranks. Packages of Megatron core are entered past their own imports,
which want kernels.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import sys
import traceback
import types
from pathlib import Path
from typing import Any

core = Path(next(path for path in sys.path if path.endswith("site-packages"))) / "megatron" / "core"
for name, place in (
    ("megatron", ".."),
    ("megatron.core", "."),
    ("megatron.core.dist_checkpointing", "dist_checkpointing"),
):
    package = types.ModuleType(name)
    package.__path__ = [str(core / place)]
    sys.modules[name] = package

import torch  # noqa: E402
from megatron.core import rerun_state_machine  # type: ignore[import-not-found] # noqa: E402

torch.cuda.current_device = lambda: 1
torch.cuda.get_rng_state = torch.get_rng_state
torch.cuda.set_rng_state = torch.set_rng_state
torch.distributed.get_world_size, torch.distributed.get_rank = lambda: 1, lambda: 0
rerun_state_machine.RerunStateMachine._reduce_any = lambda self, values: values


def train(error: str, saved: Path) -> int:
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    machine: Any = rerun_state_machine.get_rerun_state_machine()
    calls = 0

    def loss(iteration: int) -> Any:
        """Infinite from the third iteration on: once (transient), on the first GPU (persistent), or everywhere."""
        nonlocal calls
        calls += iteration == 2
        wrong = {"transient": calls == 1, "persistent": not saved.exists(), "application": True}[error]
        return torch.tensor(math.inf if iteration == 2 and wrong else 1.5)

    first = 2 if saved.exists() else 0
    if first:
        machine.load_state_dict(pickle.loads(saved.read_bytes()))
    for iteration in range(first, 3):
        while machine.should_run_forward_backward(None):
            machine.validate_result(loss(iteration), torch.isinf, "found Inf in local forward loss calculation")
        save, stop, code = machine.should_checkpoint_and_exit()
        if save:
            state = machine.state_dict(None, "torch_dist")
            saved.write_bytes(pickle.dumps({**state, "sharded": state["sharded"].data}))
        if stop:
            return int(code)
    return 0


def run(error: str, state: str, node: str, log: str) -> int:
    """Return the exit code of a job in a process of its own."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        logging.basicConfig(level=logging.INFO)  # as megatron/training/training.py does
        os.uname = lambda: os.uname_result(("Linux", node, "", "", ""))
        code = train(error, Path(state))
    except BaseException:  # a fork must never go on to the next line
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    print(run(**json.loads(line)), flush=True)
