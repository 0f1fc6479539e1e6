"""A rendered Megatron recipe, trained on this machine's CPU with Megatron-LM's own `pretrain`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.step_lines import Step
from support.step_lines import parse_step

__all__ = [
    "ADDED",
    "LEFT_OUT",
    "PYTHON",
    "Change",
    "CpuJob",
    "Trained",
    "cpu_job",
    "train_on_cpu",
    "under_torchrun",
    "words_for_cpu",
]


@dataclass(frozen=True)
class Change:
    """A flag added with its values, or left out with as many values as it takes."""

    flag: str
    values: tuple[str, ...]
    why: str


ADDED = (
    Change("--transformer-impl", ("local",), "Transformer Engine computes on CUDA alone"),
    Change("--distributed-backend", ("gloo",), "NCCL connects GPUs"),
    Change("--no-gradient-accumulation-fusion", (), "Apex's CUDA kernel"),
    Change("--no-persist-layer-norm", (), "Apex's CUDA kernel; torch's norms refuse to be asked for it"),
    Change("--no-rope-fusion", (), "Transformer Engine's CUDA kernel"),
    Change("--no-masked-softmax-fusion", (), "Megatron's CUDA kernel"),
)
LEFT_OUT: tuple[Change, ...] = ()


def words_for_cpu(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a rendered program after the script's name, as this machine's CPU can train with them."""
    kept = list(words)
    for change in LEFT_OUT:
        while change.flag in kept:
            place = kept.index(change.flag)
            del kept[place : place + 1 + len(change.values)]
    return (*kept, *(word for change in ADDED for word in (change.flag, *change.values)))


ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
MEGATRON_CPU = Path(__file__).with_name("megatron_cpu")


@dataclass(frozen=True)
class CpuJob:
    """What each of `processes` ranks is started with; `rendered` are its words before they were changed for the CPU."""

    name: str
    processes: int
    rendered: tuple[str, ...]
    environment: dict[str, str]

    @property
    def words(self) -> tuple[str, ...]:
        return words_for_cpu(self.rendered)


@dataclass(frozen=True)
class Trained:
    """What became of a job."""

    job: CpuJob
    codes: tuple[int, ...]  # of each rank
    output: tuple[str, ...]

    @property
    def steps(self) -> list[Step]:
        """The training lines as llmlaunch's own reader reads them; Megatron's last rank prints them."""
        lines = (parse_step(line) for line in self.output[-1].splitlines())
        return [line for line in lines if line is not None]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps if step.loss is not None]

    def complaint(self) -> str:
        """The end of what the first failed rank said."""
        failed = next((rank for rank, code in enumerate(self.codes) if code > 0), 0)
        said = self.output[failed].splitlines()[-40:]
        return "\n".join([f"{self.job.name}: exit codes {self.codes}, rank {failed} said:", *said])


def cpu_job(name: str, recipe: Recipe, layout: Layout) -> CpuJob:
    """The words our renderer makes, with the few changes a CPU needs (`ADDED`, `LEFT_OUT`)."""
    rendered = MegatronLM().render(recipe, layout)
    words = tuple(str(word) for word in rendered.program[1:])
    device = {"CPU_STANDS_FOR": recipe.cluster.accelerator.compute_capability or "9.0", "OMP_NUM_THREADS": "1"}
    return CpuJob(name, layout.world_size, words, {**rendered.environment, **device})


def train_on_cpu(
    jobs: Iterable[CpuJob],
    folder: Path,
    seconds: float = 120.0,
    trainer: Sequence[Path] = (MEGATRON_CPU / "train_jobs.py",),
) -> dict[str, Trained]:
    """Train the jobs one after the other, logs in `folder`; `seconds` is the most one may take. `trainer` takes what
    train_jobs.py takes."""
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.fail(f"{PYTHON.parent.parent} is missing: `make install-frameworks` makes it")
    wanted = {job.name: job for job in jobs}
    lines = "".join(json.dumps({**vars(job), "words": job.words}) + "\n" for job in wanted.values())
    command = [PYTHON, *trainer, "--logs", folder, "--seconds", str(seconds)]
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=lines, stdout=PIPE, text=True, env=environment, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        answer["name"]: Trained(
            wanted[answer["name"]],
            tuple(answer["codes"]),
            tuple(Path(log).read_text(errors="replace") for log in answer["logs"]),
        )
        for answer in answers
    }


def under_torchrun(job: CpuJob) -> subprocess.Popen[str]:
    """One job as a node starts it; all that its ranks say comes out of one pipe."""
    command = [str(PYTHON), "-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={job.processes}"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", str(MEGATRON_CPU / "train.py"), *job.words]
    environment = {**os.environ, **job.environment}
    return subprocess.Popen(command, env=environment, stdout=PIPE, stderr=STDOUT, text=True)
