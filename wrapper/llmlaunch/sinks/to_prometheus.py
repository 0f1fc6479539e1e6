"""Runs as files for node_exporter's textfile collector: one for each of the newest runs.

node_exporter reads every *.prom of its folder at every scrape: it takes no times of day in them, wants one help and one
type for a name over all files, and must be allowed to read them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from llmlaunch.documents.writing import replacing
from llmlaunch.sinks.figures import Figures, MeasuredPeak, Sink, changed_runs

MOST_RUNS = 20
"""The files of older ones are removed: every series that exists costs the server memory."""

MOST_PEAKS = 256
"""Most peaks of one run, the largest of each stage first."""

_HEAD = "# llmlaunch "
_STEM = "llmlaunch-"
_RUN = ("run", "recipe", "attempt")
_NUMBERS = {
    "step_seconds": ("llmlaunch_step_seconds", "Median seconds of a step."),
    "tokens_per_second": ("llmlaunch_tokens_per_second", "Tokens a second of the whole job."),
    "predicted_step_seconds": ("llmlaunch_predicted_step_seconds", "Seconds of a step as planned."),
    "limit_bytes": ("llmlaunch_memory_limit_bytes", "What the plan was allowed to use of a device."),
}


class Prometheus(Sink):
    """`folder` is the one that node_exporter's --collector.textfile.directory names."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise NotADirectoryError(f"{folder}: is no folder; make it, and name it to node_exporter")
        self._old: set[str] = set()

    def due(self, marks: Mapping[str, str]) -> list[str]:
        newest = dict(islice(marks.items(), MOST_RUNS))
        self._old = marks.keys() - newest.keys()
        return changed_runs(newest, {run_id: _mark_in(self._path(run_id)) for run_id in newest})

    def send(self, run: Figures, mark: str) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(run))
        self._write(self._path(run.run_id), f"{_HEAD}{mark}\n".encode() + generate_latest(registry))

    def finish(self) -> None:
        """Remove the files of runs that are not among the newest any more; another store's are left alone."""
        for run_id in self._old:
            self._path(run_id).unlink(missing_ok=True)

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{_STEM}{re.sub(r'[^A-Za-z0-9_.-]', '_', run_id)}.prom"

    def _write(self, path: Path, text: bytes) -> None:
        """Whole or not at all, and readable by node_exporter, whatever the umask."""
        with replacing(path) as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text.decode())


class _Collector:
    def __init__(self, run: Figures) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        run = self._run
        yield self._gauge(
            "llmlaunch_gpu_memory_peak_bytes",
            "Most memory of a rank on its GPU in the newest attempt.",
            ("node", "gpu_uuid", "rank", "stage", "source"),
            _largest(run.of_kind("device")),
        )
        yield self._gauge(
            "llmlaunch_resident_memory_peak_bytes",
            "Most main memory of a rank in the newest attempt.",
            ("node", "rank", "stage", "source"),
            _largest(run.of_kind("resident")),
        )
        yield self._gauge(
            "llmlaunch_torch_memory_peak_bytes",
            "Most that torch's allocator held in any rank of a stage.",
            ("stage", "kind", "source"),
            run.of_kind("reserved", "allocated"),
        )
        yield self._gauge(
            "llmlaunch_host_memory_peak_bytes",
            "Most main memory used on a node.",
            ("node", "source"),
            _largest(run.of_kind("host")),
        )
        yield self._predicted()
        state = self._family("llmlaunch_run_info", "1 for each run; its state is a label.", ("state",))
        state.add_metric([*self._own_labels, run.state], 1)
        yield state
        for name, (metric, help_text) in _NUMBERS.items():
            if name in run.numbers:
                gauge = self._family(metric, help_text, ())
                gauge.add_metric(self._own_labels, run.numbers[name])
                yield gauge

    @property
    def _own_labels(self) -> list[str]:
        return [self._run.run_id, self._run.recipe, self._run.attempt]

    def _family(self, metric: str, help_text: str, labels: Sequence[str]) -> GaugeMetricFamily:
        return GaugeMetricFamily(metric, help_text, labels=[*_RUN, *labels])

    def _gauge(self, metric: str, help_text: str, labels: Sequence[str], peaks: Sequence[MeasuredPeak]) -> Metric:
        """Return a series for each peak; `labels` are names of its fields."""
        gauge = self._family(metric, help_text, labels)
        for peak in peaks:
            values = [getattr(peak, label) for label in labels]
            gauge.add_metric([*self._own_labels, *("" if v is None else str(v) for v in values)], peak.peak_bytes)
        return gauge

    def _predicted(self) -> Metric:
        predicted = self._family(
            "llmlaunch_memory_predicted_bytes",
            "Memory predicted: of the ranks of a stage, or of a node (host).",
            ("kind", "stage"),
        )
        for name, value in self._run.numbers.items():
            head, _, where = name.partition("/")
            kind, _, stage = where.partition("/stage")
            if head == "predicted_bytes" and kind != "worst":
                predicted.add_metric([*self._own_labels, kind, stage], value)
        return predicted


def _largest(peaks: Sequence[MeasuredPeak]) -> list[MeasuredPeak]:
    """Return at most MOST_PEAKS: the largest of every stage, then the second largest of every stage, and so on."""
    if len(peaks) <= MOST_PEAKS:
        return list(peaks)
    place: dict[int | None, int] = {}
    ordered: list[tuple[int, int, int, MeasuredPeak]] = []
    for peak in sorted(peaks, key=lambda peak: -peak.peak_bytes):
        place[peak.stage] = place.get(peak.stage, 0) + 1
        ordered.append((place[peak.stage], -peak.peak_bytes, len(ordered), peak))
    return [peak for *_, peak in sorted(ordered)[:MOST_PEAKS]]


def _mark_in(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            head = file.readline()
    except (OSError, ValueError):
        return ""
    return head[len(_HEAD) :].strip() if head.startswith(_HEAD) else ""
