"""Leaves nodes at fault out when the job, or the next job of its chain, starts: `scontrol update ExcNodeList`, as its
owner.

Of what has been left out already a person's own `--exclude` stays, and of the rest the latest, so that all of them
together are no more than 5 % of the partition (one node of a small one).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from ..causes.suspects import most_left_out
from ..rundir import file_names
from ..rundir.files import read_object, read_text
from ..rundir.values import host_names, is_host, is_slurm_job
from .files import say
from .slurm_steps import ask

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

_USABLE = ("idle", "alloc", "mix", "comp")
_OWN = re.compile(r"^#SBATCH\s+(?:--exclude[=\s]|-x\s*)(\S+)", re.MULTILINE)


class PartitionNodes(NamedTuple):
    """The nodes of a partition, and those of them that take jobs."""

    nodes: frozenset[str]
    usable: frozenset[str]


def leave_out(run_directory: Path, own_job: str, at_fault: Sequence[str], chain: bool = False) -> None:
    """Leave out the nodes `at_fault` for the job itself, or with `chain` for the jobs that follow it. Not where too few
    other nodes of the partition are left: SLURM would keep a job waiting for ever."""
    at_fault = [node for node in at_fault if is_host(node)]
    needed = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    own, partition = _own_exclusion(run_directory), _partition(os.environ.get("SLURM_JOB_PARTITION", ""))
    names = ",".join(at_fault)
    for job in _following(run_directory, own_job) if chain else [own_job]:
        starts = f"job {job} starts" if chain else "the job starts again"
        listed = exclusion(at_fault, _excluded(job), own, partition.nodes)
        if len(partition.usable.difference(listed)) < needed:
            say(f"{names} at fault, but too few other nodes are left; job {job} may get it again")
        elif ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(listed)}") is not None:
            say(f"{names} at fault: left out when {starts}")


def exclusion(
    at_fault: Sequence[str], before: Sequence[str], own: Sequence[str], partition: Collection[str]
) -> list[str]:
    """Return what the job is to leave out: a person's `own` nodes, those at fault, and of those `before` the rest, as
    far as the bound on the `partition` allows."""
    ours = [node for node in dict.fromkeys([*at_fault, *before]) if node not in own]
    return [*own, *ours[: most_left_out(len(partition))]]


def _following(run_directory: Path, job: str) -> list[str]:
    """The jobs of the chain after `job`."""
    chain = (read_object(run_directory / file_names.SUBMISSION) or {}).get("chain")
    links = [str(link) for link in chain if is_slurm_job(str(link))] if isinstance(chain, list) else []
    return links[links.index(job) + 1 :] if job in links else links


def _own_exclusion(run_directory: Path) -> list[str]:
    try:
        script = read_text(run_directory / file_names.JOB_SCRIPT)
    except OSError:
        return []
    return [node for words in _OWN.findall(script)[-1:] for node in host_names(words.strip("'\""))]


def _excluded(job: str) -> list[str]:
    answer = re.search(r" ExcNodeList=(\S+)", ask("scontrol", "show", "job", "-o", job) or "")
    return [] if answer is None or answer[1] == "(null)" else host_names(answer[1])


def _partition(name: str) -> PartitionNodes:
    nodes, usable = set(), set()
    for line in (ask("sinfo", "-h", "-N", "-p", name, "-o", "%N %t") or "").splitlines():
        node, _, state = line.partition(" ")
        nodes.add(node)
        if re.split(r"[^a-z]", state)[0] in _USABLE:
            usable.add(node)
    return PartitionNodes(frozenset(nodes), frozenset(usable))
