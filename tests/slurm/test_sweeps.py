"""Several runs handed in at once on a real SLURM: as an array, a chain, jobs of their own; each looked after alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from handmade import WAIT_FOR_GO, phases, run_directory, state
from one_machine import Cluster, wait_until
from person import Person
from training import QUICKSTART, backend

from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_files import read_submission
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from llmlaunch.launchers.slurm.site import max_array_size
from llmlaunch.launchers.sweep import How, after, refuse_array, submit_sweep, task_submission
from llmlaunch.rendering.sweep import render_sweep, run_names

pytestmark = pytest.mark.slurm


def sweep(directory: Path, how: How, bodies: Sequence[str], limit: int | None = None) -> list[Path]:
    names = run_names(["sample"] * len(bodies))

    def writer(body: str) -> Callable[[Path], None]:
        return lambda path: (run_directory(path, body) / "logs").mkdir()

    writers = {name: writer(body) for name, body in zip(names, bodies, strict=True)}
    return render_sweep(directory, "sample", how, writers, [{}] * len(bodies), limit)


def hand_in(directory: Path, how: How, bodies: Sequence[str], limit: int | None = None) -> list[Submission]:
    run_dirs = sweep(directory, how, bodies, limit)
    return submit_sweep(SlurmLauncher(), directory, run_dirs, how)


def wait_for(submissions: Sequence[Submission], *wanted: str) -> None:
    wait_until(
        lambda: phases(submissions) == list(wanted),
        f"the runs are {', '.join(wanted)}",
        instead=lambda: phases(submissions),
    )


def test_an_array_is_one_job_whose_tasks_are_separate_runs(slurm: Cluster, tmp_path: Path) -> None:
    runs = hand_in(
        tmp_path / "sweep", "array", ["finish 0", "finish 3 'rank 1 exited with 3'", WAIT_FOR_GO, "finish 0"]
    )
    (array,) = {submission.job_id.partition("_")[0] for submission in runs}
    assert [submission.job_id for submission in runs] == [f"{array}_{index}" for index in range(4)]
    wait_for(runs, "succeeded", "failed", "running", "succeeded")
    assert SlurmLauncher().states(runs)[f"{array}_1"] == JobState(
        "failed", "FAILED", "NonZeroExitCode; rank 1 exited with 3", 3
    )
    assert [read_submission(submission.run_dir) for submission in runs] == runs
    assert (runs[1].run_dir / "logs" / f"{array}_1.0.job.log").exists()
    assert (runs[1].run_dir / f"slurm-{array}_1.out").exists()  # SLURM's own words are found from the run, too
    (runs[2].run_dir / "go").touch()
    wait_for(runs, "succeeded", "failed", "succeeded", "succeeded")


def test_one_task_is_cancelled_running_or_pending_and_the_sweep_cancels_what_is_left(
    slurm: Cluster, tmp_path: Path
) -> None:
    runs = hand_in(tmp_path / "sweep", "array", [WAIT_FOR_GO] * 5, limit=2)
    wait_for(runs, "running", "running", "pending", "pending", "pending")
    SlurmLauncher().cancel(runs[0])
    SlurmLauncher().cancel(runs[4])  # the last: SLURM's number of it is that of the whole array
    wait_for(runs, "cancelled", "running", "running", "pending", "cancelled")
    array = read_submission(tmp_path / "sweep")
    assert array is not None
    assert state(array).phase == "running"
    (runs[1].run_dir / "go").touch()
    wait_for(runs, "cancelled", "succeeded", "running", "running", "cancelled")
    SlurmLauncher().cancel(array)
    wait_for(runs, "cancelled", "succeeded", "cancelled", "cancelled", "cancelled")


def test_one_task_is_requeued_and_begins_its_next_attempt(slurm: Cluster, tmp_path: Path) -> None:
    body = 'echo "$attempt" >> begun\n' + WAIT_FOR_GO
    runs = hand_in(tmp_path / "sweep", "array", [body] * 2)
    wait_for(runs, "running", "running")
    last = runs[1]
    wait_until(lambda: (last.run_dir / "begun").exists(), "it has begun")
    slurm.ask("scontrol", "requeue", last.job_id)
    wait_until(lambda: (last.run_dir / "begun").read_text().split()[1:] == [f"{last.job_id}.1"], "it has begun again")
    for submission in runs:
        (submission.run_dir / "go").touch()
    wait_for(runs, "succeeded", "succeeded")
    assert (runs[0].run_dir / "begun").read_text().split() == [f"{runs[0].job_id}.0"]


def test_tasks_of_an_interrupted_submit_are_found_through_the_array(slurm: Cluster, tmp_path: Path) -> None:
    runs = hand_in(tmp_path / "sweep", "array", ["finish 0", "finish 0"])
    (runs[1].run_dir / "submission.json").unlink()
    assert task_submission(runs[1].run_dir) == runs[1]
    assert read_submission(runs[1].run_dir) == runs[1]
    assert task_submission(run_directory(tmp_path / "alone", "finish 0")) is None


def test_an_array_longer_than_the_cluster_allows_is_refused(slurm: Cluster) -> None:
    most = max_array_size()
    assert most == 1001
    refuse_array(most, most)
    with pytest.raises(UserError, match="1002 runs, and this cluster takes arrays of 1001 tasks"):
        refuse_array(most + 1, most)


def test_a_chain_runs_in_order_and_ends_with_the_first_failure(slurm: Cluster, tmp_path: Path) -> None:
    note = "echo $attempt >> ../order\n"
    runs = hand_in(tmp_path / "sweep", "afterok", [note + WAIT_FOR_GO, note + "finish 5", note + "finish 0"])
    wait_for(runs, "running", "pending", "pending")
    assert SlurmLauncher().states(runs)[runs[1].job_id].reason == "Dependency"
    (runs[0].run_dir / "go").touch()
    wait_for(runs, "succeeded", "failed", "cancelled")
    order = (tmp_path / "sweep" / "order").read_text().split()
    assert order == [f"{submission.job_id}.0" for submission in runs[:2]]


def test_an_afterany_chain_continues_after_a_failure(slurm: Cluster, tmp_path: Path) -> None:
    wait_for(hand_in(tmp_path / "sweep", "afterany", ["finish 5", "finish 0"]), "failed", "succeeded")


def test_a_run_may_depend_on_one_task_of_an_array(slurm: Cluster, tmp_path: Path) -> None:
    runs = hand_in(tmp_path / "sweep", "array", [WAIT_FOR_GO, "finish 0"])
    later = SlurmLauncher().submit(run_directory(tmp_path / "later", "finish 0"), after(runs[0]))
    wait_for([*runs, later], "running", "succeeded", "pending")
    (runs[0].run_dir / "go").touch()
    wait_for([later], "succeeded")


def test_a_refused_run_of_a_sweep_cancels_those_before_it(slurm: Cluster, tmp_path: Path) -> None:
    run_dirs = sweep(tmp_path / "sweep", "independent", [WAIT_FOR_GO, "finish 0"])
    script = run_dirs[1] / "job.sbatch"
    script.write_text(script.read_text().replace("#SBATCH --nodes=1", "#SBATCH --nodes=100"))
    with pytest.raises(SchedulerRefused, match="the 1 before it were cancelled"):
        submit_sweep(SlurmLauncher(), tmp_path / "sweep", run_dirs, "independent")
    first = read_submission(run_dirs[0])
    assert first is not None
    wait_for([first], "cancelled")
    assert read_submission(run_dirs[1]) is None


TRAINER = """
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
what, go = os.environ["WHAT"], pathlib.Path(os.environ["GO"])
for step in range(1, 10_000):
    print(f"step {step}/10000 | loss {9 / step:.4f} | 0.20 s/step | 1969 tokens/s", flush=True)
    time.sleep(0.2)
    if told or (what == "good" and go.exists()):
        sys.exit(0)
    if what == "bad":
        sys.exit(7)
