"""With slurmdbd and MariaDB: the full sacct, and what the launcher learns from it."""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from handmade import run_directory, state, submit
from one_machine import Cluster, install, running_cluster, wait_until

from llmlaunch.errors import SchedulerRefused
from llmlaunch.launchers import submit_mark
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_status import read_statuses
from llmlaunch.launchers.slurm.launcher import SlurmLauncher

pytestmark = pytest.mark.slurm


@pytest.fixture
def accounted(slurm_packages: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """One node with slurmdbd and MariaDB."""
    install(accounting=True)
    with running_cluster(1, CPUS="2", ACCOUNTING="1") as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        yield cluster


def forget_every_job(cluster: Cluster) -> None:
    """A controller started with -c knows no job, as one does MinJobAge after a job's end. One of 26.05 that was killed
    early has not yet saved the use of the accounts, and starts only where it may ignore that (-i)."""
    cluster.kill("slurmctld")
    cluster.start_controller("-c", "-i")
    cluster.wait_until_whole()


def test_sacct_knows_what_the_controller_has_forgotten(accounted: Cluster, tmp_path: Path) -> None:
    script = "[ ${SLURM_RESTART_COUNT:-0} = 1 ] && exit 4; sleep 600"
    job_id = accounted.ask("sbatch", "--parsable", "--output=/dev/null", f"--wrap={script}").strip()
    submission = Submission("slurm", job_id, tmp_path, time.time())

    def rows() -> list[str]:
        return accounted.ask("sacct", "-X", "-D", "-P", "-n", "-j", job_id, "-o", "state,exitcode").split()

    wait_until(lambda: rows() == ["RUNNING|0:0"], "the accounting knows that the job runs")
    accounted.ask("scontrol", "requeue", job_id)
    wait_until(lambda: rows() == ["REQUEUED|0:0", "FAILED|4:0"], "both attempts are in the accounting")

    assert state(submission) == JobState("failed", "FAILED", "NonZeroExitCode", 4, restarts=1)
    forget_every_job(accounted)
    # Nobody remembers the reason; code and state come from slurmdbd.
    assert state(submission) == JobState("failed", "FAILED", "", 4, restarts=1)
    told_by_sacct_of_an_interrupted_submit(accounted, tmp_path)
    limits_of_a_user_are_said_with_what_mends_them(accounted, tmp_path)


def limits_of_a_user_are_said_with_what_mends_them(accounted: Cluster, tmp_path: Path) -> None:
    """One that refuses a job at once, and one that lets it wait for ever."""
    for qos, limit in (("single", "MaxSubmitJobsPerUser=1"), ("narrow", "MaxTRESPerJob=cpu=1")):
        accounted.ask("sacctmgr", "-i", "add", "qos", qos, "set", limit)
        accounted.ask("sacctmgr", "-i", "modify", "user", pwd.getpwuid(os.getuid()).pw_name, "set", f"qos+={qos}")
    submit(run_directory(tmp_path / "first", "finish 0"), "--qos=single", "--hold")
    with pytest.raises(SchedulerRefused, match=r"QOSMaxSubmitJobPerUserLimit.*or cancel one"):
        submit(run_directory(tmp_path / "second", "finish 0"), "--qos=single")
    wide = submit(run_directory(tmp_path / "wide", "finish 0"), "--qos=narrow", "--cpus-per-task=2")
    wait_until(lambda: state(wide).reason not in ("", "Priority"), "SLURM says why it waits")
    (look,) = read_statuses([wide], lambda line: None)
    assert "QOSMaxCpuPerJobLimit; it asks for more than its account or QoS gives one job" in look.sentence()


def told_by_sacct_of_an_interrupted_submit(accounted: Cluster, tmp_path: Path) -> None:
    """A job that the controller has forgotten is known by the line it was submitted with: sacct keeps no comments
    unless the site says so. Who cancelled it is in sacct alone, too."""
    run_dir = run_directory(tmp_path / "run", "finish 0")
    (run_dir / "logs").mkdir()
    (run_dir / "run.id").write_text("sample-1\n")
    options = ("--parsable", f"--chdir={tmp_path}", "--comment=llmlaunch=sample-1")
    accounted.ask("sbatch", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")  # so that it has to wait
    job_id = accounted.ask("sbatch", *options, str(run_dir / "job.sbatch")).strip()
    submit_mark.begin(run_dir)
    mark = json.loads((run_dir / "submitting").read_text()) | {"pid": 0}  # nobody's
    (run_dir / "submitting").write_text(json.dumps(mark))

    def sacct(field: str) -> str:
        return accounted.ask("sacct", "-X", "-P", "-n", "-j", job_id, "-o", field)

    wait_until(lambda: "llmlaunch=sample-1" in sacct("submitline"), "sacct knows the job")  # it lags some seconds
    accounted.ask("scancel", job_id)
    wait_until(lambda: f"CANCELLED by {os.getuid()}" in sacct("state"), "sacct knows its end")
    forget_every_job(accounted)
    submission = SlurmLauncher().adopt(run_dir)
    assert submission is not None
    assert submission.jobs == (job_id,)
    reason = f"by {pwd.getpwuid(os.getuid()).pw_name}"
    assert state(submission) == JobState("cancelled", "CANCELLED", reason)
