"""What a run on another machine needs: its code with it, its paths there, and changes in its directory there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmlaunch.app.evidence import Notify
from llmlaunch.app.planned_run import PlannedRun
from llmlaunch.rendering.provenance import code_root
from llmlaunch.rundir import file_names

if TYPE_CHECKING:
    from llmlaunch.launchers.ssh.look import RemoteHost
    from llmlaunch.readiness.readiness import Readiness


def with_code(run: PlannedRun, notify: Notify) -> PlannedRun:
    """Return the run with the snapshot of its code that travels with it, where the code lies on this machine."""
    root, _ = code_root(run.recipe)
    if root is None or run.recipe.code.snapshot:
        return run
    notify(f"note: the code of {root} travels with the run, as it lies there (code.snapshot)")
    return replace(run, recipe=replace(run.recipe, code=replace(run.recipe.code, snapshot=True)))


def readiness_elsewhere(run: PlannedRun, host: RemoteHost) -> Readiness:
    """Return what the job needs and lacks on the host, and what it asks of its SLURM. Raises UserError where the host
    is not reached."""
    from llmlaunch.launchers.ssh.home import SshPlace
    from llmlaunch.readiness.elsewhere import findings_elsewhere
    from llmlaunch.readiness.readiness import in_sentences
    from llmlaunch.readiness.slurm_request import listed_partitions, request_findings

    recipe = run.recipe
    code = code_root(recipe)[0] if recipe.code.snapshot else None
    partitions = listed_partitions(SshPlace(host.name, host.user_id))
    findings = findings_elsewhere(recipe, host.name, code, host.lacking)
    return in_sentences(recipe, [*findings, *request_findings(recipe, run.plan.length.seconds, partitions)])


def place_shown(run_dir: Path) -> str:
    """Return the directory, and where it lives if not on this machine."""
    if not (run_dir / file_names.HOME).exists():
        return str(run_dir)
    from llmlaunch.launchers.ssh.home import home_of

    home = home_of(run_dir)
    return str(run_dir) if home is None else f"{run_dir}, which lives in {home.host}:{home.directory}"


def change_elsewhere(directory: Path, command: str, name: str) -> None:
    """Do to a file of the run directory on the run's own host what was done to it here."""
    if (directory / file_names.HOME).exists():
        from llmlaunch.launchers.ssh.home import change_there

        change_there(directory, f'{command} -- "$1"', name)