"""


def test_a_grid_is_submitted_as_an_array_and_followed_to_its_end(person: Person, tmp_path: Path) -> None:
    """Rendered runs: one succeeds, one fails, and the last is told to stop; a word to it is none to the others."""
    (tmp_path / "train.py").write_text(TRAINER)
    words = (
        *("submit", QUICKSTART, "cluster=cpu-x1", f"python={person.python}", backend(tmp_path / "train.py")),
        *("--grid", "environment.WHAT=good,bad,told", f"environment.GO={tmp_path / 'go'}"),
        *("--array", "--follow", "-o", "sweep"),
    )
    good, bad, told = (tmp_path / "sweep" / f"{index}-quickstart" for index in range(3))

    def log(run: Path) -> str:
        return "".join(path.read_text() for path in run.glob("logs/*.log"))

    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(person.llmlaunch, *words, code=1)
        wait_until(lambda: "step 3/" in log(good) and "step 3/" in log(told), "both train")
        task = read_submission(told)
        assert task is not None
        person.ask("scancel", "--batch", "--signal=TERM", task.job_id)
        wait_until((told / "status.json").exists, "it has stopped")
        (tmp_path / "go").touch()
        out, err = following.result().stdout, following.result().stderr
    assert json.loads((good / "status.json").read_text())["state"] == "succeeded"
    assert json.loads((bad / "status.json").read_text())["exit_code"] != 0
    assert "told to stop" not in log(good)
    assert "run 3 of 3" in err
    assert "environment.WHAT=bad" not in err  # values of the environment may be secrets
    name = (bad / "run.id").read_text().strip()
    assert f"{name} [{task.job_id[:-1]}1] failed" in out
    assert "of 3 runs succeeded" in out
