"""What a script does around its training: what the job needs, too, as setup lines, and what a recipe cannot keep.

A setup line is a program of a short list (modules, environments, limits) with its words quoted again, so that no other
text of the script becomes shell.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from llmlaunch.command_lines.command import ScriptContainer, TrainerCommand
from llmlaunch.command_lines.prefixes import without_prefixes
from llmlaunch.command_lines.sbatch import OF_A_TASK
from llmlaunch.command_lines.shell_state import ShellCommand, exists
from llmlaunch.documents.secrets import is_secret_variable, secret_in
from llmlaunch.documents.slurm_options import option_forms, srun_option_problem
from llmlaunch.documents.text import is_set_by_launcher
from llmlaunch.rundir.values import printable, shortened

MOST_SENTENCES = 30
MOST_CHARACTERS = 4096  # of a setup line
_TABLE = json.loads(Path(__file__).with_name("programs.json").read_text("utf-8"))
_SETUP: Mapping[str, Sequence[str]] = _TABLE["setup"]
_HOOKS: Mapping[str, str] = _TABLE["hooks"]
_REASON = {program: reason for reason, programs in _TABLE["reasons"].items() for program in programs}
_REFERENCE = re.compile(r"\$\{(\w+)\}")
_KNOWN_TO_THE_RUN_ALONE = re.compile(r"\d+|output_of_line_\d+|number_of_arguments")
_ANY_VALUE = "0123456789abcdef"  # of a variable whose name alone says that it is a secret
_LAUNCHERS = re.compile(r"(?:python[\d.]*|torchrun|deepspeed|accelerate|trl|llamafactory-cli|axolotl|swift|megatron)")
_HOOKED_BY = re.compile(r"(?:conda|mamba)\.sh|\.bashrc|\.bash_profile|\.profile|\.bash_login")
# of srun, and said by the rendered job or by the container of the recipe
_COVERED = re.compile(
    r"no-container-mount-home|container-(?:image|mounts|workdir|name)|exact|overlap|unbuffered|label|disable-status|whole"
    r"|kill-on-bad-exit|wait|threads|relative|preserve-env|export|treewidth.*"
)


def prepared(
    training: TrainerCommand,
    commands: Sequence[ShellCommand],
    index: int,
    *,
    in_container: bool = False,
    whole: bool = False,
) -> TrainerCommand:
    """Return a training with what the script does before and after it: `commands` are those of the script, of which
    `commands[index]` starts the training. What the training has already was read of a script inside that one.

    `in_container`: all of `commands` run inside the container, where setup lines do not. `whole`: they are those of the
    script itself, and not of one that it starts.
    """
    reader = _Preparation(training, in_container or training.container is not None)
    for command in commands[:index]:
        reader.add(command, "before", usable=not in_container)
    lines = reader.setup_lines(commands[index]) if whole else _with_hooks([line for line, _ in reader.lines])
    for command in commands[index + 1 :]:
        reader.add(command, "after", usable=False)
    if commands[index:]:
        reader.add_launch(commands[index])
    environment = {name: value for name, value in training.environment.items() if name not in reader.exported}
    for name, value in environment.items():
        if name == "PYTHONPATH" or value.startswith(("./", "../")):
            environment[name] = _absolute_entries(value, training.folder)
    return replace(
        training,
        setup=(*lines, *training.setup),
        python=training.python or reader.launch_python or reader.python,
        left_out=tuple(dict.fromkeys((*reader.sentences, *training.left_out)))[:MOST_SENTENCES],
        environment=environment,
    )


def surrounded(
    training: TrainerCommand, commands: Sequence[ShellCommand], trainings: Sequence[TrainerCommand], start: Path
) -> TrainerCommand:
    """Return a training of a script with what the script's `commands` do around it, and the folder in which it starts;
    the script itself starts in `start`. Of the others of its `trainings` nothing is said here.
    """
    launch = next((command for command in reversed(commands) if _place(command) == training.place), None)
    if launch is not None:
        places = {each.place for each in trainings}
        commands = [command for command in commands if command is launch or _place(command) not in places]
        training = prepared(training, commands, commands.index(launch), whole=True)
    logs = {
        option: str(start.absolute() / str(path))
        for option, path in training.slurm.items()
        if option in ("output", "error") and "/" in str(path) and exists(start / PurePath(str(path)).parent)
    }
    training = replace(training, slurm={**training.slurm, **logs})
    chdir = _option_of(("--chdir", "-D"), launch.words if launch and launch.words[:1] == ("srun",) else ())
    chdir = chdir or (str(start / str(training.slurm["chdir"])) if "chdir" in training.slurm else None)
    if chdir is not None and training.folder.absolute() == start.absolute():
        training = replace(training, folder=Path(chdir).absolute(), workdir=str(Path(chdir).absolute()))
    if training.container is None or launch is None:
        return replace(training, workdir=training.workdir or _workdir(training, start))
    inside = launch.folder != training.folder  # a shell in the container enters it
    folder = _option_of(("--container-workdir", "--pwd", "--cwd"), launch.words)
    if folder is None and not inside and training.container.runtime == "pyxis":
        return training  # it starts in the image's own folder
    workdir = _workdir(training, start) if inside or folder is None else folder
    place = training.folder if workdir is None else _on_the_host(workdir, training.container)
    return replace(training, folder=place, workdir=workdir)


def _on_the_host(folder: str, container: ScriptContainer) -> Path:
    """Return the folder of the host that a container has at this place, or the place itself."""
    for mount in container.mounts:
        source, _, rest = mount.partition(":")
        path, destination = PurePath(folder), rest.partition(":")[0] or source
        if source.startswith("/") and path.is_relative_to(destination):
            return Path(source) / path.relative_to(destination)
    return Path(folder)


def _option_of(options: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the folder that one of these options says among the words of a command, None where none says a whole
    path."""
    for word, following in zip(words, (*words[1:], ""), strict=True) if words else ():
        option, equals, value = word.partition("=")
        folder = value if equals else following
        if option in options and folder.startswith("/") and not _REFERENCE.search(folder):
            return folder
    return None


