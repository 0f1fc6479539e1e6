"""The nodes that the job holds in its allocation: which of them are lost, how those are given back to SLURM, and how
the whole job is put back into the queue; and how nodes at fault are left out of its next start, by `scontrol update
ExcNodeList` as its owner.

Of what has been left out already a person's own `--exclude` stays, and of the rest the latest, so that all of them
together are no more than 5 % of the partition (one node of a small one).
"""

from __future__ import annotations

import os
import re
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from ..causes.suspects import most_left_out
from ..rundir import file_names
from ..rundir.files import read_object, read_text
from ..rundir.values import host_names, is_host, is_slurm_job, to_type
from . import slurm_steps
from .allocation import nodes_without_answer
from .files import say
from .slurm_steps import ask

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from .training_step import StepEnd


REQUEUE_TRIES, REQUEUE_SECONDS = 30, 10.0
_NEVER = ("disabled", "denied", "nvalid")  # in an answer of SLURM's that another try would not change


class HeldNodes:
    """`names` are the nodes of the allocation, in SLURM's order, without those that are `lost`."""

    def __init__(self, job: str, names: Sequence[str], say: Callable[[str], None]) -> None:
        self.names = tuple(names)
        self.lost: tuple[str, ...] = ()  # of the last step
        self._job, self._say = job, say
        self._given_back: set[str] = set()
        self._giving: list[threading.Thread] = []

    def lose(self, lost: Sequence[str]) -> None:
        self.lost = tuple(lost)
        self.names = tuple(node for node in self.names if node not in lost)

    def give_back(self, lost: Sequence[str]) -> None:
        """Have SLURM take those nodes away, in a thread: it may take ten seconds over it. It ends a job that has a lost
        node once it has noticed that it is (SlurmdTimeout), so this is begun while the step is being ended. (sbatch
        --no-kill is no way: a job that has lost its first node would be left without a program, for ever.)"""
        if not set(lost) - self._given_back:
            return
        self._given_back.update(lost)
        kept = [node for node in self.names if node not in lost]

        def give() -> None:
            if not slurm_steps.give_back(self._job, kept):
                self._say(f"the job keeps {', '.join(lost)}, and ends when SLURM has noticed that it is lost")

        self._giving.append(threading.Thread(target=give, daemon=True))
        self._giving[-1].start()

    def wait_until_given_back(self) -> None:
        self.give_back(self.lost)
        for thread in self._giving:
            thread.join()

    def lost_nodes(self, end: StepEnd, trained: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes of a step that are gone: those that were seen to be, those that SLURM has taken away, and
        those that did not report an end and no longer start tasks."""
        held = slurm_steps.held_nodes(self._job) or list(self.names)
        taken = [node for node in trained if node not in held and node not in end.lost]
        silent = [node for node in end.silent if node not in (*end.lost, *taken)]
        others = [node for node in trained if node not in (*end.lost, *taken, *silent)]
        if silent:
            taken += nodes_without_answer(silent, others)
        return (*end.lost, *taken)

    def requeue(self, run_directory: Path, seconds: int) -> bool:
        """Put the job back into the queue, to start in so many seconds or later. SLURM ends this program as soon as it
        has done that. A controller that is being restarted is waited for: the nodes are held for nothing, but a job
        that gave up would be over. False where SLURM does not requeue it."""
        self._say(f"requeueing job {self._job}, to start again in {seconds} s or later")
        self.wait_until_given_back()
        for _ in range(REQUEUE_TRIES):
            answer = slurm_steps.answer_of("scontrol", "requeue", self._job)
            if answer is None:
                break
            self._say(f"scontrol requeue: {answer}")
            if any(word in answer for word in _NEVER):
                self._say(
                    "SLURM does not requeue it (restart: {by: chain} submits follow-up jobs instead); go on with: "
                    f"{to_type('resume', run_directory)}"
                )
                return False
            time.sleep(REQUEUE_SECONDS)  # 22.05 has tried for 9 s itself, and says "Unexpected message received"
        if seconds and slurm_steps.ask("scontrol", "update", f"JobId={self._job}", f"StartTime=now+{seconds}") is None:
            self._say("it may start at once")
        return True


_USABLE = ("idle", "alloc", "mix", "comp")
_OWN = re.compile(r"^#SBATCH\s+(?:--exclude[=\s]|-x\s*)(\S+)", re.MULTILINE)


class PartitionNodes(NamedTuple):
    """The nodes of a partition, and those of them that take jobs."""

    nodes: frozenset[str]
    usable: frozenset[str]


def leave_out(run_directory: Path, own_job: str, at_fault: Sequence[str], chain: bool = False) -> None:
    """Leave out the nodes `at_fault` for the job itself, or with `chain` for the jobs that follow it. Not where too few
    other nodes of the partition are left: SLURM would keep a job waiting for ever."""
    at_fault = [node for node in at_fault if is_host(node)]
    needed = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    own, partition = _own_exclusion(run_directory), _partition(os.environ.get("SLURM_JOB_PARTITION", ""))
    names = ",".join(at_fault)
    for job in _following(run_directory, own_job) if chain else [own_job]:
        starts = f"job {job} starts" if chain else "the job starts again"
        listed = exclusion(at_fault, _excluded(job), own, partition.nodes)
        if len(partition.usable.difference(listed)) < needed:
            say(f"{names} at fault, but too few other nodes are left; job {job} may get it again")
        elif ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(listed)}") is not None:
            say(f"{names} at fault: left out when {starts}")


def exclusion(
    at_fault: Sequence[str], before: Sequence[str], own: Sequence[str], partition: Collection[str]
) -> list[str]:
    """Return what the job is to leave out: a person's `own` nodes, those at fault, and of those `before` the rest, as
    far as the bound on the `partition` allows."""
    ours = [node for node in dict.fromkeys([*at_fault, *before]) if node not in own]
    return [*own, *ours[: most_left_out(len(partition))]]


def _following(run_directory: Path, job: str) -> list[str]:
    """The jobs of the chain after `job`."""
    chain = (read_object(run_directory / file_names.SUBMISSION) or {}).get("chain")
    links = [str(link) for link in chain if is_slurm_job(str(link))] if isinstance(chain, list) else []
    return links[links.index(job) + 1 :] if job in links else links


def _own_exclusion(run_directory: Path) -> list[str]:
    try:
        script = read_text(run_directory / file_names.JOB_SCRIPT)
    except OSError:
        return []
    return [node for words in _OWN.findall(script)[-1:] for node in host_names(words.strip("'\""))]


def _excluded(job: str) -> list[str]:
    answer = re.search(r" ExcNodeList=(\S+)", ask("scontrol", "show", "job", "-o", job) or "")
    return [] if answer is None or answer[1] == "(null)" else host_names(answer[1])


def _partition(name: str) -> PartitionNodes:
    nodes, usable = set(), set()
    for line in (ask("sinfo", "-h", "-N", "-p", name, "-o", "%N %t") or "").splitlines():
        node, _, state = line.partition(" ")
        nodes.add(node)
        if re.split(r"[^a-z]", state)[0] in _USABLE:
            usable.add(node)
    return PartitionNodes(frozenset(nodes), frozenset(usable))
