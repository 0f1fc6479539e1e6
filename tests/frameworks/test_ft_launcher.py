"""ft_launcher of nvidia-resiliency-ext under a rendered train.sh, on three nodes that are this machine, without
SLURM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from judges import FRAMEWORKS

from llmlaunch.node.process_tree import CAUGHT_SIGNALS
from support.command_line import run_llmlaunch
from support.node_rig import environment, until

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[2]
NVRX = FRAMEWORKS / "nvrx-0.6"
NODES = (
    "127.0.0.1",
    "localhost",
    "127.0.0.3",
)  # names under which this machine finds itself; the last is the spare one
JOB = "7"
"""As SLURM's: its attempts are 7.0, 7.1."""
EXIT_SECONDS = 600
"""A launcher whose `except Exception` catches the signal (nvidia-resiliency-ext 0.6) sees its ranks succeed and waits
300 s for the other launchers, which have gone."""


class Nodes:
    """train.sh of one run directory on NODES, each in a session of its own, as slurmstepd starts it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.scripts: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, port: int) -> None:
        """Start the nodes; the spare one comes once the others train, so that it is the one that waits."""
        for number, node in enumerate(NODES):
            if number == 2:
                until(lambda: len(self.records(0)) == 2, "the ranks of the first attempt")
            variables = {
                "SLURMD_NODENAME": node,
                "SLURM_NODEID": str(number),
                "SLURM_PROCID": str(number),
                "LLMLAUNCH_RUN_DIR": str(self.run),
                "LLMLAUNCH_ATTEMPT": f"{JOB}.0",
                "LLMLAUNCH_NODES": "2",
                "LLMLAUNCH_NODE_RANKS": "0 1 2",
                "MASTER_ADDR": NODES[0],
                "MASTER_PORT": str(port),
            }
            with (self.run / "logs" / f"{JOB}.0.{node}.log").open("w") as log:
                self.scripts[node] = subprocess.Popen(
                    ["bash", self.run / "train.sh"],
                    env={**environment(), **variables},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def launcher(self, node: str) -> psutil.Process:
        """The launcher of a node."""
        children = psutil.Process(self.scripts[node].pid).children()
        (launcher,) = (child for child in children if "nvidia_resiliency_ext" in " ".join(child.cmdline()))
        return launcher

    def records(self, attempt: int) -> dict[str, dict[str, Any]]:
        """The last rank record of each node in an attempt."""
        paths = (self.run / "attempts" / f"{JOB}.{attempt}" / "ranks").glob("*.jsonl")
        return {path.stem: json.loads(path.read_text().splitlines()[-1]) for path in paths if path.read_text().strip()}

    def monitored(self, node: str) -> set[str]:
        """The attempts that the monitor of a node has written of."""
        lines = (self.run / "peaks" / f"{node}.jsonl").read_text().splitlines()
        return {json.loads(line)["attempt"] for line in lines}

    def log(self, attempt: int) -> str:
        return "\n".join(path.read_text() for path in sorted((self.run / "logs").glob(f"{JOB}.{attempt}.*.log")))

    def close(self) -> None:
        """End what is left in each node's session: a killed launcher leaves the processes that watch its ranks."""
        sessions = {script.pid for script in self.scripts.values()}
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) in sessions:
                    process.kill()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    saver = ROOT / "tests" / "slurm" / "slow_saver.py"
    arguments = ["--steps", "100000", "--save", str(tmp_path / "checkpoints"), "--together"]
    script = json.dumps({"name": "deepspeed", "script": str(saver), "script_args": arguments})
    words = ("cluster=cpu-x1", f"python={sys.executable}", f"backend={script}", "nodes=2", "spare_nodes=1")
    words += ("training.global_batch_size=4", "training.steps=100000", "training.save_interval=1000")
    words += (f"training.checkpoint_path={tmp_path / 'checkpoints'}", "restart.within=ft_launcher")
    words += (f"environment.PYTHONPATH={NVRX}",)
    run = tmp_path / "run"
    run_llmlaunch(tmp_path, "render", ROOT / "recipes" / "quickstart.yaml", *words, "-o", run, code=0)
    for folder in ("done", "ranks"):
        (run / "attempts" / f"{JOB}.0" / folder).mkdir(parents=True)
    (run / "logs").mkdir(exist_ok=True)
    rig = Nodes(run)
    yield rig
    rig.close()


def handles(trainer: int) -> bool:
    """Whether the trainer saves when it is told, rather than end at once. Until it is executed it is a fork of what
    starts it, which handles signals as well."""
    if b"node.pyz" in Path(f"/proc/{trainer}/cmdline").read_bytes():
        return False
    caught = CAUGHT_SIGNALS.search(Path(f"/proc/{trainer}/status").read_text())
    return caught is not None and bool(int(caught.group(1), 16) >> (signal.SIGTERM - 1) & 1)


def test_a_killed_launcher_takes_its_trainer_along_a_spare_node_goes_on_and_all_save_when_told(nodes: Nodes) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    nodes.start(port)
    until(lambda: "step 2/" in nodes.log(0), "a step of the first attempt")
    first = nodes.records(0)
    assert {node: record["rank"] for node, record in first.items()} == {NODES[0]: 0, NODES[1]: 1}

    nodes.launcher(NODES[1]).kill()
    until(lambda: not psutil.pid_exists(first[NODES[1]]["program_pid"]), "the end of the trainer without a launcher")
    until(lambda: "step 2/" in nodes.log(1), "a step of the second attempt")
    assert {node: record["rank"] for node, record in nodes.records(1).items()} == {NODES[0]: 0, NODES[2]: 1}
    assert (nodes.run / "attempts" / f"{JOB}.0" / "failed").exists()
    assert nodes.scripts[NODES[1]].wait(300) == 128 + signal.SIGKILL

    left = (NODES[0], NODES[2])
    until(
        lambda: all(handles(record["program_pid"]) for record in nodes.records(1).values()), "trainers that can be told"
    )
    until(lambda: all(f"{JOB}.1" in nodes.monitored(node) for node in left), "monitors of the second attempt")
    launchers = [nodes.launcher(node) for node in left]
    for launcher in launchers:  # as where SLURM signals every process of a step
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            launcher.send_signal(number)
    for node in left:
        os.kill(nodes.scripts[node].pid, signal.SIGUSR1)
    assert [nodes.scripts[node].wait(EXIT_SECONDS) for node in left] == [0, 0]
    assert "after SIGTERM" in nodes.log(1)
    assert {path.name for path in (nodes.run / "attempts" / f"{JOB}.1" / "done").iterdir()} == {*left}
    assert [record["exit_code"] for record in nodes.records(1).values()] == [0, 0]
    assert [nodes.monitored(node) for node in left] == [{f"{JOB}.0", f"{JOB}.1"}] * 2
