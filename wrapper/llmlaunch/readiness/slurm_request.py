"""What a job asks of SLURM, beside what its partitions have: what could never start waits in the queue for ever where
the site leaves EnforcePartLimits at its default, and a time limit that is shorter than the training ends it.

What sbatch refuses at once, such as a partition it does not know, is only warned of: sbatch has the last word.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from math import ceil
from typing import TYPE_CHECKING

from llmlaunch.documents.slurm_options import limit_seconds
from llmlaunch.errors import UserError
from llmlaunch.findings import Finding, doubtful, missing, note
from llmlaunch.frozen import frozen
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import counted
from llmlaunch.units import duration

if TYPE_CHECKING:
    from llmlaunch.cluster.slurm_site import Gpus


ANSWER_SECONDS = 2.0  # `check` does not wait longer for SLURM
# partition, state, longest time, time unless asked, most nodes of a job, nodes, their state, GRES, memory in MiB
FORMAT = "%P|%a|%l|%L|%s|%D|%t|%G|%m"
UNUSABLE = ("down", "drain", "drng", "fail", "inval", "unk", "futr", "err", "maint")
UNITS_IN_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


@frozen
class NodeGroup:
    """Nodes of one partition that are alike, with the partition's limits; None where there is none."""

    partition: str
    default: bool
    up: bool
    longest_seconds: int | None
    default_seconds: int | None
    most_nodes: int | None
    nodes: int
    usable: bool
    gpus: tuple[Gpus, ...]
    memory_mib: int


def listed_partitions() -> str:
    """Return what sinfo says of this machine's SLURM; "" where there is none, or it does not answer at once."""
    if shutil.which("sinfo") is None:
        return ""
    from llmlaunch.launchers.slurm.commands import SlurmCommands

    try:
        answer = SlurmCommands(ANSWER_SECONDS, 1, lambda _: None).ask(["sinfo", "-h", "-e", "-o", FORMAT])
    except UserError:
        return ""
    return answer.output if answer.code == 0 else ""


def request_findings(recipe: Recipe, training_seconds: float, listed: str) -> Iterator[Finding]:
    """Yield what cannot start on the partitions as `listed_partitions` has them, and whether the training fits its time
    limit. A job for another cluster than this machine's is not judged by its partitions."""
    groups = [group for group in map(_group, listed.splitlines()) if group is not None]
    asked: Sequence[NodeGroup] = ()
    if groups and not recipe.slurm.get("clusters"):
        names = _partition_names(recipe, groups)
        asked = [group for group in groups if group.partition in names]
        yield from _unknown_partitions(recipe, groups, names)
    if asked:
        yield from _limits(recipe, asked)
        yield from _devices(recipe, asked)
    yield from _duration(recipe, training_seconds, asked)


def _group(line: str) -> NodeGroup | None:
    fields = line.split("|")
    if len(fields) != 9 or not is_whole_number(fields[5]):
        return None
    from llmlaunch.cluster.slurm_site import gpus_of_gres

    partition, state, longest, usual, size, nodes, node_state, gres, memory = fields
    most = size.rpartition("-")[2]
    return NodeGroup(
        partition=partition.rstrip("*"),
        default=partition.endswith("*"),
        up=state == "up",
        longest_seconds=limit_seconds(longest),
        default_seconds=limit_seconds(usual),
        most_nodes=int(most) if is_whole_number(most) else None,
        nodes=int(nodes),
        usable=not node_state.startswith(UNUSABLE),
        gpus=gpus_of_gres(gres),
        memory_mib=int(memory.rstrip("+")) if is_whole_number(memory.rstrip("+")) else 0,
    )


def _partition_names(recipe: Recipe, groups: Sequence[NodeGroup]) -> list[str]:
    named = recipe.slurm.get("partition")
    if named:
        return str(named).split(",")
    return list(dict.fromkeys(group.partition for group in groups if group.default))


