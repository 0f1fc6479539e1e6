"""Launchers of ranks, their options, and how many nodes and devices these say. The table is launchers.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path

from llmlaunch.command_lines.command import is_optional, is_unset
from llmlaunch.command_lines.prefixes import launcher_table
from llmlaunch.command_lines.shell import ShellCommand
from llmlaunch.command_lines.shell_state import file_text
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen

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
