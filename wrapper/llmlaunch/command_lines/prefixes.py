"""Launchers of ranks, what their options say of nodes and devices, and what comes before one: srun, MPI, remote
shells, containers, and programs that only change how another one runs. The tables are in launchers.json."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.command_lines.command import ScriptContainer, is_optional, is_unset
from llmlaunch.command_lines.sbatch import Options, srun_options
from llmlaunch.command_lines.shell import ShellCommand
from llmlaunch.command_lines.shell_state import file_text
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_BINDS = ("SINGULARITY_BIND", "APPTAINER_BIND", "SINGULARITY_BINDPATH", "APPTAINER_BINDPATH")


@frozen
class _Wrapper:
    """A program that starts the command in its own words.

    `commands` are those of its first words that do. `values` are its options with a value and `pairs` those with two;
    where it has `flags`, all but these take a value. `operands` is how many words follow its options before the
    command. `runtime` is that of a container, whose image is the operand, with the options for `mounts` and for
    `variables`. `activates` is a line of setup that makes an environment manager known to a shell. `remote`: it runs a
    text in a shell on other hosts. `mpi`: it starts ranks.
    """

    commands: Sequence[str] = ()
    values: Sequence[str] = ()
    pairs: Sequence[str] = ()
    flags: Sequence[str] = ()
    operands: int = 0
    runtime: str | None = None
    mounts: Sequence[str] = ()
    variables: Sequence[str] = ()
    activates: str = ""
    remote: bool = False
    mpi: bool = False

    def values_of(self, option: str) -> int:
        """Return how many words after an option are its values."""
        if option in self.pairs:
            return 2
        if option in (*self.values, *self.mounts, *self.variables):
            return 1
        short = option[0] == "-" != option[1:2]
        flag = option in self.flags or (short and all(f"-{letter}" in self.flags for letter in option[1:]))
        return int(bool(self.flags) and not flag)


@dataclass
class Prefix:
    """The words from a launcher on, and what came before it. `remote` is whether a remote shell starts them, `ranks`
    and `ranks_per_node` are how many MPI starts, `stated_ranks` is that as it is written, `setup` is what prepares
    their environment."""

    words: tuple[str, ...]
    exported: Mapping[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    srun: Options = field(default_factory=dict)
    has_srun: bool = False
    has_mpi: bool = False
    remote: bool = False
    ranks: int | None = None
    stated_ranks: str = ""
    ranks_per_node: int | None = None
    container: ScriptContainer | None = None
    setup: tuple[str, ...] = ()


@cache
def launcher_table() -> dict[str, Any]:
    """Return launchers.json."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("launchers.json").read_text("utf-8"))
    return table


@cache
def _wrappers() -> dict[str, _Wrapper]:
    rows: dict[str, dict[str, Any]] = launcher_table()["wrappers"]
    wholes = {name: {**rows.get(row.get("like", ""), {}), **row} for name, row in rows.items()}
    return {name: _Wrapper(**{key: row[key] for key in row if key != "like"}) for name, row in wholes.items()}


def without_prefixes(words: Sequence[str], exported: Mapping[str, str] = {}) -> Prefix:
    """Take off everything that comes before a launcher, a shell or a program. `exported` is the environment."""
    prefix = Prefix(tuple(words), exported=exported)
    for _ in range(20):
        rest = _one_less(prefix, list(prefix.words)) if prefix.words else None
        if rest is None:
            break
        prefix.words = tuple(rest)
    return prefix


def pyxis_container(options: Options) -> ScriptContainer | None:
    """Return the container that options of pyxis, a plugin of srun and sbatch, name; None where they name none."""
    image = options.get("container-image")
    mounts = str(options.get("container-mounts", ""))
    return ScriptContainer(str(image), tuple(filter(None, mounts.split(","))), "pyxis") if image else None