def _unknown_partitions(recipe: Recipe, groups: Sequence[NodeGroup], names: Sequence[str]) -> Iterator[Finding]:
    there = list(dict.fromkeys(group.partition for group in groups))
    if not names:
        yield doubtful(("slurm",), f"this SLURM has no default partition; set slurm.partition to one of {_some(there)}")
    for name in names:
        if name not in there:
            near = get_close_matches(name, there, 1)
            advice = f"write {near[0]}" if near else f"it has {_some(there)}"
            yield doubtful(("slurm", "partition"), f"this SLURM has no partition {name} that you may use; {advice}")
        elif not any(group.up for group in groups if group.partition == name):
            yield doubtful(
                ("slurm", "partition"), f"{name} is not up: the job waits until it is; {_some(there)} are there"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _limits(recipe: Recipe, asked: Sequence[NodeGroup]) -> Iterator[Finding]:
    """Time and nodes, by the most that any of the partitions allows."""
    where = "/".join(dict.fromkeys(group.partition for group in asked))
    seconds = limit_seconds(recipe.slurm.get("time"))
    longest = [group.longest_seconds for group in asked]
    most_seconds = None if None in longest else max(limit for limit in longest if limit is not None)
    if seconds is not None and most_seconds is not None and seconds > most_seconds:
        yield missing(
            ("slurm", "time"),
            f"{duration(seconds)} are more than partition {where} allows, {duration(most_seconds)}: the job would "
            "never start; lower it, or name another partition",
        )
    nodes = recipe.nodes + recipe.spare_nodes
    there = {name: sum(group.nodes for group in asked if group.partition == name) for name in where.split("/")}
    usable = sum(group.nodes for group in asked if group.usable)
    sizes = [group.most_nodes or group.nodes for group in asked if group.most_nodes is not None]
    if nodes > max(there.values()):
        yield missing(
            ("nodes",), f"{counted(nodes, 'node')}, and partition {where} has {max(there.values())}; take fewer nodes"
        )
    elif sizes and len(sizes) == len(asked) and nodes > max(sizes):
        yield missing(("nodes",), f"{counted(nodes, 'node')}, and partition {where} gives a job {max(sizes)} at most")
    elif nodes > usable:
        yield doubtful(
            ("nodes",),
            f"{counted(nodes, 'node')}, and {usable} of partition {where} are usable now: the job waits for the others "
            "to come back (sinfo -R says why they are out)",
        )


def _devices(recipe: Recipe, asked: Sequence[NodeGroup]) -> Iterator[Finding]:
    """GPUs and memory of a node; enough nodes must have both."""
    where = "/".join(dict.fromkeys(group.partition for group in asked))
    needed, kind = recipe.cluster.devices_per_node, recipe.cluster.site.gpu_type
    requests = recipe.cluster.gpu_request != "none" and recipe.cluster.accelerator.kind == "gpu"
    have = max(sum(gpus.count for gpus in group.gpus if kind in (None, gpus.type)) for group in asked)
    if requests and have < needed:
        gpus = sorted({f"{g.type or 'gpu'}:{g.count}" for group in asked for g in group.gpus})
        yield missing(
            ("cluster",),
            f"{counted(needed, 'GPU')}{f' of type {kind}' if kind else ''} a node, and no node of partition {where} "
            f"has so many (there are {_some(gpus) or 'none'}); name the partition or the cluster that has them",
        )
    asked_mib, most_mib = _memory_mib(recipe.slurm.get("mem")), max(group.memory_mib for group in asked)
    if asked_mib is not None and most_mib and asked_mib > most_mib:
        yield missing(
            ("slurm", "mem"),
            f"{recipe.slurm['mem']} are more than any node of partition {where} has, {most_mib}M; write at most that, "
            "or 0 for all of a node's",
        )


def _memory_mib(value: object) -> float | None:
    text = "" if value is None or isinstance(value, bool) else str(value).strip().upper().removesuffix("B")
    unit = text[-1:] if text[-1:] in UNITS_IN_MIB else "M"
    number = text.removesuffix(unit)
    return float(number) * UNITS_IN_MIB[unit] if is_whole_number(number) else None


def _duration(recipe: Recipe, training_seconds: float, asked: Sequence[NodeGroup]) -> Iterator[Finding]:
    """Whether the training is over before its job's time is, or comes back often enough."""
    given = limit_seconds(recipe.slurm.get("time"))
    usual = [group.default_seconds or group.longest_seconds for group in asked]
    limit = given or (max((seconds for seconds in usual if seconds), default=None) if None not in usual else None)
    if limit is None or training_seconds <= limit:
        return
    key = ("slurm", "time") if given else ("slurm",)
    takes = f"the training takes about {duration(training_seconds)}, and its time limit is {duration(limit)}"
    starts = ceil(training_seconds / limit)
    if recipe.training.save_interval is None:
        yield doubtful(
            key,
            f"{takes}: it would be ended there, and all of it lost; write training.save_interval and "
            "training.checkpoint_path, so that it comes back, or raise slurm.time",
        )
    elif recipe.restart is None:
        yield doubtful(key, f"{takes}, and restart: none keeps it from going on; remove that, or raise slurm.time")
    elif starts - 1 > recipe.restart.times:
        yield doubtful(
            key,
            f"{takes}: that is {starts} starts, and restart.times allows {counted(recipe.restart.times, 'restart')}; "
            f"write restart: {{times: {2 * starts}}}, or raise slurm.time",
        )
    else:
        yield note(key, f"{takes}: it comes back about {counted(starts - 1, 'time')} from its last checkpoint")
