"""Following on a real SLURM: from the queue's reason to the cause, and on without the terminal it was started in."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from handmade import Output, run_directory, state, submit
from one_machine import Cluster, wait_until
from person import Person
from training import QUICKSTART, backend

from llmlaunch.launchers.run_files import read_submission
from llmlaunch.watch.follow import follow
from llmlaunch.watch.screen import Screen
from support.command_line import data_folders

pytestmark = pytest.mark.slurm

STEPS = 'for i in 1 2 3; do echo "step $i/3 | loss 2.5000 | 0.10 s/step | 100 tokens/s"; sleep 0.1; done\n'
TRAINER = """
import os, pathlib, sys, time
go = pathlib.Path(os.environ["GO"])
for step in range(1, 10_000):
    print(f"step {step}/10000 | loss {9 / step:.4f} | 0.20 s/step | 1969 tokens/s", flush=True)
    time.sleep(0.2)
    if go.exists():
        sys.exit(0)
"""


def test_follow_shows_a_job_from_the_queue_to_its_last_step(slurm: Cluster, tmp_path: Path) -> None:
    """Behind a job of ten minutes SLURM knows when the next one starts."""
    blocker = slurm.ask(
        "sbatch", "--parsable", "--nodes=11", "--exclusive", "--time=10", "--output=/dev/null", "--wrap", "sleep 600"
    ).strip()
    wait_until(lambda: slurm.ask("squeue", "-h", "-j", blocker, "-o", "%T") == "RUNNING\n", "the nodes are taken")
    submission = submit(run_directory(tmp_path / "run", STEPS + "finish 0"), "--time=5")

    def hear(text: str) -> None:
        if "expects it to start" in text:
            slurm.ask("scancel", blocker)

    said = Output(hear)
    end = follow(submission, Screen(said), poll_seconds=0.5)
    assert end.phase == "succeeded"
    lines = said.getvalue().splitlines()
    waiting = [line for line in lines if "is waiting" in line]
    assert re.search(r"SLURM expects it to start at \d{4}-\d\d-\d\d \d\d:\d\d, in (\d+ min|\d+ s)$", waiting[-1])
    steps = [line for line in lines if line.startswith("step")]
    assert steps[0] == "step 1/3 | loss 2.5000 | 0.1 s/step | 100 tokens/s | 0 s left"
    assert [line.split()[1] for line in steps] == ["1/3", "2/3", "3/3"]
    assert any(line.startswith(f"Attempt 1 ({submission.job_id}.0) begins") for line in lines)


def test_status_watch_shows_the_pending_reason_then_every_step(slurm: Cluster, tmp_path: Path) -> None:
    submission = submit(run_directory(tmp_path / "run", STEPS + "finish 0"), "--hold")
    looking = subprocess.Popen(
        [sys.executable, "-m", "llmlaunch", "status", "--watch", "--interval", "0.3", str(submission.run_dir)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert looking.stdout is not None
    assert "pending: JobHeldUser" in looking.stdout.readline()
    slurm.ask("scontrol", "release", submission.job_id)
    rest, _ = looking.communicate(timeout=300)
    assert looking.returncode == 0
    assert re.search(r" step 3/3 \| loss 2\.5000 \| 0\.1 s/step \| 100 tokens/s", rest)
    ended = next(i for i, line in enumerate(rest.splitlines()) if line.endswith(f"[{submission.job_id}] succeeded"))
    summary = rest.splitlines()[ended + 1 :]
    assert summary[1].startswith("The run succeeded")
    assert summary[2].startswith("Steps: ")
    assert any(line.startswith("Next: llmlaunch report ") for line in summary)


class Terminal:
    """llmlaunch in a terminal of its own, which can be closed."""

    def __init__(self, person: Person, *words: str | Path) -> None:
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.chdir(person.home)
            argv = [sys.executable, "-m", "llmlaunch", *map(str, words)]
            os.execve(sys.executable, argv, {**os.environ, **data_folders(person.home), "COLUMNS": "150"})
        self.text = ""

    def read_until(self, words: str, seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"waited in vain for {words!r} in {self.text[-2000:]!r}"
            if select.select([self.screen], [], [], 1.0)[0]:
                self.text += os.read(self.screen, 4096).decode(errors="replace")

    def close(self) -> None:
        """As when the connection breaks: SIGHUP to the programs in it, and every word to it fails."""
        os.close(self.screen)

    def ended(self) -> bool:
        pid, self.code = os.waitpid(self.pid, os.WNOHANG)
        return pid != 0


def test_closing_the_terminal_ends_neither_the_job_nor_its_recording(person: Person, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    own = (f"python={person.python}", f"environment.GO={tmp_path / 'go'}", backend(tmp_path / "train.py"))
    follower = Terminal(person, "submit", QUICKSTART, "cluster=cpu-x1", *own, "-o", "run", "--follow")
    follower.read_until("\r\x1b[2Kstep ")  # in place: a step takes the place of the one before
    watcher = Terminal(person, "logs", "run", "--follow")
    watcher.read_until("step ")
    follower.close()
    watcher.close()
    wait_until(watcher.ended, "who only looks has gone")
    submission = read_submission(tmp_path / "run")
    assert submission is not None
    assert state(submission).phase == "running"
    assert not follower.ended()
    (tmp_path / "go").touch()
    wait_until(follower.ended, "who follows has seen the end")
    assert os.waitstatus_to_exitcode(follower.code) == 0
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "succeeded"
    (record,) = [record for record in person.measurements() if record["peak_kind"] == "resident"]
    assert record["run_state"] == "succeeded"
