"""The summary of one attempt, in the form of `attempts/<attempt>/summary.json` (docs/run-directory.md).

The job writes it as its last act, so that readers need not open the files of every node. A value is null if nobody saw
it; every number has its source in `sources`, under its own name.
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
    """What one rank used during the attempt. A key is left out if its value is unknown."""

    rank: Count
    """global rank"""
    pipeline_rank: Count | None = None
    """pipeline rank"""
    node: str | None = None
    """node on which the rank ran"""
    local_rank: Count | None = None
    """rank within the node"""
    pid: Count | None = None
    """process id of the trainer"""
    started_at: Time | None = None
    """time at which the trainer started"""
    gpu_uuid: str | None = None
    """UUID of the GPU, or of the MIG slice if the rank has one"""
    gpu_name: str | None = None
    """product name of the GPU, such as `NVIDIA H100 80GB HBM3`"""
    peak_bytes: Bytes | None = None
    """peak memory of the process, of the kind that `run.json` predicts: on its device, or resident memory on a CPU"""
    peak_source: str | None = None
    """how `peak_bytes` was measured"""
    at_least: list[str] | None = None
    """keys of the peaks that may have been higher, because the monitor or the probe that saw them was lost before the
    attempt ended"""
    device_total_bytes: Bytes | None = None
    """memory of the rank's device"""
    device_peak_bytes: Bytes | None = None
    """peak memory in use on the device, summed over all processes"""
    baseline_bytes: Bytes | None = None
    """memory in use on the device before the trainer started"""
    process_peak_bytes: Bytes | None = None
    """largest sample in the driver's process list"""
    accounting_peak_bytes: Bytes | None = None
    """peak in the driver's accounting"""
    allocated_peak_bytes: Bytes | None = None
    """peak memory that torch's caching allocator had handed out"""
    active_peak_bytes: Bytes | None = None
    """peak memory in the allocator's blocks that were in use or not yet free for reuse"""
    reserved_peak_bytes: Bytes | None = None
    """peak memory that the allocator held on the device"""
    alloc_retries: Count | None = None
    """number of times the allocator released its cache and tried again"""
    ooms: Count | None = None
    """number of times the allocator ran out of memory"""
    outside_torch_bytes: Bytes | None = None
    """memory of the process outside torch's allocator: CUDA context, NCCL, workspaces"""
    resident_peak_bytes: Bytes | None = None
    """peak resident memory of the trainer"""
    utilization_percent: float | None = None
    """mean utilization of the GPU over the attempt"""
    power_watts: float | None = None
    """mean power of the GPU over the attempt"""
    power_peak_watts: float | None = None
    """highest power sample of the GPU"""
    sources: dict[str, str] = field(default_factory=dict)
    """how each number was measured, by key"""


@dataclass(frozen=True)
class NodeSummary:
    """What the monitor of one node saw of the node itself. A key is left out if its value is unknown."""

    node: str
    """name of the node"""
    ended: bool = False
    """whether its monitor ended in order; false if it was lost"""
    gpus: Count = 0
    """number of GPUs that the monitor saw, each MIG slice counted as one"""
    host_peak_bytes: Bytes | None = None
    """peak main memory in use"""
    host_peak_source: str | None = None
    """how `host_peak_bytes` was measured"""
    host_total_bytes: Bytes | None = None
    """main memory of the node"""
    cgroup_peak_bytes: Bytes | None = None
    """peak memory charged to the job's cgroup, file cache included"""
    cgroup_limit_bytes: Bytes | None = None
    """memory limit of the job's cgroup"""
    remarks: tuple[str, ...] = ()
    """what the monitor could not see, in words"""


@dataclass(frozen=True)
class AttemptSummary:
    """What one attempt used, compiled from rank records, probes, monitors and progress."""

    attempt: str
    """name of the attempt"""
    ranks: tuple[RankSummary, ...] = ()
    """each rank that left any record"""
    nodes: tuple[NodeSummary, ...] = ()
    """each node that a monitor saw"""
    step: Step | None = None
    """last step logged"""
    steps_run: Step | None = None
    """number of steps that this attempt made; during the first, NCCL and the allocator still grow"""
    step_seconds: float | None = None
    """median step time"""
    tokens_per_second: float | None = None
    """throughput of the whole job"""
    files: dict[str, int] = field(default_factory=dict)
    """size in bytes of each file from which the summary was made, by path in the run directory. The summary is complete
    as long as these files keep their sizes and no further one exists; if a monitor's file has grown, only new lines of
    this attempt count"""
    damaged: dict[str, int] = field(default_factory=dict)
    """number of lines that could not be read, by file. Lines that name another attempt are not counted, and a file that
    is replaced as a whole counts as one line. In a monitor's file of more than 1 MiB, a `beat` that is followed by
    another is not parsed, since the next one says the same and more. A rank record that is torn or missing is taken
    from its copy in `status.json`"""

    def as_json(self) -> dict[str, Any]:
        """Return the content of summary.json. Null values of ranks and nodes are left out, because a job of a thousand
        ranks has one summary."""
        whole = asdict(self)
        for part in ("ranks", "nodes"):
            whole[part] = [{k: v for k, v in entry.items() if v is not None} for entry in whole[part]]
        return {"schema": SCHEMA, **whole}

    @property
    def ranks_of_files(self) -> set[str]:
        """The ranks, as text, whose record is in one of `files`, whether there is one file per rank or one per node."""
        folder = f"{file_names.ATTEMPTS}/{self.attempt}/{file_names.RANKS}/"
        names = (name[len(folder) :] for name in self.files if name.startswith(folder))
        of_nodes = {str(rank.rank) for rank in self.ranks if rank.started_at is not None}
        return of_nodes | {name[: -len(".json")] for name in names if name.endswith(".json")}


def summary_of_json(value: Any) -> AttemptSummary | None:
    """Return the summary in a JSON value, or None if it is not a summary, has another schema, or has a value of another
    type."""
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
    """Return the summary that the job wrote, or None if it wrote none or if more is known by now."""
    record = read_object(file_names.attempt_folder(run_directory, attempt) / file_names.SUMMARY)
    written = None if record is None else summary_of_json(record)
    if written is None or written.attempt != attempt or not still_whole(written, run_directory):
        return None
    return written


def still_whole(summary: AttemptSummary, run_directory: Path) -> bool:
    """Return whether every file with evidence about the attempt still has its size, and no file was added. A monitor's
    file holds all attempts of its node, so lines of other attempts do not matter."""
    now = dict(counted_files(run_directory, summary.attempt))
    if now.keys() != summary.files.keys():
        return False
    changed = [name for name, size in now.items() if size != summary.files[name]]
    return all(_is_of_others(run_directory / name, summary.files[name], summary.attempt) for name in changed)


def _is_of_others(path: Path, length: int, attempt: str) -> bool:
    """Whether the part of a monitor's file beyond `length` never names `attempt`."""
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
    """Yield the path in the run directory and the size of every file with evidence about the attempt that may still
    change."""
    own = f"{file_names.ATTEMPTS}/{attempt}"
    with contextlib.suppress(OSError):  # no step was seen
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
    """Return the state of each file, by name. It takes one listing and one stat call per file, because run directories
    are on network file systems."""
    states = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix) and not entry.name.startswith("."):
                with contextlib.suppress(OSError):
                    states[entry.name] = entry.stat()
    return states
