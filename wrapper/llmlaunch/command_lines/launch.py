"""The training in a command: what srun, containers, shells and launchers add is taken off and read.

Launchers, their options and where these were read are in launchers.json, trainers in trainers.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmlaunch.command_lines.command import TrainerCommand, Unset, is_optional, is_unset
from llmlaunch.command_lines.launch_problems import ScriptLaunch, launch_problems
from llmlaunch.command_lines.prefixes import (
    Prefix,
    accelerate_defaults,
    launched_devices,
    launched_nodes,
    launcher_options,
    launcher_table,
    launchers,
    pyxis_container,
    text_of,
    visible_devices,
    without_prefixes,
)
from llmlaunch.command_lines.preparation import prepared
from llmlaunch.command_lines.sbatch import OF_A_TASK, Options, device_count, node_count, sbatch_words, task_count
from llmlaunch.command_lines.shell import Script, ShellCommand, read_script
from llmlaunch.command_lines.trainers import is_tool, trainer_of, trains_by_name

DEEPEST = 4
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_SHELL_FILE = re.compile(r"\.(sh|bash|sbatch|slurm)\b")
OF_SLURM = re.compile(r"\$\{SLURM_(JOB_NUM_NODES|NNODES)\}")
PYTHON = re.compile(r"python[\d.]*|\$\{\w*PYTHON\w*\}", re.IGNORECASE)
_SET_IN_A_TASK = re.compile(r"\$\{(SLURM_(?:LAUNCH_NODE_IPADDR|NODEID|PROCID|LOCALID)):?-[^}]*\}")
# what a program that trains is given, and others are not
_TRAINING = re.compile(
    r"--(micro[-_]batch[-_]size|global[-_]batch[-_]size|train[-_]iters|train-samples|num[-_]layers|deepspeed(_config)?|lr|"
    r"learning[-_]rate|per_device_train_batch_size|num_train_epochs|max_steps|do_train|model_name_or_path|"
    r"tensor[-_]model[-_]parallel[-_]size)(=|$)"
)
# a script that reads all its settings from a file
_TRAINER = re.compile(r"((pre)?train|finetune|sft)(_(?!tokenizer|data)\w+)?")
_SETTINGS = re.compile(r"\.(ya?ml|json|toml)$")


@dataclass
class _Launch:
    """A launcher, its options by their names without dashes, and what it launches. `program` is the path of the
    launcher, `partly`: words among its options have no value in the script, `unknown`: a program that is not
    known comes before it, and may start ranks."""

    launcher: str
    trainer: str
    arguments: tuple[str, ...]
    options: dict[str, str | bool] = field(default_factory=dict)
    program: str = ""
    partly: bool = False
    unknown: bool = False


@dataclass(frozen=True)
class _Training:
    """A training, and how a script starts it."""

    command: TrainerCommand
    start: ScriptLaunch


def trainer_commands(script: Script) -> tuple[TrainerCommand, ...]:
    """Return the trainings that a script starts, in its order; empty where it starts none."""
    trainings: list[_Training] = []
    unread = False  # a shell on other nodes may start other parts of a training
    for command in script.commands:
        training = _of_shell(command, script.slurm)
        if training is not None:
            trainings.append(training)
        else:
            prefix = without_prefixes(command.words)
            script_named = any(_SHELL_FILE.search(word) for word in prefix.words)
            unread |= script_named and (prefix.has_srun or prefix.remote)
    lines = {name.name: name for name in script.unset}
    problems = launch_problems([replace(each.start, elsewhere=each.start.elsewhere or unread) for each in trainings])
    return tuple(
        replace(_complete(training.command, lines), launch_problems=of_launch)
        for training, of_launch in zip(trainings, problems, strict=True)
    )


def trainer_command(
    words: Sequence[str],
    environment: Mapping[str, str] = {},
    folder: Path = Path(),
    place: str = "the command line",
) -> TrainerCommand | None:
    """Return the training that a command starts, None where it starts none."""
    training = _of_shell(ShellCommand(tuple(words), environment, folder, 0, ""), {})
    if training is None:
        return None
    return replace(_complete(training.command, {}), place=place)


def on_devices(command: TrainerCommand, devices: int) -> TrainerCommand:
    """Return a training with what only the cluster says: how many `devices` a node has, and so how many nodes its
    ranks need."""
    nodes, ranks, per_node = command.nodes, command.ranks, command.devices_per_node
    if per_node is None:
        per_node = devices if ranks is None else max(ranks // nodes, 1) if nodes else min(ranks, devices)
    if nodes is None and ranks is not None:
        nodes = -(-ranks // per_node)
    return replace(command, nodes=nodes, devices_per_node=per_node)


def _of_shell(command: ShellCommand, slurm: Options, depth: int = 0) -> _Training | None:
    """Return the training of one command of a script; where the command is a shell itself, its last training."""
    prefix = without_prefixes(command.words, command.environment)
    command = replace(command, words=prefix.words, environment={**command.environment, **prefix.environment})
    if not prefix.words or depth > DEEPEST:
        return None
    inner = _inner_script(command, prefix)
    if inner is not None:
        inside = [
            replace(
                each, environment={**command.environment, **each.environment}, files={**command.files, **each.files}
            )
            for each in inner.commands
        ]
        trainings = [_of_shell(each, {**slurm, **inner.slurm}, depth + 1) for each in inside]
        for index, training in reversed(list(enumerate(trainings))):
            if training is not None:
                complete = prepared(training.command, inside, index, in_container=prefix.container is not None)
                return _with_prefix(replace(training, command=complete), prefix, command)
    launch = _launch(list(command.words))
    if launch is None or not launch.trainer or is_tool(launch.trainer):
        return None
    return _with_prefix(_training(launch, command, slurm, prefix), prefix, command)


def _with_prefix(training: _Training, prefix: Prefix, command: ShellCommand) -> _Training:
    """Return a training as what comes before its launcher starts it."""
    inside, start = training.command, training.start
    of_job = inside.container is not None and inside.container.runtime == "pyxis"
    outer = replace(
        inside,
        place=f"{command.script}:{command.line}" if command.line else inside.place,
        container=(prefix.container if of_job else None) or inside.container or prefix.container,
        setup=(*prefix.setup, *inside.setup),
    )
    start = replace(
        start,
        line=command.line or start.line,
        srun={**prefix.srun, **start.srun},
        has_srun=start.has_srun or prefix.has_srun,
        elsewhere=start.elsewhere or prefix.remote or prefix.has_mpi,
        text=start.text or (_task_text(command) if prefix.has_srun else ""),
    )
    if prefix.has_srun:
        outer = _by_srun(outer, start)
    elif prefix.has_mpi and inside.launcher in ("python", "mpirun", "other"):
        per_node = prefix.ranks_per_node or (prefix.ranks // inside.nodes if prefix.ranks and inside.nodes else None)
        nodes = inside.nodes or (-(-prefix.ranks // per_node) if prefix.ranks and per_node else None)
        outer = replace(outer, launcher="mpirun", nodes=nodes, devices_per_node=per_node or None, ranks=prefix.ranks)
        if is_unset(prefix.stated_ranks):
            outer = replace(outer, launcher_options={**inside.launcher_options, "np": prefix.stated_ranks})
    return _Training(outer, replace(start, launcher=outer.launcher, ranks_per_node=outer.devices_per_node))


def _by_srun(inside: TrainerCommand, start: ScriptLaunch) -> TrainerCommand:
    """Return a training as srun starts it: with its nodes, and its tasks where nothing else starts ranks."""
    step = {**start.slurm, **start.srun}
    if inside.launcher in ("python", "srun"):
        tasks = task_count(start.srun) or task_count(step) or inside.devices_per_node or device_count(step)
        total = step.get("ntasks")
        nodes = node_count(step) or inside.nodes
        ranks = total if isinstance(total, int) and total > 1 and not nodes else None
        return replace(inside, launcher="srun", nodes=nodes, devices_per_node=None if ranks else tasks, ranks=ranks)
    tasks, nodes = start.tasks_per_node, start.step_nodes
    if inside.launcher == "other" and tasks and tasks > 1:
        return replace(inside, launcher="srun", nodes=nodes, devices_per_node=tasks)
    if start.nodes is not None and tasks and nodes and tasks > 1 and start.nodes[1] == tasks * nodes:
        per_node = inside.devices_per_node  # one agent for each task
        return replace(inside, nodes=nodes, devices_per_node=per_node and per_node * tasks)
    devices = inside.devices_per_node or device_count(start.srun)
    known = inside.nodes if start.nodes is not None else None
    return replace(inside, nodes=known or node_count(start.srun) or inside.nodes, devices_per_node=devices)


def _task_text(command: ShellCommand) -> str:
    """Return what a shell reads that srun starts for each task, empty where it starts none."""
    words = command.words[1:]
    if words and re.fullmatch(r"-[a-z]*c", words[0]):
        return words[1] if words[1:] else ""
    return next((text for word in command.words[:2] if (text := text_of(command, word)) is not None), "")


def _inner_script(command: ShellCommand, prefix: Prefix) -> Script | None:
    """Return the script that a command runs in a shell of its own, None where the command is no shell."""
    program, rest = Path(command.words[0]).name, list(command.words[1:])
    environment, name = {**command.given, **command.environment}, f"{command.script}:{command.line}"
    if prefix.has_srun:
        environment = {name: value for name, value in environment.items() if name not in OF_A_TASK}
    options: dict[str, str | int | bool] = {}
    text = None
    if program == "sbatch":
        options, rest = sbatch_words(rest)
        text = str(options.pop("wrap")) if "wrap" in options else None
    elif program in SHELLS:
        while text is None and rest and re.fullmatch(r"[-+][a-zA-Z]+|--[a-z]+", rest[0]):
            option = rest.pop(0)
            if "c" in option and not option.startswith("--"):
                text = rest.pop(0) if rest else ""
            elif option in ("-o", "+o", "--rcfile"):
                del rest[:1]
    elif program.endswith((".sh", ".bash", ".sbatch", ".slurm")):
        rest = list(command.words)
    else:
        return None
    if text is None and rest:
        text, name = text_of(command, rest[0]), Path(rest[0]).name
    if text is None:
        return None
    script = read_script(_of_task(text, prefix), name, command.folder, rest[1:], environment, command.budget)
    return replace(script, slurm={**script.slurm, **options})


def _of_task(text: str, prefix: Prefix) -> str:
    """Return the text of a shell with the variables that srun sets in it, of which no default is taken."""
    return _SET_IN_A_TASK.sub(r"${\1}", text) if prefix.has_srun else text


def _launch(words: list[str]) -> _Launch | None:
    """Return the launcher in a command: a known program first, otherwise the first known one that it is given, or the
    first `*.py` followed by a training's options."""
    launch = _known(words)
    if launch is not None:
        return _without_wrapper(launch)
    for index in range(1, len(words)):
        launch = _known(words[index:])
        bare = words[index].endswith(".py") and not any(map(_TRAINING.match, words[index:]))
        if launch is not None and not bare and (_trains(launch) or words[index - 1] == "--"):
            return replace(_without_wrapper(launch), unknown=launch.launcher == "python")
    return None


