"""Hands several run directories to SLURM: as jobs of their own, one after the other, or as one array. All or none."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from llmlaunch.errors import UserError
from llmlaunch.launchers import run_environment, run_files
from llmlaunch.launchers.base import Launcher, Submission
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.identifiers import is_path_component
from llmlaunch.rundir.messages import counted

__all__ = ["How", "after", "complete_array", "max_array_size", "refuse_array", "submit_sweep", "task_submission"]

How = Literal["independent", "array", "afterok", "afterany"]

# A job whose condition can no longer be met would wait for ever.
_END_IN_VAIN = "--kill-on-invalid-dep=yes"


def submit_sweep(
    launcher: Launcher,
    directory: Path,
    run_dirs: Sequence[Path],
    how: How,
    waits: Sequence[str] = (),
    words_for: Callable[[Path], Sequence[str]] = lambda run_dir: (),
    taken: Callable[[Submission], None] = lambda submission: None,
) -> list[Submission]:
    """Submit the runs of a sweep's directory; `taken` is told of each. `waits` is what sbatch is told of jobs before
    them, of a chain the first alone; `words_for` what else it is told of a run. An array is told what its first run is.

    Where SLURM refuses one, or Ctrl-C ends it, those before it are cancelled. Raises as `Launcher.submit` does.
    """
    if how == "array":
        array = launcher.submit(directory, [*waits, *words_for(run_dirs[0])])
        submissions = complete_array(directory, run_dirs, array)
        for submission in submissions:
            taken(submission)
        return submissions
    submissions = []
    try:
        for run_dir in run_dirs:
            if submissions and how in ("afterok", "afterany"):
                waits = after(submissions[-1], how)
            submissions.append(launcher.submit(run_dir, [*waits, *words_for(run_dir)]))
            taken(submissions[-1])
    except (UserError, KeyboardInterrupt) as reason:
        for submission in reversed(submissions):
            with contextlib.suppress(UserError):
                launcher.cancel(submission)
        if not isinstance(reason, UserError):
            raise
        undone = f"; the {len(submissions)} before it were cancelled" if submissions else ""
        raise type(reason)(f"{reason}{undone}") from reason
    return submissions


def complete_array(directory: Path, run_dirs: Sequence[Path], array: Submission) -> list[Submission]:
    """The submission of each run of an array, written down in its directory where that is not done yet; SLURM's own
    words on a task are found there, too."""
    submissions = []
    for index, run_dir in enumerate(run_dirs):
        run_files.name_run(run_dir)
        known = run_files.read_submission(run_dir)
        task = replace(array, job_id=f"{array.job_id}_{index}", run_dir=run_dir.resolve())
        if known is None:
            run_files.write_submission(task)
            output = f"slurm-{task.job_id}.out"
            with contextlib.suppress(OSError):
                (run_dir / output).symlink_to(Path("..") / output)
        submissions.append(known or task)
    return submissions


def task_submission(run_dir: Path) -> Submission | None:
    """Of a run of an array that was submitted, where the writing down of its tasks was interrupted: done now. None for
    any other directory, and for one of another user, where nothing may be written.

    Raises UserError where sweep.json names a run that is no folder beside it.
    """
    directory = run_dir.resolve().parent
    sweep = read_object(directory / file_names.SWEEP) or {}
    array = run_files.read_submission(directory) if sweep.get("how") == "array" else None
    runs = sweep.get("runs")
    names = [str(run.get("directory")) for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    if array is None or run_dir.resolve().name not in names or run_files.is_foreign(directory):
        return None
    strange = next((name for name in names if not is_path_component(name)), None)
    if strange is not None:
        raise UserError(f"{directory / file_names.SWEEP}: damaged: {strange[:60]!r} is no folder beside it")
    return complete_array(directory, [directory / name for name in names], array)[names.index(run_dir.resolve().name)]


def after(submission: Submission, how: How = "afterok") -> list[str]:
    """sbatch's words for a job that waits for the end of another."""
    return [f"--dependency={how}:{submission.jobs[-1]}", _END_IN_VAIN]


def refuse_array(count: int, most: int | None) -> None:
    """Raises UserError where SLURM would not take so many tasks; `most`: MaxArraySize."""
    if most is not None and count > most:
        raise UserError(
            f"--array: {counted(count, 'run')}, and this cluster takes arrays of {most} tasks (MaxArraySize); submit "
            "fewer at once, or leave out --array"
        )


def max_array_size(timeout_seconds: float = 30.0) -> int | None:
    """MaxArraySize of this cluster: as many tasks, indices 0 to one less. None where SLURM does not say."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"],
            env=run_environment.for_queries(os.environ),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "MaxArraySize" and value.strip().isdigit():
            return int(value)
    return None
