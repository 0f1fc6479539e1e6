"""Drives slurm/one_machine/cluster.sh for the tests."""

from __future__ import annotations

import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.node_rig import environment

CLUSTER_SH = Path(__file__).parents[2] / "slurm" / "one_machine" / "cluster.sh"
_PORT_OFFSETS = (0, 1, *range(11, 23))
_PORTS = 23
_CLAIMS: dict[int, ExitStack] = {}  # by first port: tells other processes that a cluster of this one has them
_LOG_LINES = 40
IN_QUEUE = "pending,running,completing"


@dataclass(frozen=True)
class Cluster:
    """One cluster of its own, below a directory of its own."""

    directory: Path
    port: int
    settings: Mapping[str, str] = field(default_factory=dict)
    script: Path = CLUSTER_SH
    prefix: Sequence[str] = ()
    """What runs the script, for example as another user."""
    inside: Sequence[str] = ()
    """What runs every command of SLURM, where it is another Debian release's."""

    @property
    def conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """That of a person who uses the cluster."""
        return {**environment(), "SLURM_CONF": str(self.conf)}

    @property
    def nodes(self) -> list[str]:
        """Node names in SLURM's order."""
        return self.ask("sinfo", "-h", "-p", "train", "-N", "-o", "%N").split()

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`cluster.sh WORDS`, whatever its exit code."""
        variables = {
            **environment(),
            **{f"LLMLAUNCH_SLURM_{name}": value for name, value in self.settings.items()},
            "LLMLAUNCH_SLURM_DIR": str(self.directory),
            "LLMLAUNCH_SLURM_PORT": str(self.port),
        }
        variables.pop("SLURM_CONF", None)
        argv = [*self.inside, *self.prefix, "bash", str(self.script), *words]
        return subprocess.run(argv, env=variables, capture_output=True, text=True, check=False)

    def do(self, *words: str) -> str:
        """`cluster.sh WORDS`, which must succeed; what it printed."""
        done = self.call(*words)
        if done.returncode != 0:
            pytest.fail(f"cluster.sh {' '.join(words)}: {done.stderr}")
        return done.stdout

    def ask(self, *argv: str, cwd: Path | None = None) -> str:
        """Return what a SLURM command against this cluster printed; it must succeed."""
        done = subprocess.run(
            [*self.inside, *argv],
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        if done.returncode != 0:
            pytest.fail(f"{' '.join(argv)}: {done.stderr}")
        return done.stdout

    def run(self, folder: Path, *words: str, seconds: float = 600.0) -> str:
        """`sbatch WORDS` in `folder`, and wait; "0:0" where the job succeeded, else its exit code and signal. Unlike
        `sbatch --wait`, which in the end looks every 32 seconds, this sees at once that it has ended."""
        job = self.ask("sbatch", "--parsable", *words, cwd=folder).strip()
        wait_until(
            lambda: not self.ask("squeue", "-h", "-j", job, "-t", IN_QUEUE, "-o", "%i"), "the job has ended", seconds
        )
        (code,) = re.findall(r" ExitCode=(\S+)", self.ask("scontrol", "show", "job", job))
        return str(code)

    def number(self, node: str) -> str:
        """Return the number of a node, as `cluster.sh kill-node` wants it."""
        return str(self.nodes.index(node) + 1)

    def pid(self, name: str) -> int:
        return int((self.directory / "run" / f"{name}.pid").read_text())

    def daemons(self, name: str) -> list[psutil.Process]:
        """Its processes of that name: slurmctld, slurmd, munged."""
        processes = []
        for process in psutil.process_iter(["name"]):
            with suppress(psutil.Error):  # it has ended meanwhile, or is another user's
                if process.info["name"] == name and process.environ().get("SLURM_CONF") == str(self.conf):
                    processes.append(process)
        return processes

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

    def start_controller(self, *words: str) -> None:
        """Start slurmctld as cluster.sh does; it may not answer yet."""
        environment = {**self.environment, "LLMLAUNCH_SLURM_DAEMON": "controller"}
        environment["PATH"] += ":/usr/sbin:/sbin"
        argv = [*self.inside, *self.prefix, "slurmctld", *words]
        subprocess.run(argv, env=environment, check=True, capture_output=True)

    def wait_until_whole(self) -> None:
        """Wait until the controller and every node answer."""
        wait_until(lambda: self.call("status").returncode == 0, "the cluster answers")


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


@contextmanager
def running_cluster(nodes: int, **settings: str) -> Iterator[Cluster]:
    """A cluster of so many nodes, of the settings LLMLAUNCH_SLURM_<name>."""
    cluster = new_cluster(settings)
    try:
        cluster.do("up", str(nodes))
        yield cluster
    finally:
        throw_away(cluster)


def what_it_says(cluster: Cluster) -> str:
    """Its queue, its nodes, and the ends of its logs; for who looks into a test that failed. Never raises."""
    said = []
    for argv in (
        ["squeue", "-h", "-a", "-t", "all", "-O", "JobID,State,RestartCnt,StartTime,Reason"],
        ["sinfo", "-N", "-l"],
    ):
        try:
            done = subprocess.run(
                [*cluster.inside, *argv], env=cluster.environment, capture_output=True, text=True, timeout=10
            )
            said += [" ".join(argv), *(done.stdout + done.stderr).splitlines()[-_LOG_LINES:]]
        except (OSError, subprocess.TimeoutExpired) as error:
            said.append(str(error))
    for log in sorted((cluster.directory / "log").glob("slurm*.log")):
        lines = log.read_text(errors="replace").splitlines()
        said += [log.name, *lines[-_LOG_LINES if log.name == "slurmctld.log" else -5 :]]
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


def wait_until(
    true: Callable[[], bool], what: str, seconds: float = 480.0, instead: Callable[[], object] = lambda: "still not so"
) -> None:
    """Returns when `true()` is; fails after a time no healthy machine needs, and says what is so `instead`.

    A node that did not answer within MessageTimeout is told again that a job has ended, but only after 60 seconds
    (RPC_RETRY_INTERVAL of SLURM 22.05's slurmctld.h): so long the job is COMPLETING. Between two questions it pauses
    much longer than an answer takes: those who wait, ten at once, do not take the machine's time from those who are
    waited for.
    """
    end = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if true():
            return
        assert time.monotonic() < end, f"waited in vain until {what}: {instead()}"
        time.sleep(max(0.05, min(2.0, 10 * (time.monotonic() - asked))))
