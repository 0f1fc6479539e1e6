"""Memory as monitors last wrote it, by GPU or by rank, beside what was predicted. Pure but for the ranks' records,
which are opened only where the monitors' own lines do not say which rank holds a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.launchers.monitor_tails import Seen
from llmlaunch.rundir.attempt_files import AttemptFiles
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.monitor_samples import GpuPeaks
from llmlaunch.rundir.rank_peaks import rank_account
from llmlaunch.rundir.summary import RankSummary
from llmlaunch.rundir.traces import rank_traces
from llmlaunch.rundir.values import byte_count, time_or_none
from llmlaunch.units import duration
from llmlaunch.watch.model import Gauge

__all__ = ["Gauges", "Predicted", "monitor_remarks", "predicted_of"]

_LAST = 1 << 31
_SILENT_SECONDS = 180.0
"""A monitor writes every 60 s at least."""


@dataclass(frozen=True)
class Predicted:
    """Of the layout an attempt runs: its run.json, and the limit it was judged by."""

    run: Mapping[str, Any]
    limit_bytes: int | None

    @property
    def resident(self) -> bool:
        return self.run.get("peak_kind") == "resident"

    def bytes_of(self, stage: int | None) -> int | None:
        """The worst stage's where the stage is not known."""
        listed = self.run.get("predicted_bytes")
        sizes = [size for size in listed if type(size) is int] if isinstance(listed, list) else []
        return sizes[stage] if stage is not None and stage < len(sizes) else max(sizes, default=None)


def predicted_of(run_dir: Path, layout: str) -> Predicted:
    """Reads `run.json` and `plan.json` of the layout; what they do not say is unknown."""
    run, plan = (read_object(run_dir / layout / name) or {} for name in ("run.json", "plan.json"))
    memory = plan.get("memory")
    return Predicted(run, byte_count(memory.get("limit_bytes")) if isinstance(memory, dict) else None)


