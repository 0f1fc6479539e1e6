"""The account of one attempt, in the shape of `attempts/<attempt>/summary.json` (docs/run-directory.md).

Written by the job's last act, so that whoever reads the store next has all there is without opening every node's file.
Null is what nobody saw; every number that is there has its source in `sources`, by its own name.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from . import file_names
from .files import read_object
from .regular_files import MOST_BYTES, open_regular
from .schema import Bytes, Count, Step, Time, exact

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SCHEMA = 1
RECORDS = (".json", ".jsonl")
"""Suffixes of the files of ranks and probes: one for each rank, as earlier versions wrote them, or for each node."""


@dataclass(frozen=True)
class RankSummary:
    """What one global rank used, over the attempt. Keys that nobody saw are left out."""

    rank: Count
    """global rank"""
    pipeline_rank: Count | None = None
    """its stage"""
    node: str | None = None
    """where it ran"""
    local_rank: Count | None = None
    """its number on the node"""
    pid: Count | None = None
    """process id of the trainer"""
    started_at: Time | None = None
    """when it was started"""
    gpu_uuid: str | None = None
    """of a MIG slice if it has one"""
    gpu_name: str | None = None
    """such as `NVIDIA H100 80GB HBM3`"""
    peak_bytes: Bytes | None = None
    """peak of the run's kind: the process's memory on its device, or its resident memory on a CPU"""
    peak_source: str | None = None
    """how that was seen"""
    device_total_bytes: Bytes | None = None
    """memory of its device"""
    device_peak_bytes: Bytes | None = None
    """of all processes"""
    baseline_bytes: Bytes | None = None
    """what the device held before the trainer"""
    process_peak_bytes: Bytes | None = None
    """largest sample of the driver's process list"""
    accounting_peak_bytes: Bytes | None = None
    """the driver's own maximum"""
    allocated_peak_bytes: Bytes | None = None
    """of torch's caching allocator, as are the next two"""
    active_peak_bytes: Bytes | None = None
    """blocks that are allocated or not yet free again"""
    reserved_peak_bytes: Bytes | None = None
    """what it held of the device"""
    alloc_retries: Count | None = None
    """how often the allocator gave its cache back to go on"""
    ooms: Count | None = None
    """how often it ran out of memory"""
    outside_torch_bytes: Bytes | None = None
    """context, NCCL, workspaces: the process's memory less what is reserved"""
    resident_peak_bytes: Bytes | None = None
    """main memory"""
    utilization_percent: float | None = None
    """mean over the attempt"""
    power_watts: float | None = None
    """mean over the attempt"""
    power_peak_watts: float | None = None
    """highest sample"""
    sources: dict[str, str] = field(default_factory=dict)
    """where each number is from, by its key"""


@dataclass(frozen=True)
class NodeSummary:
    """What one node's monitor saw of the node itself. Keys that nobody saw are left out."""

    node: str
    """its name"""
    ended: bool = False
    """false if its monitor was lost"""
    gpus: Count = 0
    """how many it saw, MIG slices counted one by one"""
    host_peak_bytes: Bytes | None = None
    """main memory, of everything that ran there"""
    host_peak_source: str | None = None
    """how that was seen"""
    host_total_bytes: Bytes | None = None
    """its main memory"""
    cgroup_peak_bytes: Bytes | None = None
    """what the job was charged with, its file cache included"""
    cgroup_limit_bytes: Bytes | None = None
    """the most that it may be charged with"""
    remarks: tuple[str, ...] = ()
    """what it could not see"""