def _without_wrapper(launch: _Launch) -> _Launch:
    """Return what a Python script launches that forwards its arguments: before that it has no option of a training."""
    if launch.launcher not in ("python", "torchrun", "accelerate") or trains_by_name(launch.trainer, launch.arguments):
        return launch
    for index, word in enumerate(launch.arguments):
        if _TRAINING.match(word):
            break
        if index and launch.arguments[index - 1].startswith("-") and launch.arguments[index - 1] != "--":
            continue
        inner = _known(list(launch.arguments[index:]))
        if inner is None or not _trains(inner):
            continue
        if launch.launcher == "python":
            return _sent(inner, launch.trainer, launch.arguments[:index])
        return replace(launch, trainer=inner.trainer, arguments=inner.arguments)
    return launch


def _sent(launch: _Launch, sender: str, words: Sequence[str]) -> _Launch:
    """Return what a script launches on the number of nodes that its own `words` say, where it is known to do so."""
    option = launcher_table()["senders"].get(Path(sender).name)
    nodes = words[words.index(option) + 1] if option in words[:-1] else ""
    processes = str(launch.options.get("num_processes", ""))
    if not nodes.isdecimal() or not processes.isdecimal():
        return launch
    options: dict[str, str | bool] = {"num_machines": nodes, "num_processes": str(int(nodes) * int(processes))}
    return replace(launch, options=launch.options | options)


