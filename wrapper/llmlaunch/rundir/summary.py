"""The account of one attempt, in the shape of `attempts/<attempt>/summary.json` (docs/run-directory.md).

Written by the job's last act, so that whoever reads the store next has all there is without opening every node's file.
Null is what nobody saw; every number that is there has its source in `sources`, by its own name.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from . import file_names
from .files import read_object
from .regular_files import MOST_BYTES, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SCHEMA = 1
RECORDS = (".json", ".jsonl")
"""Suffixes of the files of ranks and probes: one for each rank, as earlier versions wrote them, or for each node."""
T = TypeVar("T")


@dataclass(frozen=True)
class RankSummary:
    """What one global rank used. `peak_bytes` is the peak of the run's own kind: the process's memory on its device, or
    its resident memory on a CPU; `peak_source` is how that was seen. Peaks are of the whole attempt."""

    rank: int
    pipeline_rank: int | None = None
    node: str | None = None
    local_rank: int | None = None
    pid: int | None = None  # of the trainer
    started_at: float | None = None  # unix seconds
    gpu_uuid: str | None = None  # of a MIG slice where it has one
    gpu_name: str | None = None
    peak_bytes: int | None = None
    peak_source: str | None = None
    device_total_bytes: int | None = None
    device_peak_bytes: int | None = None  # of all processes
    baseline_bytes: int | None = None  # what the device held before the trainer
    process_peak_bytes: int | None = None  # largest sample of the driver's process list
    accounting_peak_bytes: int | None = None  # the driver's own maximum
    allocated_peak_bytes: int | None = None  # of torch's caching allocator, as are the next two
    active_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    alloc_retries: int | None = None  # the allocator gave its cache back to go on
    ooms: int | None = None
    outside_torch_bytes: int | None = None  # context, NCCL, workspaces: the process's memory less what is reserved
    resident_peak_bytes: int | None = None  # main memory
    utilization_percent: float | None = None  # mean over the attempt
    power_watts: float | None = None  # mean over the attempt
    power_peak_watts: float | None = None
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeSummary:
    """What one node's monitor saw of the node itself: `gpus` is how many, MIG slices counted one by one. `ended` is
    false where the monitor was lost. `host_peak_bytes` is main memory, of everything that ran there."""

    node: str
    ended: bool = False
    gpus: int = 0
    host_peak_bytes: int | None = None
    host_peak_source: str | None = None
    host_total_bytes: int | None = None
    cgroup_peak_bytes: int | None = None  # what the job was charged with, its file cache included
    cgroup_limit_bytes: int | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttemptSummary:
    """`files` are the sizes, by path in the run directory, of what was read: where one has grown since, there is more
    to know. `damaged` are the numbers of lines of them that could not be read."""

    attempt: str
    ranks: tuple[RankSummary, ...] = ()
    nodes: tuple[NodeSummary, ...] = ()
    step: int | None = None  # the last logged
    steps_run: int | None = None  # by this attempt: NCCL and the allocator grow during the first
    step_seconds: float | None = None  # median
    tokens_per_second: float | None = None
    files: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)

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
    """The summary in a JSON value; None where it is none, or of another schema."""
    if not isinstance(value, dict) or value.get("schema") != SCHEMA or not isinstance(value.get("attempt"), str):
        return None
    try:
        ranks = tuple(_of_fields(RankSummary, entry) for entry in value.get("ranks", ()))
        nodes = tuple(
            _of_fields(NodeSummary, {**entry, "remarks": tuple(entry.get("remarks", ()))})
            for entry in value.get("nodes", ())
        )
        return _of_fields(AttemptSummary, {**value, "ranks": ranks, "nodes": nodes})
    except (TypeError, AttributeError):
        return None


def _types_of(written: str) -> frozenset[type]:
    """The exact types that a field of this annotation may hold."""
    kind, _, optional = written.partition(" | ")
    scalars: dict[str, set[type]] = {"float": {int, float}, "int": {int}, "bool": {bool}, "str": {str}}
    types = scalars.get(kind, {tuple} if kind.startswith("tuple") else {dict})
    return frozenset(types | ({type(None)} if optional == "None" else set()))


# worked out once: they are asked for every rank of every run that is collected
_TYPES: dict[type, dict[str, frozenset[type]]] = {
    kind: {field.name: _types_of(str(field.type)) for field in fields(kind)}
    for kind in (AttemptSummary, NodeSummary, RankSummary)
}
_ITEM_TYPES: dict[str, type] = {"remarks": str, "sources": str, "files": int, "damaged": int}


def _of_fields(kind: type[T], value: dict[str, Any]) -> T:
    """Keys of a newer program are left aside. Raises TypeError where a value is not of its field's type."""
    types = _TYPES[kind]
    arguments = {name: item for name, item in value.items() if name in types}
    wrong = [name for name, item in arguments.items() if type(item) not in types[name]]
    for name in _ITEM_TYPES.keys() & arguments.keys():
        items = arguments[name].values() if isinstance(arguments[name], dict) else arguments[name]
        wrong += [name for item in items if type(item) is not _ITEM_TYPES[name]]
    if wrong:
        raise TypeError(f"{', '.join(wrong)}: of another type")
    return kind(**arguments)


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
