"""The small files that launchers read and write in a run directory (docs/run-directory.md)."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import ENDED, JobState, Submission
from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import create, read_object, read_run_id, read_text, replace_json
from llmlaunch.rundir.run import attempts_in
from llmlaunch.rundir.run_file import read_run_file
from llmlaunch.rundir.submission_files import REFUSED, JobEnd, read_job_end
from llmlaunch.rundir.values import (
    count_above_zero,
    counted,
    is_attempt,
    is_cluster,
    is_local_job,
    is_slurm_job,
    job_of,
    printable,
    time_or_none,
)

_MOST_FOLLOW_UPS = 8
_MOST_FILES, _MOST_NAMED = 1000, 5
_MOST_EARLIER = 1000
_ENDS = ("succeeded", "failed", "stopped")


def prepare(run_dir: Path, again: bool = False) -> Path:
    """Return the resolved path of a run directory that is ready to be submitted: it has a name and a folder for logs.

    Raises UserError if it is not a run directory, belongs to another user, was submitted before (unless `again`), or
    cannot be written to.
    """
    run_dir = run_dir.resolve()
    missing = missing_files(run_dir)
    if not missing and not (run_dir / file_names.JOB_SCRIPT).is_file():
        raise UserError(
            f"{run_dir}: not a run directory: it has no {file_names.JOB_SCRIPT}; llmlaunch render writes one"
        )
    refuse_foreign(run_dir)
    if missing:
        checkpoint = read_run_file(run_dir).get("checkpoint")
        saved = f" in {printable(checkpoint.get('path', ''))}" if checkpoint else ""
        raise UserError(
            f"{run_dir}: {gone_text(missing)}; nothing was submitted. Put them back, or submit the recipe again: a new "
            f"run directory goes on from the checkpoints{saved}"
        )
    if not again:
        _refuse_second(run_dir)
    try:
        (run_dir / file_names.LOGS).mkdir(exist_ok=True)
        name_run(run_dir)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot write into it: {error.strerror}; nothing was submitted") from error
    return run_dir


def missing_files(run_dir: Path) -> list[str]:
    """Return the names of rendered files that are missing from a run directory. Sites that remove old files remove them
    one by one. Nothing is known about a directory that was not rendered."""
    path = run_dir / file_names.RUN
    if not path.exists():
        others = (file_names.JOB_SCRIPT, file_names.NODE_ARCHIVE)
        return [file_names.RUN] if all((run_dir / name).exists() for name in others) else []
    return [
        name for name in read_run_file(run_dir).get("files", [])[:_MOST_FILES] if not os.path.lexists(run_dir / name)
    ]


def gone_text(names: Sequence[str]) -> str:
    """Return the message about rendered files that are missing."""
    more = f" and {counted(len(names) - _MOST_NAMED, 'other')}" if len(names) > _MOST_NAMED else ""
    shown = printable(", ".join(names[:_MOST_NAMED])).replace("\n", "?")
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'} gone; the site may have removed old files"


def job_script(run_dir: Path) -> str:
    """Return the text of job.sbatch. Raises UserError if it cannot be read."""
    path = run_dir / file_names.JOB_SCRIPT
    try:
        return read_text(path, follow=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def can_be_resumed(run_dir: Path) -> bool:
    """Return whether `llmlaunch resume` may submit this directory. The job of an observed run is the user's own script,
    and only the user starts it again."""
    return read_run_file(run_dir).get("observed") is not True


def can_be_cancelled(run_dir: Path) -> bool:
    """Return whether `llmlaunch cancel` ends the job of this directory. It leaves a job that the user started by hand
    to the user."""
    by_hand = (run_dir / file_names.JOB_SCRIPT).exists() and not (run_dir / file_names.SUBMISSION).exists()
    return can_be_resumed(run_dir) and not by_hand


def is_foreign(run_dir: Path) -> bool:
    """Return whether a run directory belongs to another user. On a file system where every file has the same owner,
    none does."""
    try:
        owner = run_dir.stat().st_uid
        if owner == os.geteuid():
            return False
        with tempfile.TemporaryFile(dir=run_dir) as probe:  # without a name: it leaves nothing behind
            return os.fstat(probe.fileno()).st_uid != owner
    except OSError:
        return True


def refuse_foreign(run_dir: Path) -> None:
    """Raise UserError for a run directory of another user. It may be read, but its content starts no action."""
    if not is_foreign(run_dir):
        return
    try:
        owner = run_dir.owner()
    except (KeyError, OSError):
        owner = "another user"
    raise UserError(
        f"{run_dir}: belongs to {owner}; llmlaunch reads it, and submits, resumes and cancels only what is yours. Ask "
        f"{owner}, or render the recipe into a directory of your own"
    )


def run_name(run_dir: Path) -> str:
    """Return the name under which a run is shown: its id in the store, or the name of its directory while it has
    none."""
    return read_run_id(run_dir) or run_dir.name


def name_run(run_dir: Path) -> str:
    """Return the run's name in the store, from `run.id`, which is written first if it is absent. Raises UserError if
    the file holds no id, and OSError if it cannot be written."""
    path = run_dir / file_names.RUN_ID
    if not os.path.lexists(path):
        recipe = read_run_file(run_dir).get("name") or run_dir.resolve().name
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        create(path, f"{re.sub(r'[^A-Za-z0-9_.-]', '_', recipe)[:64]}-{stamp}-{os.urandom(2).hex()}\n")
    run_id = read_run_id(run_dir)
    if run_id is None:
        raise UserError(
            f"{path}: holds no run id (letters, digits, '.', '_', '-'); delete it, and a new one is written"
        )
    return run_id


def node_count(run_dir: Path) -> int:
    """Return `nodes` of run.json, or 1 if it is not set."""
    return read_run_file(run_dir).get("nodes") or 1


def follow_ups(run_dir: Path) -> int:
    """Return the number of follow-up jobs to submit with the first one: the maximum number of restarts if `restart` in
    run.json says chain.

    It is eight at most: each job takes a place in the queue the whole time, and sites limit the number. `resume`
    continues after the last one.
    """
    restart = read_run_file(run_dir).get("restart")
    return min(restart.get("times", 0), _MOST_FOLLOW_UPS) if restart and restart.get("by") == "chain" else 0


def requeues(run_dir: Path) -> bool:
    """Return whether the recipe asks the job to put itself back into the queue."""
    restart = read_run_file(run_dir).get("restart")
    return bool(restart and restart.get("by") == "requeue" and restart.get("times"))


def remove_stop(run_dir: Path) -> bool:
    """Remove the file with which a person asked the run to stop. Return whether there was one."""
    try:
        (run_dir / file_names.STOP).unlink()
    except FileNotFoundError:
        return False
    return True


def allow_older_checkpoint(run_dir: Path) -> None:
    """Allow the next attempt to continue from an older checkpoint than the last one saved, or to start at step 0.
    Raises UserError if the directory cannot be written to."""
    try:
        (run_dir / file_names.FROM_OLDER).touch()
    except OSError as error:
        raise UserError(f"{run_dir}: cannot write into it: {error.strerror}; nothing was submitted") from error


def write_submission(submission: Submission, over: bool = False) -> None:
    """Write `submission.json`, completely or not at all. With `over`, an existing file is replaced. Raises OSError, and
    UserError if there is one already."""
    record = _record(submission) | {"schema": 1}
    if submission.earlier:
        record["earlier"] = [_record(earlier) for earlier in submission.earlier]
    path = submission.run_dir / file_names.SUBMISSION
    if over:
        replace_json(path, record)
    elif not create(path, json.dumps(record, indent=1) + "\n"):
        _refuse_second(submission.run_dir)


def note_refusal(run_dir: Path, scheduler_words: str) -> None:
    """Keep in `ended.json` the scheduler's message when it refused the first job. It applies until there is a
    submission.json. A full disk raises nothing, because the message that follows says the same."""
    if (run_dir / file_names.SUBMISSION).exists():
        return
    refusal: JobEnd = {"schema": 1, "job_id": None, "phase": REFUSED, "at": time.time(), "reason": scheduler_words}
    with contextlib.suppress(OSError):
        replace_json(run_dir / file_names.ENDED, refusal, lasting=False)


def read_refusal(run_dir: Path) -> str:
    """Return the scheduler's message if it refused the job of a directory without a submission. Return the empty text
    if it did not, or if a job that was started by hand has begun since."""
    if (run_dir / file_names.SUBMISSION).exists():
        return ""
    refusal = read_job_end(run_dir)
    words = refusal.get("reason", "") if refusal.get("phase") == REFUSED else ""
    by_hand = seen_at_work(run_dir) if words else None
    began_since = by_hand is not None and by_hand.submitted_at > (refusal.get("at") or 0.0)
    return "" if began_since else words


def read_submission(run_dir: Path) -> Submission | None:
    """Return the content of `submission.json`, or None if llmlaunch never submitted the directory.

    Raises UserError if the file exists and cannot be understood.
    """
    path = run_dir / file_names.SUBMISSION
    if not os.path.lexists(path):
        return None
    record = read_object(path)
    directory = run_dir if run_dir.is_absolute() else run_dir.resolve()
    try:
        if record is None:
            raise ValueError("it holds no JSON object that can be read")
        earlier = tuple(_submission(past, directory) for past in _list(record.get("earlier"))[:_MOST_EARLIER])
        return replace(_submission(record, directory), earlier=earlier)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: damaged: {error}; the job's id is also in the names below {run_dir / file_names.LOGS}"
        ) from error


def seen_at_work(run_dir: Path) -> Submission | None:
    """Return the last job that began an attempt in a directory that llmlaunch did not submit: `sbatch job.sbatch`, or
    `bash job.sbatch` on this machine."""
    try:
        times = {
            entry.name: entry.stat(follow_symlinks=False).st_mtime
            for entry in os.scandir(run_dir / file_names.ATTEMPTS)
            if is_attempt(entry.name) and (is_slurm_job(job_of(entry.name)) or is_local_job(job_of(entry.name)))
        }
    except OSError:
        return None
    if not times:
        return None
    last = max(times, key=times.__getitem__)
    job = job_of(last)
    if is_slurm_job(job):
        return Submission("slurm", job, run_dir.resolve(), times[last])
    nodes, here = Attempt(run_dir, last).nodes, platform.node()
    host = here if not nodes or nodes[0] == here.split(".")[0] else nodes[0]
    return Submission("local", job, run_dir.resolve(), times[last], host)


def cancel_mark(submission: Submission) -> Path:
    """Return the path of a file that exists once llmlaunch has cancelled the job. It distinguishes a cancelled job from
    a lost one after the launcher has forgotten it."""
    return submission.run_dir / file_names.LOGS / f"{submission.job_id}.cancelled"


def was_cancelled(submission: Submission) -> bool:
    """Return whether llmlaunch has cancelled the job, or the whole array of which it is a task."""
    array, task, _ = submission.job_id.partition("_")
    of_array = submission.run_dir.parent / file_names.LOGS / f"{array}.cancelled"
    return cancel_mark(submission).exists() or (bool(task) and of_array.exists())


@dataclass(frozen=True)
class End:
    """What the job itself wrote to `status.json` when it ended. `state` is succeeded, failed or stopped."""

    state: Literal["succeeded", "failed", "stopped"]
    exit_code: int | None
    why: str

    @property
    def succeeded(self) -> bool:
        return self.state == "succeeded"


def read_end(submission: Submission) -> End | None:
    """Return the end of the submission's latest attempt, or None while there is none.

    A `status.json` left by an attempt before a requeue says nothing about the job.
    """
    status = read_object(submission.run_dir / file_names.STATUS) or {}
    attempt = str(status.get("attempt", ""))
    latest = latest_attempt(submission, attempt)
    if latest is not None and attempt != latest:  # a later link of a chain has written its own over it
        status = read_object(submission.run_dir / file_names.ATTEMPTS / latest / file_names.STATUS) or {}
    if latest is None or status.get("attempt") != latest or status.get("state") not in _ENDS:
        return None
    code = status.get("exit_code")
    return End(status["state"], code if type(code) is int else None, str(status.get("why") or ""))


def known_end(submission: Submission) -> JobState | None:
    """Return how a SLURM job ended if the run's files show it and nothing follows, or None if SLURM knows more.

    The files have the end from the job itself (`status.json`), or from an earlier answer of SLURM (`ended.json`).
    """
    if submission.launcher != "slurm":
        return None
    latest = latest_attempt(submission)
    noted = end_noted(submission)
    if noted is not None and not _changed_since(submission.run_dir, latest, file_names.ENDED):
        return noted
    end = read_end(submission)
    if end is None or latest is None:
        return None
    status = Attempt(submission.run_dir, latest).status
    following, cause = status.get("next"), status.get("cause")
    goes_on = isinstance(following, dict) and following.get("action") not in (None, "end")
    link = submission.jobs.index(job_of(latest)) + 1 if len(submission.jobs) > 1 else 0
    if goes_on or (link and link < len(submission.jobs) and not end.succeeded):
        return None
    by_person = isinstance(cause, dict) and cause.get("kind") == "cancelled"
    cancelled = not end.succeeded and (by_person or was_cancelled(submission))
    return JobState(
        "cancelled" if cancelled else end.state,
        reason=end.why,
        exit_code=None if cancelled else end.exit_code,
        restarts=count_above_zero(status.get("restarts")) or 0,
        link=link,
    )


def _changed_since(run_dir: Path, attempt: str | None, name: str) -> bool:
    """Whether an attempt's folder was changed after the file `name` of the run directory was written."""
    if attempt is None:
        return False
    try:
        folder = run_dir / file_names.ATTEMPTS / attempt
        return folder.stat().st_mtime > (run_dir / name).stat().st_mtime
    except OSError:
        return False


