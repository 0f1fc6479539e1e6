"""Nothing is submitted twice, whatever happens to `submit` or to SLURM; what was not submitted can be, later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from handmade import WAIT_FOR_GO, jobs_of, run_directory, state, submit, wait_for, write_submission
from one_machine import Cluster, wait_until

from llmlaunch.errors import SchedulerRefused
from llmlaunch.launchers import submit_mark
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_files import read_submission
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from support.command_line import CommandLine, run_llmlaunch

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = (
    "import sys, pathlib\n"
    "from llmlaunch.launchers.slurm.launcher import SlurmLauncher\n"
    "SlurmLauncher().submit(pathlib.Path(sys.argv[1]))\n"
)
STOPPED = (
    'printf \'{"schema": 1, "attempt": "%s", "state": "stopped", "exit_code": 75, "why": "told"}\' "$attempt"'
    ' > "attempts/$attempt/status.json"; cp "attempts/$attempt/status.json" status.json; exit 75'
)


def submission_of(run_dir: Path) -> Submission:
    submission = read_submission(run_dir)
    assert submission is not None
    return submission


def path_with(folder: Path, **programs: str) -> str:
    """PATH with these shell scripts before all others."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def killed_submit(run_dir: Path, tmp_path: Path, sbatch: str) -> None:
    """A submit whose sbatch is the shell script `sbatch`, in which $PPID is the submit."""
    environment = {**os.environ, "PATH": path_with(tmp_path / "bin", sbatch=sbatch)}
    done = subprocess.run([sys.executable, "-c", SUBMIT, run_dir], env=environment, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


REAL = shutil.which("sbatch")
TAKES_IT = f'{REAL} "$@" >/dev/null; kill -9 $PPID'


@pytest.mark.parametrize("command", ["status", "resume"])
def test_after_a_submit_killed_behind_sbatch_the_job_is_found(
    slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path, command: str
) -> None:
    run_dir = run_directory(tmp_path / "run", WAIT_FOR_GO)
    (run_dir / "job.sbatch").write_text(
        (run_dir / "job.sbatch").read_text().replace("#SBATCH", '#SBATCH --comment="project: ours"\n#SBATCH', 1)
    )
    killed_submit(run_dir, tmp_path, TAKES_IT)
    assert read_submission(run_dir) is None
    (job,) = jobs_of(slurm, run_dir)
    # Somebody's own job in the same directory is not taken for it.
    slurm.ask("sbatch", "--hold", f"--chdir={run_dir}", "--output=/dev/null", "--wrap=true")
    assert job in llmlaunch(command, run_dir).stderr
    submission = submission_of(run_dir)
    assert submission.jobs == (job,)
    assert not (run_dir / "submitting").exists()
    assert jobs_of(slurm, run_dir)[0] == job
    assert len(jobs_of(slurm, run_dir)) == 2
    comment = slurm.ask("squeue", "-h", "-j", job, "-o", "%k").strip()
    assert comment == f"project: ours llmlaunch={(run_dir / 'run.id').read_text().strip()}"
    (run_dir / "go").touch()
    wait_for(submission, "succeeded")


def test_a_job_started_by_hand_is_shown_from_the_queue_to_its_end(
    slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path
) -> None:
    run_dir = run_directory(tmp_path / "run", WAIT_FOR_GO)
    (run_dir / "logs").mkdir()
    script = (run_dir / "job.sbatch").read_text()
    (run_dir / "job.sbatch").write_text(script.replace("mkdir", "cd run\nmkdir", 1))  # sbatch is typed above it
    job = slurm.ask("sbatch", "--parsable", "--hold", "run/job.sbatch", cwd=tmp_path).strip()
    status = llmlaunch.json("status", run_dir)
    assert (status["phase"], status["job_id"]) == ("pending", job)
    assert f"its job {job} is pending" in llmlaunch("resume", run_dir, code=2).stderr
    slurm.ask("scontrol", "release", job)
    wait_until(lambda: llmlaunch.json("status", run_dir)["phase"] == "running", "it runs")
    assert f"its job {job} is running" in llmlaunch("resume", run_dir, code=2).stderr
    (run_dir / "go").touch()
    wait_until((run_dir / "status.json").exists, "the job has ended")
    assert llmlaunch.json("status", run_dir)["phase"] == "succeeded"
    assert not (run_dir / "submission.json").exists()


def test_after_a_submit_killed_before_sbatch_resume_submits_once(
    slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path
) -> None:
    run_dir = run_directory(tmp_path / "run", WAIT_FOR_GO)
    killed_submit(run_dir, tmp_path, "kill -9 $PPID")
    assert read_submission(run_dir) is None
    interrupted = llmlaunch("status", run_dir, code=2).stderr
    assert "its submit was interrupted, and SLURM shows no job of it" in interrupted
    llmlaunch("resume", run_dir)
    (job,) = jobs_of(slurm, run_dir)
    assert f"its job {job} is " in llmlaunch("resume", run_dir, code=2).stderr
    assert jobs_of(slurm, run_dir) == [job]


def test_resume_submits_again_and_keeps_the_earlier_jobs(
    slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path
) -> None:
    run_dir = run_directory(tmp_path / "run", f"[ -e go ] || {{ {STOPPED}; }}\nfinish 0")
    llmlaunch("resume", run_dir)  # never submitted before
    first = submission_of(run_dir)
    assert wait_for(first, "stopped") == JobState("stopped", "FAILED", "told", 75)
    (run_dir / "go").touch()
    (run_dir / "stop").touch()
    answer = llmlaunch("resume", run_dir, "--json", "--", "--job-name=again")
    assert "Removed the stop file" in answer.stderr
    assert json.loads(answer.stdout)["earlier"] == [first.job_id]
    assert not (run_dir / "stop").exists()
    second = submission_of(run_dir)
    assert second.earlier == (first,)
    assert slurm.ask("squeue", "-h", "-t", "all", "-j", second.job_id, "-o", "%j") == "again\n"
    wait_for(second, "succeeded")
    assert not second.owns(f"{first.job_id}.0")
    assert second.owns(f"{second.job_id}.0")
    assert "succeeded, so nothing is left to do" in llmlaunch("resume", run_dir, code=2).stderr


def test_a_job_of_unknown_fate_is_resumed_only_with_anyway(
    slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path
) -> None:
    run_dir = run_directory(tmp_path / "run", "finish 0")
    write_submission(run_dir, "4000000")
    assert "nobody knows whether its job 4000000 has ended" in llmlaunch("resume", run_dir, code=2).stderr
    llmlaunch("resume", run_dir, "--anyway")


def chained(path: Path, body: str, times: int) -> Path:
    run_dir = run_directory(path, body)
    restart = {"by": "chain", "times": times, "fruitless": 2, "backoff_seconds": 0}
    (run_dir / "run.json").write_text(json.dumps({"schema": 1, "name": "sample", "nodes": 1, "restart": restart}))
    return run_dir


def test_a_chain_continues_in_its_next_job(slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path) -> None:
    run_dir = chained(tmp_path / "run", f"ls attempts | grep -q -v $attempt || {{ {STOPPED}; }}\n{WAIT_FOR_GO}", 2)
    submission = submit(run_dir)
    assert len(submission.jobs) == 3
    assert submission.job_id == submission.jobs[0]
    assert read_submission(run_dir) == submission

    def reached() -> tuple[str, int]:
        now = state(submission)  # asked once: between two questions the first link may end
        return now.phase, now.link

    wait_until(lambda: reached() == ("running", 2), "the second link runs")
    shown = slurm.ask("squeue", "-h", "-j", submission.jobs[2], "-o", "%E")
    assert shown.startswith(f"afterany:{submission.jobs[1]}")
    assert f"job {submission.jobs[1]} (slurm): running [RUNNING] - link 2 of 3" in llmlaunch("status", run_dir).stdout
    (run_dir / "go").touch()
    assert wait_for(submission, "succeeded").link >= 2  # the third ends at once; whichever is looked at
    llmlaunch("cancel", run_dir)


def test_cancel_ends_every_job_of_a_chain(slurm: Cluster, tmp_path: Path) -> None:
    submission = submit(chained(tmp_path / "run", WAIT_FOR_GO, 20))
    assert len(submission.jobs) == 9  # eight follow-up jobs at most
    wait_for(submission, "running")
    SlurmLauncher().cancel(submission)
    listed = ",".join(submission.jobs)
    wait_until(
        lambda: set(slurm.ask("squeue", "-h", "-t", "all", "-j", listed, "-o", "%T").split()) == {"CANCELLED"},
        "all are cancelled",
    )


def test_resume_completes_a_partly_submitted_chain(slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path) -> None:
    run_dir = chained(tmp_path / "run", WAIT_FOR_GO, 2)
    killed_submit(run_dir, tmp_path, f'case "$*" in *--dependency*) kill -9 $PPID;; *) {REAL} "$@";; esac')
    first = submission_of(run_dir)
    assert len(first.jobs) == 1
    llmlaunch("resume", run_dir)
    whole = submission_of(run_dir)
    assert whole.jobs[0] == first.job_id
    assert whole.jobs == tuple(jobs_of(slurm, run_dir))
    assert len(whole.jobs) == 3
    assert whole.earlier == ()


def test_the_status_of_200_runs_is_one_question(
    slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run_directory(tmp_path / "run", "finish 0") / "job.sbatch"
    lines = "\n".join(f"sbatch --parsable --hold --job-name=r{i} {script}" for i in range(200))
    ids = slurm.ask("sh", "-c", lines, cwd=tmp_path / "run").split()
    run_dirs = [tmp_path / f"run{job}" for job in ids]
    for job, run_dir in zip(ids, run_dirs, strict=True):
        run_dir.mkdir()
        write_submission(run_dir, job, submitted_at=1.9e9)
    calls = tmp_path / "calls"
    noted = f'echo {{0}} "$@" | cut -c 1-20 >> {calls}\nexec {{1}} "$@"'
    programs = {name: noted.format(name, shutil.which(name)) for name in ("squeue", "sacct")}
    monkeypatch.setenv("PATH", path_with(tmp_path / "bin", **programs))
    runs = llmlaunch.json("status", *run_dirs)["runs"]
    assert [run["job_id"] for run in runs] == ids
    assert {(run["phase"], run["reason"]) for run in runs} == {("pending", "JobHeldUser")}
    asked = [line.split()[0] for line in calls.read_text().splitlines() if "sacct -c" not in line]
    assert sorted(asked) == ["sacct", "squeue"]


def test_test_only_quotes_sbatch_and_submits_nothing(slurm: Cluster, tmp_path: Path) -> None:
    script = (run_directory(tmp_path / "run", "finish 0") / "job.sbatch").read_text()
    before = slurm.ask("squeue", "-h", "-t", "all", "-o", "%F")
    would, words = SlurmLauncher().test(script)
    assert would
    assert "to start at" in words
    would, words = SlurmLauncher().test(script, ["--partition=nope"])
    assert not would
    assert "invalid partition specified: nope" in words
    assert slurm.ask("squeue", "-h", "-t", "all", "-o", "%F") == before


def test_a_refused_run_is_resumed_as_one_job(slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "llama3-8b.yaml"
    run_dir = tmp_path / "run"
    own = ("submit", recipe, "nodes=2", "backend.path=/no-such-file-system/Megatron-LM")
    tried = llmlaunch(*own, "slurm.partition=nope", "--test-only", code=4).stderr
    assert "sbatch: invalid partition specified: nope" in tried
    assert "Name a partition that you may use (slurm: {partition: NAME}" in tried
    assert "EnforcePartLimits" in tried
    refused = llmlaunch(*own, "slurm.partition=nope", "-o", run_dir, code=4).stderr
    assert f"submit it later: llmlaunch resume {run_dir}" in refused
    state = llmlaunch.json("status", run_dir)
    assert (state["phase"], state["job_id"]) == ("refused", "-")
    assert "invalid partition specified: nope" in state["reason"]
    assert f"llmlaunch resume {run_dir} submits it again" in state["reason"]
    (listed,) = llmlaunch.json("runs", "--state", "refused")["runs"]
    assert "invalid partition specified: nope" in listed["why"]
    again = llmlaunch(*own, "-o", run_dir, code=2).stderr
    assert f"rendered before, and not submitted; llmlaunch resume {run_dir} submits it as it is" in again
    assert jobs_of(slurm, run_dir) == []
    llmlaunch("resume", run_dir, "--", "--partition=train", "--hold")
    (job,) = jobs_of(slurm, run_dir)
    assert llmlaunch.json("status", run_dir)["phase"] == "pending"
    assert llmlaunch.json("runs", "--state", "refused")["runs"] == []
    assert f"already submitted as slurm job {job}" in llmlaunch(*own, "-o", run_dir, code=2).stderr
    assert job in llmlaunch("status").stdout  # all that have not ended, by the store
    # As if that submit had been killed before it wrote the job down.
    (run_dir / "submission.json").unlink()
    mark = {"since": (run_dir / "run.id").stat().st_mtime, "host": os.uname().nodename, "pid": 0, "started": 0}
    (run_dir / "submitting").write_text(json.dumps(mark | {"touched_at": 0}))
    assert f"job {job} in {run_dir}: nothing was submitted again" in llmlaunch(*own, "-o", run_dir).stderr
    assert jobs_of(slurm, run_dir) == [job]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 64 KiB, as root; else a folder in which no file may grow (RLIMIT_FSIZE)."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    yield path
    if mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_on_a_full_disk_nothing_is_submitted(slurm: Cluster, small_disk: Path) -> None:
    run_dir = run_directory(small_disk / "run", "finish 0")
    argv = [sys.executable, "-m", "llmlaunch", "resume", str(run_dir)]
    if os.path.ismount(small_disk):
        subprocess.run(["sh", "-c", f"cat /dev/zero > {small_disk / 'rest'}"], check=False, capture_output=True)
    else:
        argv = ["prlimit", "--fsize=0", *argv]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 2
    assert "cannot write into it" in answer.stderr
    assert "nothing was submitted" in answer.stderr
    assert jobs_of(slurm, run_dir) == []
    assert not list(run_dir.glob(".*"))  # no half-written files


def test_a_job_that_cannot_be_recorded_is_cancelled(slurm: Cluster, tmp_path: Path, small_disk: Path) -> None:
    """The disk fills up while sbatch works. The job is held, lest it fails on that disk before it is cancelled."""
    run_dir = run_directory(small_disk / "run", WAIT_FOR_GO)
    full = f"cat /dev/zero > {small_disk}/rest" if os.path.ismount(small_disk) else "prlimit --fsize=0 --pid=$PPID"
    path = path_with(tmp_path / "bin", sbatch=f'{REAL} --hold "$@"\n({full}) 2>/dev/null\nexit 0')
    answer = run_llmlaunch(tmp_path, "resume", run_dir, code=2, PATH=path)
    assert "was cancelled again" in answer.stderr
    (job,) = jobs_of(slurm, run_dir)
    wait_until(
        lambda: slurm.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T") == "CANCELLED\n", "it is cancelled"
    )
    assert not (run_dir / "submission.json").exists()
    assert not (run_dir / "submitting").exists()


def test_a_hanging_scheduler_is_reported_and_gets_the_job_once(
    alone: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have heard sbatch before it hung: nobody knows until it wakes."""
    run_dir = run_directory(tmp_path / "run", WAIT_FOR_GO)
    controller = alone.pid("slurmctld")
    said: list[str] = []
    monkeypatch.setattr("llmlaunch.launchers.slurm.submit._SILENCE_SECONDS", 1.0)
    os.kill(controller, signal.SIGSTOP)
    try:
        with pytest.raises(SchedulerRefused, match="SLURM did not say whether it took the job") as silence:
            SlurmLauncher(timeout_seconds=2.0, tries=1, say=said.append).submit(run_dir)
    finally:
        os.kill(controller, signal.SIGCONT)
    assert f"llmlaunch resume {run_dir}" in str(silence.value)
    assert any("looking for a job" in line for line in said)
    assert submit_mark.left_behind(run_dir) is None  # this very process might still be at it
    submission = submit(run_dir)
    assert jobs_of(alone, run_dir) == list(submission.jobs)
    assert len(submission.jobs) == 1
    (run_dir / "go").touch()
    wait_for(submission, "succeeded")


def test_a_controller_that_dies_during_sbatch_is_asked_for_the_job_afterwards(alone: Cluster, tmp_path: Path) -> None:
    """sbatch says "Connection reset by peer" and exits 1: the request was sent, and nobody says whether it was read."""
    run_dir = run_directory(tmp_path / "run", "finish 0")
    controller = psutil.Process(alone.pid("slurmctld"))
    controller.suspend()  # the kernel takes sbatch's connection for it, and resets it when the controller is killed
    said: list[str] = []

    def spoken_to() -> bool:
        """What sbatch sent lies unread at the controller's end of its connection."""
        try:
            callers = [child for child in psutil.Process().children() if child.name() == "sbatch"]
            from_ports = {each.laddr.port for caller in callers for each in caller.net_connections("tcp4")}
        except psutil.Error:  # it has ended meanwhile: it only asked for a version
            return False
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(
            int(mine.split(":")[1], 16) == alone.port
            and int(theirs.split(":")[1], 16) in from_ports
            and int(queues.split(":")[1], 16) > 0
            for _, mine, theirs, _, queues, *_ in rows
        )

    def kill_it() -> None:
        wait_until(spoken_to, "sbatch has connected")
        alone.kill("slurmctld")

    def say(line: str) -> None:
        if not said:
            alone.start_controller()
            alone.wait_until_whole()
        said.append(line)

    killer = threading.Thread(target=kill_it)
    killer.start()
    with pytest.raises(SchedulerRefused, match=r"SLURM did not say whether it took the job \(.*reset by peer\)"):
        SlurmLauncher(say=say).submit(run_dir)
    killer.join()
    assert "looking for a job" in said[0]
    assert (run_dir / "submitting").exists()
    submission = submit(run_dir)
    assert jobs_of(alone, run_dir) == list(submission.jobs)
    assert len(submission.jobs) == 1
    wait_for(submission, "succeeded")


def wait_until_saved(cluster: Cluster, job: str) -> None:
    """A controller killed before it wrote down that a job runs does not know it afterwards."""
    changed = time.time()
    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=50")
    saved = cluster.directory / "state" / "job_state"
    wait_until(lambda: saved.exists() and saved.stat().st_mtime >= changed, "the controller has saved its jobs")


def test_submit_waits_for_a_controller_that_is_down_and_says_so(alone: Cluster, tmp_path: Path) -> None:
    """It comes back while sbatch is tried again; the job that ran meanwhile has lost nothing."""
    running = submit(run_directory(tmp_path / "running", WAIT_FOR_GO))
    wait_for(running, "running")
    wait_until_saved(alone, running.job_id)
    alone.kill("slurmctld")
    said: list[str] = []

    def say(line: str) -> None:
        if not said:
            alone.start_controller()
            alone.wait_until_whole()
        said.append(line)

    submission = SlurmLauncher(say=say).submit(run_directory(tmp_path / "run", "finish 0"))
    assert said[0].startswith("waiting for SLURM (Batch job submission failed: Unable to contact slurm controller")
    assert "try 2 of 3" in said[0]
    assert jobs_of(alone, tmp_path / "run") == list(submission.jobs)
    assert state(running).phase == "running"
    (tmp_path / "running" / "go").touch()
    wait_for(running, "succeeded")
    wait_for(submission, "succeeded")


def test_commands_on_a_submitted_run_need_slurm(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_directory(tmp_path / "run", "finish 0")
    write_submission(run_dir, "12")
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in ("status", "cancel", "resume"):
        refusal = "cannot be run (No such file or directory); is this a SLURM machine?"
        assert refusal in llmlaunch(command, run_dir, code=2).stderr
