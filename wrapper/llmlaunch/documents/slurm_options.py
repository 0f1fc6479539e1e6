"""Options of sbatch and srun: which a person may set, and which would break the job they belong to.

Any long option passes through but those listed here. Read in SLURM's sources: src/common/slurm_opt.c (which options
take a value, 22.05 and 26.05), src/sbatch/opt.c and sbatch.c (what `#SBATCH` lines do). Seen with 22.05.8: a directive
`--comment` without its value makes `--exclusive` of the next line the comment; `--tasks-per-n=3` starts three tasks;
`--test-only` submits nothing; `--wrap`, `--quiet`, `--help` and `--version` do nothing as directives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["sbatch_option_problem", "sbatch_value_problem", "srun_option_problem"]

_OPTION = re.compile(r"[a-z][a-z0-9-]*")

_ONE_TASK = "each node runs one task, which starts the trainers"
_SBATCH = {
    "nodes": "the number of nodes is `nodes:` of the recipe",
    "ntasks": _ONE_TASK,
    "ntasks-per-node": _ONE_TASK,
    "ntasks-per-gpu": _ONE_TASK,
    "ntasks-per-tres": _ONE_TASK,
    "tasks-per-node": _ONE_TASK,
    "wrap": "the job script is rendered; shell lines the site needs go under `setup:`",
    "external": "the job would run no script",
    "test-only": "nothing would be submitted; llmlaunch submit --test-only asks SLURM so",
    "wait": "sbatch would not return before the job ends; llmlaunch submit --follow waits",
}

_OF_THE_STEP = "job.sbatch sets it: one task a node, one log a node, the whole step ends with its first failure"
_NO_TRAINING = "srun would not start the training"
_SRUN = {
    **dict.fromkeys(
        (
            *("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-tres", "tasks-per-node"),
            *("output", "error", "open-mode", "export", "kill-on-bad-exit", "wait"),
        ),
        _OF_THE_STEP,
    ),
    **dict.fromkeys(
        (
            *("async", "autocomplete", "external-launcher", "help", "jobid", "multi-prog", "no-allocate", "pty"),
            *("test-only", "usage", "version"),
        ),
        _NO_TRAINING,
    ),
    "label": "a task number before every line would hide from llmlaunch what the trainers say",
    "mpi": "write `mpi:` beside `srun:`",
    **dict.fromkeys(
        (
            *("container-image", "container-mounts", "container-workdir"),
            *("container-mount-home", "no-container-mount-home"),
        ),
        "the container is `container:` of the recipe, its mounts and the site's",
    ),
    "container-name": "a named container outlives its job and is shared with others; every step has one of its own",
}

# Given without its value, such an option would take the next directive for it.
_NEEDING = """
account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment constraint container
container-id context core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nodefile nodelist ntasks-per-core
ntasks-per-socket open-mode output partition prefer priority profile qos reservation resources runtime segment
signal sockets-per-node switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
wait-all-nodes wckey
"""
_TAKES_A_VALUE = frozenset(_NEEDING.split())


def sbatch_option_problem(name: str) -> str | None:
    """Why no recipe and no profile may set this option of sbatch, with the remedy; None where they may."""
    return _problem(name, _SBATCH, "sbatch")


def srun_option_problem(name: str) -> str | None:
    """The same of srun."""
    return _problem(name, _SRUN, "srun")


def sbatch_value_problem(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first option whose value would break the job, and why."""
    for name, value in options.items():
        if value is True and name in _TAKES_A_VALUE:
            return name, "needs a value: without one it would swallow the option after it"
        if name == "array" and value is not False and not str(value).endswith("%1"):
            return name, (
                f"the tasks of {value} would train into one run directory at the same time; write them one after the "
                "other, such as 1-4%1"
            )
    return None


def _problem(name: str, refused: Mapping[str, str], command: str) -> str | None:
    if name in refused:
        return f"is not set here: {refused[name]}; remove it"
    if not _OPTION.fullmatch(name):
        fixed = name.lower().lstrip("-").replace("_", "-")
        hint = f"write {fixed}" if _OPTION.fullmatch(fixed) else "use letters, digits and '-'"
        return f"is not a long option of {command} without its dashes; {hint}"
    meant = next((long for long in refused if long.startswith(name)), None)
    ambiguous = any(long.startswith(name) for long in _TAKES_A_VALUE if long != meant)
    if meant is not None and not ambiguous:  # getopt_long takes any beginning of an option that fits no other
        return f"is short for {meant}, which is not set here: {refused[meant]}; remove it"
    return None