def _one_less(prefix: Prefix, words: list[str]) -> list[str] | None:
    assignment = _ASSIGNMENT.fullmatch(words[0])
    if assignment is not None:
        prefix.environment[assignment[1]] = assignment[2]
        return words[1:]
    name, rest = Path(words[0]).name, words[1:]
    if rest and is_optional(name) and "PYTHON" not in name.upper():
        return rest
    if name == "srun":
        step, rest = srun_options(rest)
        prefix.srun, prefix.has_srun = dict(prefix.srun) | step, True
        prefix.container = pyxis_container(step) or prefix.container
        prefix.environment |= _assigned(str(step.get("export", "")).split(","))
        return rest
    if _observes(words):
        return rest[rest.index("--") + 1 :]
    wrapper = _wrappers().get(name)
    if wrapper is None or (wrapper.commands and rest[:1] not in [[command] for command in wrapper.commands]):
        return None
    options, rest = _options(wrapper, rest[1:] if wrapper.commands else rest)
    operands, rest = rest[: wrapper.operands], rest[wrapper.operands :]
    for option, value in options:
        if option in wrapper.variables:  # Apptainer takes several in a word
            several = wrapper.runtime in ("apptainer", "singularity")
            prefix.environment |= _assigned(re.split(r",(?=[A-Za-z_]\w*=)", value) if several else [value])
    if wrapper.runtime and operands:
        mounts = [value for option, value in options if option in wrapper.mounts]
        prefix.container = ScriptContainer(operands[0], _mounts(wrapper, mounts, prefix), wrapper.runtime)
    if wrapper.activates:
        chosen = [value for option, value in options if option in ("-n", "-p", "--name", "--prefix")]
        if chosen:
            prefix.setup += (wrapper.activates, f"{name} activate {shlex.quote(chosen[-1])}")
    if wrapper.mpi:
        _add_ranks(prefix, dict(options))
    if wrapper.remote:
        prefix.remote = True
        return ["bash", "-c", " ".join(rest)]
    return rest


