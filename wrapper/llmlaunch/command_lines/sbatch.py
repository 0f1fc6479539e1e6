"""Options of sbatch and srun as people write them, and what they say of nodes and devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from llmlaunch.command_lines.command import is_optional
from llmlaunch.documents.slurm_options import option_forms
from llmlaunch.rundir.values import shortened

Options = Mapping[str, str | int | bool]

OF_A_TASK = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
"""What srun sets for each task, and a shell of the task therefore knows (srun(1), OUTPUT ENVIRONMENT VARIABLES)."""

_COUNTS = ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "cpus-per-task", "cpus-per-gpu", "ntasks-per-gpu")
# a word of a directive as get_argument of src/sbatch/opt.c reads it: quotes, backslashes, a comment after any `#`
_WORD = re.compile(r"""[ \t\v\f\r]*((?:[^\s\\"'#]|\\.|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')+)""")
_QUOTES = re.compile(r"""\\(.)|"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'""")


MOST_STRAY = 20


def sbatch_options(text: str, step: Callable[[], None]) -> tuple[dict[str, str | int | bool], tuple[str, ...]]:
    """Return the options of a script's `#SBATCH` lines by long names, and a note for each line that is not read.

    As in sbatch, the lines end with the first command, nothing is expanded, and all words are one command line
    (src/sbatch/opt.c, _opt_batch_script). `step` is called for each word.
    """
    words: list[str] = []
    notes: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if re.match(r"#SBATCH\s+(?:het|pack)job\s*$", line, re.IGNORECASE):
            notes.append(f"{number}: the other components of a heterogeneous job are not read")
            break
        if line.startswith("#SBATCH"):
            position = len("#SBATCH")
            while word := _WORD.match(line, position):
                step()
                words.append(_unquoted(word[1]))
                position = word.end()
            if line[position:].lstrip()[:1] not in ("", "#"):
                notes.append(f"{number}: an option of sbatch has an open quote and is not read")
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    options, left = _read(words, "sbatch")
    for _ in range(MOST_STRAY):
        if not left:
            break
        notes.append(f"#SBATCH: {shortened(left[0])} is no option of sbatch, which refuses the script; it is not read")
        more, left = _read(left[1:], "sbatch")
        options |= more
    return options, tuple(notes)


def _unquoted(word: str) -> str:
    return _QUOTES.sub(lambda match: match[1] or re.sub(r"\\(.)", r"\1", match[2] or match[3] or ""), word)


def sbatch_words(words: Sequence[str]) -> tuple[dict[str, str | int | bool], list[str]]:
    """Return sbatch's options at the start of a command by long names, and the words after them."""
    return _read(words, "sbatch")


def srun_options(words: Sequence[str]) -> tuple[dict[str, str | int | bool], list[str]]:
    """Return srun's options at the start of a command by long names, and the words after them."""
    return _read(words, "srun")


def _read(words: Sequence[str], command: str) -> tuple[dict[str, str | int | bool], list[str]]:
    """Read options as getopt_long does: any unambiguous beginning of a name stands for it."""
    forms, short = option_forms(command)
    options: dict[str, str | int | bool] = {}
    position = 0

    def following(takes: str) -> str | None:
        nonlocal position
        if takes != "value" or position >= len(words):
            return None
        position += 1
        return words[position - 1]

    while position < len(words):
        word = words[position]
        optional = is_optional(word) and position + 1 < len(words)
        if not optional and (not word.startswith("-") or word == "-"):
            break
        position += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = _full_name(name, forms)
            value = text if equals else following(forms.get(name, "value"))
            options[name] = True if value is None else _value(name, value)
        elif not optional:
            _read_letters(word[1:], forms, short, following, options)
    return options, list(words[position:])


def _read_letters(
    letters: str,
    forms: Mapping[str, str],
    short: Mapping[str, str],
    following: Callable[[str], str | None],
    options: dict[str, str | int | bool],
) -> None:
    """Read `-vN2`: letters of flags, up to one that takes the rest of the word, or the next word, as its value."""
    for place, letter in enumerate(letters, start=1):
        name = short.get(letter, letter)
        takes = forms.get(name, "flag")
        if takes != "flag":
            value = letters[place:].removeprefix("=") or following(takes)
            options[name] = True if value is None else _value(name, value)
            break
        options[name] = True


def _full_name(name: str, forms: Mapping[str, str]) -> str:
    longer = [] if name in forms else [each for each in forms if each.startswith(name)]
    return longer[0] if len(longer) == 1 else name


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
            tasks = task_count(options) or (1 if options.get("ntasks", 1) == 1 else None)
            return None if tasks is None else count * tasks
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


def of_one_task(options: Options) -> dict[str, str | int | bool]:
    """Return options with which one task of a node gets what all its tasks have together, by options that count per
    task. Whether a task sees only some of its node's GPUs is left to the job."""
    tasks = task_count(options) or 1
    cpus, gpus = options.get("cpus-per-task"), str(options.get("gpus-per-task", ""))
    result = {name: value for name, value in options.items() if name not in ("gpus-per-task", "gpu-bind")}
    if isinstance(cpus, int):
        result["cpus-per-task"] = cpus * tasks
    count = re.fullmatch(r"((?:[\w.-]+:)?)(\d{1,6})", gpus, re.ASCII)
    if count is not None and device_count(result) is None:
        result["gpus-per-node"] = f"{count[1]}{int(count[2]) * tasks}"
    return result


def sbatch_environment(options: Options) -> dict[str, str]:
    """Return the variables that SLURM sets in a job with these options, as far as they say them."""
    nodes, tasks, devices = node_count(options), task_count(options), device_count(options)
    all_tasks = options.get("ntasks") if tasks is None or nodes is None else nodes * tasks
    first = 0 if options else None  # the batch script is the first task on the first node
    values = {
        **dict.fromkeys(OF_A_TASK, first),
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_ON_NODE": devices,
        "SLURM_GPUS_PER_NODE": options.get("gpus-per-node"),
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})" if tasks and nodes and nodes > 1 else tasks if nodes else None,
        "SLURM_NTASKS": all_tasks,
        "SLURM_NPROCS": all_tasks,
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task"),
        "SLURM_JOB_NAME": options.get("job-name"),
        "SLURM_JOB_PARTITION": options.get("partition"),
        "SLURM_JOB_ACCOUNT": options.get("account"),
    }
    return {name: str(value) for name, value in values.items() if value is not None}
