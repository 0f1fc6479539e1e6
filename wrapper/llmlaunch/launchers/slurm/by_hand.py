"""The job of a run directory that a person handed to sbatch by hand, while it waits: it has left nothing there yet."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.choose import brief_seconds
from llmlaunch.launchers.slurm.commands import SlurmCommands
from llmlaunch.launchers.slurm.text import QUEUED_SCRIPT_FORMAT, parse_queued_scripts
from llmlaunch.rundir import file_names


def queued_by_hand(run_dir: Path, say: Callable[[str], None]) -> Submission | None:
    """Return the newest job in the queue whose script is the run directory's job.sbatch. None where there is none, no
    SLURM, or no answer in a few seconds."""
    script = run_dir.resolve() / file_names.JOB_SCRIPT
    if not script.is_file() or shutil.which("squeue") is None:
        return None
    try:
        answer = SlurmCommands(brief_seconds(), 1, say).ask(["squeue", "--me", "-h", "-o", QUEUED_SCRIPT_FORMAT])
    except UserError:
        return None
    jobs = parse_queued_scripts(answer.output, script) if answer.code == 0 else []
    return Submission("slurm", jobs[-1][0], script.parent, jobs[-1][1]) if jobs else None