def _place(command: ShellCommand) -> str:
    return f"{command.script}:{command.line}"


def _workdir(training: TrainerCommand, start: Path) -> str | None:
    """Return the folder in which a trainer starts, where the script enters it, or where the trainer or a word of its
    names something in it."""
    folder = training.folder
    if _REFERENCE.search(str(folder)):
        return None
    if folder.absolute() != start.absolute() or "chdir" in training.slurm:
        return str(folder.absolute())
    words = (training.trainer, *training.arguments)
    values = (word.rpartition("=")[2] if word.startswith("-") else word for word in words)
    named = (folder / value for value in values if value and not value.startswith(("/", "-", "~")))
    return str(folder.absolute()) if any(map(exists, named)) else None


class _Preparation:
    """The setup lines of a script, its interpreter, and sentences on what is left out."""

    def __init__(self, training: TrainerCommand, contained: bool) -> None:
        self.training, self.contained = training, contained
        self.lines: list[tuple[str, Mapping[str, str]]] = []  # with the environment of their command
        self.sentences: list[str] = []
        self.exported: set[str] = set()
        self.python: str | None = None
        self.launch_python: str | None = None

    def add(self, command: ShellCommand, when: str, usable: bool) -> None:
        """Add a command that starts no training: as a setup line, as a sentence, or not at all."""
        words: Sequence[str] = [word for word in command.words if not re.match(r"\w+=", word)]
        if words and PurePath(words[0]).name not in _REASON:
            words = without_prefixes(words).words
        if not words or re.fullmatch(r"\$\{\w+\}", words[0]):
            return
        name = PurePath(words[0]).name
        if when == "before" and self._prepares(name, words):
            self._activate(name, words, command)
            line = _setup_line(words, command.folder)
            if usable and line is not None:
                self.lines.append((line, command.environment))
            elif name != "mkdir" and (usable or name not in ("source", ".")):
                reason = "setup: runs outside the container" if line is not None else _why_not(words)
                self._leave_out(command, words, reason)
        elif not _is_quiet(name, words):
            advice = "write it under setup: if the training needs it" if when == "before" else "run it after the job"
            reason = _REASON.get(name, f"it runs {when} the training, which the rendered job starts alone; {advice}")
            self._leave_out(command, words, reason)

    def _prepares(self, name: str, words: Sequence[str]) -> bool:
        following = _SETUP.get(name)
        word = words[1] if len(words) > 1 else ""
        return following is not None and word not in _TABLE["prints"] and (not following or word in following)

    def _activate(self, name: str, words: Sequence[str], command: ShellCommand) -> None:
        """Note the interpreter of an environment that is named by its path."""
        operands = [word for word in words[1:] if not word.startswith("-")]
        path = ""
        if name in ("source", ".") and operands and operands[0].endswith("/bin/activate"):
            path = str(command.folder / operands[0].removesuffix("/bin/activate"))
        elif name in _HOOKS and operands[:1] == ["activate"] and operands[1:] and "/" in operands[1]:
            path = str(command.folder / operands[1])
        elif name not in _HOOKS:
            return
        # an environment of the batch host is not that of the container
        outside = self.contained and self.training.container is not None
        self.python = f"{path}/bin/python" if path and not outside and not _REFERENCE.search(path) else None

    def _leave_out(self, command: ShellCommand, words: Sequence[str], reason: str) -> None:
        text = printable(shortened(" ".join(words), 60))
        if secret_in(" ".join(words)) is not None or "login" in words:
            text = printable(shortened(words[0], 60))
        self.sentences.append(f"{command.script}:{command.line}, `{text}`: {reason}")

    def setup_lines(self, launch: ShellCommand) -> list[str]:
        """Return the setup lines in their order: those of commands, and exports that refer to other variables, before
        the first command that sees them."""
        lines = [(line, environment) for line, environment in self.lines]
        for name, value in self.training.environment.items():
            if not _REFERENCE.search(value) or is_set_by_launcher(name) or is_secret_variable(name, _ANY_VALUE):
                continue
            if value == f"${{{name}}}" or set(OF_A_TASK) & set(_REFERENCE.findall(value)):
                self.exported.add(name)  # sbatch carries the one along, and each rank of the rendered job has the other
                continue
            if self.training.container is not None and launch.environment.get(name) != value:
                continue  # the variables of a container are not those outside
            line = _export_line(name, value, self.training.folder)
            if line is not None:
                place = next((i for i, (_, seen) in enumerate(lines) if seen.get(name) == value), len(lines))
                lines.insert(place, (line, {}))
                self.exported.add(name)
        return _with_hooks([line for line, _ in lines])

    def add_launch(self, command: ShellCommand) -> None:
        """Read the command that starts the training: its interpreter, and options of srun that only it says."""
        prefix = without_prefixes(command.words)
        first = prefix.words[0] if prefix.words else ""
        path = PurePath(first)
        manager = next((word for word in command.words[:-1] if word in ("uv", "poetry", "pixi")), None)
        environment = command.folder / ".venv" / "bin" / "python"
        if manager is not None and command.words[command.words.index(manager) + 1] == "run":
            if exists(environment):
                self.launch_python = str(environment)
            else:
                self._leave_out(command, [manager, "run"], "name the interpreter of its environment: python: PATH")
        if path.is_absolute() and _LAUNCHERS.fullmatch(path.name) and not _REFERENCE.search(first):
            self.launch_python = first if path.name.startswith("python") else str(path.parent / "python")
        for option, value in prefix.srun.items():
            if option in option_forms("sbatch")[0] or _COVERED.fullmatch(option) or value == "none":
                continue
            key = f"mpi: {value}" if option == "mpi" else f"srun: {{{option}: {'true' if value is True else value}}}"
            reason = f"if the training needs it, write cluster: {{base: ..., {key}}}"
            if srun_option_problem(option) is None or option == "mpi":
                self._leave_out(command, ["srun", f"--{option}" if value is True else f"--{option}={value}"], reason)
            elif option == "container-mount-home":
                self._leave_out(command, ["srun", f"--{option}"], "no home is mounted; name it under container.mounts")


