"""`--on HOST`: planned on a laptop, run on a cluster behind ssh. A real sshd in front of the real SLURM."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from laptop import CUT, CUT_OF_A_CHILD, NAME, Laptop, LoginNode, laptop, login_node
from one_machine import Cluster, wait_until
from person import Person
from training import QUICKSTART, backend

from support.side_by_side import Story, by_name

pytestmark = pytest.mark.slurm

REAL, TAR = shutil.which("sbatch"), shutil.which("tar")

TRAINER = """
import os, time
from pathlib import Path
for step in range(1, 4):
    print(f"step {step}/3 | loss {9 / step:.4f} | 0.20 s/step | 1969 tokens/s", flush=True)
    time.sleep(0.4)
while "GO" in os.environ and not Path(os.environ["GO"]).exists():
    time.sleep(0.1)
"""


def submission(away: Laptop, folder: Path, *words: str) -> list[Any]:
    """The words that submit the trainer in `folder` from a laptop."""
    code = folder / "code"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text(TRAINER)
    keys = ("cluster=cpu-x1", f"python={away.person.python}", "training.steps=3")
    return ["submit", QUICKSTART, *keys, backend(code / "train.py"), *words, "--on", NAME, "-o", folder / "run"]


def jobs_in(cluster: Cluster, directory: Path) -> list[str]:
    """Every job that works in the directory, ended ones too, by id."""
    rows = [row.split(" ", 1) for row in cluster.ask("squeue", "-h", "-t", "all", "-o", "%F %Z").splitlines()]
    return sorted((job for job, folder in rows if folder == str(directory)), key=int)


def lives_in(run: Path) -> Path:
    return Path(json.loads((run / "host.json").read_text())["directory"])


def from_the_recipe_here_to_the_peaks_here(node: LoginNode, away: Laptop, folder: Path) -> None:
    run, once = folder / "run", folder / "once"
    node.put(  # the connection over which the files come is lost once
        python3=f'case "$*" in *stdin*) [ -n "$SLURM_JOB_ID" ] || [ -e {once} ] || {{ touch {once}; '
        f'(sleep 1; {CUT}) & }};; esac\nexec {shutil.which("python3")} "$@"'
    )
    said = away(*submission(away, folder), "--follow")
    node.put(python3="")
    assert once.exists()
    directory = lives_in(run)
    assert directory == node.run_directory((run / "run.id").read_text().strip())
    assert f"Submitting to SLURM on {NAME}" in said.stderr
    assert f"The run will live in {NAME}:{directory}" in said.stderr
    assert [line.split()[1] for line in said.stdout.splitlines() if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    assert "The run succeeded" in said.stdout
    (job,) = jobs_in(node.cluster, directory)
    assert json.loads((directory / "submission.json").read_text())["job_id"] == job
    assert (directory / "code" / "train.py").read_text() == TRAINER
    (record,) = [each for each in away.person.measurements() if each["peak_kind"] == "resident"]
    assert record["run_state"] == "succeeded"
    assert record["peak_bytes"] > 1 << 20
    assert "step 3/3" in away("logs", run).stdout
    state = json.loads(away("status", run, "--json").stdout)
    assert [state[name] for name in ("job_id", "phase", "host")] == [job, "succeeded", NAME]


def a_connection_that_is_cut_submits_nothing_twice(node: LoginNode, away: Laptop, folder: Path) -> None:
    run, words = folder / "run", submission(away, folder, f"environment.GO={folder / 'go'}")
    node.put(tar=f'head -c 9000 | cat - >{folder}/part; {CUT_OF_A_CHILD}; exec {TAR} "$@" <{folder}/part')
    cut = away(*words, code=2).stderr
    assert "login is not reached: the connection was lost" in cut
    assert f"Nothing was submitted; the run directory is kept, and llmlaunch resume {run} sends it again" in cut
    directory = lives_in(run)
    assert not directory.exists()
    state = json.loads(away("status", run, "--json").stdout)
    assert [state[name] for name in ("job_id", "phase", "host")] == ["-", "refused", NAME]
    node.put(tar="", sbatch=f'case "$*" in *--parsable*) {REAL} "$@" >/dev/null; {CUT};; *) exec {REAL} "$@";; esac')
    said = away("resume", run).stderr
    assert "looking for a job of" in said
    (job,) = jobs_in(node.cluster, directory)
    assert f"job {job} in {run}" in said
    node.put(sbatch="")
    assert f"its job {job} is " in away("resume", run, code=2).stderr
    assert f"already submitted as slurm job {job}" in away(*words, code=2).stderr
    assert f"Cancelling job {job}" in away("cancel", run).stderr
    wait_until(lambda: "cancelled" in away("status", run).stdout, "it is cancelled")
    assert jobs_in(node.cluster, directory) == [job]


def a_laptop_that_is_closed_while_sbatch_answers_finds_its_job(node: LoginNode, away: Laptop, folder: Path) -> None:
    run, asked = folder / "run", folder / "asked"
    node.put(sbatch=f'case "$*" in *--parsable*) {REAL} "$@" >/dev/null; touch {asked}; sleep 600;; esac')
    closed = threading.Thread(target=away, args=submission(away, folder), kwargs={"code": -signal.SIGKILL})
    closed.start()
    wait_until(asked.exists, "SLURM has taken the job")
    (me,) = [each for each in psutil.process_iter(["cmdline"]) if str(run) in (each.info["cmdline"] or [])]
    me.kill()
    closed.join()
    node.put(sbatch="")
    directory = lives_in(run)
    (job,) = jobs_in(node.cluster, directory)
    assert f"job {job} of {run} was found" in away("status", run).stderr
    assert json.loads((run / "submission.json").read_text())["job_id"] == job
    assert jobs_in(node.cluster, directory) == [job]


def a_host_that_is_down_is_one_message(node: LoginNode, away: Laptop, folder: Path) -> None:
    away(*submission(away, folder, "slurm.hold=true"))
    config = folder / "config"
    config.write_text(node.config.read_text().replace(str(node.port), "1"))  # nobody listens at port 1
    cut_off = laptop(node, folder / "me", config)
    message = "login is not reached: ssh: connect to host 127.0.0.1 port 1: Connection refused; try again when"
    assert message in cut_off("status", folder / "run", code=2).stderr
    (folder / "other").mkdir()
    assert message in cut_off(*submission(away, folder / "other"), code=2).stderr
    assert not (folder / "other" / "run").exists()
    listed = cut_off("runs")
    assert message in listed.stderr
    assert "submitted" in listed.stdout or "unknown" in listed.stdout


def told(story: Callable[[LoginNode, Laptop, Path], None], person: Person) -> None:
    """Someone with a laptop and a login node of their own."""
    with login_node(person.cluster) as node:
        story(node, laptop(node, person.home / "me"), person.home)


STORIES = by_name(
    from_the_recipe_here_to_the_peaks_here,
    a_connection_that_is_cut_submits_nothing_twice,
    a_laptop_that_is_closed_while_sbatch_answers_finds_its_job,
    a_host_that_is_down_is_one_message,
)


@pytest.mark.parametrize("story", [partial(told, story) for story in STORIES.values()], ids=STORIES)
def test_from_a_laptop(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, story: Story) -> None:
    stories[request.node.nodeid].result()
