"""One attempt of a run as measurement records, and in words why it has none. Pure: no database, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.store.attribution import RankPeak, device_peaks, resident_peaks
from llmlaunch.store.peaks import NodePeaks, Peaks, time_or_none

__all__ = ["AttemptRecords", "attempt_records", "pipeline_rank_of", "predicted_bytes_of"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class AttemptRecords:
    """The measurement records of one attempt; `why_none` is a sentence where there are none."""

    records: tuple[dict[str, Any], ...]
    why_none: str | None


def attempt_records(
    run: Record, run_id: str, attempt: str, ranks: Sequence[Record], peaks: Peaks, state: str
) -> AttemptRecords:
    """One record per global rank that a peak is known of. `run` is run.json, `ranks` the rank records of the attempt,
    `state` what became of it: the peak of a failed run is what it reached, not what it needs."""
    nodes = {node.node: node for (name, _), node in peaks.items() if name == attempt}
    usable = [record for record in ranks if type(record.get("rank")) is int and record["rank"] >= 0]
    found = _peaks_by_rank(run, usable, nodes)
    of_rank = {record["rank"]: record for record in usable}
    home = {rank: name for name, node in nodes.items() for rank in node.resident_peak_bytes}
    made = []
    for rank, peak in sorted(found.items()):
        record = of_rank.get(rank, {})
        node = record.get("node") or home.get(rank)
        made.append(_measurement(run, run_id, attempt, peak, record.get("started_at"), node, state))
    return AttemptRecords(tuple(made), None if made else _why_none(run, attempt, usable, nodes))


def _peaks_by_rank(run: Record, ranks: Sequence[Record], nodes: Mapping[str, NodePeaks]) -> dict[int, RankPeak]:
    found: dict[int, RankPeak] = {}
    names = dict.fromkeys([*(str(record.get("node")) for record in ranks), *nodes])
    for name in names:
        here = [record for record in ranks if str(record.get("node")) == name]
        if run.get("peak_kind") == "resident":
            found.update(resident_peaks(here, nodes.get(name)))
        else:
            found.update(device_peaks(here, nodes.get(name), _count(run, "devices_per_node")))
    return found


def _measurement(
    run: Record, run_id: str, attempt: str, peak: RankPeak, started_at: object, node: str | None, state: str
) -> dict[str, Any]:
    template = run.get("measurement")
    record: dict[str, Any] = dict(template) if isinstance(template, Mapping) else {}
    kind = str(run.get("peak_kind"))
    pipeline_rank = pipeline_rank_of(run, record, peak.rank)
    record.update(
        id=f"{run_id}/{attempt}/rank{peak.rank}/{kind}",
        peak_kind=kind,
        peak_bytes=peak.peak_bytes,
        pipeline_rank=pipeline_rank,
        rank_scope="stage" if pipeline_rank is not None else "unknown",
        schema=1,
        run_id=run_id,
        attempt=attempt,
        run_state=state,
        started_at=time_or_none(started_at),
        node=node,
        global_rank=peak.rank,
        gpu_uuid=peak.gpu_uuid,
        baseline_bytes=peak.baseline_bytes,
        peak_source=peak.source,
        predicted_bytes=predicted_bytes_of(run, pipeline_rank),
    )
    if record.get("gpu") is None:
        record["gpu"] = peak.gpu_name
    return record


def pipeline_rank_of(run: Record, template: Record, rank: int) -> int | None:
    """Pipeline is the outermost rank order; None where the numbers do not fit together."""
    pipeline = _count(run, "pipeline")
    world = _count(template, "world_size") or _count(run, "nodes") * _count(run, "devices_per_node")
    if not pipeline or not world or world % pipeline or rank >= world:
        return None
    return rank // (world // pipeline)


def predicted_bytes_of(run: Record, pipeline_rank: int | None) -> int | None:
    predicted = run.get("predicted_bytes")
    if pipeline_rank is None or not isinstance(predicted, list) or pipeline_rank >= len(predicted):
        return None
    value = predicted[pipeline_rank]
    return value if type(value) is int else None


def _why_none(run: Record, attempt: str, ranks: Sequence[Record], nodes: Mapping[str, NodePeaks]) -> str:
    if not ranks and not nodes:
        return f"attempt {attempt} started no trainer and no monitor"
    if run.get("peak_kind") == "resident":
        return f"no rank of attempt {attempt} left its resident peak"
    if not nodes:
        return f"the monitors of attempt {attempt} wrote nothing"
    remarks = [f"{name}: {remark}" for name, node in sorted(nodes.items()) for remark in node.remarks]
    if remarks:
        return "; ".join(remarks[:3])
    if not any(node.gpus for node in nodes.values()):
        return f"the monitors of attempt {attempt} saw no GPU"
    if not ranks:
        return f"no rank of attempt {attempt} left a record, so no GPU can be given to one"
    return f"the driver named none of the processes of attempt {attempt}, and the job did not have whole nodes"


def _count(record: Record, key: str) -> int:
    value = record.get(key)
    return value if type(value) is int and value > 0 else 0
