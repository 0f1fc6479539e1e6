"""SLURM as the job sees it: one partition, one job, nodes that go and come back. It answers the commands of the
rendered job.sbatch and node.pyz, starts the job, and ends it where SLURM would.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from clock import Command, SimulatedClock, kill_all
from steps import OtherStep
from training import Job, Training

from llmlaunch.causes.suspects import most_left_out
from llmlaunch.node.node_channel import PREFLIGHT, PREPARE
from llmlaunch.node.rollback import skipped_steps

JOB, PARTITION = "4711", "gpu"
QUEUE_SECONDS = 600.0  # from the end of a job to its next start
SLURMD_TIMEOUT_SECONDS = 300.0  # SLURM's default: so long until it notices that a node is gone
KILL_WAIT_SECONDS = 30.0  # its default, too
NO_ANSWER_SECONDS = 11.0  # until an srun to a node that is gone says so, as on the one-machine cluster
BATCH_OVER = "slurmstepd: error: *** JOB {job} ON {node} CANCELLED AT 2026-01-05T00:00:00 DUE TO NODE FAILURE ***\n"


class Cluster:
    """`over` is called when the job has ended for good, with its exit code, and `trains` with each training step."""

    def __init__(
        self, clock: SimulatedClock, job: Job, nodes: Sequence[str], allocated: int, environment: dict[str, str]
    ) -> None:
        self.clock, self.job, self.nodes, self.allocated = clock, job, list(nodes), allocated
        self.environment = environment
        self.allocation: list[str] = []
        self.excluded: list[str] = []
        self.training: Training | None = None
        self.over: Callable[[int], None] = lambda code: None
        self.trains: Callable[[Training], None] = lambda training: None
        self.allocated_seconds = self.queue_seconds = 0.0
        self.queue_waits = 0
        self.violations: list[str] = []
        self._restarts = 0
        self._not_before = 0.0
        self._requeued = False
        self._batch_host = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = self._ended_at = clock.now
        self._left_behind: Training | None = None
        clock.command = self._answer
        clock.ended = self._process_ended
        clock.moved = self._advance
        clock.is_ordinary = lambda: self.training is not None and self.training.is_ordinary

    def _advance(self) -> None:
        if self.training is not None:
            self.training.advance()

    # --- the job ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the job on nodes that are there and not left out; wait for some where too few are."""
        free = [node for node in self.nodes if node not in self.job.down and node not in self.excluded]
        if len(free) < self.allocated:
            self.clock.after(QUEUE_SECONDS, self.start)
            return
        self.allocation = free[: self.allocated]
        self._batch_host = self.allocation[0]
        self._requeued = False
        self._started_at = self.clock.now
        self.queue_seconds += self.clock.now - self._ended_at
        run = self.job.run_directory
        environment = {
            **self.environment,
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NUM_NODES": str(self.allocated),
            "SLURM_JOB_NODELIST": ",".join(self.allocation),
            "SLURM_JOB_PARTITION": PARTITION,
            "SLURM_CLUSTER_NAME": "week",
            "SLURM_SUBMIT_DIR": str(run),
            "SLURM_CPUS_ON_NODE": "96",
            "SLURM_RESTART_COUNT": str(self._restarts),
            "SLURMD_NODENAME": self._batch_host,
        }
        with (run / f"slurm-{JOB}.out").open("ab") as output:
            self._process = subprocess.Popen(
                ["/bin/bash", str(run / "job.sbatch")],
                cwd=run,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _process_ended(self, pid: int, code: int) -> None:
        if self._process is not None and pid == self._process.pid:
            self._process = None
            if self._batch_host not in self.job.down:  # else nobody tells SLURM
                self._released(code)

    def _released(self, code: int) -> None:
        self.allocated_seconds += self.clock.now - self._started_at
        self._ended_at = self.clock.now
        self.allocation = []
        if self.training is not None:
            self.training.stop()
        if not self._requeued:
            self.over(code)
            return
        self._restarts += 1
        self.queue_waits += 1
        self.clock.after(max(QUEUE_SECONDS, self._not_before - self.clock.now), self.start)

    def running_seconds(self) -> float:
        """How long the job has its nodes now; 0 in the queue."""
        return self.clock.now - self._started_at if self.allocation else 0.0

    # --- nodes -----------------------------------------------------------------------------------------------

    def lose(self, node: str, seconds: float) -> None:
        """A node loses its power, for so long. Whether the job still has it when SLURM notices decides what follows."""
        self.job.down[node] = self.clock.now + seconds
        self.clock.after(seconds, lambda: self._repair(node))
        if node == self._batch_host and self._process is not None:
            kill_all(self._process.pid)
        if self.training is not None:
            self.training.lose_node(node)
        self.clock.after(SLURMD_TIMEOUT_SECONDS, lambda: self._notice(node))

    def _repair(self, node: str) -> None:
        self.job.down.pop(node, None)
        self.job.slow.pop(node, None)

    def _notice(self, node: str) -> None:
        """End every job that has the node, and put it back into the queue."""
        if node not in self.allocation or self._requeued:
            return
        self._requeued = True
        self.allocation = []
        with (self.job.run_directory / f"slurm-{JOB}.out").open("a") as output:
            output.write(BATCH_OVER.format(job=JOB, node=self._batch_host))
        if self._process is None:  # it went with the node
            self._released(0)
            return
        self.clock.watch_closely(60.0)
        if self.training is not None:
            self.training.take_slurms_signal()
        process = self._process
        process.send_signal(signal.SIGTERM)
        self.clock.after(KILL_WAIT_SECONDS, lambda: kill_all(process.pid) if self._process is process else None)

    # --- commands --------------------------------------------------------------------------------------------

    def _answer(self, command: Command) -> None:
        name, *words = command.words
        text = " ".join(words)
        if name == "srun":
            self._srun(command, words)
        elif name == "scontrol" and words[:2] == ["show", "hostnames"]:
            command.answer(0, words[2].replace(",", "\n") + "\n")
        elif name == "scontrol" and words[:2] == ["show", "job"]:
            script = self.job.run_directory / "job.sbatch"
            left = ",".join(self.excluded) or "(null)"
            command.answer(0, f"JobId={JOB} ExcNodeList={left}\n   Command={script}\n")
        elif name == "scontrol" and words[:1] == ["requeue"]:
            self._requeued = True
            command.answer()
        elif name == "scontrol" and words[:1] == ["update"]:
            self._update(text)
            command.answer()
        elif name == "scontrol" and words[:2] == ["show", "config"]:
            command.answer(0, "ProctrackType           = proctrack/cgroup\n")
        elif name == "squeue" and words[-1] == "%N":
            command.answer(0, ",".join(self.allocation) + "\n")
        elif name == "squeue":
            running = self.training is not None and self.training.active
            command.answer(0, f"{JOB}.batch\n" + (f"{JOB}.1\n" if running else ""))
        elif name == "sinfo":
            states = [f"{node} {'down*' if node in self.job.down else 'alloc'}\n" for node in self.nodes]
            command.answer(0, "".join(states))
        else:  # scancel of a step that srun has left; scontrol show topology, of which there is none
            command.answer(int(name != "scancel"))

    def _update(self, text: str) -> None:
        nodes, later, left = (re.search(rf" {key}=(\S*)", text) for key in ("NodeList", "StartTime", "ExcNodeList"))
        if nodes is not None:
            self.allocation = nodes[1].split(",")
        if later is not None:
            self._not_before = self.clock.now + float(later[1].partition("+")[2] or 0)
        if left is not None:
            self.excluded = [node for node in left[1].split(",") if node]
            if len(self.excluded) > most_left_out(len(self.nodes)):
                self.violations.append(f"{len(self.excluded)} of {len(self.nodes)} nodes are left out")

    def _srun(self, command: Command, words: list[str]) -> None:
        named = next((word.partition("=")[2] for word in words if word.startswith("--nodelist=")), None)
        nodes = named.split(",") if named else list(self.allocation)
        if words[-1] == "true":
            is_down = nodes[0] in self.job.down
            self.clock.after(NO_ANSWER_SECONDS if is_down else 0.0, lambda: command.answer(int(is_down)))
            return
        attempt, ranks = _option(words, "--attempt"), _option(words, "--node-ranks")
        if words[-1] == PREFLIGHT:
            OtherStep(self.job, command, attempt, nodes).try_nodes()
        elif words[-1] == PREPARE:
            OtherStep(self.job, command, attempt, nodes).prepare()
        else:
            by_node = dict(zip(nodes, map(int, ranks.split(",")), strict=True)) if ranks else {}
            order = sorted(nodes, key=by_node.__getitem__) if ranks else nodes
            skips = skipped_steps(_option(words, "--skip"))
            self.training = Training(self.job, command, attempt, order, skips)
            self.trains(self.training)


def _option(words: Sequence[str], name: str) -> str:
    """What follows the option; empty where it is not there."""
    return words[words.index(name) + 1] if name in words else ""


def build(folder: Path, sources: Path) -> None:
    """Compile the clock's library, and the command that stands for SLURM's."""
    commands = folder / "bin"
    commands.mkdir()
    flags = ["cc", "-O2", "-Wall", "-Wextra"]
    subprocess.run([*flags, "-shared", "-fPIC", "-o", str(folder / "clock.so"), str(sources / "clock.c")], check=True)
    subprocess.run([*flags, "-o", str(commands / "srun"), str(sources / "command.c")], check=True)
    for name in ("scontrol", "squeue", "sinfo", "scancel"):
        os.link(commands / "srun", commands / name)
