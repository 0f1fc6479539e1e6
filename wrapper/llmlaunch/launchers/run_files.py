"""The small files launchers read and write in a run directory (docs/run-directory.md)."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import ENDED, JobState, Submission
from llmlaunch.launchers.small_files import create, read_object
from llmlaunch.launchers.small_files import replace as replace_file

__all__ = [
    "End",
    "cancel_mark",
    "end_noted",
    "follow_ups",
    "latest_attempt",
    "name_run",
    "node_count",
    "note_end",
    "prepare",
    "read_end",
    "read_submission",
    "remove_stop",
    "seen_at_work",
    "was_cancelled",
    "write_submission",
]

SCRIPT = "job.sbatch"
SUBMISSION = "submission.json"
_NOTED = "ended.json"
_MOST_FOLLOW_UPS = 8
_ENDS = ("succeeded", "failed", "stopped")


def prepare(run_dir: Path, again: bool = False) -> Path:
    """The run directory's resolved path, ready to be submitted: named, with a folder for logs.

    Raises UserError where it is no run directory, was submitted before (unless `again`), or cannot be written into.
    """
    run_dir = run_dir.resolve()
    if not (run_dir / SCRIPT).is_file():
        raise UserError(f"{run_dir}: not a run directory: it has no {SCRIPT}; llmlaunch render writes one")
    if not again:
        _refuse_second(run_dir)
    try:
        (run_dir / "logs").mkdir(exist_ok=True)
        name_run(run_dir)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot write into it: {error.strerror}; nothing was submitted") from error
    return run_dir


def name_run(run_dir: Path) -> str:
    """The run's name in the store: what `run.id` holds, written first where it is absent."""
    path = run_dir / "run.id"
    if not path.exists():
        recipe = str(read_object(run_dir / "run.json").get("name") or run_dir.resolve().name)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        create(path, f"{recipe}-{stamp}-{os.urandom(2).hex()}\n")
    return path.read_text(encoding="utf-8").strip()


def node_count(run_dir: Path) -> int:
    """`nodes` of run.json; 1 where it does not say."""
    nodes = read_object(run_dir / "run.json").get("nodes", 1)
    return nodes if isinstance(nodes, int) else 1


def follow_ups(run_dir: Path) -> int:
    """How many follow-up jobs go in with the first: where `restart` of run.json says chain, as many as it may restart.

    Eight at most: each takes a place in the queue for the whole time, and sites bound those. `resume` goes on after
    the last.
    """
    restart = read_object(run_dir / "run.json").get("restart")
    if not isinstance(restart, dict) or restart.get("by") != "chain":
        return 0
    times = restart.get("times")
    return min(times, _MOST_FOLLOW_UPS) if isinstance(times, int) else 0


def remove_stop(run_dir: Path) -> bool:
    """Remove the file with which a person told the run to stop; whether there was one."""
    try:
        (run_dir / "stop").unlink()
    except FileNotFoundError:
        return False
    return True


def write_submission(submission: Submission, over: bool = False) -> None:
    """Write `submission.json`, whole or not at all. Raises OSError, and UserError if there is one already (`over`: it
    is replaced)."""
    record = _record(submission) | {"schema": 1}
    if submission.earlier:
        record["earlier"] = [_record(one) for one in submission.earlier]
    path = submission.run_dir / SUBMISSION
    if over:
        replace_file(path, record)
    elif not create(path, json.dumps(record, indent=1) + "\n"):
        _refuse_second(submission.run_dir)


def read_submission(run_dir: Path) -> Submission | None:
    """What `submission.json` says; None where the directory was never submitted by llmlaunch.

    Raises UserError where the file is there and cannot be understood.
    """
    path = run_dir / SUBMISSION
    if not path.exists():
        return None
    record = read_object(path)
    directory = run_dir if run_dir.is_absolute() else run_dir.resolve()
    try:
        earlier = tuple(_submission(one, directory) for one in record.get("earlier", ()))
        return replace(_submission(record, directory), earlier=earlier)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged; the job's id is also in the names below {run_dir / 'logs'}") from error


def seen_at_work(run_dir: Path) -> Submission | None:
    """The last job that began an attempt in a directory llmlaunch did not submit: a bare `sbatch job.sbatch`."""
    try:
        folders = [entry for entry in os.scandir(run_dir / "attempts") if re.fullmatch(r"\d+(_\d+)?\.\d+", entry.name)]
    except OSError:
        return None
    if not folders:
        return None
    last = max(folders, key=lambda entry: entry.stat().st_mtime)
    return Submission("slurm", last.name.rpartition(".")[0], run_dir.resolve(), last.stat().st_mtime)


