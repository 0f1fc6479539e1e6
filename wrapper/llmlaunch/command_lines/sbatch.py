"""Options of sbatch and srun as people write them, and what they say of nodes and devices."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from llmlaunch.command_lines.command import is_optional
from llmlaunch.documents.slurm_options import sbatch_option_takes

__all__ = [
    "Options",
    "device_count",
    "node_count",
    "sbatch_environment",
    "sbatch_options",
    "srun_options",
    "task_count",
]

Options = Mapping[str, str | int | bool]

_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "C": "constraint", "c": "cpus-per-task", "D": "chdir",
    "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "i": "input", "J": "job-name",
    "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks",
    "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos", "S": "core-spec",
    "s": "oversubscribe", "t": "time", "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_SRUN_SHORT = _SHORT | {
    "l": "label", "u": "unbuffered", "K": "kill-on-bad-exit", "T": "threads", "r": "relative", "X": "disable-status",
    "Z": "no-allocate", "E": "preserve-env", "I": "immediate",
}  # fmt: skip
# of srun and its plugins, beside what sbatch knows: those without a value, and those whose value may be left out
_SRUN_FLAGS = (
    "label", "unbuffered", "disable-status", "no-allocate", "preserve-env", "exact", "overlap", "multi-prog", "pty",
    "quit-on-interrupt", "treewidth-off", "container-mount-home", "no-container-mount-home", "container-writable",
    "container-readonly", "container-remap-root", "no-container-remap-root", "no-container-entrypoint",
    "container-entrypoint", "whole", "interactive", "send-libs-off",
)  # fmt: skip
_SRUN_EITHER = ("kill-on-bad-exit", "immediate", "send-libs", "wait")
_COUNTS = ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "cpus-per-task", "cpus-per-gpu", "ntasks-per-gpu")


def sbatch_options(text: str) -> tuple[dict[str, str | int | bool], tuple[str, ...]]:
    """Return the options of a script's `#SBATCH` lines by long names, and a note for each line that is not read."""
    options: dict[str, str | int | bool] = {}
    notes: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line[len("#SBATCH") :], comments=True)
            except ValueError:
                notes.append(f"{number}: an option of sbatch has an open quote and is not read")
                continue
            read, left = _read(words, _SHORT)
            options.update(read)
            if left:
                notes.append(f"{number}: {' '.join(left)} is no option of sbatch and is not read")
        elif line.strip() and not line.startswith("#"):
            break  # sbatch looks no further
    return options, tuple(notes)


def srun_options(words: Sequence[str]) -> tuple[dict[str, str | int | bool], list[str]]:
    """Return srun's options at the start of a command by long names, and the words after them."""
    return _read(words, _SRUN_SHORT)


def _read(words: Sequence[str], short: Mapping[str, str]) -> tuple[dict[str, str | int | bool], list[str]]:
    options: dict[str, str | int | bool] = {}
    left = list(words)
    while left and ((left[0].startswith("-") and left[0] != "-") or (is_optional(left[0]) and len(left) > 1)):
        word = left.pop(0)
        if word == "--":
            break
        if is_optional(word):
            continue
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            takes = _takes(name)
            if equals:
                options[name] = _value(name, value)
            elif takes == "value" and left:
                options[name] = _value(name, left.pop(0))
            else:
                options[name] = True
            continue
        name = short.get(word[1], word[1])
        if _takes(name) == "value":
            value = word[2:].removeprefix("=") or (left.pop(0) if left else "")
            options[name] = _value(name, value)
        elif _takes(name) == "either" and word[2:]:
            options[name] = _value(name, word[2:].removeprefix("="))
        else:
            options.update({short.get(letter, letter): True for letter in word[1:]})
    return options, left


def _takes(name: str) -> str:
    if name in _SRUN_FLAGS:
        return "flag"
    if name in _SRUN_EITHER:
        return "either"
    return sbatch_option_takes(name) or "value"


def _value(name: str, value: str) -> str | int:
    return int(value) if name in _COUNTS and re.fullmatch(r"\d{1,9}", value, re.ASCII) else value


def node_count(options: Options) -> int | None:
    """Return how many nodes the options ask for: the most of a range, one where sbatch takes one; None if open."""
    match = re.fullmatch(r"(?:\d+-)?(\d{1,9})", str(options.get("nodes", "")), re.ASCII)
    return int(match[1]) if match else None


def device_count(options: Options) -> int | None:
    """Return how many devices a node has for the job, None where the options do not say."""
    for name in ("gpus-per-node", "gpus-per-task", "gpus", "gres"):
        count = _gpus(str(options.get(name, "")), needs_name=name == "gres")
        if count is None:
            continue
        if name == "gpus":
            nodes = node_count(options) or 1
            return count // nodes if count % nodes == 0 else None
        if name == "gpus-per-task":
            return count * (task_count(options) or 1)
        return count
    return None


def _gpus(text: str, needs_name: bool) -> int | None:
    """Return the count of `8`, `h100:8`, `gpu:8`, `gpu:h100:8` or `gpu`, of which gres needs the name."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:(gpu)(?=:|$))?:?(?:[A-Za-z_][\w.-]*(?=:|$))?:?(\d{1,6})?(?:\(.*\))?", part, re.ASCII)
        if match is not None and part and (match[1] or not needs_name):
            counts.append(int(match[2] or 1))
    return sum(counts) if counts else None


def device_type(options: Options) -> str | None:
    """Return the kind of device that the options name, such as `h100`; None where they name none."""
    for name in ("gpus-per-node", "gpus-per-task", "gpus", "gres"):
        for part in str(options.get(name, "")).split(","):
            match = re.fullmatch(r"(?:gpu:)?([A-Za-z_][\w.-]*)(?::\d+)?", part, re.ASCII)
            if match is not None and match[1] != "gpu" and (name != "gres" or part.startswith("gpu:")):
                return match[1]
    return None


def task_count(options: Options) -> int | None:
    """Return how many tasks start on a node, None where the options do not say."""
    for name in ("ntasks-per-node", "tasks-per-node"):
        if isinstance(options.get(name), int):
            return int(options[name])
    tasks, nodes = options.get("ntasks"), node_count(options)
    if isinstance(tasks, int) and not isinstance(tasks, bool) and nodes and tasks % nodes == 0:
        return tasks // nodes
    return None


def sbatch_environment(options: Options) -> dict[str, str]:
    """Return the variables that SLURM sets in a job with these options, as far as they say them."""
    nodes, tasks, devices = node_count(options), task_count(options), device_count(options)
    all_tasks = options.get("ntasks") if tasks is None or nodes is None else nodes * tasks
    values = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_ON_NODE": devices,
        "SLURM_GPUS_PER_NODE": options.get("gpus-per-node"),
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_TASKS_PER_NODE": None
        if tasks is None or nodes is None
        else f"{tasks}(x{nodes})"
        if nodes > 1
        else tasks,
        "SLURM_NTASKS": all_tasks,
        "SLURM_NPROCS": all_tasks,
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task"),
        "SLURM_JOB_NAME": options.get("job-name"),
        "SLURM_JOB_PARTITION": options.get("partition"),
        "SLURM_JOB_ACCOUNT": options.get("account"),
    }
    return {name: str(value) for name, value in values.items() if value is not None}
