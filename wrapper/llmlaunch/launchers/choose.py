"""Which launcher takes a run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Launcher, Submission
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.slurm import SlurmLauncher

__all__ = ["Choice", "choose", "launcher_of"]


@dataclass(frozen=True)
class Choice:
    launcher: Launcher
    why: str
    """One sentence for the person who submits."""


def choose(local: bool) -> Choice:
    """SLURM where there is one; this machine where there is none, or where `local` asks for it."""
    if local:
        return Choice(LocalLauncher(), "Running on this machine, as --local asks.")
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return Choice(LocalLauncher(), "Running on this machine: there is no sbatch on PATH, so no SLURM here.")
    return Choice(SlurmLauncher(), f"Submitting to SLURM: {sbatch}.")


def launcher_of(submission: Submission) -> Launcher:
    """The launcher that can say what became of `submission`. Raises UserError for one this version lacks."""
    launchers: tuple[Launcher, ...] = (SlurmLauncher(), LocalLauncher())
    for launcher in launchers:
        if launcher.name == submission.launcher:
            return launcher
    raise UserError(
        f"{submission.run_dir / 'submission.json'}: launcher is {submission.launcher!r}; "
        f"one of {', '.join(launcher.name for launcher in launchers)}"
    )