def latest_attempt(submission: Submission, among: str = "") -> str | None:
    """Return the name of the last attempt that the submission's jobs began, in the order of the chain. `among` names an
    attempt that left no folder and is considered as well."""
    ours = [name for name in {*attempts_in(submission.run_dir), among} if submission.owns(name)]
    jobs = submission.jobs

    def order(name: str) -> tuple[int, int]:
        job, _, count = name.rpartition(".")
        return (jobs.index(job) if job in jobs else 0, int(count))

    return max(ours, key=order, default=None)


def attempt_names(submission: Submission) -> list[str]:
    """Return the names of the submission's attempts so far, oldest first."""
    return [name for name in attempts_in(submission.run_dir) if submission.owns(name)]


def note_end(submission: Submission, state: JobState) -> bool:
    """Keep in `ended.json` what only the launcher knows, and the scheduler forgets: how a job ended that left no
    status.json of its own. Return False, and change nothing, if that is already recorded, if there is nothing to
    record, or if the directory belongs to another user."""
    if not state.ended or read_end(submission) is not None or end_noted(submission) == state:
        return False
    if is_foreign(submission.run_dir):
        return False
    lasting = {name: value for name, value in vars(state).items() if name != "expected_start"}
    record = {"schema": 1, "job_id": submission.jobs[-1], **lasting}
    try:
        replace_json(submission.run_dir / file_names.ENDED, record, lasting=False)
    except OSError:
        return True  # a full or read-only disk: the store can still be updated
    return True


