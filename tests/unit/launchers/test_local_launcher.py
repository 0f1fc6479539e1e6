"""A local run is a real, detached job: it ends as its script ended, outlives its launcher, and stops when told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.run_files import End, read_end, read_submission
from support.local_jobs import run_directory, wait_until


def state(submission: Submission) -> JobState:
    return LocalLauncher().states([submission])[submission.job_id]


def wait_for_end(submission: Submission) -> JobState:
    wait_until(lambda: state(submission).phase != "running")
    return state(submission)


def process_of(run_dir: Path, name: str) -> psutil.Process:
    """The process whose id the job wrote into the file `name`."""
    wait_until(lambda: (run_dir / name).is_file() and bool((run_dir / name).read_text().strip()))
    return psutil.Process(int((run_dir / name).read_text()))


def submit(tmp_path: Path, body: str) -> Submission:
    return LocalLauncher().submit(run_directory(tmp_path / "run", body))


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_success(tmp_path: Path) -> None:
    submission = submit(tmp_path, "echo to the terminal\necho training > $log\nfinish 0 'all done'")
    assert wait_for_end(submission) == JobState("succeeded", reason="all done", exit_code=0)
    assert read_submission(tmp_path / "run") == submission
    assert (tmp_path / "run" / "run.id").read_text().startswith("sample-")
    assert (tmp_path / "run" / "logs" / f"{submission.job_id}.out").read_text() == "to the terminal\n"


NO_LAST_WORD = "its process is gone and left no status.json: killed, or the machine restarted"


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("finish 9 'rank 1 exited with 9'", JobState("failed", reason="rank 1 exited with 9", exit_code=9)),
        ("exit 0", JobState("failed", reason=NO_LAST_WORD)),  # exit code 0 alone is no success
        ("kill -9 $$", JobState("failed", reason=NO_LAST_WORD)),
        # inside an allocation the job is still a local one
        ('finish 0 "job ${SLURM_JOB_ID:-none}"', JobState("succeeded", reason="job none", exit_code=0)),
    ],
)
def test_an_end_is_the_script_s_own_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, state: JobState
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert wait_for_end(submit(tmp_path, body)) == state


def test_outlives_the_launcher_and_its_terminal(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "until [ -e go ]; do sleep 0.05; done\nfinish 0")
    code = (
        "import sys, time, pathlib\n"
        "from llmlaunch.launchers.local import LocalLauncher\n"
        "LocalLauncher().submit(pathlib.Path(sys.argv[1]))\n"
        "print('submitted', flush=True)\n"
        "time.sleep(60)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, run_dir], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "submitted\n"
    os.killpg(launcher.pid, signal.SIGHUP)  # what a closing terminal sends to all that runs in it
    assert launcher.wait() == -signal.SIGHUP
    launcher.stdout.close()
    submission = read_submission(run_dir)
    assert submission is not None
    assert state(submission).phase == "running"
    (run_dir / "go").touch()
    assert wait_for_end(submission).phase == "succeeded"


def test_cancel_tells_the_script_alone_which_puts_things_in_order_and_its_children_hear_it_once(tmp_path: Path) -> None:
    child = "trap 'echo TERM >> heard; sleep 0.5; exit 0' TERM; echo $$ > pid; while :; do sleep 0.05; done"
    body = f"bash -c {child!r} &\ntrap 'kill -TERM $!' TERM\nwait $!\nwait $!\nfinish 143"
    submission = submit(tmp_path, body)
    process_of(submission.run_dir, "pid")
    LocalLauncher().cancel(submission)
    assert (submission.run_dir / "heard").read_text() == "TERM\n"
    assert read_end(submission) == End("failed", 143, ""), "it could put things in order"
    assert state(submission).phase == "cancelled"


def test_cancel_kills_what_does_not_listen_in_whatever_session(tmp_path: Path) -> None:
    deaf = "trap '' TERM; echo $$ > {name}; while :; do sleep 0.05; done"
    body = f"bash -c {deaf.format(name='child')!r} &\nsetsid bash -c {deaf.format(name='stray')!r} &\nwait"
    submission = submit(tmp_path, body)
    child, stray = (process_of(submission.run_dir, name) for name in ("child", "stray"))
    LocalLauncher(kill_after_seconds=1.0).cancel(submission)
    wait_until(lambda: gone(child) and gone(stray))
    assert state(submission).phase == "cancelled"


def test_cancel_leaves_an_ended_job_and_strangers_alone(tmp_path: Path) -> None:
    submission = submit(tmp_path, "finish 0")
    wait_for_end(submission)
    assert LocalLauncher().cancel(submission) is False
    assert state(submission).phase == "succeeded"
    # The same process id, started at another time: someone else's.
    stranger = subprocess.Popen(["sleep", "600"])
    reused = replace(submission, job_id=f"local-{int(submission.submitted_at) - 1000}-{stranger.pid}")
    LocalLauncher().cancel(reused)
    assert stranger.poll() is None
    assert state(reused).phase == "failed"
    stranger.kill()
    stranger.wait()


def test_of_another_host_s_job_only_the_end_is_known(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "finish 0")
    elsewhere = Submission("local", "local-1700000000-1", run_dir, 1700000000.0, "login7")
    assert state(elsewhere).phase == "unknown"
    with pytest.raises(UserError, match="cancel it there"):
        LocalLauncher().cancel(elsewhere)
    record = {"attempt": "local-1700000000-1.0", "state": "succeeded", "exit_code": 0, "why": ""}
    (run_dir / "status.json").write_text(json.dumps(record))
    assert state(elsewhere).phase == "succeeded"


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [(4, (), "nodes is 4, and this machine is one"), (1, ("--partition=gpu",), "options of sbatch")],
)
def test_what_this_machine_cannot_do_is_refused(
    tmp_path: Path, nodes: int, options: tuple[str, ...], message: str
) -> None:
    run_dir = run_directory(tmp_path / "run", "finish 0", nodes=nodes)
    with pytest.raises(UserError, match=message):
        LocalLauncher().submit(run_dir, options)
    assert sorted(path.name for path in run_dir.iterdir()) == ["job.sbatch", "run.json"]
