"""A recipe while it is read from a command line: its keys, and what is to be told of them; and options of a script
whose own parser is not at hand."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmlaunch.command_lines.command import (
    Reading,
    ScriptContainer,
    StandIn,
    TrainerCommand,
    Undecided,
    UnreadWords,
    Unset,
    is_optional,
    is_unset,
    option_values,
)
from llmlaunch.command_lines.sbatch import of_one_task
from llmlaunch.documents.keys import key_names
from llmlaunch.documents.secrets import is_secret_variable, secret_in, without_passwords
from llmlaunch.documents.slurm_options import follows_from_recipe, sbatch_option_problem, sbatch_value_problem
from llmlaunch.documents.text import is_set_by_launcher, mount_problem, variable_problem
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.errors import UserError
from llmlaunch.families.hub_ids import hub_model, is_hub_id, preset_names, unknown_hub_id
from llmlaunch.recipe.training import Training
from llmlaunch.rundir.values import shortened
from llmlaunch.user_data import with_home

STAND_IN_STEPS = 1000
NO_DATA = "the data is not known; made-up tokens are assumed, with which memory is the same"
ZERO_STAGES = (0, 1, 2, 3)
JOB_KEYS = ("slurm", "setup", "container", "python", "workdir", "environment", "secrets")
"""Keys that `add_job` adds, beside the nodes."""
LEFT_OUT = "rendering leaves out "
"""How a note begins on what the script does and the job of the recipe does not."""
PASSWORD_LEFT_OUT = "a name and password in an address are never written; log in where you submit"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # names of torch's settings of its allocator
RUNTIMES = {"pyxis": "pyxis", "enroot": "pyxis", "apptainer": "apptainer", "singularity": "apptainer"}
_ORDER = ("model", "backend", "nodes", "training", "data", "tracking", "layout", *JOB_KEYS)


@dataclass
class RecipeDraft:
    """Keys of a recipe and of its sections, and the sentences of a `Reading`."""

    name: str
    kind: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    unread: list[UnreadWords] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_rendered: str | None = None
    undecided: list[Undecided] = field(default_factory=list)
    stand_ins: dict[str, StandIn] = field(default_factory=dict)

    def leave_out(self, words: tuple[str, ...], reason: str, matters: bool = True) -> None:
        """Tell of words that the recipe does not say, and whether they matter to the job as it is."""
        if words:
            self.unread.append(UnreadWords(words, reason, matters))

    def lack(self, key: str, sentence: str) -> None:
        """Tell of a key that the command line does not say; the sentence ends with what to do."""
        self.missing.append(f"{key}: {sentence}")

    def stand_in(self, key: str, value: Any, reason: str) -> None:
        """Assume a value of a key that the command line does not say."""
        self.stand_ins[key] = StandIn(value, reason)

    def leave_stage_open(self, reason: str) -> None:
        """Tell that the ZeRO stage was not read, and why; nothing stands for it."""
        self.undecided.append(Undecided("layout.zero_stage", reason, ZERO_STAGES))

    def ask(self, key: str, sentence: str) -> None:
        """Tell of what the command line gives a value that is not known, and that decides memory: no default may stand
        for it."""
        self.undecided.append(Undecided(key, sentence, ()))

    def reading(self, kind: str) -> Reading:
        """Return what was read, its keys in the order of the gallery."""
        order = {name: place for place, name in enumerate(key_names(Training))}
        open_keys = {each.key.partition(".")[2] for each in self.undecided}
        layout = {key: value for key, value in self.layout.items() if key not in open_keys}
        training = dict(sorted(self.training.items(), key=lambda item: order.get(item[0], len(order))))
        sections = {**self.keys, "training": training, "layout": layout}
        document = {"schema": 1, "name": self.name} | {key: sections[key] for key in _ORDER if sections.get(key)}
        written = without_passwords(document)
        if written != document and PASSWORD_LEFT_OUT not in self.notes:
            self.notes.append(PASSWORD_LEFT_OUT)
        return Reading(
            kind,
            written,
            tuple(self.unread),
            (*self.missing, *(f"{each.key}: {each.reason}" for each in self.undecided)),
            tuple(self.notes),
            self.not_rendered,
            tuple(self.undecided),
            self.stand_ins,
        )


def wanted_value(name: str, text: str, unset: Sequence[Unset]) -> str:
    """Return a sentence that asks for the variables without a value of a text, the value of `name`."""
    lines = {each.name: each.line for each in unset}
    names = dict.fromkeys(re.findall(r"\$\{(\w+)\}", text))
    where = ", ".join(
        f"{'$' * each.isdecimal()}{each}" + f" (line {lines.get(each)})" * (each in lines) for each in names
    )
    remedy = " ".join(f"--set {name}=VALUE" for name in names)
    return f"{name} reads {where}, which {'has' if len(names) == 1 else 'have'} no value in the script; give {remedy}"


def add_job(draft: RecipeDraft, command: TrainerCommand) -> None:
    """Add what the job's own script says beside the trainer: nodes, options of sbatch, variables, setup lines, the
    container and the folder in which the trainer starts."""
    if command.nodes is not None:
        draft.keys["nodes"] = command.nodes
    else:
        draft.lack("nodes", "neither the launcher nor sbatch says how many; write nodes: N")
    draft.keys["slurm"] = _sbatch_options(draft, command)
    _add_environment(draft, command)
    draft.keys |= {"setup": list(command.setup), "python": command.python, "workdir": command.workdir}
    if command.container is not None:
        _add_container(draft, command, command.container)
    draft.notes += [f"{LEFT_OUT}{sentence}" for sentence in command.left_out]


def _sbatch_options(draft: RecipeDraft, command: TrainerCommand) -> dict[str, Any]:
    """Return the options of sbatch for one task on each node. Those that the rendered job has anyway are left out
    quietly."""
    options: dict[str, Any] = {}
    for name, value in of_one_task(command.slurm).items():
        if follows_from_recipe(name) or (name == "job-name" and value == draft.name):
            continue  # the recipe's name is that of its jobs
        if command.container is not None and name.startswith("container-"):
            continue
        problem = sbatch_option_problem(name)
        if problem is None and isinstance(value, str) and is_unset(value):
            problem = "has no value in the script"
        elif problem is None:
            wrong = sbatch_value_problem({**options, name: value})
            problem = None if wrong is None else wrong[1]
        if problem is None:
            options[name] = value
        elif name != "job-name":
            draft.leave_out((f"--{name}={value}",), problem.removesuffix("; remove it"), matters=False)
    return options


def _add_environment(draft: RecipeDraft, command: TrainerCommand) -> None:
    """Add the variables that the script exports. Those that look like secrets are named without their values."""
    variables, secrets = {}, []
    for name, value in command.environment.items():
        if name.startswith("SLURM_") or is_set_by_launcher(name):  # which every job has anew
            continue
        problem = variable_problem(name, value)
        named_secret = is_secret_variable(name, "0123456789abcdef" if is_unset(value) else value)
        if problem is None and (named_secret or secret_in(value) is not None):
            secrets.append(name)
        elif problem is not None or is_unset(value):
            draft.leave_out((name,), problem or "has no value in the script", matters=False)
        else:
            variables[name] = value
    if command.trainer and not any(map(command.environment.get, ALLOCATOR)):
        _add_allocator(draft, command, variables)
    draft.keys |= {"environment": variables, "secrets": secrets}
    if secrets:
        draft.notes.append(f"secrets: {', '.join(secrets)} must be set where you submit; no value is written")


def _add_allocator(draft: RecipeDraft, command: TrainerCommand, variables: dict[str, str]) -> None:
    """Say what the rendered job sets of torch's allocator and the script does not. A process beside the trainer that
    writes its checkpoints cannot read tensors in segments that grow (`async-whole-segments` of checkpoint_rules.py)."""
    if {"--async-save", "--use-persistent-ckpt-worker"} <= set(command.arguments):
        variables[ALLOCATOR[0]] = "expandable_segments:False"
        return
    draft.notes.append(
        f"rendering sets {ALLOCATOR[0]}=expandable_segments:True, which the script does not: memory fragments less, so "
        "the recipe is safer than the script"
    )


def _add_container(draft: RecipeDraft, command: TrainerCommand, container: ScriptContainer) -> None:
    """Add the container, or say why a recipe cannot have it."""
    from llmlaunch.recipe.containers import Container, container_problems, is_path

    runtime = RUNTIMES.get(container.runtime or "pyxis")
    image = full_path(container.image, command.folder) if is_path(container.image) else container.image
    if is_unset(image):
        problem: str | None = "its image has no value in the script"
    elif runtime is None:
        problem = f"SLURM's nodes run images with pyxis or Apptainer, and not with {container.runtime}"
    elif container.runtime == "enroot" and not is_path(image):
        problem = "it is named, and only enroot knows which image that is"
    else:
        problem = next((why for _, why in container_problems(Container(image, (), runtime), "")), None)
    if problem is not None:
        draft.notes.append(
            f"{LEFT_OUT}{command.place}, the container {container.image}: {problem}; write container: {{image: ...}}"
        )
        return
    mounts: list[str] = []
    for mount in container.mounts:
        whole = _whole_mount(mount, command.folder)
        if is_unset(mount) or mount_problem(whole) is not None:
            problem = mount_problem(whole) or "has no value in the script"
            draft.notes.append(f"{LEFT_OUT}{command.place}, the mount {mount}: {problem}")
        else:
            mounts.append(whole)
    draft.keys["container"] = {"image": image} | ({"mounts": mounts} if mounts else {}) | {"runtime": runtime}


def _whole_mount(mount: str, folder: Path) -> str:
    """Return a mount with its source and destination: a folder alone is mounted at its own place."""
    source, *rest = mount.split(":")
    source = full_path(source, folder)
    return ":".join([source, *(rest if rest and rest[0] else [source, *rest[1:]])])


def add_model(draft: RecipeDraft, name: str | None, folder: Path) -> None:
    """Add the model that a script names: a folder with a config.json, or a model on the hub."""
    if name is None:
        draft.lack("model", "the command does not name one; write a preset or the path of a config.json")
        return
    place = folder / name
    if is_file(place / "config.json"):
        draft.keys["model"] = full_path(name, folder)
        return
    published = hub_model(name)
    if published is not None:
        draft.keys["model"] = name if published.changes else published.preset
        if not published.changes:
            draft.notes.append(f"{name} is the preset {published.preset}")
        return
    if is_hub_id(name):
        draft.lack("model", f"{name}: {unknown_hub_id(name, preset_names())}")
    else:
        draft.lack("model", f"there is no config.json in {name} here; write a preset or the path of a config.json")


def assume_steps(draft: RecipeDraft, *at_least: float | None) -> int:
    """Assume how many steps are trained where nothing says it, more than each of `at_least`; return their number."""
    steps = int(max(STAND_IN_STEPS, *(2 * (number or 0) for number in at_least)))
    draft.stand_in("training.steps", steps, f"how long it trains is not known; {steps} steps are assumed")
    return steps


def is_file(place: Path) -> bool:
    """Return whether there is such a file here; False where the path is none."""
    try:
        return place.is_file()
    except (OSError, ValueError):
        return False


def file_text(command: TrainerCommand, path: str) -> str | None:
    """Return the text of a file that a command names: one that its script writes, or one that is there. None where
    there is none. Raises UserError for a file that cannot be read."""
    for name in (path, Path(path).name):
        if name in command.files:
            return command.files[name]
    place = command.folder / path
    return read_text(place) if is_file(place) else None


def full_path(path: str, folder: Path) -> str:
    """Return the path of a file that the command names, as it is found from anywhere."""
    return str((folder / with_home(path)).absolute())


def job_name(command: TrainerCommand, *otherwise: str | None) -> str:
    """Return the recipe's name: that of the script's job, else the first of which a name can be made."""
    name = command.slurm.get("job-name")
    return recipe_name(name if isinstance(name, str) and not is_unset(name) else None, *otherwise)


def recipe_name(*candidates: str | None) -> str:
    """Return the first text of which a recipe's name can be made."""
    for candidate in candidates:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", candidate or "").strip("-.")[:64]
        if name:
            return name
    return "from-script"


