"""A site as its SLURM describes it: what `scontrol show` and its like print, read into plain facts.

Text and never --json, whose shape changed in 23.11 and 24.05. Fields as printed by 22.05 to 26.05 (SLURM src/api/
node_info.c, partition_info.c, topo_info.c and the topology plugins); what a version does not print is simply not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from llmlaunch.frozen import frozen
from llmlaunch.rundir.foreign_values import is_whole_number

_NONE = ("(null)", "N/A", "n/a", "None", "none", "")


@frozen
class Answers:
    """The output of each SLURM command; "" if a command has none here."""

    config: str  # scontrol show config
    partitions: str  # scontrol show partition
    nodes: str  # scontrol show node
    topology: str = ""  # scontrol show topology
    srun_help: str = ""  # srun --help
    associations: str = ""  # sacctmgr -nP show assoc user=... format=account,qos
    programs: tuple[str, ...] = ()  # of those that run containers, the ones on PATH


@frozen
class Gpus:
    """The GPUs of a node, as its GRES name them; `type` is None where they have none there."""

    type: str | None
    count: int


@frozen
class SlurmNode:
    """One node. `cpus` are those jobs may have; `memory_mib` is what SLURM hands out."""

    name: str
    cpus: int
    memory_mib: int
    gpus: tuple[Gpus, ...]
    features: tuple[str, ...]
    partitions: tuple[str, ...]


@frozen
class Partition:
    """One partition, with SLURM's own words for its limits."""

    name: str
    default: bool
    max_time: str
    max_nodes: str
    preempt_mode: str
    grace_time: str
    whole_nodes: bool
    shared: bool = False
    """Its nodes are shared, whatever a job asks for."""
    accounts: tuple[str, ...] = ()
    """Those whose jobs it takes; empty where it takes all."""


@frozen
class SlurmSite:
    """`nodes_per_switch` and `nodes_per_block` are the smallest leaf's, None where SLURM knows of none."""

    config: Mapping[str, str]
    partitions: tuple[Partition, ...]
    nodes: tuple[SlurmNode, ...]
    nodes_per_switch: int | None
    nodes_per_block: int | None
    has_pyxis: bool
    programs: tuple[str, ...]
    accounts: tuple[str, ...]
    qos: tuple[str, ...]

    def setting(self, name: str) -> str:
        """Return a value of `scontrol show config`; "" if it is not set or not known."""
        value = self.config.get(name, "")
        return "" if value in _NONE else value


def read_site(answers: Answers) -> SlurmSite:
    """Return the facts in these answers. It never fails: what cannot be read is left out."""
    accounts, qos = _associations(answers.associations)
    return SlurmSite(
        config=_config(answers.config),
        partitions=tuple(_partition(record) for record in _records(answers.partitions, "PartitionName")),
        nodes=tuple(_node(record) for record in _records(answers.nodes, "NodeName")),
        nodes_per_switch=_smallest(answers.topology, "SwitchName", "Level=0"),
        nodes_per_block=_smallest(answers.topology, "BlockName", ""),
        has_pyxis="--container-image" in answers.srun_help,
        programs=answers.programs,
        accounts=accounts,
        qos=qos,
    )


def host_count(hosts: str) -> int:
    """Return how many hosts a list such as `n[01-16,20],gpu-[1-2]-[1-4]` names."""
    return sum(
        prod(_range_count(ranges) for ranges in re.findall(r"\[([^\]]*)\]", name))
        for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    )


def _range_count(ranges: str) -> int:
    ends = (part.partition("-") for part in ranges.split(","))
    return sum(int(last) - int(first) + 1 if last else 1 for first, _, last in ends)


def _config(text: str) -> dict[str, str]:
    pairs = (re.fullmatch(r"(\w+)\s*=\s*(.*?)\s*", line) for line in text.splitlines())
    return {pair[1]: pair[2] for pair in pairs if pair}


def _records(text: str, first: str) -> list[str]:
    """Return the records of `scontrol show`, each on one line or on many."""
    return [f"{first}={record}" for record in re.split(rf"(?:^|\n){first}=", text)[1:]]


def _field(record: str, name: str) -> str:
    match = re.search(rf"(?:^|\s){name}=(\S*)", record)
    return "" if match is None or match[1] in _NONE else match[1]


def _names(record: str, field: str) -> tuple[str, ...]:
    return tuple(filter(None, _field(record, field).split(",")))


def _number(record: str, *fields: str) -> int:
    values = (_field(record, field) for field in fields)
    return next((int(value) for value in values if is_whole_number(value)), 0)


def _partition(record: str) -> Partition:
    return Partition(
        name=_field(record, "PartitionName"),
        default=_field(record, "Default") == "YES",
        max_time=_field(record, "MaxTime"),
        max_nodes=_field(record, "MaxNodes"),
        preempt_mode=_field(record, "PreemptMode"),
        grace_time=_field(record, "GraceTime"),
        # The second as 26.05 says the same, with OverSubscribe=NO beside it.
        whole_nodes="EXCLUSIVE" in _field(record, "OverSubscribe") or _field(record, "Exclusive") == "NODE",
        shared=_field(record, "OverSubscribe").startswith("FORCE"),
        accounts=tuple(name for name in _names(record, "AllowAccounts") if name != "ALL"),
    )


def _node(record: str) -> SlurmNode:
    return SlurmNode(
        name=_field(record, "NodeName"),
        cpus=_number(record, "CPUEfctv", "CPUTot"),
        memory_mib=_number(record, "RealMemory"),
        gpus=gpus_of_gres(_field(record, "Gres")),
        features=_names(record, "ActiveFeatures") or _names(record, "AvailableFeatures"),
        partitions=_names(record, "Partitions"),
    )


def gpus_of_gres(gres: str) -> tuple[Gpus, ...]:
    """Return the GPUs in a GRES such as `gpu:h100:8(S:0-1),nvme:2`, `gpu:8` or `gpu:a100:no_consume:4`."""
    entries = (entry.split(":") for entry in re.sub(r"\([^)]*\)", "", gres).split(","))
    gpus = []
    for kind, *parts in entries:
        if kind == "gpu" and parts and is_whole_number(parts[-1]):
            named = [word for word in parts[:-1] if word != "no_consume"]
            gpus.append(Gpus(named[0] if named else None, int(parts[-1])))
    return tuple(gpus)


def _smallest(topology: str, first: str, which: str) -> int | None:
    counts = [host_count(_field(leaf, "Nodes")) for leaf in _records(topology, first) if which in leaf]
    return min((count for count in counts if count), default=None)


def _associations(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rows = [line.split("|") for line in text.splitlines() if "|" in line]
    accounts = dict.fromkeys(row[0] for row in rows if row[0])
    qos = dict.fromkeys(name for row in rows for name in row[1].split(",") if name)
    return tuple(accounts), tuple(qos)
