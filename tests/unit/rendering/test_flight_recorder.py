"""On clusters with GPUs the trainers find PyTorch's flight recorder switched on, and the person's own settings kept."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_samples import H100, cluster, deepspeed_cpu, outside_slurm

from llmlaunch.rendering.run_directory import render_run
from llmlaunch.rendering.scripts import train_script

# What it finds, and whether each rank's pipe can be made where it is told to.
TRAINER = b"""\
import os
rank = os.environ["RANK"]
os.mkfifo(os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe")
open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "w").close()
if rank == "0":
    for name in sorted(os.environ):
        if name.startswith(("TORCH_FR", "TORCH_NCCL")):
            print(name, os.environ[name], flush=True)
"""


@pytest.mark.frameworks
def test_the_variables_of_this_torch_and_a_place_for_the_pipes(tmp_path: Path) -> None:
    of, plan, rendered = deepspeed_cpu()
    of = replace(of, cluster=cluster(H100, 2), environment={"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"})
    files = {"trainer/train.py": TRAINER, "trainer/prepare.py": b""}
    rendered = replace(rendered, program=("trainer/train.py",), prepare=("trainer/prepare.py",), files=files)
    run = tmp_path / "run"
    render_run(of, plan, {}, rendered, run)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = outside_slurm(LLMLAUNCH_PYTHON=sys.executable, TMPDIR=str(scratch))
    done = subprocess.run(["bash", str(run / "job.sbatch")], env=environment, capture_output=True, text=True)
    (attempt,) = (run / "attempts").iterdir()
    log = next(path for path in (run / "logs").iterdir() if path.name.count(".") == 3 and ".job." not in path.name)
    assert done.returncode == 0, done.stderr + log.read_text()
    variables = dict(line.split() for line in log.read_text().splitlines() if line.startswith("TORCH_"))
    pipes = variables.pop("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    variables.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING")  # torchrun's
    assert variables == {
        "TORCH_FR_BUFFER_SIZE": "50",
        "TORCH_FR_DUMP_TEMP_FILE": f"{attempt}/flight/rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{attempt}/flight/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "50",
    }
    assert pipes.startswith(str(scratch))
    assert list(scratch.glob("llmlaunch*")) == []  # of the trainer, and of what was prepared before it
    assert sorted(path.name for path in (attempt / "flight").iterdir()) == ["rank_0", "rank_1"]


def test_without_gpus_or_without_a_watchdog_there_is_none() -> None:
    of, _, rendered = deepspeed_cpu()
    assert "TORCH_NCCL" not in train_script(of, rendered, None)
    assert "TORCH_NCCL" in train_script(replace(of, cluster=cluster(H100, 2)), rendered, None)
    assert "TORCH_NCCL" not in train_script(replace(of, cluster=cluster(H100, 2), watchdog=None), rendered, None)
