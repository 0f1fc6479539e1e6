"""A training job of a test: rendered and submitted by llmlaunch, the trainer needs no torch."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from one_machine import IN_QUEUE, wait_until
from person import Person

from llmlaunch.rundir.attempt import rank_records

HERE = Path(__file__).parent
QUICKSTART = HERE.parents[1] / "recipes" / "quickstart.yaml"
SLOW_SAVER = HERE / "slow_saver.py"

# Makes two steps, saves, and fails.
FAILS_AFTER_SAVING = """\
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
latest = folder / "latest"
step = int(latest.read_text().rpartition("-")[2]) if latest.exists() else 0
if os.environ["RANK"] == "0":
    for step in (step + 1, step + 2):
        print(f"step {step}/100 | loss 1.0 | 0.50 s/step | 1000 tokens/s", flush=True)
        time.sleep(0.5)
    latest.write_text(f"step-{step}")
    sys.exit(3)
time.sleep(600)
"""
# The same, but it fails only when there is a file `fail` beside its checkpoints.
FAILS_WHEN_TOLD = FAILS_AFTER_SAVING.replace(
    "    sys.exit(3)", "    while not (folder / 'fail').exists():\n        time.sleep(0.1)\n    sys.exit(3)"
)


@dataclass(frozen=True)
class Training:
    """A submitted run directory, and what `submit` printed."""

    person: Person
    run: Path
    said: subprocess.CompletedProcess[str]

    @property
    def job(self) -> str:
        return str(self.read("submission.json")["job_id"])

    @property
    def checkpoints(self) -> Path:
        return self.run.parent / "checkpoints"

    def hurry(self) -> None:
        """From now on, and in later attempts, a step of slow_saver.py takes no time."""
        (self.checkpoints / "hurry").touch()

    def saved_step(self) -> int:
        return int((self.checkpoints / "latest").read_text().rpartition("-")[2])

    def read(self, name: str) -> dict[str, Any]:
        """A file of the run directory; empty where there is none."""
        path = self.run / name
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return content

    def attempt(self, number: str) -> str:
        """Name of the job's attempt NUMBER, counted from 0 among those that began: SLURM counts as a restart, too,
        that it puts a job back whose batch script no node started."""
        begun = [path.parent.name for path in self.run.glob(f"attempts/{self.job}.*/attempt.json")]
        begun.sort(key=lambda name: int(name.rpartition(".")[2]))
        return begun[int(number)] if int(number) < len(begun) else f"{self.job}.{number}"

    def of_attempt(self, number: str, name: str) -> dict[str, Any]:
        """A file of the job's attempt NUMBER."""
        return self.read(f"attempts/{self.attempt(number)}/{name}")

    def status(self, attempt: str = "") -> dict[str, Any]:
        """status.json of the run, or of the job's attempt ATTEMPT; empty where there is none."""
        return self.of_attempt(attempt, "status.json") if attempt else self.read("status.json")

    def ranks(self, attempt: str) -> list[dict[str, Any]]:
        """The records of the ranks that have begun in the job's attempt ATTEMPT, in their order."""
        return rank_records(self.run / "attempts" / self.attempt(attempt))

    def attempts(self) -> list[str]:
        """In the order they began."""
        records = [json.loads(path.read_text()) for path in self.run.glob("attempts/*/attempt.json")]
        return [record["attempt"] for record in sorted(records, key=lambda record: record["started_at"])]

    def log(self, attempt: str = "*") -> str:
        """What the trainers printed and the scripts said, in all attempts or in the job's attempt ATTEMPT."""
        name = attempt if attempt == "*" else f"{self.attempt(attempt)}.*"
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.run.glob(f"logs/{name}")))

    def steps(self, attempt: str = "*") -> list[int]:
        return [int(step) for step in re.findall(r"^\[rank\d+\]: step (\d+)/", self.log(attempt), re.MULTILINE)]

    def times_told(self, attempt: str = "0") -> dict[int, int]:
        """How often each rank of slow_saver.py was told to save."""
        found = re.findall(r": rank (\d+) was told (\d+) times$", self.log(attempt), re.MULTILINE)
        return {int(rank): int(times) for rank, times in found}

    def phase(self) -> dict[str, Any]:
        """What `llmlaunch status` says."""
        return dict(self.person.json("status", self.run))

    def in_queue(self) -> str:
        """State and reason as squeue gives them, or why it does not answer; empty once the job has ended."""
        answer = self.person.call("squeue", "-h", "-j", self.job, "-t", IN_QUEUE, "-o", "%T %r")
        is_forgotten = "Invalid job id" in answer.stderr  # some minutes after the job's end
        return answer.stdout.strip() or ("" if is_forgotten else answer.stderr.strip())

    def wait(self, true: Callable[[Training], object], what: str, seconds: float = 480.0) -> None:
        def instead() -> str:
            return f"{self.in_queue()}\n{self.status()}\n{self.log()}"

        wait_until(lambda: bool(true(self)), what, seconds, instead)

    def wait_for_step(self, step: int, attempt: str = "*") -> None:
        self.wait(lambda it: max(it.steps(attempt), default=0) >= step, f"step {step} of attempt {attempt}")

    def wait_for_end(self, seconds: float = 480.0) -> None:
        self.wait(lambda it: it.in_queue() == "", "the job has left the queue", seconds)


_one_at_a_time = threading.Lock()


def backend(trainer: Path, *arguments: object) -> str:
    """The recipe's key for a script of one's own."""
    return f"backend={json.dumps({'name': 'deepspeed', 'script': str(trainer), 'script_args': [*map(str, arguments)]})}"


def submit(person: Person, folder: Path, *words: str, code: int = 0, **variables: str) -> Training:
    """`llmlaunch submit` of the quickstart on nodes without GPUs, to `folder`/run."""
    argv = ("submit", QUICKSTART, "cluster=cpu-x1", f"python={person.python}", *words, "-o", folder / "run")
    if "--follow" in words:
        said = person.llmlaunch(*argv, **variables)
    else:
        with _one_at_a_time:  # each takes a second of a core; side by side they would be slower
            said = person.llmlaunch(*argv, **variables)
    training = Training(person, folder / "run", said)
    assert said.returncode == code, said.stdout + said.stderr + training.log()
    return training


def train(
    person: Person, folder: Path, trainer: Path, arguments: Sequence[object], *words: str, **variables: str
) -> Training:
    """Submitted: checkpoints below `folder`/checkpoints, every other key by `words`."""
    saved = (f"training.checkpoint_path={folder / 'checkpoints'}", "training.save_interval=1000")
    return submit(person, folder, backend(trainer, *arguments), *saved, *words, **variables)


def slow_saver(
    person: Person,
    folder: Path,
    *words: str,
    steps: int,
    save_seconds: float = 0.0,
    step_seconds: float = 0.2,
    options: Sequence[object] = (),
) -> Training:
    """A trainer that saves for so long when it is told to stop."""
    arguments = ["--steps", steps, "--step-seconds", step_seconds]
    arguments += ["--save", folder / "checkpoints", "--save-seconds", save_seconds, *options]
    return train(person, folder, person.give(SLOW_SAVER), arguments, f"training.steps={steps}", *words)


def script(person: Person, folder: Path, text: str, *words: str, **variables: str) -> Training:
    """A trainer of the test's own; its argument is the folder of its checkpoints."""
    (folder / "trainer.py").write_text(text)
    steps = "training.steps=100"
    return train(person, folder, folder / "trainer.py", [folder / "checkpoints"], steps, *words, **variables)