def end_noted(submission: Submission) -> JobState | None:
    """Return what `note_end` recorded about this submission."""
    noted = read_job_end(submission.run_dir)
    phase = next((phase for phase in ENDED if phase == noted.get("phase")), None)
    if noted.get("job_id") != submission.jobs[-1] or phase is None:
        return None
    return JobState(
        phase,
        noted.get("state", ""),
        noted.get("reason", ""),
        noted.get("exit_code"),
        restarts=noted.get("restarts", 0),
        link=min(noted.get("link", 0), len(submission.jobs)),
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _record(submission: Submission) -> dict[str, Any]:
    return {
        "launcher": submission.launcher,
        "job_id": submission.job_id,
        "submitted_at": submission.submitted_at,
        "cluster": submission.cluster,
        **({"chain": list(submission.chain)} if submission.chain else {}),
    }


def _submission(record: Mapping[str, Any], run_dir: Path) -> Submission:
    """Return the submission in a record. Raises ValueError if an id has the wrong form: each id becomes an argument of
    squeue and scancel, part of a path, or a process to signal."""
    launcher, cluster, at = record["launcher"], record["cluster"], record["submitted_at"]
    jobs = [record["job_id"], *_list(record.get("chain"))]
    has_form = {"slurm": is_slurm_job, "local": is_local_job}.get(str(launcher))
    if has_form is None:
        raise ValueError(f"launcher is {str(launcher)[:20]!r}; one of slurm, local")
    wrong = [job for job in jobs if not has_form(job)]
    if wrong:
        raise ValueError(f"{str(wrong[0])[:60]!r} is no id of a {launcher} job")
    if cluster is not None and not is_cluster(cluster):
        raise ValueError(f"{str(cluster)[:60]!r} is no name of a cluster")
    if time_or_none(at) is None:
        raise ValueError(f"submitted_at is {str(at)[:60]!r}, no time in unix seconds")
    return Submission(str(launcher), jobs[0], run_dir, float(at), cluster, tuple(jobs[1:]))


def _refuse_second(run_dir: Path) -> None:
    earlier = read_submission(run_dir)
    if earlier is not None:
        raise UserError(
            f"{run_dir}: already submitted as {earlier.launcher} job {earlier.job_id}; when that has ended, "
            "llmlaunch resume submits it again; render a directory of its own for another run"
        )
