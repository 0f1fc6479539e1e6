"""Asks SLURM about the site: what `llmlaunch init --site` drafts a profile from, its nodes, and which to exclude."""

from __future__ import annotations

import getpass
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmlaunch.causes.suspects import most_left_out
from llmlaunch.cluster.slurm_site import Answers
from llmlaunch.errors import UserError
from llmlaunch.launchers.slurm.commands import CommandAnswer, SlurmCommands
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import host_names

_ASK_SECONDS, _ASK_TRIES = 30.0, 2
_RUNNERS = ("apptainer", "singularity")
_SHIPPED = "or start from a shipped profile (base: h100-80gb-x8, docs/sites.md)"


def ask_site(say: Callable[[str], None]) -> Answers:
    """Changes nothing. Raises UserError where there is no SLURM, or it does not answer; what only some sites have
    (accounting, a topology) may be missing."""
    if shutil.which("scontrol") is None:
        raise UserError(
            "init --site: no SLURM here (scontrol is not on PATH); run it on a login node of the cluster, " + _SHIPPED
        )
    commands = SlurmCommands(_ASK_SECONDS, _ASK_TRIES, say)
    # side by side: a site may have thousands of nodes
    needed = [commands.start(["scontrol", "show", what]) for what in ("config", "partition", "node")]
    optional = [commands.start(["scontrol", "show", "topology"]), commands.start(["srun", "--help"])]
    if shutil.which("sacctmgr") is not None:
        user = f"user={getpass.getuser()}"
        optional.append(commands.start(["sacctmgr", "-nP", "show", "assoc", user, "format=account,qos"]))
    config, partitions, nodes = (_needed(commands.insist(call)) for call in needed)
    topology, srun_help, *associations = (_optional(call.answer()) for call in optional)
    return Answers(
        config=config,
        partitions=partitions,
        nodes=nodes,
        topology=topology,
        srun_help=srun_help,
        associations="".join(associations),
        programs=tuple(name for name in _RUNNERS if shutil.which(name) is not None),
    )


def _needed(answer: CommandAnswer) -> str:
    if answer.code != 0:
        raise UserError(f"init --site: SLURM does not answer ({answer.words}); try again later, {_SHIPPED}")
    return answer.output


def _optional(answer: CommandAnswer) -> str:
    return answer.output if answer.code == 0 else ""


TIMEOUT_SECONDS, TRIES = 20.0, 1  # to leave a node out is a service: a slow SLURM gets the job without it
_OPTIONS = {"-x": "exclude", "-p": "partition", "-N": "nodes", "-w": "nodelist", "-M": "clusters"}
_UNUSABLE = ("down", "drain", "drng", "drained", "draining", "fail", "failg", "inval", "unk", "futr", "err", "error")


@dataclass(frozen=True)
class Exclusion:
    """`names` are the sick nodes to leave out, `words` the options for sbatch that do it: they stand for the script's
    own `--exclude`, too, which they hide. `too_few`: without them the job could not start, so it gets them. `beyond`
    are those it gets because `most` of the partition's nodes are left out already."""

    names: tuple[str, ...]
    words: tuple[str, ...]
    too_few: bool = False
    beyond: tuple[str, ...] = ()
    most: int = 0


def cluster_name(say: Callable[[str], None]) -> str | None:
    """ClusterName of this machine's SLURM; None where it does not say."""
    return _configured("ClusterName", say)


def max_array_size() -> int | None:
    """Return MaxArraySize of this cluster (task indices end one below), or None if SLURM does not say."""
    try:
        size = _configured("MaxArraySize", lambda line: None)
    except UserError:  # there is no scontrol
        return None
    return int(size) if size is not None and is_whole_number(size) else None


def _configured(name: str, say: Callable[[str], None]) -> str | None:
    answer = SlurmCommands(TIMEOUT_SECONDS, TRIES, say).ask(["scontrol", "show", "config"])
    match = re.search(rf"^{name}\s*=\s*(\S+)", answer.output, re.MULTILINE) if answer.code == 0 else None
    return None if match is None else match[1]


def nodes_of_cluster(say: Callable[[str], None]) -> str | None:
    """`node|partition|state`, a line for each node and partition; None where SLURM does not say."""
    answer = SlurmCommands(TIMEOUT_SECONDS, TRIES, say).ask(["sinfo", "-h", "-N", "-o", "%N|%P|%t"])
    return answer.output if answer.code == 0 else None


def exclusion(sick: Sequence[str], directives: Sequence[str], listed: str) -> Exclusion:
    """Which of the `sick` nodes a job with these `#SBATCH` words is kept from; `listed` is of `nodes_of_cluster`.

    Only nodes that the job's partitions have: sbatch refuses a name the cluster does not know. None that the job asks
    for by name. No more than 5 % of them, those that come first, and no more than leave it as many usable nodes as it
    needs. None where it goes to another cluster than this machine's, whose nodes are not listed.
    """
    options = _options(directives)
    if "clusters" in options:
        return Exclusion((), ())
    partitions = options["partition"].split(",") if "partition" in options else None
    there: dict[str, str] = {}
    for line in listed.splitlines():
        node, partition, state = [*line.split("|"), "", ""][:3]
        if partition.rstrip("*") in partitions if partitions else partition.endswith("*"):
            there[node] = state
    wanted = set(host_names(options.get("nodelist", "")))
    known = tuple(node for node in dict.fromkeys(sick) if node in there and node not in wanted)
    most = most_left_out(len(there))
    names, beyond = known[:most], known[most:]
    if not names:
        return Exclusion((), ())
    own = options.get("exclude", "")
    left = {node for node, state in there.items() if re.split(r"[^a-z]", state)[0] not in _UNUSABLE}
    left -= {*names, *host_names(own)}
    if len(left) < _count(options.get("nodes", "1")):
        return Exclusion(names, (), too_few=True, beyond=beyond, most=most)
    together = ",".join(part for part in (own, *names) if part)
    return Exclusion(names, (f"--exclude={together}",), beyond=beyond, most=most)


def _options(directives: Sequence[str]) -> dict[str, str]:
    """The options by long name, from `--nodes=2`, `--nodes 2`, `-N2` and `-N 2`; the last of several counts."""
    options: dict[str, str] = {}
    arguments = [argument.strip("'\"") for argument in directives]
    for place, argument in enumerate(arguments):
        after = arguments[place + 1] if place + 1 < len(arguments) else ""
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            options[name] = value if equals else after
        elif argument[:2] in _OPTIONS:
            options[_OPTIONS[argument[:2]]] = argument[2:] or after
    return options


def _count(nodes: str) -> int:
    """The least of `--nodes`: `2`, or `2-4`."""
    match = re.match(r"\d+", nodes)
    return int(match[0]) if match else 1
