"""The recipe file of a script, a ds_config.json or a file of training arguments that somebody has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from llmlaunch.cluster.gpu_names import profile_of_gpu
from llmlaunch.cluster.load import load_cluster, profile_names
from llmlaunch.command_lines.command import Reading, TrainerCommand, Undecided, Unset
from llmlaunch.command_lines.launch import assumptions, on_devices, trainer_commands
from llmlaunch.command_lines.preparation import surrounded
from llmlaunch.command_lines.sbatch import device_type
from llmlaunch.command_lines.shell import Script, read_script
from llmlaunch.documents.keys import key_names
from llmlaunch.documents.yaml_strict import Document, parse_document, read_text
from llmlaunch.errors import UserError
from llmlaunch.imports.command import read_command
from llmlaunch.imports.script_words import ScriptWords
from llmlaunch.recipe.load import recipe_from
from llmlaunch.recipe.overrides import apply_overrides, from_working_directory
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir import file_names
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import printable, shortened

FILES = (".json", ".yaml", ".yml")
MOST_COMMENTS = 40
# Options of sbatch that ask for devices, which memory does not depend on: what is wrong with them is a launch problem.
OF_DEVICES = re.compile(r"gres|tres-per-task|gpus(-per-\w+)?")
OWN_VARIABLES = ("HOME", "USER")  # of the person's environment, which the job has, too
SETTING = re.compile(r"[A-Za-z_]\w*|[0-9]{1,3}|[a-z]\w*(\.[\w-]+)+")


@dataclass(frozen=True)
class RecipeSource:
    """What was read of a file: the recipe's keys, and of a script the command that they come from.

    `trainings` says where each training of the script is and what starts it, `text` is that of the script. `keys` are
    the `KEY=VALUE` words for the recipe among the settings that a person gave.
    """

    path: Path
    reading: Reading
    command: TrainerCommand | None = None
    trainings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    text: str = ""
    keys: tuple[str, ...] = ()

    @property
    def words(self) -> ScriptWords:
        return ScriptWords(self.path, self.command, self.reading.document, self.text)

    @property
    def unset(self) -> tuple[Unset, ...]:
        """The variables without a value that a person may know; SLURM's are those of the job alone."""
        unset = () if self.command is None else self.command.unset
        return tuple(variable for variable in unset if not variable.name.startswith("SLURM_"))


def read_source(
    path: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    number: int | None = None,
    cluster: str | None = None,
    nodes: int | None = None,
) -> RecipeSource:
    """Read a file by its kind. `arguments` and `variables` are those of a script, `number` chooses one of its
    trainings, from 1 on; otherwise it is the last. `cluster` is a profile, which has the devices of a node where the
    script does not say them; `nodes` is how many a file of arguments is for.

    Raises UserError where nothing of it can be read.
    """
    _refuse_run_directory(path)
    text = read_text(path)
    if path.suffix.lower() in FILES:
        from llmlaunch.frameworks.deepspeed.command_line import read_training_args

        devices = None if cluster is None else load_cluster(cluster).devices_per_node
        reading = read_training_args(text, path.name, path.parent, nodes=nodes, devices_per_node=devices)
        return RecipeSource(path, reading)
    script = read_script(text, path.name, path.parent, arguments, variables or {})
    trainings = trainer_commands(script)
    if not trainings:
        raise UserError(f"{path}: starts no training that llmlaunch knows{_commands(script)}")
    if number is not None and not 1 <= number <= len(trainings):
        raise UserError(
            f"{path}: --command {number}: there are {len(trainings)} trainings; choose 1 to {len(trainings)}"
        )
    command = _on_cluster(trainings[len(trainings) - 1 if number is None else number - 1], cluster)
    command = surrounded(command, script.commands, trainings, path.parent)
    starts = tuple(f"{training.place}: {training.launcher} {training.trainer}" for training in trainings)
    notes = (*script.notes, *assumptions(command))
    return RecipeSource(path, read_command(command), command, starts, notes, text)