@dataclass(frozen=True)
class AttemptSummary:
    """The account of one attempt, from rank records, probes, monitors and progress."""

    attempt: str
    """its name"""
    ranks: tuple[RankSummary, ...] = ()
    """one for each that left anything"""
    nodes: tuple[NodeSummary, ...] = ()
    """one for each that a monitor saw"""
    step: Step | None = None
    """the last that was logged"""
    steps_run: Step | None = None
    """made by this attempt: NCCL and the allocator grow during the first"""
    step_seconds: float | None = None
    """median"""
    tokens_per_second: float | None = None
    """of the job"""
    files: dict[str, int] = field(default_factory=dict)
    """size of each file that it was made from, by path in the run directory. It is complete while all of them have
    their size and no other exists; of a monitor's file that has grown, only lines of this attempt are news. What a node
    kept in its spool is in none of these"""
    damaged: dict[str, int] = field(default_factory=dict)
    """lines that could not be read, by file. A line that names another attempt is not counted, and a file that is
    replaced as a whole counts as one line. Of a monitor's file of more than 1 MiB, beats that another beat follows are
    not parsed: the next says the same and more. A rank record that is torn or gone is taken from its copy in
    `status.json`"""

    def as_json(self) -> dict[str, Any]:
        """What nobody saw is left out of ranks and nodes: a job of a thousand ranks has one summary."""
        whole = asdict(self)
        for part in ("ranks", "nodes"):
            whole[part] = [{k: v for k, v in entry.items() if v is not None} for entry in whole[part]]
        return {"schema": SCHEMA, **whole}

    @property
    def ranks_of_files(self) -> set[str]:
        """The ranks, as text, whose record is in one of `files`: a file for each rank, or one for each node."""
        folder = f"{file_names.ATTEMPTS}/{self.attempt}/{file_names.RANKS}/"
        names = (name[len(folder) :] for name in self.files if name.startswith(folder))
        of_nodes = {str(rank.rank) for rank in self.ranks if rank.started_at is not None}
        return of_nodes | {name[: -len(".json")] for name in names if name.endswith(".json")}


def summary_of_json(value: Any) -> AttemptSummary | None:
    """The summary in a JSON value; None where it is none, of another schema, or has a value of another type."""
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        return None
    try:
        account = exact(AttemptSummary, {**value, "ranks": [], "nodes": []})
        ranks = [RankSummary(**exact(RankSummary, entry)) for entry in value.get("ranks", ())]
        nodes = [exact(NodeSummary, entry) for entry in value.get("nodes", ())]
        of_nodes = [NodeSummary(**{**node, "remarks": tuple(node.get("remarks", ()))}) for node in nodes]
        return AttemptSummary(**{**account, "ranks": tuple(ranks), "nodes": tuple(of_nodes)})
    except TypeError:  # also for a key that is missing
        return None


def whole_summary(run_directory: Path, attempt: str) -> AttemptSummary | None:
    """Return the summary that the job wrote; None where it did not, or where there is more to know by now."""
    record = read_object(file_names.attempt_folder(run_directory, attempt) / file_names.SUMMARY)
    written = None if record is None else summary_of_json(record)
    if written is None or written.attempt != attempt or not still_whole(written, run_directory):
        return None
    return written


def still_whole(summary: AttemptSummary, run_directory: Path) -> bool:
    """Return whether every file that says what the attempt used is as long as it was, and none was added. A monitor's
    file holds all attempts of its node: what was appended of others is nothing new."""
    now = dict(counted_files(run_directory, summary.attempt))
    if now.keys() != summary.files.keys():
        return False
    changed = [name for name, size in now.items() if size != summary.files[name]]
    return all(_is_of_others(run_directory / name, summary.files[name], summary.attempt) for name in changed)


def _is_of_others(path: Path, length: int, attempt: str) -> bool:
    """Whether what a monitor's file has gained beyond `length` never names `attempt`."""
    if path.parent.name != file_names.PEAKS:
        return False
    try:
        with open_regular(path) as file:
            file.seek(length)
            added = file.read(MOST_BYTES + 1) or b""
    except OSError:
        return False
    return 0 < len(added) <= MOST_BYTES and json.dumps(attempt).encode() not in added


def counted_files(run_directory: Path, attempt: str) -> Iterator[tuple[str, int]]:
    """Path in the run directory and size of every file that says what an attempt used and may still change."""
    own = f"{file_names.ATTEMPTS}/{attempt}"
    with contextlib.suppress(OSError):  # no step was ever seen
        progress = f"{own}/{file_names.PROGRESS}"
        yield progress, (run_directory / progress).stat().st_size
    folders = (
        (f"{own}/{file_names.RANKS}", RECORDS),
        (f"{own}/{file_names.PROBES}", RECORDS),
        (file_names.PEAKS, ".jsonl"),
    )
    for folder, suffix in folders:
        for name, state in sorted(file_states(run_directory / folder, suffix).items()):
            yield f"{folder}/{name}", state.st_size


def file_states(folder: Path, suffix: str | tuple[str, ...]) -> dict[str, os.stat_result]:
    """Return the state of each file by name: one listing and one question for each, since run directories lie on
    network file systems."""
    states = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix) and not entry.name.startswith("."):
                with contextlib.suppress(OSError):
                    states[entry.name] = entry.stat()
    return states
