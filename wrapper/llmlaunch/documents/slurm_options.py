"""Options of sbatch and srun: which exist, which a person may set, and which values break the job they belong to.

sbatch's options and the forms of their values are data (slurm/sbatch-options.json, which names its sources). Read in
SLURM's sources: src/sbatch/opt.c and sbatch.c (what `#SBATCH` lines do). Seen with 22.05.8: a directive `--comment`
without its value makes `--exclusive` of the next line the comment; `--tasks-per-n=3` starts three tasks; `--test-only`
submits nothing; `--wrap`, `--quiet`, `--help` and `--version` do nothing as directives.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.rundir.values import shortened
from llmlaunch.units import DAY, HOUR, MINUTE

_OPTION = re.compile(r"[a-z][a-z0-9-]*")

# of PBS and of people -> of sbatch
_OTHER_NAMES = {
    "mem-per-node": "mem",
    "memory": "mem",
    "walltime": "time",
    "time-limit": "time",
    "queue": "partition",
    "project": "account",
    "allocation": "account",
}
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
            *("output", "error", "input", "open-mode", "export", "kill-on-bad-exit", "wait"),
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
    "label": "a task number before every line would hide from llmlaunch what the nodes say",
    "unbuffered": "lines of several nodes would mix; what the trainers print is in the log at once without it",
    "mpi": "write `mpi:` beside `srun:`",
    **dict.fromkeys(
        (
            *("container-image", "container-mounts", "container-workdir"),
            *("container-mount-home", "no-container-mount-home"),
        ),
        "the container is `container:` of the recipe, its mounts and the site's",
    ),
    "container-name": "a named container outlives its job and is shared with others; llmlaunch names those of its jobs",
}

_CONFLICTS = (
    ("mem", "mem-per-cpu", "mem-per-gpu"),  # src/common/slurm_opt.c, _validate_memory_options
    ("core-spec", "thread-spec"),  # _validate_spec_cores_options
    ("exclusive", "oversubscribe"),  # _validate_share_options, from 23.11 on; before, the last one wins
    ("cpus-per-task", "cpus-per-gpu"),  # _validate_cpus_per_gres
    ("requeue", "no-requeue"),  # the last one wins, which nobody can see in a mapping
    ("bb", "bbf"),  # src/sbatch/opt.c, _opt_verify
)

GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")


def over_site_options(site: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the site's sbatch options with a recipe's own over them. An own option also replaces the site's other way
    to ask for the same thing: `mem-per-gpu` of a recipe a site's `mem`."""
    requested = {name for name, value in own.items() if value is not False}
    replaced = {name for group in (GPU_OPTIONS, *_CONFLICTS) if requested.intersection(group) for name in group}
    return {name: value for name, value in site.items() if name not in replaced} | dict(own)


def other_gres(options: Mapping[str, Any]) -> list[str]:
    """Return the parts of `gres` that are no GPUs."""
    return [part for part in str(options.get("gres") or "").split(",") if part and not part.startswith("gpu")]


def refused_sbatch_option(name: str) -> str | None:
    """Say why no recipe and no profile may set this option of sbatch, with the remedy; None if they may.

    An option that sbatch does not know is not refused here: a plugin of the site may have added it.
    """
    return _problem(name, _SBATCH, "sbatch")


def follows_from_recipe(name: str) -> bool:
    """Return whether an option of sbatch says what the rendered job says by itself: its nodes and its tasks."""
    return name == "nodes" or _SBATCH.get(name) == _ONE_TASK


def sbatch_option_problem(name: str) -> str | None:
    """Say why `slurm:` may not hold this option; None if it may. Only real options of sbatch are allowed."""
    if name in _options():
        return _problem(name, _SBATCH, "sbatch")
    problem = _misspelt(name, "sbatch")
    if problem is not None:
        return problem
    from llmlaunch.documents.likely_meaning import nearest

    near = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else nearest(name, tuple(_options()))
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"is no option of sbatch{hint} An option that a plugin of the site adds goes under slurm_plugins:"