def read_with_settings(
    path: Path,
    settings: Sequence[str],
    arguments: Sequence[str] = (),
    number: int | None = None,
    cluster: str | None = None,
) -> RecipeSource:
    """Read a file with the `NAME=VALUE` words that a person gives with it. A NAME is a variable of the script, one of
    its arguments by its number, or a key of the recipe: one with a dot, or a section of the recipe's that the script
    does not read as a variable. The rest is as for `read_source`.

    Raises UserError for a word that is none of these, and where nothing of the file can be read.
    """
    variables = {name: os.environ[name] for name in OWN_VARIABLES if name in os.environ}
    keys: list[str] = []
    words = {str(place): word for place, word in enumerate(arguments, start=1)}
    sections = key_names(Recipe)
    text = "" if path.suffix.lower() in FILES or not settings else _text_if_any(path)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not SETTING.fullmatch(name):
            raise UserError(f"--set {name!a}: is not NAME=VALUE; write for example --set CHECKPOINTS=/ckpt")
        if is_whole_number(name):
            words[name] = value
        elif "." in name or (name in sections and not re.search(rf"\$\{{?[#!]?{name}\b", text)):
            keys.append(setting)
        else:
            variables[name] = value
    stated = next((key.partition("=")[2] for key in keys if key.startswith("nodes=")), "1")
    nodes = int(stated) if is_whole_number(stated) else None
    return replace(read_source(path, (), variables | words, number, cluster, nodes), keys=tuple(keys))


def _text_if_any(path: Path) -> str:
    try:
        return read_text(path)
    except UserError:  # the reader says it
        return ""


def holds_arguments(path: Path) -> bool:
    """Return whether a JSON or YAML file is one of training arguments or a ds_config.json rather than a recipe: most
    of its keys are no recipe's."""
    if path.suffix.lower() not in FILES:
        return False
    value = parse_document(read_text(path), str(path)).value
    if not isinstance(value, Mapping) or "schema" in value:
        return False
    sections = key_names(Recipe)
    return sum(key in sections for key in value) * 2 < len(value)


def _on_cluster(command: TrainerCommand, cluster: str | None) -> TrainerCommand:
    """Return a training with the devices of a node of the cluster, where its script does not say how many it uses."""
    device = device_type(command.slurm)
    name = cluster or (None if device is None else profile_of_gpu(device))
    if name is None or (command.nodes is not None and command.devices_per_node is not None):
        return command
    return on_devices(command, load_cluster(name).devices_per_node)


def _refuse_run_directory(path: Path) -> None:
    """Raise UserError for a script of a run directory, and for the directory: its recipe is there, too."""
    folder = path if path.is_dir() else path.parent
    if (folder / file_names.RUN).is_file() and (folder / file_names.RECIPE).is_file():
        raise UserError(f"{path}: this is a run directory; its recipe is {folder / file_names.RECIPE}")


def _commands(script: Script) -> str:
    """Return the end of a message that a script starts no training: what it starts, and what was not read."""
    commands = [f"line {command.line}: {shortened(' '.join(command.words), 40)}" for command in script.commands[-3:]]
    starts = f"; it starts {', '.join(commands)}" if commands else ""
    unread = [note for note in script.notes if "not read" in note]
    rest = "".join(f"; {note}" for note in (*filter(None, [script.ended]), *unread[:3]))
    return f"{starts}{rest}; name the script that starts torchrun, deepspeed or accelerate"


