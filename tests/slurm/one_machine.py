"""Drives slurm/one_machine/cluster.sh for the tests, and makes run directories by hand."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

CLUSTER_SH = Path(__file__).parents[2] / "slurm" / "one_machine" / "cluster.sh"
_PORT_OFFSETS = (0, 1, *range(11, 23))
_PORTS = 23
_CLAIMS: dict[int, ExitStack] = {}
"""By first port: what tells other processes that a cluster of this one has them."""

_SAID_LINES = 40


@dataclass(frozen=True)
class Cluster:
    """One cluster of its own, below a directory of its own."""

    directory: Path
    port: int
    settings: Mapping[str, str] = field(default_factory=dict)
    script: Path = CLUSTER_SH
    prefix: Sequence[str] = ()
    """What runs the script, for example as another user."""

    @property
    def conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """That of a person who uses the cluster."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    @property
    def nodes(self) -> list[str]:
        """Node names in SLURM's order."""
        return self.ask("sinfo", "-h", "-p", "train", "-N", "-o", "%N").split()

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`cluster.sh WORDS`, whatever its exit code."""
        environment = {
            **os.environ,
            **{f"LLMLAUNCH_SLURM_{name}": value for name, value in self.settings.items()},
            "LLMLAUNCH_SLURM_DIR": str(self.directory),
            "LLMLAUNCH_SLURM_PORT": str(self.port),
        }
        environment.pop("SLURM_CONF", None)
        argv = [*self.prefix, "bash", str(self.script), *words]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)

    def do(self, *words: str) -> str:
        """`cluster.sh WORDS`, which must succeed; what it printed."""
        done = self.call(*words)
        if done.returncode != 0:
            pytest.fail(f"cluster.sh {' '.join(words)}: {done.stderr}")
        return done.stdout

    def ask(self, *argv: str) -> str:
        """A SLURM command against this cluster, which must succeed; what it printed."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False, timeout=180)
        if done.returncode != 0:
            pytest.fail(f"{' '.join(argv)}: {done.stderr}")
        return done.stdout

    def run(self, folder: Path, *words: str, seconds: float = 600.0) -> str:
        """`sbatch WORDS` in `folder`, and wait; "0:0" where the job succeeded, else its exit code and signal. Unlike
        `sbatch --wait`, which in the end looks every 32 seconds, this sees at once that it has ended."""
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=180,
        )
        if done.returncode != 0:
            pytest.fail(f"sbatch {' '.join(words)}: {done.stderr}")
        job = done.stdout.strip()
        every = "pending,running,completing"
        wait_until(
            lambda: not self.ask("squeue", "-h", "-j", job, "-t", every, "-o", "%i"), "the job has ended", seconds
        )
        (code,) = re.findall(r" ExitCode=(\S+)", self.ask("scontrol", "show", "job", job))
        return str(code)

    def pid(self, name: str) -> int:
        return int((self.directory / "run" / f"{name}.pid").read_text())

    def daemons(self, name: str) -> list[psutil.Process]:
        """Its processes of that name: slurmctld, slurmd, munged."""
        found = []
        for process in psutil.process_iter(["name"]):
            try:
                if process.info["name"] == name and process.environ().get("SLURM_CONF") == str(self.conf):
                    found.append(process)
            except psutil.Error:  # it has ended meanwhile, or is another user's
                continue
        return found

    def kill(self, name: str) -> None:
        """SIGKILL for a daemon, and its end: until then it still takes connections."""
        daemon = psutil.Process(self.pid(name))
        daemon.kill()

        def gone() -> bool:
            try:
                return daemon.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True

        wait_until(gone, f"{name} is gone")


def install(*, accounting: bool = False) -> None:
    """The Debian packages: installed where root, else the test fails with the line to type."""
    settings = {"ACCOUNTING": "1" if accounting else "0"}
    Cluster(Path("/tmp/llmlaunch-install-only"), 26800, settings).do("install")