@functools.cache
def option_forms(command: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return what the options of sbatch or srun take, "value", "flag" or "either", by their long names, and the long
    names by their letters."""
    takes = {name: option["takes"] for name, option in _options().items()}
    if command != "srun":
        return takes, _data()["short"]
    srun = _data()["srun"]
    takes |= {name: kind for kind in ("value", "flag", "either") for name in srun[kind]}
    return takes, {**_data()["short"], **srun["short"]}


def plugin_option_problem(name: str) -> str | None:
    """Say why `slurm_plugins:` may not hold this option; None if it may."""
    if name in _options() and name not in _SBATCH:
        return "is an option of sbatch itself; write it under slurm:"
    return refused_sbatch_option(name)


def srun_option_problem(name: str) -> str | None:
    """Say why a profile's `srun:` may not hold this option, with the remedy; None if it may."""
    return _problem(name, _SRUN, "srun")


def sbatch_value_problem(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first option whose value sbatch would refuse or that would break the job, and why."""
    for name, value in options.items():
        problem = None if value is False else _value_problem(name, value)
        if problem is not None:
            return name, problem
    for group in _CONFLICTS:
        requested = [name for name in group if options.get(name, False) is not False]
        if len(requested) > 1:
            return requested[1], (f"contradicts {requested[0]}: sbatch takes one of the two; remove one")
    return None


def _value_problem(name: str, value: Any) -> str | None:
    option = _options().get(name)
    takes = None if option is None else option["takes"]
    if value is True:
        return "needs a value: without one it would swallow the option after it" if takes == "value" else None
    if name == "array" and not str(value).endswith("%1"):
        return (
            f"the tasks of {value} would train into one run directory at the same time; write them one after the "
            "other, such as 1-4%1"
        )
    if takes == "flag":
        return f"takes no value, not {_shown(value)}; write true, or false to leave it out"
    form = _forms().get((option or {}).get("form", ""))
    if form is None or form[0].fullmatch(str(value)):
        return None
    return f"{_shown(value)} is no form that sbatch takes; write {form[1]}"


def _shown(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) else str(value)
    return shortened(text)


@functools.cache
def _options() -> Mapping[str, Mapping[str, str]]:
    options: Mapping[str, Mapping[str, str]] = _data()["options"]
    return options


@functools.cache
def _forms() -> Mapping[str, tuple[re.Pattern[str], str]]:
    return {name: (re.compile(form["pattern"], re.ASCII), form["write"]) for name, form in _data()["forms"].items()}


@functools.cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(asset("slurm", "sbatch-options.json").read_text(encoding="utf-8"))
    return data


def _problem(name: str, refused: Mapping[str, str], command: str) -> str | None:
    if name in refused:
        return f"is not set here: {refused[name]}; remove it"
    problem = _misspelt(name, command)
    if problem is not None:
        return problem
    meant = next((long for long in refused if long.startswith(name)), None)
    # getopt_long takes any beginning of an option that fits no other
    if (
        meant is not None
        and name not in _options()
        and not any(long.startswith(name) for long in _options() if long != meant)
    ):
        return f"is short for {meant}, which is not set here: {refused[meant]}; remove it"
    return None


def _misspelt(name: str, command: str) -> str | None:
    if _OPTION.fullmatch(name):
        return None
    fixed = name.lower().lstrip("-").replace("_", "-")
    hint = f"write {fixed}" if _OPTION.fullmatch(fixed) else "use letters, digits and '-'"
    return f"is not a long option of {command} without its dashes; {hint}"


_UNLIMITED = {"", "0", "-1", "infinite", "unlimited"}
_WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_WITHOUT_DAYS = re.compile(r"(?:(\d+):)?(\d+):(\d+)|(\d+)")


def limit_seconds(value: object) -> int | None:
    """Return the seconds of a time limit as sbatch reads it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.
    None without a limit, which every zero asks for, and for what is none: sbatch itself refuses it."""
    text = "" if value is None or isinstance(value, bool) else str(value).strip()
    if text.lower() in _UNLIMITED:
        return None
    if match := _WITH_DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return (days * DAY + hours * HOUR + minutes * MINUTE + seconds) or None
    if match := _WITHOUT_DAYS.fullmatch(text):
        hours, minutes, seconds, alone = (int(part or 0) for part in match.groups())
        return (hours * HOUR + (minutes + alone) * MINUTE + seconds) or None
    return None