def recipe_text(
    source: RecipeSource, target: Path, cluster: str | None = None, keys: Sequence[str] = (), option: str = "--set "
) -> tuple[str, tuple[str, ...]]:
    """Return the recipe file of a source, and notes on the cluster. `keys` are `key=value` words for what it lacks,
    each of which a person gives after `option`.

    Raises UserError where no recipe can be made of it: the message says what to add.
    """
    keys = (*source.keys, *keys)
    document, notes = with_cluster(source, cluster)
    if source.command is not None and any(problem.fatal for problem in source.command.launch_problems):
        document = without_devices(document)
    undecided = undecided_keys(source, keys)
    words = source.words
    written = Document(words.place, "", document, words.places(document), {})
    changed = apply_overrides(written, from_working_directory(keys))
    try:
        if undecided:
            raise UserError(f"{undecided[0].key}: is not known")
        recipe_from(changed, target.parent)
    except UserError as error:
        lacking = [sentence for sentence in source.reading.missing if sentence.partition(":")[0] not in _names(keys)]
        if not lacking:
            raise UserError(f"{source.path}: what was read is no recipe: {error}") from None
        lines = "".join(f"\n  {sentence}" for sentence in lacking)
        raise UserError(
            f"{source.path}: does not say all that a recipe needs:{lines}\nadd {option}KEY=VALUE for each, such as "
            f"{option}{lacking[0].partition(':')[0]}=VALUE. As a recipe it says: {error}"
        ) from None
    return "".join(f"# {line}\n" for line in _comments(source)) + dumped(changed.value), notes


def without_devices(document: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without what it asks SLURM for in devices, which llmlaunch asks for by itself."""
    options = {name: value for name, value in document.get("slurm", {}).items() if not OF_DEVICES.fullmatch(name)}
    return {**document, "slurm": options} if "slurm" in document else document


def undecided_keys(source: RecipeSource, keys: Sequence[str]) -> tuple[Undecided, ...]:
    """Return the keys that decide memory, were not read, and are not among `keys`, which are `key=value` words."""
    return tuple(each for each in source.reading.undecided if each.key not in _names((*source.keys, *keys)))


def _names(keys: Iterable[str]) -> list[str]:
    return [word.partition("=")[0] for word in keys]


def with_cluster(source: RecipeSource, cluster: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the recipe that was read with its cluster, and notes on that.

    Raises UserError where neither the script nor a person says which cluster it is for.
    """
    document, notes = dict(source.reading.document), []
    command = source.command
    if cluster is None and "cluster" not in document:
        device = None if command is None else device_type(command.slurm)
        cluster = None if device is None else profile_of_gpu(device)
        if cluster is None:
            raise UserError(
                f"{source.path}: does not say which cluster it is for; add --cluster NAME, a profile's name or path "
                f"(there are {', '.join(profile_names())})"
            )
        notes.append(f"cluster: {cluster} is guessed from {device} of sbatch; --cluster NAME says another one")
    if cluster is not None:
        document["cluster"] = cluster
    devices = None if command is None else command.devices_per_node
    if cluster is not None and devices is not None and load_cluster(cluster).devices_per_node != devices:
        document["cluster"] = {"base": cluster, "devices_per_node": devices}
        notes.append(f"cluster: a node of the script has {devices} devices, other than {cluster}")
    order = ("schema", "name", "model", "backend", "cluster")
    first = {key: document[key] for key in order if key in document}
    return _plain(first | document), tuple(notes)


def dumped(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(_plain(document), sort_keys=False, allow_unicode=True, width=110)


def _plain(value: Any) -> Any:
    """Return a value in the types that YAML has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _comments(source: RecipeSource) -> list[str]:
    """Return the lines at the top of the file: where it comes from, what is not in it, what to know."""
    reading, command = source.reading, source.command
    place = source.path.name if command is None else f"{command.place} ({command.launcher} {command.trainer})"
    lines = [f"Read from {place} by llmlaunch init --from; the script was not run."]
    lines += [f"Missing: {sentence}" for sentence in reading.missing]
    lines += [f"Not read ({unread.reason}): {' '.join(unread.words)}" for unread in reading.unread]
    lines += [f"Note: {note}" for note in reading.notes]
    if reading.not_rendered is not None:
        lines.append(f"It can be checked and not submitted: {reading.not_rendered}")
    left = len(lines) - MOST_COMMENTS
    lines = [*lines[:MOST_COMMENTS], *([f"... and {left} more lines, which init --from prints"] if left > 0 else [])]
    return [shortened(" ".join(printable(line).split()), 400) for line in lines]
