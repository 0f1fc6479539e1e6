"""Hands a run directory to sbatch, so that no job is ever handed in twice and none is lost.

Traps seen with SLURM 22.05.8: a controller that answers late has taken the job although sbatch exits 1; one that dies
or is cut off while sbatch speaks with it may have taken it; a submit that is killed right after sbatch leaves a job
that nobody has written down.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.launchers import run_environment, run_files, submit_mark
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.run_environment import VariableFilter
from llmlaunch.launchers.slurm import commands
from llmlaunch.launchers.slurm.commands import CommandAnswer, SlurmCommands
from llmlaunch.launchers.slurm.text import (
    LATE_JOB_FORMAT,
    PAST_JOB_FIELDS,
    PAST_JOB_FIELDS_BEFORE_21_08,
    JobMatch,
    parse_job_id,
    parse_late_jobs,
    parse_past_jobs,
)
from llmlaunch.report.slurm_words import mend_of_refusal
from llmlaunch.rundir import file_names
from llmlaunch.rundir.values import is_attempt, is_slurm_job, job_of, to_type

_LOOKS = 10
_SILENCE_SECONDS = 60.0
_PAUSE_SECONDS = 1.0
_ASK_SECONDS = 10.0
_ANY = "BF,CA,CD,DL,F,NF,OOM,PD,PR,R,S,TO"
_CLOCK_SLACK = timedelta(minutes=1)


@dataclass(frozen=True)
class JobQuery:
    """Which jobs are meant: this run's, submitted since, and none of those that are `known`."""

    run_dir: Path
    run_id: str
    since: float
    """Unix seconds, when the submit began."""
    known: frozenset[str]
    clusters: Sequence[str] = ()
    """`-M` and its value, where the job was not meant for this cluster alone."""

    @property
    def mark(self) -> str:
        return f"llmlaunch={self.run_id}"

    @property
    def earliest(self) -> datetime:
        return datetime.fromtimestamp(self.since) - _CLOCK_SLACK


Job = tuple[str, str | None]
"""Its id, and its cluster where that is named."""


def comment_of(run_id: str, own: str | None) -> str:
    """The comment a job carries: the recipe's own, if any, then the run's id."""
    return f"{own} llmlaunch={run_id}" if own else f"llmlaunch={run_id}"


def look_for_jobs(slurm: SlurmCommands, wanted: JobQuery) -> tuple[list[Job], CommandAnswer]:
    """The jobs, looked for ten times, because a controller that wakes up may answer squeue before it takes the job; and
    squeue's last answer. One that stays silent is waited for a minute."""
    once = replace(slurm, tries=1)
    slurm.say(f"looking for a job of {wanted.run_dir} that SLURM may have taken without saying so")
    silent_until, answered = time.monotonic() + _SILENCE_SECONDS, 0
    while True:
        jobs, answer = find_jobs(once, wanted)
        answered += answer.code == 0
        refused = answer.code != 0 and not (answer.late or answer.unreached)
        silent = answer.code != 0 and time.monotonic() > silent_until
        if jobs or refused or silent or answered == _LOOKS:
            return jobs, answer
        time.sleep(_PAUSE_SECONDS)


def find_jobs(slurm: SlurmCommands, wanted: JobQuery) -> tuple[list[Job], CommandAnswer]:
    """Return the jobs that squeue, sacct or the run directory's attempts know, ordered by id, and squeue's answer."""
    queue = slurm.start(["squeue", *wanted.clusters, "-t", "all", "--me", "-o", LATE_JOB_FORMAT])
    past = _past(slurm, wanted)
    answer = slurm.insist(queue)
    now = []
    if answer.code == 0:
        now = parse_late_jobs(answer.output, wanted.mark, wanted.run_dir, wanted.earliest)
    matches = [*(JobMatch(job, False) for job in _attempted(wanted)), *past, *now]
    # The working directory decides only if no comment names the run: somebody may have submitted a job by hand.
    new = [match for match in matches if str(match.job) not in wanted.known]
    marked = [match for match in new if match.marked]
    jobs = {match.job: match.cluster for match in marked or new}  # squeue, the last, knows clusters
    return [(str(job), jobs[job]) for job in sorted(jobs)], answer


