"""A thin layer over sbatch, squeue, sacct and scancel.

Traps behind the shape of this module were seen with SLURM 22.05.8: a controller that answers late has taken the job
although sbatch exits 1; squeue forgets a job after MinJobAge; sacct lags a few seconds, and is disabled on some
clusters; a step that never started left a job COMPLETED.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.launchers import environment, run_files, slurm_versions, submitting
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.slurm_commands import Answer, Call, SlurmCommands
from llmlaunch.launchers.slurm_late import Job, Wanted, comment_of, find_jobs, look_for_jobs
from llmlaunch.launchers.slurm_state import Heard, conclude
from llmlaunch.launchers.slurm_text import SACCT_FIELDS, SQUEUE_FORMAT, Row, parse_job_id, parse_sacct, parse_squeue

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

    def submit(self, run_dir: Path, extra: Sequence[str] = (), again: bool = False) -> Submission:
        run_dir = run_files.prepare(run_dir, again)
        before = run_files.read_submission(run_dir) if again else None
        script = (run_dir / run_files.SCRIPT).read_text(encoding="utf-8")
        slurm_versions.refuse_unknown([*environment.directives(script), *extra], self._version)
        mark, interrupted = submitting.begin(run_dir)
        wanted = _wanted(run_dir, mark.since, before, _clusters(script, extra))
        jobs = self._taken(wanted, before) if interrupted else []
        try:
            return self._hand_in(wanted, script, extra, jobs, before)
        except _MayBeTaken as late:  # the mark stays: the next command looks for the job again
            raise SchedulerRefused(
                f"SLURM did not answer in time ({late}), and the job is not seen in the queue; it may still turn up. "
                f"The run directory is kept; llmlaunch resume {run_dir} looks for the job again, and submits it only "
                "where there is none"
            ) from late
        except BaseException as error:
            if not isinstance(error, (KeyboardInterrupt, SystemExit)):
                submitting.remove(run_dir)
            raise

    def adopt(self, run_dir: Path) -> Submission | None:
        """The submission of a directory whose submit was interrupted: its jobs, looked for once and written down.

        None where none is seen. Raises UserError while another process submits it.
        """
        mark = submitting.left_behind(run_dir)
        if mark is None:
            return run_files.read_submission(run_dir)
        before = run_files.read_submission(run_dir)
        script = (run_dir / run_files.SCRIPT).read_text(encoding="utf-8")
        wanted = _wanted(run_dir.resolve(), mark.since, before, _clusters(script, ()))
        jobs, _ = find_jobs(self._commands, wanted)
        jobs = _with_written(jobs, wanted, before)
        if not jobs:
            return before
        submission = _submission(wanted, jobs, before)
        run_files.write_submission(submission, over=before is not None)
        if len(jobs) > run_files.follow_ups(run_dir):
            submitting.remove(run_dir)  # else resume hands in the follow-up jobs that are missing
        return submission

    def test(self, script: str, extra: Sequence[str] = ()) -> tuple[bool, str]:
        """What `sbatch --test-only` says of a script, and whether it would take it. Nothing is submitted."""
        slurm_versions.refuse_unknown([*environment.directives(script), *extra], self._version)
        argv = ["sbatch", "--test-only", *extra]
        call = self._commands.start(argv, environment.for_sbatch(os.environ, script), given=script)
        answer = call.answer()
        return answer.code == 0, answer.words

    def states(self, submissions: Iterable[Submission]) -> Mapping[str, JobState]:
        by_cluster: dict[str | None, list[Submission]] = {}
        for submission in submissions:
            by_cluster.setdefault(submission.cluster, []).append(submission)
        asked = [(group, self._ask_about(cluster, group)) for cluster, group in by_cluster.items()]
        return {one.job_id: conclude(one, heard) for group, hear in asked for heard in [hear()] for one in group}

    def cancel(self, submission: Submission) -> None:
        # The last link first: one that waits for another begins as soon as that one ends.
        jobs = submission.jobs[::-1]
        answer = self._commands.ask(["scancel", *_on(submission.cluster), *jobs])
        ended = "already completing or completed" in answer.words
        if answer.code != 0 and not ended:
            raise SchedulerRefused(f"scancel did not cancel job {', '.join(jobs)}: {answer.words}")
        with contextlib.suppress(OSError):  # a full disk must not keep a job from being stopped
            run_files.cancel_mark(submission).touch()

    @property
    def _commands(self) -> SlurmCommands:
        return SlurmCommands(self.timeout_seconds, self.tries, self.say)

    def _version(self) -> str:
        return self._commands.ask(["sbatch", "--version"]).output

    def _taken(self, wanted: Wanted, before: Submission | None) -> list[Job]:
        """The jobs an interrupted submit handed in, those it wrote down among them. Raises SchedulerRefused where SLURM
        does not say."""
        self.say(f"an earlier submit of {wanted.run_dir} was interrupted")
        jobs, answer = look_for_jobs(self._commands, wanted)
        jobs = _with_written(jobs, wanted, before)
        if jobs:
            self.say(f"found job {', '.join(job for job, _ in jobs)}, which that submit had handed in")
        elif answer.code != 0:
            raise SchedulerRefused(
                f"an earlier submit of {wanted.run_dir} was interrupted, and SLURM does not say whether it has the job "
                f"({answer.words}); nothing was submitted; try again: llmlaunch resume {wanted.run_dir}"
            )
        return jobs

    def _hand_in(
        self, wanted: Wanted, script: str, extra: Sequence[str], jobs: list[Job], before: Submission | None
    ) -> Submission:
        """The first job and its follow-up jobs, but for those SLURM has; each is written down before the next."""
        links = 1 + run_files.follow_ups(wanted.run_dir)
        submission = None
        if jobs:
            submission = self._write_down(wanted, jobs, before)
        while len(jobs) < links:
            after = [f"--dependency=afterany:{jobs[-1][0]}"] if jobs else []
            try:
                jobs.append(self._sbatch(wanted, script, [*extra, *after], jobs))
            except SchedulerRefused as refusal:
                if submission is None:
                    raise
                self.say(f"{len(jobs)} of {links} jobs of the chain are in, and no more: {refusal}")
                break
            submission = self._write_down(wanted, jobs, before if submission is None else submission)
        submitting.remove(wanted.run_dir)
        assert submission is not None
        return submission

    def _write_down(self, wanted: Wanted, jobs: Sequence[Job], before: Submission | None) -> Submission:
        submission = _submission(wanted, jobs, before)
        try:
            run_files.write_submission(submission, over=before is not None)
        except (OSError, UserError) as error:
            # Another submit was faster, or the disk is full: a job nobody knows of must not run on.
            self.cancel(submission)
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{wanted.run_dir}: cannot write into it: {error.strerror}; job {', '.join(submission.jobs)} was "
                "cancelled again"
            ) from error
        return submission

    def _sbatch(self, wanted: Wanted, script: str, extra: Sequence[str], jobs: Sequence[Job]) -> Job:
        """One job handed in. Raises SchedulerRefused, and _MayBeTaken where nobody knows."""
        env = environment.for_sbatch(os.environ, script)
        own = environment.option([*environment.directives(script), *extra], "--comment")
        comment = comment_of(wanted.run_id, own)
        argv = ["sbatch", "--parsable", *extra, f"--comment={comment}", run_files.SCRIPT]
        for attempt in range(1, self.tries + 1):
            answer = self._commands.start(argv, env, wanted.run_dir).answer()
            if not answer.unreached or attempt == self.tries:
                break
            self._commands.wait_before(attempt, answer)  # it was not heard, so it may be said again
        job = parse_job_id(answer.output) if answer.code == 0 else None
        if job is None and (answer.late or answer.code == 0):
            # Never again: a second job in the same directory would be worse than none.
            known = wanted.known | {job_id for job_id, _ in jobs}
            found, _ = look_for_jobs(self._commands, replace(wanted, known=known))
            if not found:
                raise _MayBeTaken(answer.words)
            return found[0]
        if job is None:
            raise SchedulerRefused(
                f"sbatch refused the job: {answer.words}; the run directory is kept: {wanted.run_dir}; submit it "
                f"later: llmlaunch resume {wanted.run_dir}"
            )
        return job

    def _ask_about(self, cluster: str | None, submissions: Sequence[Submission]) -> Callable[[], Heard]:
        """Start to ask a cluster; what is returned waits for the answers. Of several jobs squeue and sacct are asked
        side by side; of a single one, as who follows it does over and over, sacct is left alone while it runs."""
        jobs = [job for submission in submissions for job in submission.jobs]
        since = min(submission.submitted_at for submission in submissions)
        listed = ",".join(jobs)
        queue = self._commands.start(
            ["squeue", *_on(cluster), "-h", "-r", "-t", "all", "-j", listed, "-O", SQUEUE_FORMAT]
        )
        account = self._account(cluster, listed, since) if len(submissions) > 1 else None

        def hear() -> Heard:
            answer = self._commands.insist(queue)
            live = parse_squeue(answer.output) if answer.code == 0 else {}
            if account is None and all(row.phase in ("pending", "running") for row in live.values()) and live:
                return Heard(live, {})
            past = self._past(account or self._account(cluster, listed, since), listed)
            return Heard(live, past, "" if _answered(answer) else answer.words)

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


class _MayBeTaken(Exception):
    """sbatch was not answered, and the job is nowhere to be seen."""


def _wanted(run_dir: Path, since: float, before: Submission | None, clusters: Sequence[str]) -> Wanted:
    past = (*before.earlier, before) if before else ()
    known = {job for one in past for job in one.jobs if one.submitted_at != since}  # of others than this submit
    return Wanted(run_dir, run_files.name_run(run_dir), since, frozenset(known), clusters)


def _with_written(jobs: list[Job], wanted: Wanted, before: Submission | None) -> list[Job]:
    """With those the submit had written down before it was interrupted; SLURM may have forgotten them."""
    if before is None or before.submitted_at != wanted.since:
        return jobs
    written = [(job, before.cluster) for job in before.jobs]
    return [*written, *(job for job in jobs if job[0] not in before.jobs)]


def _submission(wanted: Wanted, jobs: Sequence[Job], before: Submission | None) -> Submission:
    """`before`: what submission.json holds, of earlier jobs or of the first links of this chain."""
    ids = tuple(job for job, _ in jobs)
    earlier = () if before is None else before.earlier
    if before is not None and before.job_id not in ids:
        earlier = (*earlier, replace(before, earlier=()))
    chain = ids if len(ids) > 1 else ()
    cluster = next((cluster for _, cluster in jobs if cluster), None)
    return Submission("slurm", ids[0], wanted.run_dir, wanted.since, cluster, chain, earlier)


def _clusters(script: str, extra: Sequence[str]) -> list[str]:
    words = [*environment.directives(script), *extra]
    named = environment.option(words, "--clusters") or environment.option(words, "-M")
    named = named or os.environ.get("SBATCH_CLUSTERS")
    return ["-M", named] if named else []


def _on(cluster: str | None) -> list[str]:
    return ["-M", cluster] if cluster else []


def _answered(answer: Answer) -> bool:
    # An id squeue has forgotten is an error when it is asked for alone, and left out among others.
    return answer.code == 0 or "Invalid job id" in answer.words
