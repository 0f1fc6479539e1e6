"""The nodes that the job holds in its allocation: which of them are lost, how those are given back to SLURM, and how
the whole job is put back into the queue."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ..rundir.values import to_type
from . import slurm_steps
from .allocation import nodes_without_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
