"""A training job of a test: rendered and submitted by llmlaunch, run by torchrun; the trainer needs no torch."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from one_machine import wait_until
from person import Person

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
    person: Person
    run: Path

    @property
    def job(self) -> str:
        return str(json.loads((self.run / "submission.json").read_text())["job_id"])

    @property
    def checkpoints(self) -> Path:
        return self.run.parent / "checkpoints"

    def saved_step(self) -> int:
        return int((self.checkpoints / "latest").read_text().rpartition("-")[2])

    def status(self, attempt: str = "") -> dict[str, Any]:
        """status.json of the run, or of attempt <job>.ATTEMPT; empty where there is none."""
        path = self.run / "attempts" / f"{self.job}.{attempt}" / "status.json" if attempt else self.run / "status.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def attempts(self) -> list[str]:
        """In the order they began."""
        records = [json.loads(path.read_text()) for path in self.run.glob("attempts/*/attempt.json")]
        return [record["attempt"] for record in sorted(records, key=lambda record: record["started_at"])]

    def log(self, attempt: str = "*") -> str:
        """What the trainers printed and the scripts said, in all attempts or in <job>.ATTEMPT."""
        name = attempt if attempt == "*" else f"{self.job}.{attempt}.*"
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.run.glob(f"logs/{name}")))

    def steps(self, attempt: str = "*") -> list[int]:
        return [int(step) for step in re.findall(r"^step (\d+)/", self.log(attempt), re.MULTILINE)]

    def phase(self) -> dict[str, Any]:
        """What `llmlaunch status` says."""
        said: dict[str, Any] = self.person.json("status", str(self.run))
        return said

    def in_queue(self) -> str:
        """State and reason as squeue tells them; empty once the job has ended."""
        return self.person.ask(
            "squeue", "-h", "-j", self.job, "-t", "pending,running,completing", "-o", "%T %r"
        ).strip()

    def wait(self, true: Callable[[Training], object], what: str, seconds: float = 240.0) -> None:
        def there() -> bool:
            return bool(true(self))

        try:
            wait_until(there, what, seconds)
        except AssertionError:
            raise AssertionError(f"in vain until {what}\n{self.in_queue()}\n{self.status()}\n{self.log()}") from None

    def wait_for_step(self, step: int, attempt: str = "*") -> None:
        self.wait(lambda it: max(it.steps(attempt), default=0) >= step, f"step {step} of attempt {attempt}")

    def wait_for_end(self, seconds: float = 240.0) -> None:
        self.wait(lambda it: it.in_queue() == "", "the job has left the queue", seconds)


_one_at_a_time = threading.Lock()


def train(person: Person, folder: Path, trainer: Path, arguments: list[str], *words: str) -> Training:
    """Submitted: checkpoints below `folder`/checkpoints, every other key by `words`."""
    own = json.dumps({"name": "deepspeed", "script": str(trainer), "script_args": arguments})
    with _one_at_a_time:  # each takes a second of a core; side by side they would be slower
        done = person.llmlaunch(
            "submit", str(QUICKSTART), "cluster=cpu-x1", f"python={person.python}", f"backend={own}",
            f"training.checkpoint_path={folder / 'checkpoints'}", "training.save_interval=1000", *words,
            "-o", str(folder / "run"),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Training(person, folder / "run")


def slow_saver(
    person: Person, folder: Path, *words: str, steps: int, save_seconds: float = 0.0, step_seconds: float = 0.2
) -> Training:
    """A trainer that saves for so long when it is told to stop."""
    arguments = ["--steps", str(steps), "--step-seconds", str(step_seconds)]
    arguments += ["--save", str(folder / "checkpoints"), "--save-seconds", str(save_seconds)]
    return train(person, folder, person.give(SLOW_SAVER), arguments, f"training.steps={steps}", *words)


def script(person: Person, folder: Path, text: str, *words: str) -> Training:
    """A trainer of the test's own; its argument is the folder of its checkpoints."""
    (folder / "trainer.py").write_text(text)
    return train(person, folder, folder / "trainer.py", [str(folder / "checkpoints")], "training.steps=100", *words)
