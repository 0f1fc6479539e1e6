"""The environment SLURM's commands and a local job are started in.

sbatch reads an option from the environment (SBATCH_PARTITION, SBATCH_TIMELIMIT...) and lets it win over the
script's own directive, silently. What was rendered and shown is what must run, so those are left out. Some of
them are how sites set a default account or partition for their users: these stay where the script says nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

INTERPRETER_VARIABLE = "LLMLAUNCH_PYTHON"
"""Names the Python that trains, where the recipe names none."""

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


@dataclass(frozen=True)
class VariableFilter:
    """Which variables a command is started without: those that begin with one of `prefixes`, but for `exceptions`, and
    `names`. `submits`: inside a job that job's own variables are left out, too."""

    prefixes: tuple[str, ...]
    names: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()
    submits: bool = False

    def of(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return `environment` as the command gets it."""
        remaining = {
            name: value
            for name, value in environment.items()
            if not (name.startswith(self.prefixes) and name not in self.exceptions) and name not in self.names
        }
        if self.submits and "SLURM_JOB_ID" in remaining:
            remaining = {
                name: value
                for name, value in remaining.items()
                if not name.startswith(_OF_A_JOB) or name in _CONNECTION
            }
        return remaining


QUERIES = VariableFilter(("SQUEUE_", "SACCT_", "SCANCEL_"), ("SLURM_TIME_FORMAT", "SLURM_CLUSTERS"))
"""Without the variables that filter or reshape the answers, such as SQUEUE_STATES and SACCT_FORMAT."""


def for_sbatch(script: str) -> VariableFilter:
    """Return what leaves out the variables that would override the directives of `script`.

    Submitted from inside a job, that job's own SLURM_* are left out, too: sbatch hands the environment on, and srun
    in the new job would take them for its options (SLURM_MEM_PER_CPU beside --mem is an error).
    """
    own = directives(script)
    exceptions = tuple(name for name, options in _SITE_DEFAULTS.items() if not _asks(own, options))
    return VariableFilter(("SBATCH_",), exceptions=exceptions, submits=True)


def for_local_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without SLURM's variables: inside an allocation job.sbatch would otherwise take itself for a
    SLURM job."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_A_JOB)}


def directives(script: str) -> list[str]:
    """Return the arguments on a script's `#SBATCH` lines, unquoted."""
    arguments: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            rest = line.removeprefix("#SBATCH")
            try:
                arguments += shlex.split(rest)
            except ValueError:  # a quote that does not end
                arguments += rest.split()
    return arguments


def option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of the option `name` (`--comment`, `-M`) on a command line, the last one if it is repeated."""
    value = None
    for number, word in enumerate(arguments):
        if word.startswith(f"{name}="):
            value = word.partition("=")[2]
        elif word == name and number + 1 < len(arguments):
            value = arguments[number + 1]
    return value


def _asks(arguments: Sequence[str], names: tuple[str, str]) -> bool:
    long, short = names
    return any(word.split("=")[0] == long or word.startswith(short) for word in arguments)
