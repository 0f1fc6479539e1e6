"""The environment SLURM's commands and a local job are started in.

sbatch reads an option from the environment (SBATCH_PARTITION, SBATCH_TIMELIMIT...) and lets it win over the
script's own directive, silently. What was rendered and shown is what must run, so those are left out. Some of
them are how sites set a default account or partition for their users: these stay where the script says nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

__all__ = ["directives", "for_local_job", "for_queries", "for_sbatch", "option"]

_SITE_DEFAULTS: Mapping[str, tuple[str, str]] = {
    "SBATCH_ACCOUNT": ("--account", "-A"),
    "SBATCH_CLUSTERS": ("--clusters", "-M"),
    "SBATCH_CONSTRAINT": ("--constraint", "-C"),
    "SBATCH_PARTITION": ("--partition", "-p"),
    "SBATCH_QOS": ("--qos", "-q"),
    "SBATCH_RESERVATION": ("--reservation", "--reservation"),
}

# How the commands find and address SLURM; all other SLURM_* inside a job describe that job.
_CONNECTION = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")

_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_")


def for_sbatch(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """`environment` without what would override the directives of `script`.

    Submitted from inside a job, that job's own SLURM_* are left out, too: sbatch hands the environment on, and srun
    in the new job would take them for its options (SLURM_MEM_PER_CPU beside --mem is an error).
    """
    given = directives(script)
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith("SBATCH_") or (name in _SITE_DEFAULTS and not _asks(given, _SITE_DEFAULTS[name]))
    }
    return _outside_of_jobs(kept) if "SLURM_JOB_ID" in kept else kept


def for_queries(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what filters or reshapes the answers (SQUEUE_STATES, SACCT_FORMAT, SLURM_TIME_FORMAT)."""
    shaping = ("SQUEUE_", "SACCT_", "SCANCEL_")
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(shaping) and name not in ("SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
    }


def for_local_job(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` of no job: inside an allocation, job.sbatch would otherwise take itself for a SLURM job."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_A_JOB)}


def _outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_OF_A_JOB) or name in _CONNECTION}


def directives(script: str) -> list[str]:
    """The words of a script's `#SBATCH` lines, with their quotes taken off."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            rest = line.removeprefix("#SBATCH")
            try:
                words += shlex.split(rest)
            except ValueError:  # a quote that does not end
                words += rest.split()
    return words


def option(words: Sequence[str], name: str) -> str | None:
    """The value `name` (`--comment`, `-M`) has among the words of a command line; the last one counts."""
    found = None
    for number, word in enumerate(words):
        if word.startswith(f"{name}="):
            found = word.partition("=")[2]
        elif word == name and number + 1 < len(words):
            found = words[number + 1]
    return found


def _asks(words: Sequence[str], names: tuple[str, str]) -> bool:
    long, short = names
    return any(word.split("=")[0] == long or word.startswith(short) for word in words)