def _past(slurm: SlurmCommands, wanted: JobQuery) -> list[JobMatch]:
    """Return the jobs the accounting knows, even if the controller has forgotten them; without it, ask `sacct -c`."""
    since = (wanted.earliest - timedelta(days=1)).strftime("%Y-%m-%d")
    # Without the states sacct leaves out a job that never started (seen with 22.05.8).
    argv = ["sacct", *wanted.clusters, "-X", "-P", "-n", "-u", str(os.getuid())]
    argv += ["-S", since, "-E", "now", "-s", _ANY, "-o"]
    try:
        answer = slurm.ask([*argv, PAST_JOB_FIELDS])
    except UserError:  # this machine has no sacct
        return []
    if "Invalid field" in answer.words:
        answer = slurm.ask([*argv, PAST_JOB_FIELDS_BEFORE_21_08])
    elif "storage is disabled" in answer.words:
        answer = slurm.ask(["sacct", "-c", "-P", "-n", "-S", since, "-o", "JobID,Start,WorkDir"])
    return parse_past_jobs(answer.output, wanted.mark, wanted.run_dir, wanted.earliest) if answer.code == 0 else []


def _attempted(wanted: JobQuery) -> list[int]:
    jobs = set()
    for folder in wanted.run_dir.glob("attempts/*"):
        job = job_of(folder.name)
        if is_attempt(folder.name) and is_slurm_job(job) and folder.lstat().st_mtime >= wanted.earliest.timestamp():
            jobs.add(int(job.partition("_")[0]))
    return sorted(jobs)


def submit(
    slurm: SlurmCommands, run_dir: Path, extra: Sequence[str], again: bool, cancel: Callable[[Submission], object]
) -> Submission:
    """Submit as `Launcher.submit` says. `cancel` cancels a submission that cannot be written down."""
    run_dir = run_files.prepare(run_dir, again)
    before = run_files.read_submission(run_dir) if again else None
    script = run_files.job_script(run_dir)
    commands.refuse_unknown([*run_environment.directives(script), *extra], lambda: _version(slurm))
    mark, interrupted = submit_mark.begin(run_dir)
    wanted = _wanted(run_dir, mark.since, before, _clusters(script, extra))
    jobs = _taken(slurm, wanted, before) if interrupted else []
    try:
        submission = _JobSubmitter(slurm, cancel, wanted, script).all(extra, jobs, before)
    except _MayBeTaken as late:  # the mark stays: the next command looks for the job again
        raise SchedulerRefused(
            f"SLURM did not say whether it took the job ({late}), which is not in the queue and may still turn up. "
            f"The run directory is kept; {to_type('resume', run_dir)} looks for the job again, and submits it only "
            "where there is none"
        ) from late
    except Exception:  # not Ctrl-C: sbatch may have been at work
        submit_mark.remove(run_dir)
        raise
    _warn_of_no_requeue(slurm, submission)
    return submission


def _warn_of_no_requeue(slurm: SlurmCommands, submission: Submission) -> None:
    """Say it where the site has taken `--requeue` away: a job_submit plugin may do so without a word."""
    if not run_files.requeues(submission.run_dir):
        return
    on = ["-M", submission.cluster] if submission.cluster else []
    try:
        shown = replace(slurm, timeout_seconds=_ASK_SECONDS, tries=1).ask(
            ["scontrol", *on, "show", "job", "-o", submission.job_id]
        )
    except UserError:  # there is no scontrol
        return
    if shown.code == 0 and re.search(r"\bRequeue=0\b", shown.output):
        slurm.say(
            f"warning: this site does not put job {submission.job_id} back into the queue (Requeue=0). When its time "
            f"is over or a node fails it ends, and {to_type('resume', submission.run_dir)} goes on from its last "
            "checkpoint; restart: {by: chain} (restart_by: chain in the cluster profile) hands in follow-up jobs"
        )