def _known(words: list[str]) -> _Launch | None:
    """Return the launcher of a command that begins with one, with Python, or with a training script."""
    program = Path(words[0]).name
    for name, launcher in launchers().items():
        for beginning in launcher.commands:
            if [program, *words[1 : len(beginning)]] == beginning:
                return _launched(name, words[len(beginning) :], words[0])
    if PYTHON.fullmatch(program):
        launch = _launched("python", words[1:], words[0])
        started = [launch.trainer, *launch.arguments]
        for name, launcher in launchers().items():
            for beginning in launcher.modules if "m" in launch.options else ():
                if started[: len(beginning)] == beginning:
                    return _launched(name, started[len(beginning) :], words[0])
        return launch if _trains(launch) or _without_wrapper(launch) is not launch else None
    if trains_by_name(words[0], words[1:]) and not program.endswith(".py"):
        return _Launch("torchrun", program, tuple(words[1:]), {}, words[0])
    launch = _Launch("python", words[0], tuple(words[1:]))
    return launch if program.endswith(".py") and _trains(launch) else None


def _trains(launch: _Launch) -> bool:
    """Return whether it is a training: not one of the tools and conversions that Python runs, too."""
    if launch.launcher != "python" and launch.launcher in launchers() and launch.trainer.endswith(".py"):
        return True
    configured = _TRAINER.fullmatch(Path(launch.trainer).stem) and any(map(_SETTINGS.search, launch.arguments))
    return (
        bool(configured)
        or any(map(_TRAINING.match, launch.arguments))
        or trains_by_name(launch.trainer, launch.arguments)
    )


