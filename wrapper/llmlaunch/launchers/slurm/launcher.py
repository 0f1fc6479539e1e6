"""A thin layer over sbatch, squeue, sacct and scancel, and what became of a job by what they and the job itself say.

Traps behind the shape of this module were seen with SLURM 22.05.8: squeue forgets a job after MinJobAge; sacct lags a
few seconds, and is disabled on some clusters; a step that never started left a job COMPLETED. Those of sbatch are in
submit.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.launchers import run_files
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.slurm.commands import Call, CommandAnswer, SlurmCommands
from llmlaunch.launchers.slurm.text import (
    OWNER_FORMAT,
    SACCT_FIELDS,
    SQUEUE_FORMAT,
    Row,
    Rows,
    parse_sacct,
    parse_squeue,
    row_of,
    strange_jobs,
)
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import create, read_run_id


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
        strange = strange_jobs(answer.output, os.getuid(), marks, folders) if answer.code == 0 else []
        if strange:
            file = submission.run_dir / file_names.SUBMISSION
            raise UserError(
                f"{file if file.exists() else submission.run_dir}: names job {', '.join(strange)}, which SLURM shows "
                "as another user's, or as submitted in another directory under another run id; nothing was cancelled. "
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
            nonlocal account
            if account is None and queue.is_silent(_SILENT_SECONDS):  # one wait for both, not one after the other
                account = self._account(cluster, listed, since)
            answer = self._commands.insist(queue)
            live = parse_squeue(answer.output) if answer.code == 0 else {}
            if all(is_settled(submission, live) for submission in submissions):
                if account is not None:
                    account.abandon()
                return SlurmAnswers(live, {}, "" if _answered(answer) else answer.words)
            past = self._past(listed, account or self._account(cluster, listed, since))
            return SlurmAnswers(live, past, "" if _answered(answer) else answer.words)

        return hear

    def _account(self, cluster: str | None, jobs: str, since: float) -> Call | None:
        """None where this machine has no sacct."""
        # From a day before: sacct otherwise looks at today only, and an older job may have had the same id.
        day = datetime.fromtimestamp(since) - timedelta(days=1)
        argv = ["sacct", *_on(cluster), "-X", "-D", "-S", f"{day:%Y-%m-%d}", "-P", "-n", "-j", jobs, "-o", SACCT_FIELDS]
        try:
            return self._commands.start(argv)
        except UserError:
            return None

    def _past(self, jobs: str, account: Call | None) -> Mapping[str, Row]:
        """What the accounting knows; without slurmdbd, what the job completion file of `sacct -c` does. Nothing where
        the site keeps neither: how a job ended is then known from squeue, for some minutes, and from its own files."""
        if account is None:
            return {}
        answer = self._commands.insist(account)
        if answer.code != 0 and "storage is disabled" in answer.words:
            answer = self._commands.ask(["sacct", "-c", "-P", "-n", "-j", jobs, "-o", SACCT_FIELDS])
        return parse_sacct(answer.output) if answer.code == 0 else {}


def _on(cluster: str | None) -> list[str]:
    return ["-M", cluster] if cluster else []


def _answered(answer: CommandAnswer) -> bool:
    # An id squeue has forgotten is an error when it is asked for alone, and left out among others.
    return answer.code == 0 or "Invalid job id" in answer.words


_SMALL_FILE_BYTES = 1 << 16
_SILENT_SECONDS = 1.0
"""After so long without a word of squeue, sacct is asked as well."""


@dataclass(frozen=True)
class SlurmAnswers:
    """The rows of squeue (`live`) and of sacct (`past`), and squeue's error (`silence`) if it did not answer."""

    live: Rows
    past: Rows
    silence: str = ""


def job_state(submission: Submission, heard: SlurmAnswers) -> JobState:
    """Return the state of a submission; for a chain, the state of the job it has reached."""
    links = [_state(replace(submission, job_id=job, chain=()), heard) for job in submission.jobs]
    state = links[0] if len(links) == 1 else _of_chain(links)
    if state.phase in ("pending", "running"):
        return state
    noted = run_files.end_noted(submission)
    if noted is not None and state.phase in ("unknown", noted.phase):
        return noted  # who cancelled it, and the reason, are known for a while only
    # A task of an array that is cancelled while it waits may leave no trace in SLURM (seen with 22.05.8).
    if state.phase == "unknown" and not heard.silence and run_files.was_cancelled(submission):
        return JobState("cancelled", reason="cancelled with llmlaunch before it started")
    return state