def cancel_mark(submission: Submission) -> Path:
    """Exists once llmlaunch has cancelled the job; where a launcher forgets it, this tells it from a lost one."""
    return submission.run_dir / "logs" / f"{submission.job_id}.cancelled"


def was_cancelled(submission: Submission) -> bool:
    """Whether llmlaunch has cancelled it: the job, or the whole array of which it is a task."""
    array, task, _ = submission.job_id.partition("_")
    of_array = submission.run_dir.parent / "logs" / f"{array}.cancelled"
    return cancel_mark(submission).exists() or (bool(task) and of_array.exists())


@dataclass(frozen=True)
class End:
    """What the job itself wrote in `status.json` when it ended. `state` is succeeded, failed or stopped."""

    state: Literal["succeeded", "failed", "stopped"]
    exit_code: int | None
    why: str

    @property
    def succeeded(self) -> bool:
        return self.state == "succeeded"


def read_end(submission: Submission) -> End | None:
    """The end of the submission's latest attempt; None while there is none.

    A `status.json` left by an attempt before a requeue says nothing about the job.
    """
    status = read_object(submission.run_dir / "status.json")
    attempt = str(status.get("attempt", ""))
    latest = latest_attempt(submission, attempt)
    if latest is not None and attempt != latest:  # a later link of a chain has written its own over it
        status = read_object(submission.run_dir / "attempts" / latest / "status.json")
    if latest is None or status.get("attempt") != latest or status.get("state") not in _ENDS:
        return None
    code = status.get("exit_code")
    return End(status["state"], code if isinstance(code, int) else None, str(status.get("why") or ""))


def latest_attempt(submission: Submission, among: str = "") -> str | None:
    """The name of the last attempt its jobs began, in the order of the chain; `among`: one that left no folder."""
    try:
        names = {entry.name for entry in os.scandir(submission.run_dir / "attempts")} | {among}
    except OSError:
        names = {among}
    ours = [name for name in names if submission.owns(name) and name.rpartition(".")[2].isdecimal()]
    jobs = submission.jobs

    def order(name: str) -> tuple[int, int]:
        job, _, count = name.rpartition(".")
        return (jobs.index(job) if job in jobs else 0, int(count))

    return max(ours, key=order, default=None)


def note_end(submission: Submission, state: JobState) -> bool:
    """Keep in `ended.json` what only the launcher knows: how a job ended that left no status.json of its own. The
    scheduler forgets it. False, and nothing changed, where that is noted already or there is nothing to note."""
    if not state.ended or read_end(submission) is not None or end_noted(submission) == state:
        return False
    record = {
        "schema": 1,
        "job_id": submission.jobs[-1],
        "phase": state.phase,
        "state": state.state,
        "reason": state.reason,
        "exit_code": state.exit_code,
        "restarts": state.restarts,
        "link": state.link,
    }
    try:
        replace_file(submission.run_dir / _NOTED, record, lasting=False)
    except OSError:
        return True  # a full or read-only disk: the store can still be told
    return True


def end_noted(submission: Submission) -> JobState | None:
    """What `note_end` kept of this submission."""
    noted = read_object(submission.run_dir / _NOTED)
    if noted.get("job_id") != submission.jobs[-1] or noted.get("phase") not in ENDED:
        return None
    code = noted.get("exit_code")
    return JobState(
        noted["phase"],
        str(noted.get("state") or ""),
        str(noted.get("reason") or ""),
        code if isinstance(code, int) else None,
        restarts=_count(noted.get("restarts")),
        link=_count(noted.get("link")),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _record(submission: Submission) -> dict[str, Any]:
    return {
        "launcher": submission.launcher,
        "job_id": submission.job_id,
        "submitted_at": submission.submitted_at,
        "cluster": submission.cluster,
        **({"chain": list(submission.chain)} if submission.chain else {}),
    }


def _submission(record: Mapping[str, Any], run_dir: Path) -> Submission:
    return Submission(
        launcher=str(record["launcher"]),
        job_id=str(record["job_id"]),
        run_dir=run_dir,
        submitted_at=float(record["submitted_at"]),
        cluster=None if record["cluster"] is None else str(record["cluster"]),
        chain=tuple(str(job) for job in record.get("chain", ())),
    )


def _refuse_second(run_dir: Path) -> None:
    earlier = read_submission(run_dir)
    if earlier is not None:
        raise UserError(
            f"{run_dir}: already submitted as {earlier.launcher} job {earlier.job_id}; when that has ended, "
            "llmlaunch resume submits it again; render a directory of its own for another run"
        )