def _launched(launcher: str, words: Sequence[str], program: str) -> _Launch:
    options, rest, partly = launcher_options(launcher, words)
    if "no_python" in options and rest:
        inner = _launch(rest)
        if inner is not None:
            return _Launch(launcher, inner.trainer, inner.arguments, options, program, partly)
    return _Launch(launcher, rest[0] if rest else "", tuple(rest[1:]), options, program, partly)


def _training(launch: _Launch, command: ShellCommand, slurm: Options, prefix: Prefix) -> _Training:
    source = text_of(command, launch.trainer)
    row = trainer_of(launch.trainer, launch.arguments, lambda: source or "")
    launcher = launchers()[launch.launcher]
    options, single, partly = dict(launch.options), launcher.single, launch.partly
    starts_itself = Path(launch.program).name == launch.trainer
    if starts_itself:  # by torchrun
        options = _of_environment(command, (*row.nodes, *row.devices, "NODE_RANK", "MASTER_ADDR"), "")
        single, partly = row.single, "master_addr" not in options  # a platform may set it for each machine
    elif launch.launcher == "torchrun":
        partly = partly or not options
        names = tuple(name for name in command.environment if name.startswith("PET_"))
        options = _of_environment(command, names, "PET_") | options
    defaults: dict[str, str | bool] = {}
    if launch.launcher == "accelerate":
        known = accelerate_defaults(command, options)
        defaults, partly = known or {}, partly or known is None
    nodes = launched_nodes(launch.launcher, defaults | options, command, partly)
    count = nodes[1] if nodes else node_count(slurm)
    devices, ranks = launched_devices(launch.launcher, defaults | options, command, count)
    stated = any(name in options for name in launcher.devices_per_node)
    if devices is None and single and not stated and (starts_itself or not partly):
        devices = 1
    if devices is None and ranks is None and (launch.launcher != "python" or not prefix.has_srun):
        devices = visible_devices(command) or device_count(slurm)
    place = f"{command.script}:{command.line}"
    exported = {name: value for name, value in command.environment.items() if " --" not in value}
    training = TrainerCommand(
        trainer=launch.trainer,
        arguments=launch.arguments,
        launcher="other" if launch.unknown else launch.launcher,
        nodes=count,
        devices_per_node=devices,
        environment=exported,
        slurm=slurm,
        folder=command.folder,
        place=place,
        launcher_options={"module": True} if options.get("m") else {} if launch.launcher == "python" else options,
        files=command.files,
        container=pyxis_container(slurm),
        family=row.name,
        ranks=ranks,
    )
    start = ScriptLaunch(
        launcher=launch.launcher,
        training=(launch.trainer, *launch.arguments),
        family=row.name,
        nodes_option=launcher.nodes[0] if launcher.nodes else "",
        by_hosts=launcher.names_hosts,
        line=command.line,
        nodes=nodes,
        options=defaults | options,
        partly=partly,
        environment=command.environment,
        slurm=slurm,
    )
    return _Training(training, start)


def _complete(command: TrainerCommand, lines: Mapping[str, Unset]) -> TrainerCommand:
    """Return a training with the variables without a value that it needs, those of its own words and of the number of
    nodes. Where nothing says how many nodes there are, it is one, and Python alone is one rank."""
    before = (command.trainer, *command.arguments)
    words = [
        word
        for last, word in zip(("", *before), before, strict=False)
        if last.startswith("-") or last in ("", command.trainer) or not is_optional(word)
    ]
    stated = _stated_nodes(command)
    if command.nodes is None and command.ranks is None and (OF_SLURM.search(stated) or not is_unset(stated)):
        command = replace(command, nodes=1)
    if command.launcher == "python" and command.devices_per_node is None:
        command = replace(command, devices_per_node=1)
    words += [stated] if command.nodes is None else []
    names = dict.fromkeys(re.findall(r"\$\{(\w+)\}", " ".join(words)))
    return replace(command, unset=tuple(lines.get(name, Unset(name, 0)) for name in names))


def _stated_nodes(command: TrainerCommand) -> str:
    """Return what the launcher's options say of nodes, as it is written."""
    return " ".join(
        str(command.launcher_options.get(name, "")) for name in ("nnodes", "num_nodes", "num_machines", "np")
    )


def assumptions(command: TrainerCommand) -> tuple[str, ...]:
    """Return what is assumed of a training's start, a sentence each for a person."""
    if command.nodes != 1 or not OF_SLURM.search(_stated_nodes(command)):
        return ()
    return (f"{command.place}: the job does not say how many nodes it has, which is one for sbatch; --nodes says it",)


def _of_environment(command: ShellCommand, names: Sequence[str], before: str) -> dict[str, str | bool]:
    """Return options of torchrun that variables of the environment say."""
    return {
        name.removeprefix(before).lower(): command.environment[name] for name in names if name in command.environment
    }
