"""What comes before a launcher: srun, MPI, remote shells, containers, and programs that only change how another one
runs. The table of these wrappers is in launchers.json."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.command_lines.command import ScriptContainer, is_optional
from llmlaunch.command_lines.sbatch import Options, srun_options
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