def adopt(slurm: SlurmCommands, run_dir: Path) -> Submission | None:
    """Find and write down the jobs of an interrupted submit, as `SlurmLauncher.adopt` says."""
    mark = submit_mark.left_behind(run_dir)
    if mark is None or run_files.is_foreign(run_dir):
        return run_files.read_submission(run_dir)
    before = run_files.read_submission(run_dir)
    script = run_files.job_script(run_dir)
    wanted = _wanted(run_dir.resolve(), mark.since, before, _clusters(script, ()))
    jobs, _ = find_jobs(slurm, wanted)
    jobs = _with_written(jobs, wanted, before)
    if not jobs:
        return before
    submission = _submission(wanted, jobs, before)
    run_files.write_submission(submission, over=before is not None)
    if len(jobs) > run_files.follow_ups(run_dir):
        submit_mark.remove(run_dir)  # else resume hands in the follow-up jobs that are missing
    return submission


def test(slurm: SlurmCommands, script: str, extra: Sequence[str]) -> tuple[bool, str]:
    """Ask `sbatch --test-only`, as `SlurmLauncher.test` says."""
    commands.refuse_unknown([*run_environment.directives(script), *extra], lambda: _version(slurm))
    argv = ["sbatch", "--test-only", *extra]
    call = slurm.start(argv, run_environment.for_sbatch(script), stdin_text=script)
    answer = call.answer()
    return answer.code == 0, answer.words


def _version(slurm: SlurmCommands) -> str:
    return slurm.ask(["sbatch", "--version"]).output


def _taken(slurm: SlurmCommands, wanted: JobQuery, before: Submission | None) -> list[Job]:
    """Return the jobs that an interrupted submit submitted, including those it wrote down.

    Raises SchedulerRefused if SLURM does not answer.
    """
    slurm.say(f"an earlier submit of {wanted.run_dir} was interrupted")
    jobs, answer = look_for_jobs(slurm, wanted)
    jobs = _with_written(jobs, wanted, before)
    if jobs:
        slurm.say(f"found job {', '.join(job for job, _ in jobs)}, which that submit had submitted")
    elif answer.code != 0:
        raise SchedulerRefused(
            f"an earlier submit of {wanted.run_dir} was interrupted, and SLURM does not say whether it has the job "
            f"({answer.words}); nothing was submitted; try again: {to_type('resume', wanted.run_dir)}"
        )
    return jobs


