"""What the job's program looks at before it starts anything: setup lines that failed, secrets that are not set, an
allocation of another size than planned."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..rundir import file_names
from . import slurm_steps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Run = Mapping[str, Any]  # run.json


class JobError(Exception):
    """Why the job cannot train: one sentence for a person."""


def refuse_job(run_directory: Path, run: Run, environment: Mapping[str, str]) -> list[str]:
    """Return warnings. Raises JobError for what would only fail on the nodes."""
    spec = run.get("job")
    if not spec:
        raise JobError(f"{run_directory / file_names.RUN} says nothing of how to run the job")
    failed = failed_setup_lines(environment.get("LLMLAUNCH_SETUP", ""))
    if failed:
        line, code = failed[0]
        raise JobError(
            f"line {line} of job.sbatch, a setup line, failed with exit code {code}: "
            f"{_script_line(run_directory, line)} (a line that may fail ends in `|| true`)"
        )
    for name in spec["secrets"]:
        if not environment.get(name):
            raise JobError(f"{name}: a secret of the recipe; export it where you submit, sbatch carries it along")
    webhook = (run.get("notify") or {}).get("webhook")
    if webhook and not environment.get(webhook):
        return [f"{webhook} is not set, so no notice of this job is posted (notify.webhook)"]
    return []


def allocation_of(run: Run, environment: Mapping[str, str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the nodes of the allocation, and warnings. Raises JobError where they are not as many as planned."""
    planned, devices, nodes = int(run["job"]["allocated"]), int(run["devices_per_node"]), int(run["nodes"])
    if not environment.get("SLURM_JOB_ID"):
        if nodes != 1:
            raise JobError(f"planned for {nodes} nodes; without SLURM it runs on one. Submit it with sbatch")
        return (os.uname().nodename.partition(".")[0],), []
    names = slurm_steps.allocated_nodes(environment)
    if len(names) != planned:
        raise JobError(
            f"planned for {planned} node(s), but this allocation has {len(names)}; render again with nodes={len(names)}"
        )
    cpus = environment.get("SLURM_CPUS_ON_NODE", "")
    if cpus.isdigit() and int(cpus) < devices:
        return tuple(names), [
            f"SLURM gives this job {cpus} CPU core(s) a node for {devices} trainers; ask for more (cpus_per_node in "
            "the cluster profile, or slurm: {cpus-per-gpu: N} or {exclusive: true})"
        ]
    return tuple(names), []


def _script_line(run_directory: Path, number: int) -> str:
    try:
        lines = (run_directory / file_names.JOB_SCRIPT).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    return lines[number - 1] if 0 < number <= len(lines) else ""


def failed_setup_lines(noted: str) -> list[tuple[int, int]]:
    """Return line and exit code of each setup line that failed, as the script's trap notes them: ` LINE:CODE:DEPTH`.
    A command within a file that a line reads (`source`) is deeper than 1; what counts is the line itself."""
    failed = []
    for word in noted.split():
        line, code, depth = (int(number) for number in word.split(":"))
        if depth == 1:
            failed.append((line, code))
    return failed
