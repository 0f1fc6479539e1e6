"""Which launcher takes a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Launcher, Submission
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from llmlaunch.rundir import file_names
from llmlaunch.rundir.foreign_values import number_in

Say = Callable[[str], None]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True)
class LauncherChoice:
    launcher: Launcher
    why: str
    """One sentence for the person who submits."""
    where: str = ""
    """Where jobs go, and why: one sentence where nothing is submitted."""


def choose(local: bool, say: Say = _silent) -> LauncherChoice:
    """SLURM where there is one; this machine where there is none, or where `local` asks for it. `say` is told what a
    launcher waits for."""
    if local:
        return _here(", as --local asks.")
    import shutil  # not for questions about a job, which should feel instant

    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return _here(": there is no sbatch on PATH, so no SLURM here.")
    return LauncherChoice(SlurmLauncher(say=say), f"Submitting to SLURM: {sbatch}.", f"Jobs go to SLURM: {sbatch}.")


def _here(because: str) -> LauncherChoice:
    return LauncherChoice(_local(), f"Running on this machine{because}", where=f"Jobs run on this machine{because}")


BRIEF_SECONDS = 5.0
BRIEF_VARIABLE = "LLMLAUNCH_ANSWER_SECONDS"


def brief_seconds() -> float:
    """Return how long a screen waits for SLURM's answer: what LLMLAUNCH_ANSWER_SECONDS says, since the controllers of
    large sites take their time, else a few seconds."""
    asked = number_in(os.environ.get(BRIEF_VARIABLE))
    return asked if asked is not None and asked > 0 else BRIEF_SECONDS


def slurm_asked_briefly(say: Say = _silent) -> SlurmLauncher:
    """Return the SLURM launcher that asks once, and waits a few seconds for the answer."""
    return SlurmLauncher(brief_seconds(), 1, say)


def launcher_of(submission: Submission, say: Say = _silent, *, briefly: bool = False) -> Launcher:
    """The launcher that can say what became of `submission`. With `briefly` it asks SLURM once, and waits a few seconds
    for the answer, as a screen does that shows runs. Raises UserError for a launcher this version lacks."""
    if submission.launcher == "slurm" and briefly:
        return slurm_asked_briefly(say)
    if submission.launcher == "slurm":
        return SlurmLauncher(say=say)
    if submission.launcher == "local":
        return _local()
    raise UserError(
        f"{submission.run_dir / file_names.SUBMISSION}: launcher is {submission.launcher!r}; one of slurm, local"
    )


def _local() -> Launcher:
    from llmlaunch.launchers.local import LocalLauncher  # late: psutil, which a question about SLURM need not wait for

    return LocalLauncher()
