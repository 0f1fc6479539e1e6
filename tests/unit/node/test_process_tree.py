"""Which processes are of our job: by SLURM's cgroups, else by descent."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from llmlaunch.node import process_tree

VERSION_1 = "12:pids:/x\n4:memory:/slurm/uid_1000/job_{job}/step_0/task_0\n0::/\n"
VERSION_2 = "0::/system.slice/slurmstepd.scope/job_{job}/step_batch/user/task_0\n"


@pytest.mark.parametrize("cgroup_lines", [VERSION_1, VERSION_2])
def test_a_cgroup_of_slurm_decides(monkeypatch: pytest.MonkeyPatch, cgroup_lines: str) -> None:
    groups = {"self": 7, "10": 7, "11": 70, "12": None}  # the job of each process

    def read(pid: str, name: str) -> str:
        assert name == "cgroup"
        job = groups.get(pid)
        return cgroup_lines.format(job=job) if job is not None else "0::/user.slice\n"

    monkeypatch.setattr(process_tree, "_read", read)
    job = process_tree.JobProcesses()
    assert [job.owns(pid, (11, 12)) for pid in (10, 11, 12, 13)] == [True, False, False, False]


def test_descent_decides_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "JOB_CGROUP", re.compile("no cgroup of any job"))
    job = process_tree.JobProcesses()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert job.owns(child.pid, ())  # below us, and so below our parent
        assert job.owns(os.getpid(), ())
        monkeypatch.setattr(job, "_parent", -1)
        assert not job.owns(child.pid, ())
        assert job.owns(child.pid, (os.getpid(),))
        assert not job.owns(os.getppid(), (os.getpid(),))
        child.communicate(b"\n")
    assert not job.owns(child.pid, (child.pid,))  # a number that is nobody's now