def is_settled(submission: Submission, live: Rows) -> bool:
    """Return whether sacct has nothing to add: each job waits or runs, has written its own status, or was noted as
    ended before."""
    rows = {job: row_of(live, job) for job in submission.jobs}
    missing = [job for job, row in rows.items() if row is None or row.phase not in ("pending", "running")]
    if not missing or run_files.end_noted(submission) is not None:
        return True
    return all(run_files.read_end(replace(submission, job_id=job, chain=())) is not None for job in missing)


def _of_chain(links: Sequence[JobState]) -> JobState:
    """The link that reached the end of the training, else the one that runs, else the first that waits, else the
    last."""
    for phase in ("succeeded", "running", "pending"):
        for number, state in enumerate(links, start=1):
            if state.phase == phase:
                return replace(state, link=number)
    return replace(links[-1], link=len(links))


def _state(submission: Submission, heard: SlurmAnswers) -> JobState:
    row, record = row_of(heard.live, submission.job_id), row_of(heard.past, submission.job_id)
    restarts = max(row.restarts if row else 0, record.restarts if record else 0)
    return replace(_phase(submission, row, record, heard.silence), restarts=restarts)


def _phase(submission: Submission, row: Row | None, record: Row | None, silence: str) -> JobState:
    latest = row or record
    silence = silence if silence.startswith("squeue ") or not silence else f"squeue: {silence}"
    reason = silence or f"SLURM does not know job {submission.job_id}"
    if latest is None:
        return _own_word(submission) or JobState("unknown", reason=reason)
    if latest.phase in ("pending", "running"):
        if row is None and not silence:
            # The controller has forgotten it, the accounting has not heard of its end (yet, or never).
            return _own_word(submission) or JobState("unknown", latest.state, f"{reason}; sacct says {latest.state}")
        if row is None:
            return JobState(latest.phase, latest.state, f"by sacct alone; {reason}")
        starts = latest.starts if latest.phase == "pending" else None
        return JobState(latest.phase, latest.state, latest.reason, expected_start=starts)
    if latest.phase == "succeeded":
        reason = f"SLURM says COMPLETED, but job {submission.job_id} left no status.json{_full_disk(submission)}"
        return _own_word(submission, latest.state) or JobState("unknown", latest.state, reason)
    if latest.phase == "failed":
        return _failed(submission, latest, record)
    return JobState(latest.phase, latest.state, _cancelled_by(record) or latest.reason)


def _failed(submission: Submission, latest: Row, record: Row | None) -> JobState:
    own = _own_word(submission, latest.state)
    if own is None or own.phase == "succeeded":
        reason = "; ".join(part for part in (latest.reason, _lost_node(submission, latest.state)) if part)
        return JobState("failed", latest.state, reason, record.exit_code if record else None)
    if own.phase == "stopped":
        return own
    reason = "; ".join(part for part in (latest.reason, own.reason) if part)
    return JobState("failed", latest.state, reason, own.exit_code)


def _full_disk(submission: Submission) -> str:
    with contextlib.suppress(OSError):
        if shutil.disk_usage(submission.run_dir).free < _SMALL_FILE_BYTES:
            return f"; no space is left on the disk of {submission.run_dir}"
    return ""


def _lost_node(submission: Submission, state: str) -> str:
    """Which node SLURM lost. srun says so in the job's log, and waits longer for the lost node's task than SLURM leaves
    the batch script: so there is no status.json."""
    if state != "NODE_FAIL":
        return ""
    from llmlaunch.causes.attempt_cause import cause_of  # late: a question about SLURM need not wait for it
    from llmlaunch.causes.cause import sentence
    from llmlaunch.launchers.run_files import attempt_names
    from llmlaunch.rundir.attempt import Attempt

    names = attempt_names(submission)
    try:
        cause = cause_of(Attempt(submission.run_dir, names[-1]), (), 1, state) if names else None
    except Exception:  # a file that nobody foresaw; the state of the job is known without it
        return ""
    return "" if cause is None else sentence(cause)


def _own_word(submission: Submission, state: str = "") -> JobState | None:
    end = run_files.read_end(submission)
    if end is None:
        return None
    return JobState(end.state, state, end.why, end.exit_code)


def _cancelled_by(record: Row | None) -> str:
    if record is None or not record.by:
        return ""
    import pwd

    try:
        return f"by {pwd.getpwuid(int(record.by)).pw_name}"
    except (KeyError, OverflowError):
        return f"by user {record.by}"
