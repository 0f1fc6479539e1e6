"""Hands several run directories to SLURM: as jobs of their own, one after the other, or as one array. All or none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from llmlaunch.errors import UserError
from llmlaunch.launchers import run_files
from llmlaunch.launchers.base import Launcher, Submission
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.values import counted, is_path_component

How = Literal["independent", "array", "afterok", "afterany"]

# A job whose condition can no longer be met would wait for ever.
_END_IN_VAIN = "--kill-on-invalid-dep=yes"


def submit_sweep(
    launcher: Launcher,
    directory: Path,
    run_dirs: Sequence[Path],
    how: How,
    waits: Sequence[str] = (),
    arguments_for: Callable[[Path], Sequence[str]] = lambda run_dir: (),
    on_submitted: Callable[[Submission], None] = lambda submission: None,
) -> list[Submission]:
    """Submit the runs of a sweep's directory and report each to `on_submitted`.

    `waits` are sbatch arguments about earlier jobs (for a chain only the first run gets them), `arguments_for` returns
    further ones for a run; an array gets those of its first run. If SLURM refuses a run, or on Ctrl-C, the runs before
    it are cancelled. Raises as `Launcher.submit` does.
    """
    if how == "array":
        array = launcher.submit(directory, [*waits, *arguments_for(run_dirs[0])])
        submissions = complete_array(directory, run_dirs, array)
        for submission in submissions:
            on_submitted(submission)
        return submissions
    submissions = []
    try:
        for run_dir in run_dirs:
            if submissions and how in ("afterok", "afterany"):
                waits = after(submissions[-1], how)
            submissions.append(launcher.submit(run_dir, [*waits, *arguments_for(run_dir)]))
            on_submitted(submissions[-1])
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
    """Return the submission of each run of an array, written into its directory if it is not there yet, with a link to
    SLURM's output of its task."""
    submissions = []
    for index, run_dir in enumerate(run_dirs):
        run_files.name_run(run_dir)
        written = run_files.read_submission(run_dir)
        task = replace(array, job_id=f"{array.job_id}_{index}", run_dir=run_dir.resolve())
        if written is None:
            run_files.write_submission(task)
            output = f"slurm-{task.job_id}.out"
            with contextlib.suppress(OSError):
                (run_dir / output).symlink_to(Path("..") / output)
        submissions.append(written or task)
    return submissions


def task_submission(run_dir: Path) -> Submission | None:
    """Finish an interrupted submit of an array and return the submission of this run of it. Returns None for any other
    directory, and for another user's, which may not be written.

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
    return [f"--dependency={how}:{submission.jobs[-1]}", _END_IN_VAIN]


def refuse_array(count: int, most: int | None) -> None:
    """Raise UserError if SLURM would not take so many tasks. `most` is MaxArraySize."""
    if most is not None and count > most:
        raise UserError(
            f"--array: {counted(count, 'run')}, and this cluster takes arrays of {most} tasks (MaxArraySize); submit "
            "fewer at once, or leave out --array"
        )
