"""A thin layer over sbatch, squeue, sacct and scancel.

Traps behind the shape of this module were seen with SLURM 22.05.8: squeue forgets a job after MinJobAge; sacct lags a
few seconds, and is disabled on some clusters; a step that never started left a job COMPLETED. Those of sbatch are in
submit.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.launchers import run_files
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.slurm.commands import Call, CommandAnswer, SlurmCommands
from llmlaunch.launchers.slurm.state import SlurmAnswers, is_settled, job_state
from llmlaunch.launchers.slurm.text import (
    OWNER_FORMAT,
    SACCT_FIELDS,
    SQUEUE_FORMAT,
    Row,
    parse_sacct,
    parse_squeue,
    strange_jobs,
)
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import create, read_run_id

__all__ = ["SlurmLauncher"]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True)
class SlurmLauncher:
    """Submits to SLURM. Each call of a command may take `timeout_seconds`; questions are asked `tries` times, and
    `say` is told what is waited for."""

    timeout_seconds: float = 60.0
    tries: int = 3
    say: Callable[[str], None] = _silent

    @property
    def name(self) -> str:
        return "slurm"

    # submit.py is imported where it is used: a question, which should feel instant, need not wait for it.

    def submit(self, run_dir: Path, extra: Sequence[str] = (), again: bool = False) -> Submission:
        from llmlaunch.launchers.slurm.submit import submit

        return submit(self._commands, run_dir, extra, again, self.cancel)

    def adopt(self, run_dir: Path) -> Submission | None:
        """The submission of a directory whose submit was interrupted: its jobs, looked for once and written down.

        None where none is seen. Raises UserError while another process submits it.
        """
        from llmlaunch.launchers.slurm.submit import adopt

        return adopt(self._commands, run_dir)

    def test(self, script: str, extra: Sequence[str] = ()) -> tuple[bool, str]:
        """Whether `sbatch --test-only` would take a script, and what it says. Nothing is submitted."""
        from llmlaunch.launchers.slurm.submit import test

        return test(self._commands, script, extra)

    def states(self, submissions: Iterable[Submission]) -> Mapping[str, JobState]:
        by_cluster: dict[str | None, list[Submission]] = {}
        for submission in submissions:
            by_cluster.setdefault(submission.cluster, []).append(submission)
        questions = [(group, self._ask_about(cluster, group)) for cluster, group in by_cluster.items()]
        return {
            submission.job_id: job_state(submission, answers)
            for group, wait_for_answers in questions
            for answers in [wait_for_answers()]
            for submission in group
        }

    def cancel(self, submission: Submission) -> bool:
        self._refuse_strangers(submission)
        # scancel says nothing of a job that ended a moment ago. Of a chain that has succeeded, links may still wait.
        if not submission.chain and self.states([submission])[submission.job_id].ended:
            return False
        # The last link first: one that waits for another begins as soon as that one ends.
        jobs = submission.jobs[::-1]
        answer = self._commands.ask(["scancel", *_on(submission.cluster), *jobs])
        ended = "already completing or completed" in answer.words
        if answer.code != 0 and not ended:
            raise SchedulerRefused(f"scancel did not cancel job {', '.join(jobs)}: {answer.words}")
        with contextlib.suppress(OSError):  # a full disk must not keep a job from being stopped
            create(run_files.cancel_mark(submission), "")
        return True

    def _refuse_strangers(self, submission: Submission) -> None:
        """Raises UserError where SLURM knows one of the jobs as another user's, or as none of this run directory:
        submission.json may name any job, and an operator's scancel obeys. A job that has left the queue is nobody's."""
        listed = ",".join(submission.jobs)
        answer = self._commands.ask(
            ["squeue", *_on(submission.cluster), "-h", "-t", "all", "-j", listed, "-o", OWNER_FORMAT]
        )
        if not _answered(answer):
            raise SchedulerRefused(f"squeue does not say whose job {listed} is ({answer.words}); nothing was cancelled")
        # A task of an array was submitted in the directory above its own.
        folders = [submission.run_dir, *([submission.run_dir.parent] if "_" in submission.job_id else [])]
        marks = [f"llmlaunch={run_id}" for run_id in map(read_run_id, folders) if run_id]
        strange = strange_jobs(answer.output, os.geteuid(), marks, folders) if answer.code == 0 else []
        if strange:
            raise UserError(
                f"{submission.run_dir / file_names.SUBMISSION}: names job {', '.join(strange)}, which SLURM shows as "
                "another user's, or as submitted in another directory under another run id; nothing was cancelled. "
                "Where it is yours: scancel it yourself"
            )

    @property
    def _commands(self) -> SlurmCommands:
        return SlurmCommands(self.timeout_seconds, self.tries, self.say)

    def _ask_about(self, cluster: str | None, submissions: Sequence[Submission]) -> Callable[[], SlurmAnswers]:
        """Start to ask a cluster; what is returned waits for the answers. Of several jobs squeue and sacct are asked
        side by side; of a single one, as who follows it does over and over, sacct only where something is missing."""
        jobs = [job for submission in submissions for job in submission.jobs]
        since = min(submission.submitted_at for submission in submissions)
        listed = ",".join(jobs)
        queue = self._commands.start(
            ["squeue", *_on(cluster), "-h", "-r", "-t", "all", "-j", listed, "-O", SQUEUE_FORMAT]
        )
        account = self._account(cluster, listed, since) if len(submissions) > 1 else None

        def hear() -> SlurmAnswers:
            answer = self._commands.insist(queue)
            live = parse_squeue(answer.output) if answer.code == 0 else {}
            if all(is_settled(submission, live) for submission in submissions):
                if account is not None:
                    account.abandon()
                return SlurmAnswers(live, {}, "" if _answered(answer) else answer.words)
            past = self._past(account or self._account(cluster, listed, since), listed)
            return SlurmAnswers(live, past, "" if _answered(answer) else answer.words)

        return hear

    def _account(self, cluster: str | None, jobs: str, since: float) -> Call:
        # From a day before: sacct otherwise looks at today only, and an older job may have had the same id.
        day = datetime.fromtimestamp(since) - timedelta(days=1)
        argv = ["sacct", *_on(cluster), "-X", "-D", "-S", f"{day:%Y-%m-%d}", "-P", "-n", "-j", jobs, "-o", SACCT_FIELDS]
        return self._commands.start(argv)

    def _past(self, account: Call, jobs: str) -> Mapping[str, Row]:
        """What the accounting knows; without slurmdbd, what the job completion file of `sacct -c` does."""
        answer = self._commands.insist(account)
        if answer.code != 0 and "storage is disabled" in answer.words:
            answer = self._commands.ask(["sacct", "-c", "-P", "-n", "-j", jobs, "-o", SACCT_FIELDS])
        return parse_sacct(answer.output) if answer.code == 0 else {}


def _on(cluster: str | None) -> list[str]:
    return ["-M", cluster] if cluster else []


def _answered(answer: CommandAnswer) -> bool:
    # An id squeue has forgotten is an error when it is asked for alone, and left out among others.
    return answer.code == 0 or "Invalid job id" in answer.words