def _options(wrapper: _Wrapper, words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return a wrapper's options with their values, and the words after them."""
    options: list[tuple[str, str]] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        option = rest.pop(0)
        if option == "--":
            break
        name, equals, value = option.partition("=")
        if not equals:
            count = wrapper.values_of(option)
            value = " ".join(rest[:count])
            del rest[:count]
        options.append((name, value))
    return options, rest


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """Return the variables among `NAME=value` words; a name alone keeps its value."""
    matches = (_ASSIGNMENT.fullmatch(word) for word in words)
    return {match[1]: match[2] for match in matches if match is not None}


def _mounts(wrapper: _Wrapper, values: Sequence[str], prefix: Prefix) -> tuple[str, ...]:
    """Return the mounts of a container, `type=bind,source=/a,target=/b` as `/a:/b`."""
    mounts: list[str] = []
    if wrapper.runtime in ("apptainer", "singularity"):
        known = {**prefix.exported, **prefix.environment}
        values = [*values, *(known[name] for name in _BINDS if name in known)]
    for value in values:
        keys = dict(part.partition("=")[::2] for part in value.split(","))
        source = keys.get("source") or keys.get("src")
        if source:
            mounts.append(f"{source}:{keys.get('target') or keys.get('dst') or keys.get('destination')}")
        else:
            mounts += [mount for mount in value.split(",") if mount]
    return tuple(mounts)


def _add_ranks(prefix: Prefix, options: Mapping[str, str]) -> None:
    """Add how many ranks mpirun starts: Open MPI's options, and those of Hydra, which MPICH and Intel MPI have."""
    mapped = re.search(r"ppr:(\d+):node", options.get("--map-by", options.get("-map-by", "")))
    per_node = [options.get(name, "") for name in ("-N", "-npernode", "--npernode", "-ppn", "--ppn", "-perhost")]
    prefix.ranks_per_node = next(
        (int(text) for text in [mapped[1] if mapped else "", *per_node] if text.isdecimal()), None
    )
    totals = [options.get(name, "") for name in ("-np", "-n", "-c", "--np", "--n")]
    prefix.stated_ranks = next(filter(None, totals), "")
    prefix.ranks = int(prefix.stated_ranks) if prefix.stated_ranks.isdecimal() else None
    prefix.has_mpi = True


def _observes(words: Sequence[str]) -> bool:
    """Return whether llmlaunch itself is to observe a training."""
    if "--" not in words:
        return False
    before = list(words[: words.index("--")])
    program = Path(before[0]).name
    if program == "llmlaunch" and before[1:2] == ["observe"]:
        return True
    names = [Path(word).name for word in before]
    return program.startswith("python") and "node.pyz" in names and "observe" in names


Range = tuple[int, int]
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@frozen
class LauncherRow:
    """A launcher of ranks, or Python without one.

    `commands` and `modules` are the first words of its command lines, the latter after `python -m`. `flags` are its
    options without a value, `short` maps options of one letter to long ones. `nodes`, `devices_per_node` and `devices`
    are the options with these numbers. `node_range`: the number of nodes may be a range. `names_hosts`: other options
    name hosts. `single`: it starts one rank where no option says how many, otherwise one for each device.
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
    single: bool = False


@cache
def launchers() -> dict[str, LauncherRow]:
    return {name: LauncherRow(**row) for name, row in launcher_table()["launchers"].items()}


def launcher_options(launcher: str, words: Sequence[str]) -> tuple[dict[str, str | bool], list[str], bool]:
    """Return a launcher's options, the words from the program on that it launches, and whether there may be others."""
    options: dict[str, str | bool] = {}
    rest, partly = list(words), False
    while rest and ((rest[0].startswith("-") and len(rest[0]) > 1) or (is_optional(rest[0]) and len(rest) > 1)):
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("-"):
            partly = True
            if not any(each.endswith(".py") for each in rest) and "module" not in options:
                rest.insert(0, word)  # the script itself is in the variable
                break
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        name = launchers()[launcher].short.get(name, name)
        if launcher == "python" and not word.startswith("--") and not equals:
            options.update(dict.fromkeys(name, True) if name[:1] not in ("W", "X") else {})
            if name in ("W", "X", "c"):
                del rest[:1]
            if "m" in options:
                break
        elif equals:
            options[name] = value
        elif name in launchers()[launcher].flags or not rest:
            options[name] = True
        else:
            options[name] = rest.pop(0)
    return options, rest, partly


def launched_nodes(name: str, options: Mapping[str, str | bool], command: ShellCommand, partly: bool) -> Range | None:
    """Return the fewest and the most nodes that a launcher waits for, None where that is not known. Without an option
    that says it, a launcher stays on its own node."""
    launcher = launchers()[name]
    if options.get("standalone"):
        return 1, 1
    text = next((str(options[each]) for each in launcher.nodes if each in options), None)
    if text is not None:
        first, colon, last = text.partition(":") if launcher.node_range else (text, "", "")
        fewest, most = _number(first), _number(last if colon else first)
        return None if fewest is None or most is None else (fewest, most)
    if launcher.names_hosts and {"include", "hostfile"} & set(options):
        hosts = _hosts(command, options)[0]
        return (hosts, hosts) if hosts else None
    return None if partly or name == "python" else (1, 1)


def launched_devices(
    name: str, options: Mapping[str, str | bool], command: ShellCommand, nodes: int | None
) -> tuple[int | None, int | None]:
    """Return the devices of a node that a launcher's options say; and how many ranks there are in all, where only that
    is known."""
    launcher = launchers()[name]
    total = next((_number(options[each]) for each in launcher.devices if each in options), None)
    if total is not None:
        return (max(total // nodes, 1), None) if nodes else (None, total)
    number = next((_number(options[each]) for each in launcher.devices_per_node if each in options), None)
    return (number or _hosts(command, options)[1] if launcher.names_hosts else number), None


def _hosts(command: ShellCommand, options: Mapping[str, str | bool]) -> tuple[int | None, int | None]:
    """Return nodes and devices of each that DeepSpeed's `--include` or its file of hosts names. A host without a value
    may stand for several: a loop over names that only the run knows is read once."""
    include = str(options.get("include", ""))
    hosts = {host: slots for host, _, slots in (part.partition(":") for part in include.split("@")) if host}
    if hosts:
        slots = {len(slots.split(",")) for slots in hosts.values() if slots}
        return len(hosts), slots.pop() if len(slots) == 1 else None
    path = options.get("hostfile")
    text = text_of(command, path) or "" if isinstance(path, str) else ""
    lines = re.findall(r"^([^#\s]\S*)\s+slots=(\d{1,6})", text, re.MULTILINE)
    counts = {int(count) for _, count in lines}
    known = lines and not any(is_unset(host) for host, _ in lines)
    return len(lines) if known else None, counts.pop() if len(counts) == 1 else None


def visible_devices(command: ShellCommand) -> int | None:
    """Return how many devices the environment leaves visible, None where it does not say."""
    texts = (command.environment.get(name, "") for name in VISIBLE)
    return next((text.count(",") + 1 for text in texts if text and not is_unset(text)), None)


def accelerate_defaults(command: ShellCommand, options: Mapping[str, str | bool]) -> dict[str, str | bool] | None:
    """Return what accelerate's file of defaults says about machines; None where it is not here."""
    path = options.get("config_file")
    if path is None:
        return {}
    text = text_of(command, path) if isinstance(path, str) else None
    try:
        document = {} if text is None else parse_document(text, str(path)).value
    except UserError:
        document = {}  # the reader of the options says so
    names = ("num_machines", "num_processes", "machine_rank", "main_process_ip", "rdzv_backend")
    values: dict[str, str | bool] = {name: str(document[name]) for name in names if document.get(name) is not None}
    if str(document.get("distributed_type", "")).upper() == "DEEPSPEED":
        values["use_deepspeed"] = True
        launcher = (document.get("deepspeed_config") or {}).get("deepspeed_multinode_launcher")
        values |= {"deepspeed_multinode_launcher": str(launcher)} if launcher else {}
    return values if document else None


def text_of(command: ShellCommand, path: str) -> str | None:
    """Return the text of a file, as the script wrote it or as it is there."""
    place = command.folder / path
    written = command.files.get(path) or command.files.get(str(place))
    return written or file_text(place, command.budget) or file_text(Path.cwd() / path, command.budget)


def _number(value: object) -> int | None:
    text = str(value)
    return int(text) or None if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None
