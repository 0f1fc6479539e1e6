"""A rendered Megatron recipe, trained on this machine's CPU with Megatron-LM's own `pretrain`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from judges import line_for_line, megatron_python

from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.step_lines import Step
from support.step_lines import parse_step

# What is added to the rendered words, and why.
ADDED = {
    ("--transformer-impl", "local"): "Transformer Engine computes on CUDA alone",
    ("--distributed-backend", "gloo"): "NCCL connects GPUs",
    ("--no-gradient-accumulation-fusion",): "Apex's CUDA kernel",
    ("--no-persist-layer-norm",): "Apex's CUDA kernel; torch's norms refuse to be asked for it",
    ("--no-rope-fusion",): "Transformer Engine's CUDA kernel",
    ("--no-masked-softmax-fusion",): "Megatron's CUDA kernel",
    ("--num-workers", "0"): "a process for each worker takes longer to start than these datasets to read",
}
ADDED_WORDS = tuple(word for words in ADDED for word in words)
MEGATRON_CPU = Path(__file__).with_name("megatron_cpu")


@dataclass(frozen=True)
class CpuJob:
    """What each of `processes` ranks is started with, as rendered. With `told_after`, rank 0 alone gets SIGTERM once
    that step is over."""

    name: str
    processes: int
    rendered: tuple[str, ...]
    environment: dict[str, str]
    told_after: int = 0
    script: str = ""  # a person's own, in place of train.py

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.rendered, *ADDED_WORDS)


@dataclass(frozen=True)
class TrainedJob:
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
        """Return the last lines of the first failed rank."""
        failed = next((rank for rank, code in enumerate(self.codes) if code > 0), 0)
        lines = self.output[failed].splitlines()[-40:]
        return "\n".join([f"{self.job.name}: exit codes {self.codes}, rank {failed} said:", *lines])


def cpu_job(name: str, recipe: Recipe, layout: Layout) -> CpuJob:
    rendered = MegatronLM().render(recipe, layout)
    words = tuple(str(word) for word in rendered.program[1:])
    device = {"CPU_STANDS_FOR": recipe.cluster.accelerator.compute_capability or "9.0", "OMP_NUM_THREADS": "1"}
    return CpuJob(name, layout.world_size, words, {**rendered.environment, **device})


TrainOnCpu = Callable[[Iterable[CpuJob]], dict[str, TrainedJob]]


@contextmanager
def cpu_trainer(folder: Path, seconds: float = 120.0, through: Sequence[Path] = ()) -> Iterator[TrainOnCpu]:
    """A process that has imported Megatron and trains jobs one after the other, logs in `folder`; `seconds` is the most
    one may take. `through` are scripts that run the one after them."""
    command = (megatron_python(), *through, MEGATRON_CPU / "train_jobs.py", "--logs", folder, "--seconds", str(seconds))
    folder.mkdir(parents=True, exist_ok=True)
    with line_for_line(*command) as say:

        def train(jobs: Iterable[CpuJob]) -> dict[str, TrainedJob]:
            return {job.name: trained(job) for job in jobs}

        def trained(job: CpuJob) -> TrainedJob:
            answer = json.loads(say(json.dumps({**vars(job), "words": job.words})))
            output = tuple(Path(log).read_text(errors="replace") for log in answer["logs"])
            return TrainedJob(job, tuple(answer["codes"]), output)

        yield train


def train_on_cpu(
    jobs: Iterable[CpuJob], folder: Path, seconds: float = 120.0, through: Sequence[Path] = ()
) -> dict[str, TrainedJob]:
    """Train the jobs by a process of their own."""
    with cpu_trainer(folder, seconds, through) as train:
        return train(jobs)
