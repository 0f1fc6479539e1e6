"""The training in a command: what srun, containers, shells and launchers add is taken off and read.

Launchers, their options and where these were read are in launchers.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmlaunch.command_lines.command import TrainerCommand, Unset, is_optional
from llmlaunch.command_lines.prefixes import Prefix, without_prefixes
from llmlaunch.command_lines.preparation import prepared
from llmlaunch.command_lines.sbatch import Options, device_count, node_count, task_count
from llmlaunch.command_lines.shell import Script, ShellCommand, read_script
from llmlaunch.command_lines.shell_state import file_text
from llmlaunch.command_lines.trainers import is_tool, trains_by_name
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen

__all__ = ["on_devices", "trainer_command", "trainer_commands"]

DEEPEST = 4


@frozen
class _Launcher:
    """A launcher of ranks, or Python without one.

    `commands` and `modules` are the first words of its command lines, the latter after `python -m`. `flags` are its
    options without a value, `short` maps options of one letter to long ones. `nodes`, `devices_per_node` and `devices`
    are the options with these numbers. `node_range`: the number of nodes may be a range. `names_hosts`: other options
    name hosts.
    """

    commands: Sequence[Sequence[str]] = ()
    modules: Sequence[Sequence[str]] = ()
    flags: Sequence[str] = ()
    short: Mapping[str, str] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    devices_per_node: Sequence[str] = ()
    devices: Sequence[str] = ()
    node_range: bool = False
    names_hosts: bool = False


_TABLE = json.loads(Path(__file__).with_name("launchers.json").read_text("utf-8"))["launchers"]
_LAUNCHERS = {name: _Launcher(**row) for name, row in _TABLE.items()}
# what a program that trains is given, and others are not
_TRAINING = re.compile(
    r"--(micro-batch-size|global-batch-size|train-iters|train-samples|num-layers|deepspeed(_config)?|lr|learning[-_]rate|"
    r"per_device_train_batch_size|num_train_epochs|max_steps|do_train|model_name_or_path|tensor-model-parallel-size)(=|$)"
)


def trainer_commands(script: Script) -> tuple[TrainerCommand, ...]:
    """Return the trainings that a script starts, in its order; empty where it starts none."""
    commands = (_of_shell(command, script.slurm) for command in script.commands)
    trainings = [command for command in commands if command is not None]
    lines = {name.name: name for name in script.unset}
    return tuple(replace(command, unset=_unset(command, lines)) for command in trainings)


def trainer_command(
    words: Sequence[str],
    environment: Mapping[str, str] = {},
    slurm: Options | None = None,
    folder: Path = Path(),
    place: str = "the command line",
) -> TrainerCommand | None:
    """Return the training that a command starts, None where it starts none."""
    command = ShellCommand(tuple(words), environment, folder, 0, "")
    training = _of_shell(command, slurm or {})
    if training is None:
        return None
    return replace(training, place=place, unset=_unset(training, {}))


def on_devices(command: TrainerCommand, devices: int) -> TrainerCommand:
    """Return a training with what only the cluster says: how many `devices` a node has, and so how many nodes its
    ranks need."""
    nodes, ranks, per_node = command.nodes, command.ranks, command.devices_per_node
    if per_node is None:
        per_node = devices if ranks is None else max(ranks // nodes, 1) if nodes else min(ranks, devices)
    if nodes is None and ranks is not None:
        nodes = -(-ranks // per_node)
    return replace(command, nodes=nodes, devices_per_node=per_node)


def _of_shell(command: ShellCommand, slurm: Options, depth: int = 0) -> TrainerCommand | None:
    """Return the training of one command of a script; where the command is a shell itself, its last training."""
    prefix = without_prefixes(command.words)
    command = replace(command, words=prefix.words, environment=dict(command.environment) | prefix.environment)
    if not prefix.words or depth > DEEPEST:
        return None
    inner = _inner_script(command)
    if inner is not None:
        inside = [
            replace(
                each, environment={**command.environment, **each.environment}, files={**command.files, **each.files}
            )
            for each in inner.commands
        ]
        commands = [_of_shell(each, {**slurm, **inner.slurm}, depth + 1) for each in inside]
        index = max((number for number, each in enumerate(commands) if each is not None), default=None)
        training = None if index is None else commands[index]
        if index is None or training is None:
            return None
        return _with_prefix(prepared(training, inside, index), prefix, command)
    launch = _launch(command)
    if launch is None or not launch.trainer or is_tool(launch.trainer):
        return None
    return _with_prefix(_command(launch, command, slurm, prefix), prefix, command)


def _with_prefix(training: TrainerCommand, prefix: Prefix, command: ShellCommand) -> TrainerCommand:
    """Return a training as srun and its like start it: their nodes, and their tasks where nothing else launches."""
    place = f"{command.script}:{command.line}" if command.line else training.place
    nodes = training.nodes or node_count(prefix.srun)
    devices = training.devices_per_node
    if training.launcher in ("python", "srun") and prefix.has_srun:
        devices = task_count(prefix.srun) or task_count(training.slurm) or devices
        return replace(training, place=place, launcher="srun", nodes=nodes, devices_per_node=devices)
    return replace(training, place=place, nodes=nodes, devices_per_node=devices or device_count(prefix.srun))


def _inner_script(command: ShellCommand) -> Script | None:
    """Return the script that a command runs in a shell of its own, None where the command is no shell."""
    program, rest = Path(command.words[0]).name, list(command.words[1:])
    environment, place = {**command.given, **command.environment}, f"{command.script}:{command.line}"
    if program in ("bash", "sh", "zsh", "dash", "ksh"):
        while rest and re.fullmatch(r"[-+][a-zA-Z]+|--[a-z]+", rest[0]):
            option = rest.pop(0)
            if "c" in option and not option.startswith("--"):
                return read_script(rest[0], place, command.folder, rest[2:], environment) if rest else None
            if option in ("-o", "+o", "--rcfile"):
                del rest[:1]
    elif not program.endswith((".sh", ".bash", ".sbatch", ".slurm")):
        return None
    else:
        rest = list(command.words)
    if not rest:
        return None
    text = _text_of(command, rest[0])
    if text is None:
        return None
    return read_script(text, Path(rest[0]).name, command.folder, rest[1:], environment)


@dataclass
class _Launch:
    """A launcher, its options by their names with dashes, and what it launches."""

    launcher: str
    trainer: str
    arguments: tuple[str, ...]
    options: dict[str, str | bool] = field(default_factory=dict)


def _launch(command: ShellCommand) -> _Launch | None:
    words = list(command.words)
    program = Path(words[0]).name
    for name, launcher in _LAUNCHERS.items():
        for beginning in launcher.commands:
            if [program, *words[1 : len(beginning)]] == beginning:
                return _launched(name, words[len(beginning) :])
    if re.fullmatch(r"python[\d.]*", program) or re.fullmatch(r"\$\{\w*PYTHON\w*\}", words[0], re.IGNORECASE):
        return _python(words[1:])
    if program == "ray" and words[1:3] == ["job", "submit"] and "--" in words:
        return _launch(replace(command, words=tuple(words[words.index("--") + 1 :]))) if words[-1] != "--" else None
    if trains_by_name(program, words[1:]):
        return _Launch("torchrun", program, tuple(words[1:]))
    if program.endswith(".py"):
        return _trains(_Launch("python", words[0], tuple(words[1:])))
    return None


def _python(words: list[str]) -> _Launch | None:
    launch = _launched("python", words)
    module = launch.trainer
    if "m" not in launch.options:
        return _trains(launch)
    started = [module, *launch.arguments]
    for name, launcher in _LAUNCHERS.items():
        for beginning in launcher.modules:
            if started[: len(beginning)] == beginning:
                return _launched(name, started[len(beginning) :])
    return _trains(launch)


def _trains(launch: _Launch) -> _Launch | None:
    """Leave out what python runs beside the training: tools, conversions."""
    known = any(_TRAINING.match(word) for word in launch.arguments)
    return launch if known or trains_by_name(launch.trainer, launch.arguments) else None


def _launched(launcher: str, words: Sequence[str]) -> _Launch:
    options, rest = _options(launcher, words)
    if "no_python" in options and rest and re.fullmatch(r"python[\d.]*", Path(rest[0]).name):
        inner = _launched("python", rest[1:])
        return _Launch(launcher, inner.trainer, inner.arguments, options)
    return _Launch(launcher, rest[0] if rest else "", tuple(rest[1:]), options)


def _options(launcher: str, words: Sequence[str]) -> tuple[dict[str, str | bool], list[str]]:
    """Return a launcher's options and the words from the program on that it launches."""
    options: dict[str, str | bool] = {}
    rest = list(words)
    while rest and ((rest[0].startswith("-") and len(rest[0]) > 1) or (is_optional(rest[0]) and len(rest) > 1)):
        word = rest.pop(0)
        if word == "--":
            break
        if is_optional(word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        name = _LAUNCHERS[launcher].short.get(name, name)
        if launcher == "python" and not word.startswith("--") and not equals:
            options.update(dict.fromkeys(name, True) if name[:1] not in ("W", "X") else {})
            if name in ("W", "X", "c"):
                del rest[:1]
            if "m" in options:
                break
        elif equals:
            options[name] = value
        elif name in _LAUNCHERS[launcher].flags or not rest:
            options[name] = True
        else:
            options[name] = rest.pop(0)
    return options, rest


def _command(launch: _Launch, command: ShellCommand, slurm: Options, prefix: Prefix) -> TrainerCommand:
    options = launch.options
    defaults = _accelerate_defaults(command, options) if launch.launcher == "accelerate" else {}
    launcher = _LAUNCHERS[launch.launcher]
    nodes, devices = _size(launcher, defaults | options)
    if launcher.names_hosts and nodes is None:
        nodes, devices = _hosts(command, options, devices)
    nodes = nodes or node_count(slurm)
    if launch.launcher == "python":
        devices = task_count(slurm) if prefix.has_srun else devices
        devices = device_count(slurm) if devices in (None, 1) and device_count(slurm) else devices
    elif options.get("standalone"):
        nodes = 1
    return TrainerCommand(
        trainer=launch.trainer,
        arguments=launch.arguments,
        launcher=launch.launcher,
        nodes=nodes,
        devices_per_node=devices or device_count(slurm),
        environment={name: value for name, value in command.environment.items() if " --" not in value},
        slurm=slurm,
        folder=command.folder,
        place=f"{command.script}:{command.line}",
        launcher_options={"module": True} if options.get("m") else {} if launch.launcher == "python" else options,
        files=command.files,
    )


def _size(launcher: _Launcher, options: Mapping[str, str | bool]) -> tuple[int | None, int | None]:
    """Return nodes and devices of each as a launcher's options have them. Of a range of nodes the upper end counts."""

    def written(names: Sequence[str]) -> str:
        return next((str(options[name]) for name in names if name in options), "")

    nodes_text = written(launcher.nodes)
    nodes = _number(nodes_text.rpartition(":")[2] if launcher.node_range else nodes_text)
    devices = _number(written(launcher.devices))
    if devices is not None:
        return nodes, devices // (nodes or 1) or None
    return nodes, _number(written(launcher.devices_per_node))


def _hosts(
    command: ShellCommand, options: Mapping[str, str | bool], devices: int | None
) -> tuple[int | None, int | None]:
    """Return nodes and devices of each that DeepSpeed's `--include` or its file of hosts names."""
    include = str(options.get("include", ""))
    hosts = {host: slots for host, _, slots in (part.partition(":") for part in include.split("@")) if host}
    if hosts:
        slots = {len(slots.split(",")) for slots in hosts.values() if slots}
        return len(hosts), devices or (slots.pop() if len(slots) == 1 else None)
    path = options.get("hostfile")
    if not isinstance(path, str):
        return None, devices
    text = _text_of(command, path) or ""
    counts = [int(count) for count in re.findall(r"^[^#\s]\S*\s+slots=(\d{1,6})", text, re.MULTILINE)]
    return len(counts) or None, devices or (counts[0] if len(set(counts)) == 1 else None)


def _accelerate_defaults(command: ShellCommand, options: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """Return how many machines and processes accelerate's file of defaults says; nothing where it is not here."""
    path = options.get("config_file")
    text = _text_of(command, path) if isinstance(path, str) else None
    if text is None:
        return {}
    try:
        document = parse_document(text, str(path)).value
    except UserError:
        return {}  # the reader of the options says so
    return {name: str(document[name]) for name in ("num_machines", "num_processes") if name in document}


def _text_of(command: ShellCommand, path: str) -> str | None:
    """Return the text of a file, as the script wrote it or as it lies there."""
    place = command.folder / path
    return command.files.get(path) or command.files.get(str(place)) or file_text(place)


def _number(value: object) -> int | None:
    text = str(value)
    return int(text) or None if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None


def _unset(command: TrainerCommand, lines: Mapping[str, Unset]) -> tuple[Unset, ...]:
    """Return the variables without a value that the training needs: those in its own words and in its size."""
    before = (command.trainer, *command.arguments)
    words = [
        word
        for last, word in zip(("", *before), before, strict=False)
        if last.startswith("-") or last in ("", command.trainer) or not is_optional(word)
    ]
    if command.nodes is None:
        words += [str(command.launcher_options.get(name, "")) for name in ("nnodes", "num_nodes", "num_machines")]
    if command.devices_per_node is None:
        words += [
            str(command.launcher_options.get(name, "")) for name in ("nproc_per_node", "num_gpus", "num_processes")
        ]
    names = dict.fromkeys(re.findall(r"\$\{(\w+)\}", " ".join(words)))
    return tuple(lines.get(name, Unset(name, 0)) for name in names)