def _is_quiet(name: str, words: Sequence[str]) -> bool:
    """Whether a command only prints or waits, so that no training misses it."""
    if name == "nvidia-smi":
        return not any(re.match(r"dmon|pmon|-l|--loop", word) for word in words)
    if name in ("conda", "mamba"):
        return words[1:2] != () and words[1] in ("info", "list", "env")
    if re.fullmatch(r"python[\d.]*", name):
        return words[1:2] != () and words[1] in ("-c", "-V", "--version")
    return name in _TABLE["quiet"] or words[1:] == ("--version",)


def _why_not(words: Sequence[str]) -> str:
    names = [name for name in _REFERENCE.findall(" ".join(words)) if _KNOWN_TO_THE_RUN_ALONE.fullmatch(name)]
    if names:
        return "only the run knows its words; write it under setup:"
    return "it holds a secret or a line break; write it under setup: without"


def _setup_line(words: Sequence[str], folder: Path) -> str | None:
    """Return the words of a command as one line of shell, None where they cannot be."""
    name = PurePath(words[0]).name
    if name in ("source", ".", "mkdir", *_HOOKS):  # a word without a slash may be a name
        words = [_absolute_path(word, folder) if "/" in word or name == "mkdir" else word for word in words[1:]]
        words = [name, *words]
    return _usable(" ".join(map(_quoted, words)))


