"""A training that hangs is noticed, explained, ended and started again; one that saves is left in peace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster, wait_until

HERE = Path(__file__).parent
QUICKSTART = HERE.parents[1] / "recipes" / "quickstart.yaml"
FLOOR_SECONDS = 5

pytestmark = pytest.mark.slurm


class Run:
    """A submitted run directory whose trainer needs no torch."""

    def __init__(self, folder: Path, trainer: str, arguments: list[str], *words: str) -> None:
        self.directory, self.checkpoints = folder / "run", folder / "checkpoints"
        own = json.dumps({"name": "deepspeed", "script": str(HERE / trainer), "script_args": arguments})
        done = subprocess.run(
            [
                sys.executable, "-m", "llmlaunch", "submit", str(QUICKSTART), "cluster=cpu-x1", f"backend={own}",
                f"python={sys.executable}", f"training.checkpoint_path={self.checkpoints}", "training.save_interval=10",
                f"watchdog={{floor_seconds: {FLOOR_SECONDS}, first_step_seconds: 300}}",
                "restart={backoff_seconds: 1}", 'slurm.time="00:10:00"', *words, "-o", str(self.directory),
            ],
            env={**os.environ, "XDG_DATA_HOME": str(folder / "data")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def attempts(self) -> list[Path]:
        return sorted((self.directory / "attempts").iterdir())

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.directory / "logs").iterdir()))

    def status(self, of: Path) -> dict[str, Any]:
        path = of / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def wait(self, holds: Callable[[], object], what: str, seconds: float = 240.0) -> None:
        try:
            wait_until(lambda: bool(holds()), what, seconds)
        except AssertionError:
            raise AssertionError(f"never {what}\n{self.log()}") from None


def test_a_hang_is_noticed_explained_and_ended_and_the_training_comes_back(slurm: Cluster, tmp_path: Path) -> None:
    run = Run(
        tmp_path, "hangs_once.py", [str(tmp_path / "checkpoints"), "30"], "nodes=2", "training.steps=30"
    )  # fmt: skip
    run.wait(lambda: run.status(run.directory).get("state") == "succeeded", "succeeded")
    first, second = run.attempts()
    hung = json.loads((first / "progress.json").read_text())["hung"]
    assert hung["what"] == "a step"
    assert hung["since_seconds"] >= hung["allowed_seconds"] >= FLOOR_SECONDS
    assert "line 19 in hangs_here" in (first / "stacks" / "1.txt").read_text()
    assert "in waits_for_the_other_ranks" in (first / "stacks" / "0.txt").read_text()
    status = run.status(first)
    assert (status["state"], status["cause"]["kind"], status["next"]["action"]) == ("failed", "hung", "requeue")
    assert "in hangs_here (hangs_once.py line 19)" in status["cause"]["line"]
    assert not (second / "stacks").exists()
    progress = json.loads((second / "progress.json").read_text())
    assert (progress["step"], progress["steps"], progress["hung"]) == (30, 30, None)
    assert json.loads((second / "attempt.json").read_text())["from_step"] == 10


def test_a_slow_save_is_no_hang_and_the_stop_file_ends_it_in_order(slurm: Cluster, tmp_path: Path) -> None:
    arguments = ["--steps", "5000", "--step-seconds", "0.2", "--save", str(tmp_path / "checkpoints")]
    arguments += ["--save-seconds", str(2 * FLOOR_SECONDS), "--save-interval", "20"]
    run = Run(tmp_path, "slow_saver.py", arguments, "training.steps=5000")
    run.wait(lambda: "step 2/5000" in run.log(), "begun")
    (attempt,) = run.attempts()
    job = attempt.name.partition(".")[0]
    slurm.ask("scancel", "--signal=USR2", job)
    slurm.ask("scancel", "--batch", "--signal=USR2", job)
    run.wait(lambda: "in pause" in (attempt / "stacks" / "0.txt").read_text(), "said where it is")
    run.wait(lambda: "step 24/5000" in run.log(), "past the first save")
    (run.directory / "stop").touch()
    run.wait(lambda: run.status(run.directory), "ended")
    assert run.attempts() == [attempt]
    status = run.status(attempt)
    saved = int(re.findall(r"saved step (\d+) after SIGTERM", run.log())[0])
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step-{saved}"
    assert (status["state"], status["next"]["action"], status["saved_step"]) == ("stopped", "end", saved)
    assert json.loads((attempt / "progress.json").read_text())["hung"] is None