@dataclass
class Gauges:
    """The gauges of one attempt. Records of ranks are opened once."""

    folder: Path
    """attempts/<attempt>"""
    predicted: Predicted
    _records: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, nodes: Mapping[str, Seen]) -> tuple[Gauge, ...]:
        ranks = self._ranks(nodes)
        if self.predicted.resident:
            gauges = [
                self._resident(nodes[one.node], one) for one in ranks if one.node is not None and one.node in nodes
            ]
        else:
            held: dict[tuple[str | None, str | None], list[RankSummary]] = {}
            for one in ranks:
                held.setdefault((one.node, one.gpu_uuid), []).append(one)
            gauges = [
                self._device(seen, gpu, held.get((name, gpu.uuid), []))
                for name, seen in nodes.items()
                for gpu in _countable(seen.peaks.gpus.values())
            ]
        return tuple(sorted(gauges, key=lambda gauge: (gauge.ranks or (_LAST,), gauge.node, gauge.device)))

    def _ranks(self, nodes: Mapping[str, Seen]) -> list[RankSummary]:
        """What the monitors say of each rank; with its own record where they do not say which GPU is its own."""
        seen = {name: one.peaks for name, one in nodes.items()}
        found = self._accounts(AttemptFiles(described=self.predicted.run, nodes=seen))
        if self.predicted.resident or all(one.gpu_uuid for one in found):
            return found
        given = {one.rank for one in found if one.gpu_uuid}
        ranks: list[Mapping[str, Any]] = [
            {"rank": rank, "node": name, "local_rank": local, **({} if rank in given else self._record(rank))}
            for name, node in seen.items()
            for local, rank in enumerate(sorted(node.rank_pids))
        ]
        return self._accounts(AttemptFiles(described=self.predicted.run, nodes=seen, ranks=ranks))

    def _accounts(self, files: AttemptFiles) -> list[RankSummary]:
        return [rank_account(traces, self.predicted.resident) for traces in rank_traces(files)]

    def _resident(self, seen: Seen, rank: RankSummary) -> Gauge:
        processes = [item for item in _objects(seen.line, "processes") if type(item.get("rank")) is int]
        now = {process["rank"]: byte_count(process.get("resident_bytes")) for process in processes}
        return self._gauge(seen, "", None, [rank], now.get(rank.rank), rank.peak_bytes, None)

    def _device(self, seen: Seen, gpu: GpuPeaks, held: Sequence[RankSummary]) -> Gauge:
        last = next((one for one in _objects(seen.line, "gpus") if one.get("uuid") == gpu.uuid), {})
        before = gpu.baseline_bytes or 0
        used, whole = byte_count(last.get("used_bytes")), gpu.device_peak_bytes
        known = [one.peak_bytes for one in held if one.peak_bytes is not None]
        peak = sum(known) if known else None if whole is None else max(0, whole - before)
        lost = last.get("lost")
        note = "" if lost is None else f"lost (NVML code {lost})"
        now = None if used is None else max(0, used - before)
        return self._gauge(
            seen, _label(gpu, seen.peaks.gpus.values()), gpu.uuid, held, now, peak, gpu.total_bytes, note
        )

    def _gauge(
        self,
        seen: Seen,
        device: str,
        uuid: str | None,
        held: Sequence[RankSummary],
        used: int | None,
        peak: int | None,
        total: int | None,
        note: str = "",
    ) -> Gauge:
        stage = held[0].pipeline_rank if held else None
        return Gauge(
            node=seen.peaks.node,
            device=device,
            uuid=uuid,
            ranks=tuple(sorted(one.rank for one in held)),
            pipeline_rank=stage,
            used_bytes=used,
            peak_bytes=peak,
            predicted_bytes=self.predicted.bytes_of(stage),
            limit_bytes=self.predicted.limit_bytes,
            total_bytes=total,
            seen_at=time_or_none(seen.line.get("time")) or seen.at,
            note=note,
        )

    def _record(self, rank: int) -> Mapping[str, Any]:
        if rank not in self._records:
            record = read_object(self.folder / "ranks" / f"{rank}.json") or {}
            if record.get("rank") != rank:
                return {}
            self._records[rank] = record
        return self._records[rank]


def _label(gpu: GpuPeaks, gpus: Iterable[GpuPeaks]) -> str:
    """Its number; of a MIG slice `2.0`, the first slice of GPU 2."""
    if gpu.mig is None:
        return str(gpu.index)
    slices = [one.uuid for one in gpus if one.mig == gpu.mig]
    return f"{gpu.index}.{slices.index(gpu.uuid)}"


def _countable(gpus: Iterable[GpuPeaks]) -> list[GpuPeaks]:
    """Slices instead of the GPUs that are cut into them."""
    found = list(gpus)
    cut = {gpu.mig for gpu in found}
    return [gpu for gpu in found if gpu.uuid not in cut]


def _objects(line: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    listed = line.get(name)
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def monitor_remarks(nodes: Mapping[str, Seen], expected: Sequence[str], resident: bool, now: float) -> list[str]:
    """What monitors cannot see, and which are silent; nodes of the same trouble in one sentence. For a run that goes
    on: a monitor that has said its `end` is not silent."""
    found: dict[str, list[str]] = {}
    for name, seen in nodes.items():
        waited = now - seen.at
        if not seen.peaks.ended and waited > _SILENT_SECONDS:
            found.setdefault(f"monitor silent for {duration(waited)}: killed, or its disk is full", []).append(name)
        if seen.stalled:
            found.setdefault("NVML hangs in the driver; its numbers stand still", []).append(name)
        if seen.problem and not resident:
            found.setdefault(f"no GPU is seen: {seen.problem}", []).append(name)
    missing = [name for name in expected if name not in nodes]
    if nodes and missing:
        found["monitor has written nothing yet"] = missing
    return [f"{_few(names)}: {what}" for what, names in found.items()]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more nodes"