_NUMBER = re.compile(r"[-+]?(\d{1,32}\.?\d{0,32}|\.\d{1,32})([eE][-+]?\d{1,4})?", re.ASCII)
_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0", "none", "null")


class ScriptOptions:
    """Options by name; of several with one name the last counts, as for argparse.

    `beneath` are options that a file says, over which `words` go; only those of `words` are handed on. `names` has the
    name under which an option of another is found. A value that holds a variable without a value counts as absent.
    """

    def __init__(
        self,
        words: Sequence[str],
        place: str,
        beneath: Sequence[str] = (),
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.place = place
        own, below = ([(_name(group[0]), group) for group in _groups(each)] for each in (words, beneath))
        self._own = [(names.get(name, name), group) for name, group in own]
        self._groups = [*((names.get(name, name), group) for name, group in below), *self._own]
        self._taken: set[str] = set()

    def has(self, *names: str) -> bool:
        """Return whether one of these options is written."""
        return any(name in names for name, _ in self._groups)

    def values(self, *names: str) -> tuple[str, ...] | None:
        """Return the words after the last of these options; None where none is written. The option is handed on."""
        words = self._words(*names)
        return None if words is None or any(map(is_unset, words)) else words

    def path(self, *names: str) -> str | None:
        """Return the value of an option that names a file, also with a variable without a value in it."""
        words = self._words(*names)
        return words[0] if words else None

    def _words(self, *names: str) -> tuple[str, ...] | None:
        group = next((group for name, group in reversed(self._groups) if name in names), None)
        if group is None:
            return None
        return (group[0].partition("=")[2], *group[1:]) if "=" in group[0] else group[1:]

    def text(self, *names: str) -> str | None:
        """Return the value of an option; "True" for one without."""
        words = self.values(*names)
        return None if words is None else words[0] if words else "True"

    def whole(self, *names: str) -> int | None:
        """Return a whole number. Raises UserError for another value."""
        value = self.number(*names)
        if value is not None and value != int(value):
            raise self.wrong(names, "is no whole number")
        return None if value is None else int(value)

    def number(self, *names: str) -> float | None:
        """Return a finite number. Raises UserError for another value."""
        text = self.text(*names)
        if text is None or text.lower() in ("none", "null"):
            return None
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise self.wrong(names, "is no finite number")
        return value

    def flag(self, *names: str) -> bool | None:
        """Return true or false; true where bash drops the only word after it. Raises UserError for another value."""
        text = self.text(*names)
        if text is None:
            words = self._words(*names)
            return True if words and all(map(is_optional, words)) else None
        value = true_or_false(text)
        if value is None:
            raise self.wrong(names, "is neither true nor false")
        return value

    def take(self, *names: str) -> None:
        """Leave these options out of what is handed on."""
        self._taken.update(names)

    def rest(self) -> tuple[tuple[str, ...], ...]:
        """Return the options that are handed on, each with its words, in their order."""
        return tuple(group for name, group in self._own if name not in self._taken)

    def of_the_file(self) -> tuple[tuple[str, ...], ...]:
        """Return the options that only the file beneath says, each with its words."""
        own = {name for name, _ in self._own}
        return tuple(group for name, group in self._groups if name not in own)

    def all(self) -> tuple[tuple[str, ...], ...]:
        """Return all options, each with its words; those of a file first."""
        return tuple(group for _, group in self._groups)

    def without_value(self) -> tuple[tuple[str, ...], ...]:
        """Return the options that hold a variable without a value."""
        return tuple(group for _, group in self._groups if any(map(is_unset, group)))

    def written(self, *names: str) -> tuple[str, ...]:
        """Return the words of these options as they were written."""
        return tuple(word for name, group in self._groups if name in names for word in group)

    def wrong(self, names: Sequence[str], problem: str) -> UserError:
        """Return the error of a value that cannot be used."""
        flag = next(group[0] for name, group in reversed(self._groups) if name in names).partition("=")[0]
        return UserError(f"{self.place}: {flag}: {shortened(str(self.text(*names)))!a} {problem}; correct it")


def _groups(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each option with the words up to the next one; words before the first option make a group of their own."""
    group: list[str] = []
    for word in words:
        if _is_option(word) and group:
            yield _present(group)
            group = []
        group.append(word)
    if group:
        yield _present(group)


def _present(group: list[str]) -> tuple[str, ...]:
    """Return an option's words without variables that nobody sets, where another value is left."""
    return (group[0], *option_values(group[1:], "+")[0])


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _name(word: str) -> str:
    """Return an option's name as Python has it; a word that is no option stays apart from all names."""
    return word.lstrip("-").partition("=")[0].replace("-", "_") if _is_option(word) else f" {word}"


def true_or_false(value: Any) -> bool | None:
    """Return what a value of a file or a command line says as a truth value, None where it says none."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def whole_or_none(settings: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of a file, which may be written as 5e8; None for anything else."""
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**63 else None
