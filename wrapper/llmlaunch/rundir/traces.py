"""What each rank of an attempt left, put together from the files of all who saw it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .gpu_assignment import given_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .attempt_files import AttemptFiles
    from .gpu_assignment import GivenGpu
    from .monitor_samples import Logged
    from .probe_files import TorchPeaks
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Traces", "pipeline_rank_of", "rank_traces"]


@dataclass(frozen=True)
class Traces:
    """What one global rank left: its record (empty where there is none), what torch's probe, the log and the monitor
    say of it, and its GPU. `pids` are its processes as the driver lists them; `shared`: another rank's probe names the
    same device."""

    rank: int
    node: str | None
    pipeline_rank: int | None
    record: Mapping[str, Any] = field(default_factory=dict)
    torch: TorchPeaks | None = None
    shared: bool = False
    logged: Logged | None = None
    resident_seen_bytes: int | None = None
    pids: set[str] = field(default_factory=set)
    given: GivenGpu | None = None


def rank_traces(files: AttemptFiles) -> list[Traces]:
    """Of every rank that left anything, in their order."""
    records = {record["rank"]: record for record in files.ranks}
    torch = {one.rank: one for one in (files.probes.of_rank(rank) for rank in _probed(files)) if one is not None}
    logged = {rank: said for node in files.nodes.values() for rank, said in node.logged.items()}
    resident = _resident(files)
    homes = _homes(files, records, torch)
    pids = {rank: _pids(files, records.get(rank, {}), rank) for rank in sorted({*records, *torch, *logged, *resident})}
    given = _given(files, homes, torch, pids)
    uses = Counter((homes.get(rank), one.uuid) for rank, one in torch.items())
    return [
        Traces(
            rank=rank,
            node=homes.get(rank),
            pipeline_rank=pipeline_rank_of(files.described, rank),
            record=records.get(rank, {}),
            torch=torch.get(rank),
            shared=rank in torch and uses[homes.get(rank), torch[rank].uuid] > 1,
            logged=logged.get(rank),
            resident_seen_bytes=resident.get(rank),
            pids=own,
            given=given.get(rank),
        )
        for rank, own in pids.items()
    ]


def _probed(files: AttemptFiles) -> set[int]:
    return {one.rank for one in files.probes.peaks}


def _resident(files: AttemptFiles) -> dict[int, int]:
    found: dict[int, int] = {}
    for node in files.nodes.values():
        for rank, peak in node.resident_peak_bytes.items():
            found[rank] = max(peak, found.get(rank, 0))
    return found


def _homes(
    files: AttemptFiles, records: Mapping[int, Mapping[str, Any]], torch: Mapping[int, TorchPeaks]
) -> dict[int, str]:
    """The node of each rank: by its own record, else by its probe, else by the monitor that saw it."""
    homes = {rank: name for name, node in files.nodes.items() for rank in (*node.logged, *node.resident_peak_bytes)}
    homes.update({rank: one.node for rank, one in torch.items() if one.node})
    homes.update({rank: record["node"] for rank, record in records.items() if isinstance(record.get("node"), str)})
    return homes


def _pids(files: AttemptFiles, record: Mapping[str, Any], rank: int) -> set[str]:
    found = {str(record[key]) for key in ("program_pid", "pid") if record.get(key) is not None}
    found |= {str(one.pid) for one in files.probes.peaks if one.rank == rank and one.pid is not None}
    return found.union(*(node.rank_pids.get(rank, set()) for node in files.nodes.values()))


def _given(
    files: AttemptFiles, homes: Mapping[int, str], torch: Mapping[int, TorchPeaks], pids: Mapping[int, set[str]]
) -> dict[int, GivenGpu]:
    each = files.described.get("devices_per_node")
    found: dict[int, GivenGpu] = {}
    for name, node in files.nodes.items():
        here = {rank for rank in pids if homes.get(rank) == name}
        found.update(
            given_gpus(
                [record for record in files.ranks if record["rank"] in here],
                {rank: one.uuid for rank, one in torch.items() if rank in here and one.uuid is not None},
                {rank: own for rank, own in pids.items() if rank in here},
                node,
                each if type(each) is int else 0,
            )
        )
    return found


def pipeline_rank_of(run: Mapping[str, Any], rank: int) -> int | None:
    """`run` is run.json. Pipeline is the outermost rank order; None where the numbers do not fit together. A rank that
    runs alone is of the stage it was started for, whatever number it has there."""
    rehearsal = run.get("rehearsal")
    if isinstance(rehearsal, dict) and type(rehearsal.get("pipeline_rank")) is int:
        return int(rehearsal["pipeline_rank"])
    template = run.get("measurement")
    pipeline = _count(run, "pipeline")
    world = _count(template, "world_size") if isinstance(template, dict) else 0
    world = world or _count(run, "nodes") * _count(run, "devices_per_node")
    if not pipeline or not world or world % pipeline or rank >= world:
        return None
    return rank // (world // pipeline)


def _count(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    return value if type(value) is int and value > 0 else 0
