"""The real frameworks behind a pipe: what Megatron core and DeepSpeed say of a job.

`traced/megatron_judge.py` and `deepspeed_judge.py` are the programs at the other end. conftest.py starts each once for
all test modules, because importing a framework takes ten seconds. Megatron core has an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import pytest

from llmlaunch.frameworks.deepspeed.config import ds_config, model_config
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from support.recorded import Recorded, versions

FRAMEWORKS = Path(__file__).resolve().parents[2] / ".venv-frameworks"
TRACED = Path(__file__).with_name("traced")  # programs of that environment
# What a person's own environment may hold, and a job is judged without.
OURS_ALONE = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1", "NVTE_CUTEDSL_FUSED_GROUPED_MLP"),
    "PYTORCH_CUDA_ALLOC_CONF",
)


def megatron_python() -> Path:
    """Return the interpreter that has Megatron core. Fails the test where it is not installed."""
    if not (FRAMEWORKS / ".installed").exists():
        pytest.fail(f"{FRAMEWORKS} is missing: `make install-frameworks` makes it")
    return FRAMEWORKS / "bin" / "python"


def megatron_versions() -> dict[str, str]:
    """Return the versions that Megatron's answers depend on."""
    places = (megatron_python().parents[1] / "lib").glob("python*/site-packages")
    return versions(("megatron-core", "megatron-bridge", "transformer-engine", "torch"), list(places))


def deepspeed_versions() -> dict[str, str]:
    """Return the versions that answers of DeepSpeed and Transformers depend on, of the Python that runs the tests."""
    return versions(("deepspeed", "transformers", "peft", "torch"), list(map(Path, sys.path)))


@dataclass(frozen=True)
class Verdict:
    """`layer` is None where Megatron takes the job, else the one of its four layers that refuses it, with `error` in
    its own words and `at`, file and line. `stages` are rank, chunk, first layer, kinds of the layers and prediction
    heads of all that is built, `model` its parameters and configuration. `stopped` is why a job that was taken could
    not be run to its end here."""

    layer: str | None
    error: str = ""
    at: str = ""
    stages: tuple[list[Any], ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""

    @property
    def accepted(self) -> bool:
        return self.layer is None


Say = Callable[[str], str]


class MegatronJudge:
    """Megatron core, asked one question after the other. `until` is how far a job is taken: its "model" is built, its
    "stages" are laid out, the "forward" pass of one micro-batch, or a whole training "step"."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def __call__(
        self,
        world_size: int,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        compute_capability: str = "9.0",
        pipeline_rank: int = 0,
        until: str = "step",
    ) -> Verdict:
        job = {
            "world_size": world_size,
            "arguments": list(words),
            "environment": dict(environment or {}),
            "compute_capability": compute_capability,
            "pipeline_rank": pipeline_rank,
            "until": until,
        }
        answer = json.loads(self._say(json.dumps(job)))
        said = {name: answer[name] for name in ("error", "at", "model", "stopped") if name in answer}
        return Verdict(answer["layer"], **said, stages=tuple(answer.get("stages", ())))


@contextmanager
def line_for_line(*command: str | Path) -> Iterator[Say]:
    """Return a function that says one line to a program and returns its answer. The program starts with the first."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    environment = {**clean, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:

        @cache
        def program() -> Popen[str]:
            started = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=environment)
            return stack.enter_context(started)

        def say(line: str) -> str:
            process = program()
            assert process.stdin is not None
            assert process.stdout is not None
            print(line, file=process.stdin, flush=True)
            return process.stdout.readline()

        yield say


def as_recorded(record: Recorded, say: Say) -> Say:
    """Return a function that answers as recorded, and asks where this run does."""
    return lambda line: json.dumps(record.answer(line, lambda: json.loads(say(line))))


@dataclass(frozen=True)
class Started:
    """A process of `MegatronScripts`."""

    pid: int
    output: Path
    errors: Path
    wait: Callable[[int], int]

    def end(self) -> tuple[int, str]:
        """Wait for it; its exit code and what it printed."""
        return self.wait(self.pid), self.output.read_text()


class MegatronScripts:
    """traced/dataset_ranks.py with Megatron core imported once: each script that it runs is a fork."""

    def __init__(self, say: Callable[[object], int], folder: Path) -> None:
        self._say, self._folder, self._started = say, folder, 0

    def start(self, *words: str, together: bool = True, **environment: str) -> Started:
        """With `together`, what is printed and what is said of errors are one text."""
        self._started += 1
        output = self._folder / f"{self._started}.out"
        errors = output if together else output.with_suffix(".err")
        everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        asked = {"words": words, "environment": everything, "output": str(output), "errors": str(errors)}
        return Started(self._say(asked), output, errors, self._say)


@contextmanager
def megatron_scripts(folder: Path) -> Iterator[MegatronScripts]:
    with line_for_line(megatron_python(), TRACED / "dataset_ranks.py", "serve") as say:
        yield MegatronScripts(lambda asked: int(say(json.dumps(asked))), folder)


DEEPSPEED_JUDGE = Path(__file__).with_name("deepspeed_judge.py")
MARK = '{"refused"'


class DeepSpeedJudge:
    """DeepSpeed behind a pipe (deepspeed_judge.py): answers one question after the other."""

    def __init__(self, process: Popen[str]) -> None:
        self.process = process

    def keys_read(self) -> list[str]:
        """The keys DeepSpeedConfig looks for, dotted."""
        answer: Any = self(reads=True)
        assert isinstance(answer, list)
        return answer

    def judge(self, recipe: Recipe, layout: Layout, **machine: bool) -> str | None:
        """Ask about what we render of a recipe, on a `machine` as deepspeed_judge.py describes it."""
        return self(
            config=ds_config(recipe, layout),
            data=layout.data,
            total=recipe.workload.global_batch_size,
            gpu=recipe.cluster.accelerator.kind == "gpu",
            model=model_config(recipe),
            sequence=recipe.workload.sequence_length,
            **machine,
        )

    def __call__(self, **case: Any) -> str | None:
        """Return None where DeepSpeed takes it, else why not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                refused: str | None = json.loads(line)["refused"]
                return refused
        raise AssertionError("the judge ended without an answer")


@contextmanager
def deepspeed_judge() -> Iterator[DeepSpeedJudge]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with Popen(
        [sys.executable, str(DEEPSPEED_JUDGE)],
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        text=True,
        env=environment,
    ) as process:
        try:
            yield DeepSpeedJudge(process)
        finally:
            process.stdin.close()
            process.terminate()