@dataclass(frozen=True)
class _JobSubmitter:
    slurm: SlurmCommands
    cancel: Callable[[Submission], object]
    wanted: JobQuery
    script: str

    def all(self, extra: Sequence[str], jobs: list[Job], before: Submission | None) -> Submission:
        """The first job and its follow-up jobs, but for those SLURM has; each is written down before the next."""
        links = 1 + run_files.follow_ups(self.wanted.run_dir)
        submission = None
        if jobs:
            submission = self._write_down(jobs, before)
        while len(jobs) < links:
            after = [f"--dependency=afterany:{jobs[-1][0]}"] if jobs else []
            try:
                jobs.append(self._sbatch([*extra, *after], jobs))
            except SchedulerRefused as refusal:
                if submission is None:
                    raise
                again = to_type("resume", self.wanted.run_dir)
                self.slurm.say(
                    f"{len(jobs)} of {links} jobs of the chain are in, and no more: {refusal}. When the last of them "
                    f"has ended, {again} goes on"
                )
                break
            submission = self._write_down(jobs, before if submission is None else submission)
        submit_mark.remove(self.wanted.run_dir)
        assert submission is not None
        return submission

    def _write_down(self, jobs: Sequence[Job], before: Submission | None) -> Submission:
        submission = _submission(self.wanted, jobs, before)
        try:
            run_files.write_submission(submission, over=before is not None)
        except (OSError, UserError) as error:
            # Another submit was faster, or the disk is full: a job nobody knows of must not run on.
            self.cancel(submission)
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self.wanted.run_dir}: cannot write into it: {error.strerror}; job {', '.join(submission.jobs)} was "
                "cancelled again"
            ) from error
        return submission

    def _sbatch(self, extra: Sequence[str], jobs: Sequence[Job]) -> Job:
        """One job handed in. Raises SchedulerRefused, and _MayBeTaken where nobody knows."""
        variables = run_environment.for_sbatch(self.script)
        own = run_environment.option([*run_environment.directives(self.script), *extra], "--comment")
        comment = comment_of(self.wanted.run_id, own)
        argv = ["sbatch", "--parsable", *extra, f"--comment={comment}", file_names.JOB_SCRIPT]
        answer = self._answer(argv, variables)
        job = parse_job_id(answer.output) if answer.code == 0 else None
        if job is None and (answer.late or answer.code == 0):
            # Never again: a second job in the same directory would be worse than none.
            known = self.wanted.known | {job_id for job_id, _ in jobs}
            matches, _ = look_for_jobs(self.slurm, replace(self.wanted, known=known))
            if not matches:
                raise _MayBeTaken(answer.words)
            return matches[0]
        if job is None:
            if not jobs:
                run_files.note_refusal(self.wanted.run_dir, answer.words)
            raise SchedulerRefused(self._refusal(answer.words, extra, is_first=not jobs))
        return job

    def _refusal(self, words: str, extra: Sequence[str], is_first: bool) -> str:
        """Return what a person reads of a refusal: sbatch's own words, how to mend it, and, where nothing of the run
        was submitted, what becomes of it."""
        mend = mend_of_refusal(words, [*run_environment.directives(self.script), *extra])
        sentences = [f"sbatch refused the job: {words}", *([mend.sentence] if mend.sentence else [])]
        if not is_first:
            return ". ".join(sentences)
        options = ("--", mend.option) if mend.option else ()
        later = to_type("resume", self.wanted.run_dir, *options)
        return ". ".join([*sentences, f"The run directory is kept: {self.wanted.run_dir}; submit it later: {later}"])

    def _answer(self, argv: Sequence[str], variables: VariableFilter) -> CommandAnswer:
        """What a command says; where it was not heard it is said again."""
        for attempt in range(1, self.slurm.tries + 1):
            answer = self.slurm.start(argv, variables, self.wanted.run_dir).answer()
            if not answer.unreached or attempt == self.slurm.tries:
                break
            self.slurm.wait_before(attempt, answer)
        return answer


class _MayBeTaken(Exception):
    """sbatch was not answered, and the job is nowhere to be seen."""


def _wanted(run_dir: Path, since: float, before: Submission | None, clusters: Sequence[str]) -> JobQuery:
    past = (*before.earlier, before) if before else ()
    known = {
        job for submission in past for job in submission.jobs if submission.submitted_at != since
    }  # of others than this submit
    return JobQuery(run_dir, run_files.name_run(run_dir), since, frozenset(known), clusters)


def _with_written(jobs: list[Job], wanted: JobQuery, before: Submission | None) -> list[Job]:
    """Return `jobs` with those that the submit wrote down before it was interrupted; SLURM may have forgotten them."""
    if before is None or before.submitted_at != wanted.since:
        return jobs
    written = [(job, before.cluster) for job in before.jobs]
    return [*written, *(job for job in jobs if job[0] not in before.jobs)]


def _submission(wanted: JobQuery, jobs: Sequence[Job], before: Submission | None) -> Submission:
    """`before`: what submission.json holds, of earlier jobs or of the first links of this chain."""
    ids = tuple(job for job, _ in jobs)
    earlier = () if before is None else before.earlier
    if before is not None and before.job_id not in ids:
        earlier = (*earlier, replace(before, earlier=()))
    chain = ids if len(ids) > 1 else ()
    cluster = next((cluster for _, cluster in jobs if cluster), None)
    return Submission("slurm", ids[0], wanted.run_dir, wanted.since, cluster, chain, earlier)


def _clusters(script: str, extra: Sequence[str]) -> list[str]:
    words = [*run_environment.directives(script), *extra]
    named = run_environment.option(words, "--clusters") or run_environment.option(words, "-M")
    named = named or os.environ.get("SBATCH_CLUSTERS")
    return ["-M", named] if named else []
