"""Which launcher takes a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Launcher, Submission
from llmlaunch.launchers.place import THIS_MACHINE, Place
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from llmlaunch.rundir import file_names
from llmlaunch.rundir.foreign_values import number_in

if TYPE_CHECKING:
    from llmlaunch.launchers.ssh.look import RemoteHost


Say = Callable[[str], None]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True)
class LauncherChoice:
    launcher: Launcher
    why: str
    """One sentence for the person who submits."""
    host: RemoteHost | None = None
    """Where the run will live, if not here."""
    where: str = ""
    """Where jobs go, and why: one sentence where nothing is submitted."""


def choose(local: bool, say: Say = _silent, on: str | None = None) -> LauncherChoice:
    """SLURM where there is one; this machine where there is none, or where `local` asks for it; the SLURM of the host
    that `on` names (HOST or HOST:FOLDER). `say` is told what a launcher waits for. Raises UserError for a host that is
    not reached, or lacks what a run needs there."""
    if on is not None:
        return _on_host(on, local, say)
    if local:
        return _here(", as --local asks.")
    import shutil  # not for questions about a job, which should feel instant

    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return _here(": there is no sbatch on PATH, so no SLURM here.")
    return LauncherChoice(
        SlurmLauncher(say=say), f"Submitting to SLURM: {sbatch}.", None, f"Jobs go to SLURM: {sbatch}."
    )


def _here(because: str) -> LauncherChoice:
    return LauncherChoice(_local(), f"Running on this machine{because}", where=f"Jobs run on this machine{because}")


def _on_host(on: str, local: bool, say: Say) -> LauncherChoice:
    if local:
        raise UserError(
            f"--on {on}, --local: --local runs the job on this machine; choose one (on a machine without SLURM: "
            f"`ssh {on.partition(':')[0]}`, and submit --local there)"
        )
    from llmlaunch.launchers.ssh.home import SshPlace
    from llmlaunch.launchers.ssh.look import look_at

    host = look_at(on)
    launcher = SlurmLauncher(say=say, place=SshPlace(host.name, host.user_id))
    place = f"SLURM on {host.name}: {host.sbatch}."
    return LauncherChoice(launcher, f"Submitting to {place}", host, f"Jobs go to {place}")


def choose_again(run_dir: Path, local: bool, say: Say = _silent) -> LauncherChoice:
    """Choose for a run directory that was submitted before: it stays where it lives."""
    place = place_of(run_dir)
    if place == THIS_MACHINE:
        return choose(local, say)
    if local:
        raise UserError(f"--local: {run_dir} lives on another machine (its {file_names.HOME} says where); leave it out")
    return LauncherChoice(SlurmLauncher(say=say, place=place), "Submitting to SLURM where the run lives.")


def place_of(run_dir: Path) -> Place:
    """Return where a run lives: the host that its host.json names, else this machine. Raises UserError where that file
    is damaged."""
    if not os.path.lexists(run_dir / file_names.HOME):
        return THIS_MACHINE
    from llmlaunch.launchers.ssh.home import SshPlace, home_of  # few runs are of another machine

    home = home_of(run_dir)
    return THIS_MACHINE if home is None else SshPlace(home.host, home.user_id)


BRIEF_SECONDS = 5.0
BRIEF_REMOTE_SECONDS = 20.0  # ssh takes some to connect
BRIEF_VARIABLE = "LLMLAUNCH_ANSWER_SECONDS"


def brief_seconds(place: Place = THIS_MACHINE) -> float:
    """Return how long a screen waits for SLURM's answer: what LLMLAUNCH_ANSWER_SECONDS says, since the controllers of
    large sites take their time, else a few seconds."""
    usual = BRIEF_SECONDS if place == THIS_MACHINE else BRIEF_REMOTE_SECONDS
    asked = number_in(os.environ.get(BRIEF_VARIABLE))
    return asked if asked is not None and asked > 0 else usual


def slurm_asked_briefly(run_dir: Path, say: Say = _silent) -> SlurmLauncher:
    """Return the SLURM launcher of a run directory that asks once, and waits a few seconds for the answer."""
    place = place_of(run_dir)
    return SlurmLauncher(brief_seconds(place), 1, say, place)


def launcher_of(submission: Submission, say: Say = _silent, *, briefly: bool = False) -> Launcher:
    """The launcher that can say what became of `submission`. With `briefly` it asks SLURM once, and waits a few seconds
    for the answer, as a screen does that shows runs. Raises UserError for a launcher this version lacks."""
    if submission.launcher == "slurm" and briefly:
        return slurm_asked_briefly(submission.run_dir, say)
    if submission.launcher == "slurm":
        return SlurmLauncher(say=say, place=place_of(submission.run_dir))
    if submission.launcher == "local":
        return _local()
    raise UserError(
        f"{submission.run_dir / file_names.SUBMISSION}: launcher is {submission.launcher!r}; one of slurm, local"
    )


def _local() -> Launcher:
    from llmlaunch.launchers.local import LocalLauncher  # late: psutil, which a question about SLURM need not wait for

    return LocalLauncher()
