"""Which launcher takes a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Launcher, Submission
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from llmlaunch.rundir import file_names

__all__ = ["LauncherChoice", "choose", "launcher_of"]

Say = Callable[[str], None]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True)
class LauncherChoice:
    launcher: Launcher
    why: str
    """One sentence for the person who submits."""


def choose(local: bool, say: Say = _silent) -> LauncherChoice:
    """SLURM where there is one; this machine where there is none, or where `local` asks for it. `say` is told what a
    launcher waits for."""
    if local:
        return LauncherChoice(_local(), "Running on this machine, as --local asks.")
    import shutil  # not for questions about a job, which should feel instant

    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return LauncherChoice(_local(), "Running on this machine: there is no sbatch on PATH, so no SLURM here.")
    return LauncherChoice(SlurmLauncher(say=say), f"Submitting to SLURM: {sbatch}.")


def launcher_of(submission: Submission, say: Say = _silent) -> Launcher:
    """The launcher that can say what became of `submission`. Raises UserError for one this version lacks."""
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