def new_cluster(settings: Mapping[str, str], **other: object) -> Cluster:
    """A cluster that is not up yet, where no other checkout's is. `throw_away` it in the end."""
    # Directly below /tmp: the sockets in it have paths of 107 bytes at most.
    parent = Path(tempfile.mkdtemp(prefix="llmlaunch-", dir="/tmp"))
    parent.chmod(0o777)
    return Cluster(parent / "c", _free_ports(), settings, **other)  # type: ignore[arg-type]


def throw_away(cluster: Cluster) -> None:
    cluster.do("down")
    shutil.rmtree(cluster.directory.parent)
    _CLAIMS.pop(cluster.port).close()


def what_it_says(cluster: Cluster) -> str:
    """Its queue, its nodes, and the ends of its logs; for who looks into a test that failed. Never raises."""
    said = []
    for argv in (
        ["squeue", "-h", "-a", "-t", "all", "-O", "JobID,State,RestartCnt,StartTime,Reason"],
        ["sinfo", "-N", "-l"],
    ):
        try:
            done = subprocess.run(argv, env=cluster.environment, capture_output=True, text=True, timeout=10)
            said += [" ".join(argv), *(done.stdout + done.stderr).splitlines()[-_SAID_LINES:]]
        except (OSError, subprocess.TimeoutExpired) as error:
            said.append(str(error))
    for log in sorted((cluster.directory / "log").glob("slurm*.log")):
        lines = log.read_text(errors="replace").splitlines()
        said += [log.name, *lines[-_SAID_LINES if log.name == "slurmctld.log" else -5 :]]
    return "\n".join(said)


def _free_ports() -> int:
    """The first of 23 ports. Above those jobs choose (20000 to 29999), below those the kernel hands out."""
    bases = list(range(30000, 32768 - _PORTS, _PORTS))
    for base in random.sample(bases, len(bases)):
        with ExitStack() as taken:
            try:
                # One who starts a cluster at this moment has bound no port yet, and one whose node is off has not now.
                claim = taken.enter_context(socket.socket(socket.AF_UNIX))
                claim.bind(f"\0llmlaunch-slurm-ports-{base}")
                with ExitStack() as ports:
                    for offset in _PORT_OFFSETS:
                        ports.enter_context(socket.socket()).bind(("", base + offset))
            except OSError:
                continue
            _CLAIMS[base] = taken.pop_all()
            return base
    pytest.fail("no 23 free ports between 30000 and 32767")


# What every job.sbatch does around its training: a name for the attempt, a log, a last word.
_FRAME = """#!/bin/bash
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --job-name=sample
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
attempt=$job.${{SLURM_RESTART_COUNT:-0}}
mkdir -p "attempts/$attempt"
exec >> "logs/$attempt.job.log" 2>&1
finish() {{
  state=failed
  [ "$1" != 0 ] || state=succeeded
  printf '{{"schema": 1, "attempt": "%s", "state": "%s", "exit_code": %d, "nodes": [], "ranks": [], "ended_at": 1,
    "why": "%s"}}' "$attempt" "$state" "$1" "$2" > .status && mv .status status.json
  exit "$1"
}}
"""


def run_directory(path: Path, body: str, nodes: int = 1) -> Path:
    """A run directory whose job.sbatch runs `body`, which ends with `finish CODE [WHY]`."""
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"schema": 1, "name": "sample", "nodes": nodes}))
    (path / "job.sbatch").write_text(_FRAME.format(nodes=nodes) + body)
    return path


class Output(io.StringIO):
    """Keeps what is written, and calls back with each text."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__()
        self.hear = hear

    def write(self, text: str) -> int:
        self.hear(text)
        return super().write(text)


def wait_until(
    true: Callable[[], bool], what: str, seconds: float = 240.0, instead: Callable[[], object] = lambda: "still not so"
) -> None:
    """Returns when `true()` is; fails after a time no healthy machine needs, and says what is so `instead`.

    A node that did not answer within MessageTimeout is told again that a job has ended, but only after 60 seconds
    (RPC_RETRY_INTERVAL of SLURM 22.05's slurmctld.h): so long the job is COMPLETING.
    """
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited in vain until {what}: {instead()}"
        time.sleep(0.1)
