"""A recipe while it is read from a command line: its keys, and what is to be told of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.command_lines.command import (
    Reading,
    ScriptContainer,
    StandIn,
    TrainerCommand,
    Undecided,
    UnreadWords,
    Unset,
    is_unset,
)
from llmlaunch.command_lines.sbatch import of_one_task
from llmlaunch.documents.keys import key_names
from llmlaunch.documents.secrets import is_secret_variable, secret_in, without_passwords
from llmlaunch.documents.slurm_options import follows_from_recipe, sbatch_option_problem, sbatch_value_problem
from llmlaunch.documents.text import is_set_by_launcher, mount_problem, variable_problem
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.families.hub_ids import hub_model, is_hub_id, preset_names, unknown_hub_id
from llmlaunch.recipe.training import Training
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
