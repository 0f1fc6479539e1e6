"""The memory of an attempt by GPU or by rank, beside what was predicted: the peaks that `collect` will record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.memory_files import MemoryWatch
from llmlaunch.rundir.monitor_samples import GpuPeaks, NodePeaks, countable_gpus
from llmlaunch.rundir.peak_account import idle_bytes
from llmlaunch.rundir.summary import RankSummary
from llmlaunch.rundir.values import byte_count
from llmlaunch.units import duration
from llmlaunch.watch.model import Gauge

_LAST = 1 << 31
_MEMORY_SECONDS = 5.0
"""Between two reads of the monitors' files: they write every 10 s at most."""
_SILENT_SECONDS = 180.0
"""A monitor writes every 60 s at least."""


class MemoryReader:
    """The memory of one run's newest attempt, from the files of its monitors. Missing or torn files are no error."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._memory: MemoryWatch | None = None
        self._run: Mapping[str, Any] = {}
        self._limit_bytes: int | None = None
        self._read_at = float("-inf")
        self._last: tuple[Gauge, ...] = ()

    @property
    def files(self) -> int:
        return self._memory.files if self._memory else 0

    def begin(self, attempt: Attempt) -> None:
        """Read the memory of this attempt from now on, beside the prediction and the limit of the layout it runs."""
        run_dir = attempt.run_directory
        run, plan = (read_object(run_dir / attempt.layout / name) or {} for name in (file_names.RUN, file_names.PLAN))
        memory = plan.get("memory")
        self._attempt, self._memory, self._run = attempt, MemoryWatch(run_dir, attempt.name), run
        self._limit_bytes = byte_count(memory.get("limit_bytes")) if isinstance(memory, dict) else None
        self._read_at = float("-inf")

    def gauges(self, at_once: bool = False) -> tuple[Gauge, ...]:
        """Return the gauges, read anew if the last ones are some seconds old or `at_once` is set."""
        if self._memory is not None and (at_once or time.monotonic() - self._read_at >= _MEMORY_SECONDS):
            self._read_at = time.monotonic()
            gauges = self._refreshed(self._memory)
            self._last = tuple(sorted(gauges, key=lambda gauge: (gauge.ranks or (_LAST,), gauge.node, gauge.device)))
        return self._last

    def remarks(self) -> tuple[str, ...]:
        """Return sentences about what the monitors cannot measure, and about monitors that are silent."""
        if self._attempt is None or self._memory is None:
            return ()
        return tuple(_remarks(self._memory.evidence.nodes, self._attempt.nodes, self._resident, time.time()))

    @property
    def _resident(self) -> bool:
        return self._run.get("peak_kind") == "resident"

    def _refreshed(self, memory: MemoryWatch) -> Iterator[Gauge]:
        ranks, nodes = memory.refresh(), memory.evidence.nodes
        if self._resident:
            for rank in ranks:
                node = nodes.get(rank.node or "")
                if node is not None:
                    yield self._gauge(node, "", None, [rank], node.resident_bytes.get(rank.rank), rank.peak_bytes, None)
            return
        by_gpu: dict[tuple[str | None, str | None], list[RankSummary]] = {}
        for rank in ranks:
            by_gpu.setdefault((rank.node, rank.gpu_uuid), []).append(rank)
        for name, node in nodes.items():
            for gpu in countable_gpus(node):
                yield self._device(node, gpu, by_gpu.get((name, gpu.uuid), []))

    def _device(self, node: NodePeaks, gpu: GpuPeaks, ranks: Sequence[RankSummary]) -> Gauge:
        """A GPU that no rank is known to use shows what all processes hold beyond what it held before."""
        before = idle_bytes(gpu.baseline_bytes, gpu.reserved_bytes)
        peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
        whole = None if gpu.device_peak_bytes is None else max(0, gpu.device_peak_bytes - before)
        note = "" if gpu.lost_code is None else f"lost (NVML code {gpu.lost_code})"
        used = None if gpu.used_bytes is None else max(0, gpu.used_bytes - before)
        peak = sum(peaks) if peaks else whole
        return self._gauge(node, _label(gpu, node), gpu.uuid, ranks, used, peak, gpu.total_bytes, note)

    def _gauge(
        self,
        node: NodePeaks,
        device: str,
        uuid: str | None,
        ranks: Sequence[RankSummary],
        used: int | None,
        peak: int | None,
        total: int | None,
        note: str = "",
    ) -> Gauge:
        stage = ranks[0].pipeline_rank if ranks else None
        return Gauge(
            node=node.node,
            device=device,
            uuid=uuid,
            ranks=tuple(sorted(rank.rank for rank in ranks)),
            pipeline_rank=stage,
            used_bytes=used,
            peak_bytes=peak,
            predicted_bytes=self._predicted_bytes(stage),
            limit_bytes=self._limit_bytes,
            total_bytes=total,
            seen_at=node.sampled_at or node.written_at,
            note=note,
        )

    def _predicted_bytes(self, stage: int | None) -> int | None:
        """The worst stage's where the stage is not known."""
        listed = self._run.get("predicted_bytes")
        sizes = [size for size in listed if type(size) is int] if isinstance(listed, list) else []
        return sizes[stage] if stage is not None and stage < len(sizes) else max(sizes, default=None)


def _label(gpu: GpuPeaks, node: NodePeaks) -> str:
    """The GPU's number; of a MIG slice `2.0`, the first slice of GPU 2."""
    if gpu.mig is None:
        return str(gpu.index)
    slices = [slice_.uuid for slice_ in node.gpus.values() if slice_.mig == gpu.mig]
    return f"{gpu.index}.{slices.index(gpu.uuid)}"


def _remarks(nodes: Mapping[str, NodePeaks], expected: Sequence[str], resident: bool, now: float) -> list[str]:
    """What monitors cannot see, and which are silent; nodes of the same trouble in one sentence. For a run that goes
    on: a monitor that has said its `end` is not silent."""
    remarks: dict[str, list[str]] = {}
    for name, node in nodes.items():
        waited = now - node.written_at
        if not node.ended and waited > _SILENT_SECONDS:
            remarks.setdefault(f"monitor silent for {duration(waited)}: killed, or its disk is full", []).append(name)
        if node.stalled:
            remarks.setdefault("NVML hangs in the driver; its numbers stand still", []).append(name)
        if node.no_nvml and not resident:
            remarks.setdefault(f"no GPU is seen: {node.no_nvml}", []).append(name)
    missing = [name for name in expected if name not in nodes]
    if nodes and missing:
        remarks["monitor has written nothing yet"] = missing
    sentences = []
    for what, names in remarks.items():
        few = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more nodes"
        sentences.append(f"{few}: {what}")
    return sentences
