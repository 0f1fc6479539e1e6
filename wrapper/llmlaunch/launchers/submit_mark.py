"""The mark that a submission is under way: `submitting` in the run directory, from before sbatch until submission.json.

Where it is found without the process that made it, a submit was interrupted: the scheduler may have the job or not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import create, read_object, replace_json
from llmlaunch.rundir.values import is_host, time_or_none, to_type

_NAME = file_names.SUBMITTING
_OTHER_HOST_SECONDS = 600.0
_SETTLED_SECONDS = 0.2


@dataclass(frozen=True)
class SubmitMark:
    """`since`: unix seconds, of the first attempt to submit. `started`: the process's start in the kernel's ticks, for
    process ids are used again."""

    since: float
    host: str
    pid: int
    started: int
    touched_at: float


def begin(run_dir: Path) -> tuple[SubmitMark, bool]:
    """Leave a mark; return it and whether an interrupted submit had left one before.

    Raises UserError if another submit is at work in the directory, or if the directory cannot be written.
    """
    path, now = run_dir / _NAME, time.time()
    ours = SubmitMark(now, os.uname().nodename, os.getpid(), _start_of(os.getpid()) or 0, now)
    try:
        if create(path, json.dumps(asdict(ours)) + "\n"):
            return ours, False
        left = was_submitting(run_dir)
        if left is not None:
            _refuse_while_at_work(run_dir, left)
            ours = replace(ours, since=min(left.since, now))
        replace_json(path, asdict(ours))
    except OSError as error:
        raise UserError(f"{run_dir}: cannot write into it: {error.strerror}; nothing was submitted") from error
    # Of several that find the same mark the last to write has it.
    time.sleep(_SETTLED_SECONDS)
    holder = was_submitting(run_dir)
    if holder is not None and holder != ours:
        _refuse_while_at_work(run_dir, holder)
    return ours, True


def remove(run_dir: Path) -> None:
    (run_dir / _NAME).unlink(missing_ok=True)


def was_submitting(run_dir: Path) -> SubmitMark | None:
    """Return the mark in the directory, whoever made it; a damaged one is as old as its file."""
    path = run_dir / _NAME
    try:
        changed = path.lstat().st_mtime
    except OSError:
        return None
    return _mark(read_object(path) or {}) or SubmitMark(changed, "", 0, 0, 0.0)


def left_behind(run_dir: Path) -> SubmitMark | None:
    """Return the mark of a submit that is no longer at work, or None."""
    mark = was_submitting(run_dir)
    return None if mark is None or at_work(mark) else mark


def at_work(mark: SubmitMark) -> bool:
    """Return whether the process that made the mark still runs. A process of another host is believed to run for ten
    minutes."""
    if mark.host != os.uname().nodename:
        return abs(time.time() - mark.touched_at) < _OTHER_HOST_SECONDS
    return mark.pid != 0 and _start_of(mark.pid) == mark.started


def _refuse_while_at_work(run_dir: Path, mark: SubmitMark) -> None:
    if at_work(mark) and mark.pid != os.getpid():
        raise UserError(
            f"{run_dir}: another llmlaunch is submitting it (process {mark.pid} on {mark.host}); look again with "
            f"{to_type('status', run_dir)}"
        )


def _mark(record: Mapping[str, Any]) -> SubmitMark | None:
    """Return None if a value is not of its kind: messages show the host and process, and the age decides."""
    since, touched_at = (time_or_none(record.get(name)) for name in ("since", "touched_at"))
    host, pid, started = (record.get(name) for name in ("host", "pid", "started"))
    if since is None or touched_at is None or not is_host(host) or type(pid) is not int or type(started) is not int:
        return None
    return SubmitMark(since, str(host), pid, started, touched_at)


def _start_of(pid: int) -> int | None:
    """Return when a process started, in ticks since boot, or None if there is none or it is a zombie."""
    try:
        # after the name, which stands in parentheses and may hold anything: state, then 19 fields to the start
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
