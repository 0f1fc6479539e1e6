"""`--on HOST`: typed on a laptop, run on a cluster behind ssh. A real sshd in front of the real SLURM."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from laptop import Laptop, LoginNode, laptop, login_node
from one_machine import wait_until
from person import SOURCES, Person
from training import QUICKSTART, backend

from support.side_by_side import side_by_side

pytestmark = pytest.mark.slurm

TRAINER = """
import os, time
from pathlib import Path
for step in range(1, 4):
    print(f"step {step}/3 | loss {9 / step:.4f} | 0.20 s/step | 1969 tokens/s", flush=True)
    time.sleep(0.4)
while "GO" in os.environ and not Path(os.environ["GO"]).exists():
    time.sleep(0.1)
"""


def submission(away: Laptop, *words: str) -> list[str]:
    """The words that submit a recipe of the laptop's, with the trainer beside it, once both are written."""
    folder = away.person.home
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "train.py").write_text(TRAINER)
    (folder / "it's mine.yaml").write_text(QUICKSTART.read_text())
    keys = ("cluster=cpu-x1", f"python={away.person.python}", "training.steps=3")
    return ["submit", "it's mine.yaml", *keys, backend(Path("code/train.py")), *words]


def from_the_recipe_here_to_the_peaks_there(node: LoginNode, away: Laptop) -> None:
    said = away(*submission(away, "-o", "runs/first", "--follow"))
    folder = node.work(away.person.home)
    assert f"Sending 2 files to login:llmlaunch-work/{away.person.home.name}" in said.stderr
    assert (folder / "code" / "train.py").read_text() == TRAINER
    assert [line.split()[1] for line in said.stdout.splitlines() if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    assert "The run succeeded" in said.stdout
    assert "Welcome to the cluster" not in said.stdout + said.stderr
    assert not (away.person.home / "runs").exists()
    state = json.loads(away("status", "runs/first", "--json").stdout)
    assert [state[name] for name in ("phase", "run_dir")] == ["succeeded", str(folder / "runs" / "first")]
    assert "step 3/3" in away("logs", "last").stdout
    (run,) = json.loads(away("runs", "--json").stdout)["runs"]
    assert run["job_id"] == state["job_id"]
    away("report", "last", "--html", "page.html")
    assert "<html" in (away.person.home / "page.html").read_text()
    assert "is succeeded" not in away("resume", "last", code=2).stderr


def ctrl_c_reaches_what_runs_there(node: LoginNode, away: Laptop) -> None:
    go = away.person.home / "go"
    away(*submission(away, f"environment.GO={go}"))
    argv = [sys.executable, "-m", "llmlaunch", "logs", "--on", "login", "last", "--follow"]
    with followed(away, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        lines = iter(follower.stdout.readline, b"")
        assert any(line.startswith(b"step 3/3") for line in lines)
        follower.send_signal(signal.SIGINT)
        rest, _ = follower.communicate(timeout=60)
    assert b"Stopped following" in rest
    assert follower.returncode == 0
    assert json.loads(away("status", "last", "--json").stdout)["phase"] == "running"
    assert "Cancelling job" in away("cancel", "last").stderr
    wait_until(lambda: "cancelled" in away("status", "last").stdout, "it is cancelled")


def followed(away: Laptop, argv: list[str], **streams: int) -> subprocess.Popen[bytes]:
    home = away.person.home
    environment = {**os.environ, **away.variables, "HOME": str(home), "PYTHONPATH": str(SOURCES)}
    return subprocess.Popen(argv, cwd=home, env=environment, **streams)


def a_terminal_there_is_as_wide_as_the_one_here(node: LoginNode, away: Laptop) -> None:
    (node.home / "bin" / "llmlaunch").write_text("#!/bin/sh\nstty size; test -t 0 -a -t 1 -a -t 2; exit $?\n")
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "rows", "33", "cols", "71"], stdin=theirs, check=True)
    argv = [sys.executable, "-m", "llmlaunch", "status", "--on", "login"]
    with followed(away, argv, stdin=theirs, stdout=theirs, stderr=theirs) as shown:
        os.close(theirs)
        assert shown.wait(60) == 0
    assert os.read(ours, 1 << 16) == b"33 71\r\n"
    os.close(ours)


def a_host_that_is_down_or_lacks_llmlaunch_is_one_message(node: LoginNode, away: Laptop) -> None:
    (node.home / "bin" / "llmlaunch").unlink()
    for words in (["status"], submission(away)):
        assert "error: login: llmlaunch is not on the PATH of a login shell there" in away(*words, code=2).stderr
    node.down()
    away.person.call("ssh", "-O", "exit", "login", **away.variables)
    said = away("status", code=2).stderr
    assert "Connection refused" in said
    assert "error: login is not reached, or the connection was lost; try again when `ssh login true` works" in said


def told(story: Callable[[LoginNode, Laptop], None], person: Person) -> None:
    """Someone with a laptop and a login node of their own."""
    with login_node(person.cluster) as node:
        story(node, laptop(node, person.home / "me"))


test_from_a_laptop = side_by_side(
    from_the_recipe_here_to_the_peaks_there,
    ctrl_c_reaches_what_runs_there,
    a_terminal_there_is_as_wide_as_the_one_here,
    a_host_that_is_down_or_lacks_llmlaunch_is_one_message,
    tell=told,
)
