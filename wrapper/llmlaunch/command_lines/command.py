"""A training as somebody's own script starts it, and the recipe that was read of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_VARIABLE = re.compile(r"\$\{\w+\}")
_VARIABLES = re.compile(r"(?:\$\{\w+\})+")


@dataclass(frozen=True)
class Unset:
    """A variable that has no value where only the script is known: an argument of the script ("1"), or one that the
    environment of the job sets. `line` is where the script reads it."""

    name: str
    line: int


@dataclass(frozen=True)
class LaunchProblem:
    """What is wrong with the way in which a script starts its ranks, and how to fix it.

    `line` is the line of the script, 0 where there is none. `fatal`: the job cannot train this way; otherwise it trains
    and the problem is a warning.
    """

    line: int
    problem: str
    fix: str
    fatal: bool = True


@dataclass(frozen=True)
class ScriptContainer:
    """The container that a script runs its trainer in: `mounts` as its runtime writes them (`/host:/inside`)."""

    image: str
    mounts: tuple[str, ...] = ()
    runtime: str | None = None  # pyxis, apptainer, singularity, enroot or docker


@dataclass(frozen=True)
class TrainerCommand:
    """One command that starts a training on every device of a job.

    `trainer` is the training script as written, a module after `-m`, or a command that starts one (llamafactory-cli,
    trl); `arguments` are its own, after it. A variable without a value stays in a word as `${NAME}`. `nodes` and
    `devices_per_node` are what launcher and sbatch options say; None where neither does. `launcher_options` holds the
    launcher's own options by their long names, without dashes in front and with underscores inside (accelerate's
    `config_file`), the last value of each. `slurm` holds options of sbatch by their long names, `environment` the
    variables that the script exports. `files` is the text of files that the script writes itself (`cat > ds.json <<E`),
    by their paths as written. `folder` is where relative paths are looked for. `place` names the line of the command,
    such as "job.sbatch:14". `setup` holds the commands before it that prepare its environment (`module load cuda`),
    `python` the interpreter where the script names one by its path, `workdir` the folder in which the trainer starts,
    None where the script does not decide it. `left_out` names what the script does besides and a recipe cannot keep.
    `family` is the name of the trainer in the table of trainers, empty where its kind is not known by name. `ranks` is
    how many ranks there are in all, where nodes or devices are not known and only that is.
    """

    trainer: str
    arguments: tuple[str, ...]
    launcher: str = "python"  # torchrun, deepspeed, accelerate, srun, mpirun, python or other
    nodes: int | None = None
    devices_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    slurm: Mapping[str, str | int | bool] = field(default_factory=dict)
    unset: tuple[Unset, ...] = ()
    launcher_options: Mapping[str, str | bool] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    place: str = "the command line"
    container: ScriptContainer | None = None
    setup: tuple[str, ...] = ()
    python: str | None = None
    launch_problems: tuple[LaunchProblem, ...] = ()
    family: str = ""
    ranks: int | None = None
    workdir: str | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnreadWords:
    """Words of a command line that no key of a recipe says, and why. They do not matter to the job as it is where it is
    rendering alone that has no use for them."""

    words: tuple[str, ...]
    reason: str
    matters: bool = True


@dataclass(frozen=True)
class Undecided:
    """What decides memory and was not read, a key of the recipe or an option: why, and the values that the key may
    have. Without any, a person has to say it."""

    key: str
    reason: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class StandIn:
    """The value of a recipe key that is assumed for a plan where the command line does not say it; memory does not
    depend on it, or hardly. `reason` is a sentence for the person, without the key."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Reading:
    """A recipe that was read of a command line.

    `document` is the recipe as a person would write it, keys in the order of the gallery; it lacks what the command
    line does not say, which `missing` names, a sentence each that ends with what to do. `notes` are what a person
    should know of it. `not_rendered` says why the recipe can be checked and not rendered; None where it can be.
    `undecided` are keys without which there is no verdict; the document does not have them. `stand_ins` are values of
    keys among those that `missing` names, with which the job can be planned all the same.
    """

    kind: str  # megatron-lm, megatron-bridge, deepspeed or hugging-face
    document: Mapping[str, Any]
    unread: tuple[UnreadWords, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    not_rendered: str | None = None
    undecided: tuple[Undecided, ...] = ()
    stand_ins: Mapping[str, StandIn] = field(default_factory=dict)


def is_unset(word: str) -> bool:
    """Return whether a word holds a variable that has no value."""
    return _VARIABLE.search(word) is not None


def is_optional(word: str) -> bool:
    """Return whether a word holds nothing but variables without a value: bash drops it where nobody sets them."""
    return _VARIABLES.fullmatch(word) is not None


def option_values(words: Sequence[str], takes: int | str) -> tuple[list[str], list[str]]:
    """Return the values of an option and the words after them. `words` follow the option, `takes` is argparse's nargs.

    An optional word (`is_optional`) is a value only where the option has too few without it, or none; otherwise it
    disappears.
    """
    present = [word for word in words if not is_optional(word)]
    fewest = takes if isinstance(takes, int) else 1
    values = present if len(present) >= fewest else list(words)
    most = takes if isinstance(takes, int) else 1 if takes == "?" else len(values)
    return values[:most], values[most:]
