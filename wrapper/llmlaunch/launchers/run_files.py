"""The small files launchers read and write in a run directory (docs/run-directory.md)."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Submission

__all__ = ["End", "cancel_mark", "name_run", "node_count", "prepare", "read_end", "read_submission", "write_submission"]

SCRIPT = "job.sbatch"


def prepare(run_dir: Path) -> Path:
    """The run directory's resolved path, ready to be submitted: named, with a folder for logs.

    Raises UserError where it is no run directory or was submitted before.
    """
    run_dir = run_dir.resolve()
    if not (run_dir / SCRIPT).is_file():
        raise UserError(f"{run_dir}: not a run directory: it has no {SCRIPT}; llmlaunch render writes one")
    _refuse_second(run_dir)
    try:
        (run_dir / "logs").mkdir(exist_ok=True)
        name_run(run_dir)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot write into it: {error.strerror}") from error
    return run_dir


def name_run(run_dir: Path) -> str:
    """The run's name in the store: what `run.id` holds, written first where it is absent."""
    path = run_dir / "run.id"
    recipe = str(_read_object(run_dir / "run.json").get("name") or run_dir.resolve().name)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    _create(path, f"{recipe}-{stamp}-{secrets.token_hex(2)}\n")
    return path.read_text(encoding="utf-8").strip()


def node_count(run_dir: Path) -> int:
    """`nodes` of run.json; 1 where it does not say."""
    nodes = _read_object(run_dir / "run.json").get("nodes", 1)
    return nodes if isinstance(nodes, int) else 1


def write_submission(submission: Submission) -> None:
    """Write `submission.json`, whole or not at all. Raises UserError if there is one already, and OSError."""
    record = {
        "schema": 1,
        "launcher": submission.launcher,
        "job_id": submission.job_id,
        "submitted_at": submission.submitted_at,
        "cluster": submission.cluster,
    }
    if not _create(submission.run_dir / "submission.json", json.dumps(record, indent=1) + "\n"):
        _refuse_second(submission.run_dir)


def read_submission(run_dir: Path) -> Submission | None:
    """What `submission.json` says; None where the directory was never submitted by llmlaunch.

    Raises UserError where the file is there and cannot be understood.
    """
    path = run_dir / "submission.json"
    if not path.exists():
        return None
    record = _read_object(path)
    try:
        return Submission(
            launcher=str(record["launcher"]),
            job_id=str(record["job_id"]),
            run_dir=run_dir.resolve(),
            submitted_at=float(record["submitted_at"]),
            cluster=None if record["cluster"] is None else str(record["cluster"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged; the job's id is also in the names below {run_dir / 'logs'}") from error


def cancel_mark(submission: Submission) -> Path:
    """Exists once llmlaunch has cancelled the job; where a launcher forgets it, this tells it from a lost one."""
    return submission.run_dir / "logs" / f"{submission.job_id}.cancelled"


@dataclass(frozen=True)
class End:
    """What the job itself wrote in `status.json` when it ended."""

    succeeded: bool
    exit_code: int | None
    why: str


def read_end(submission: Submission) -> End | None:
    """The end of the submission's latest attempt; None while there is none.

    A `status.json` left by an attempt before a requeue says nothing about the job.
    """
    status = _read_object(submission.run_dir / "status.json")
    attempt = str(status.get("attempt", ""))
    if status.get("state") not in ("succeeded", "failed") or attempt != _latest_attempt(submission, attempt):
        return None
    code = status.get("exit_code")
    return End(
        succeeded=status["state"] == "succeeded",
        exit_code=code if isinstance(code, int) else None,
        why=str(status.get("why") or ""),
    )


def _latest_attempt(submission: Submission, attempt: str) -> str | None:
    attempts = {path.name for path in submission.run_dir.glob("attempts/*")} | {attempt}
    ours = [name for name in attempts if submission.owns(name) and name.rpartition(".")[2].isdecimal()]
    return max(ours, key=lambda name: int(name.rpartition(".")[2]), default=None)


def _refuse_second(run_dir: Path) -> None:
    earlier = read_submission(run_dir)
    if earlier is not None:
        raise UserError(
            f"{run_dir}: already submitted as {earlier.launcher} job {earlier.job_id}; "
            "render a directory of its own for another run"
        )


def _create(path: Path, text: str) -> bool:
    """Create `path` with `text`; False, and nothing changed, where it exists. Readers never see half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # link, unlike rename, fails where the name is taken; it is atomic on NFS too.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is none to read (missing, unreadable, damaged)."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
