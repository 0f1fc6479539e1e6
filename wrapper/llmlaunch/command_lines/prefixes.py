"""What stands before a launcher: srun, containers, and programs that only change how another one runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmlaunch.command_lines.command import is_optional
from llmlaunch.command_lines.sbatch import Options, srun_options

__all__ = ["Prefix", "without_prefixes"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
# options with a value in the next word; all other options of these programs are one word
_WITH_VALUE: Mapping[str, tuple[str, ...]] = {
    "nohup": (), "exec": ("-a",), "command": (), "time": ("-f", "-o"), "setsid": (), "stdbuf": ("-i", "-o", "-e"),
    "nice": ("-n",), "ionice": ("-c", "-n"), "sudo": ("-u", "-g"), "unbuffer": (), "ddprun": (), "coproc": (),
    "numactl": ("-N", "-m", "-C", "-i", "-l", "-p"), "catchsegv": (), "strace": ("-o", "-e", "-p"),
    "nsys": ("-o", "-t", "-c", "-w", "-s", "-b", "-f", "-x", "-y", "-d", "-e", "-n"),
    "ncu": ("-o", "-k", "-c", "-s", "-f"), "rocprof": ("-o", "-i"), "py-spy": ("-o", "-r", "-d", "-f"),
    "uv": ("--with", "--extra", "--group", "-p", "--python", "--project", "--directory"), "poetry": (), "pixi": ("-e",),
    "conda": ("-n", "-p", "--name", "--prefix"), "mamba": ("-n", "-p"), "micromamba": ("-n", "-p"),
}  # fmt: skip
_WITH_COMMAND = {
    "nsys": ("profile", "launch"), "uv": ("run",), "poetry": ("run",), "pixi": ("run",), "conda": ("run",),
    "mamba": ("run",), "micromamba": ("run",), "py-spy": ("record",),
}  # fmt: skip
_CONTAINER_VALUES = (
    "-B", "--bind", "-H", "--home", "-W", "--workdir", "--pwd", "--env", "--env-file", "-S", "--scratch", "-o",
    "--overlay", "--network", "--hostname", "--app", "--security", "--mount", "-M", "--fusemount", "--cwd",
    "--dns", "--network-args", "--pid-file", "--cpus", "--memory",
)  # fmt: skip


@dataclass
class Prefix:
    """The words from a launcher on, and what stood before it."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    srun: Options = field(default_factory=dict)
    has_srun: bool = False


def without_prefixes(words: Sequence[str]) -> Prefix:
    """Take off everything that stands before a launcher, a shell or a program."""
    prefix = Prefix(tuple(words))
    for _ in range(20):
        if not prefix.words:
            break
        rest = _one_less(prefix, list(prefix.words))
        if rest is None:
            break
        prefix.words = tuple(rest)
    return prefix


def _one_less(prefix: Prefix, words: list[str]) -> list[str] | None:
    assignment = _ASSIGNMENT.fullmatch(words[0])
    if assignment is not None:
        prefix.environment[assignment[1]] = assignment[2]
        return words[1:]
    name, rest = Path(words[0]).name, words[1:]
    if rest and is_optional(name) and "PYTHON" not in name.upper():
        return rest
    if name == "srun":
        options, rest = srun_options(rest)
        prefix.srun, prefix.has_srun = dict(prefix.srun) | options, True
        return rest
    if name == "env":
        return _after_options(rest, ("-u", "--unset", "-C", "--chdir"))
    if name == "timeout":
        return _after_options(rest, ("-s", "-k", "--signal", "--kill-after"))[1:]
    if name == "taskset":
        return _after_options(rest, ())[1:]
    if name in ("apptainer", "singularity") and rest[:1] in (["exec"], ["run"]):
        return _after_options(rest[1:], _CONTAINER_VALUES)[1:]
    if _observes(words):
        return rest[rest.index("--") + 1 :]
    if name in ("mpirun", "mpiexec", "orterun"):
        return _after_mpirun(rest)
    if name not in _WITH_VALUE:
        return None
    if name in _WITH_COMMAND:
        if rest[:1] not in [[command] for command in _WITH_COMMAND[name]]:
            return None
        rest = rest[1:]
    return _after_options(rest, _WITH_VALUE[name])


def _observes(words: Sequence[str]) -> bool:
    """Whether llmlaunch itself is to observe a training."""
    if "--" not in words:
        return False
    before = list(words[: words.index("--")])
    program = Path(before[0]).name
    if program == "llmlaunch" and before[1:2] == ["observe"]:
        return True
    names = [Path(word).name for word in before]
    return program.startswith("python") and "node.pyz" in names and "observe" in names


def _after_options(words: Sequence[str], with_value: Sequence[str]) -> list[str]:
    rest = list(words)
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        option = rest.pop(0)
        if option == "--":
            break
        if option in with_value:
            del rest[:1]
    return rest


def _after_mpirun(words: Sequence[str]) -> list[str]:
    """Return the words from the first program on; options of MPI launchers take one value, some two or none."""
    values = {"-x": 1, "-np": 1, "-n": 1, "-N": 1, "-H": 1, "--host": 1, "-hostfile": 1, "--hostfile": 1, "-mca": 2,
              "--mca": 2, "--map-by": 1, "--bind-to": 1, "-ppn": 1, "-machinefile": 1, "--output-filename": 1,
              "--npernode": 1, "-npernode": 1, "-genv": 2, "-wdir": 1, "-f": 1}  # fmt: skip
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        del rest[: values.get(option, 0)]
    return rest