def _export_line(name: str, value: str, folder: Path) -> str | None:
    """Return a line that exports a variable, None where it cannot be."""
    return _usable(f"export {name}={_quoted(_absolute_entries(value, folder) if name == 'PYTHONPATH' else value)}")


def _usable(line: str) -> str | None:
    """Return a line of shell, None where only the run knows its words, or where no recipe may hold it."""
    if any(map(_KNOWN_TO_THE_RUN_ALONE.fullmatch, _REFERENCE.findall(line))):
        return None
    return None if len(line) > MOST_CHARACTERS or secret_in(line) is not None or not line.isprintable() else line


def _absolute_path(word: str, folder: Path) -> str:
    """Return a path as it is found from anywhere."""
    if not word or word.startswith(("/", "-", "~", "${")) or _REFERENCE.search(str(folder)):
        return word
    return str(folder / word)


def _absolute_entries(value: str, folder: Path) -> str:
    """Return a search path with its relative folders as they are found from anywhere."""
    return ":".join(_absolute_path(entry, folder) for entry in value.split(":"))


def _quoted(word: str) -> str:
    """Return a word as the shell reads it back; variables without a value are expanded where the line runs."""
    if not _REFERENCE.search(word):
        return shlex.quote(word)
    pieces = re.split(r"(\$\{\w+\})", word)
    return '"' + "".join(p if _REFERENCE.fullmatch(p) else re.sub(r'(["$`\\])', r"\\\1", p) for p in pieces) + '"'


def _with_hooks(lines: Sequence[str]) -> list[str]:
    """Return setup lines in which an environment manager is made known to the shell before it is used: a batch shell
    has not read the person's startup files."""
    result: list[str] = []
    for line in lines:
        program = line.partition(" ")[0]
        hook = _HOOKS.get(program)
        if hook is not None and hook not in result and not any(map(_HOOKED_BY.search, result)):
            result.append(hook)
        result.append(line)
    return result
