"""How far measured step times are from predicted ones, made from tests/data/measurements.

`make step-time-table` writes `wrapper/llmlaunch/calibration/step_time_errors.json`, and
tests/unit/calibration/test_step_time_errors.py keeps that file equal to what the formula of today predicts for the same
records.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.accuracy.summary import measured_step_seconds
from llmlaunch.calibration.records import read_records
from llmlaunch.calibration.step_time_errors import TABLE, JobKind, job_kind
from llmlaunch.cluster.cards import machines
from llmlaunch.layout import LayoutColumns
from llmlaunch.timing.step import step_time
from validation.scoring import score

MEASUREMENTS = Path(__file__).resolve().parents[1] / "data" / "measurements"
FILES = (
    *("fit.jsonl", "outcomes.jsonl", "released.jsonl", "released_outcomes.jsonl"),
    *("mixtures.jsonl", "mixture_switches.jsonl", "families.jsonl", "step_times.jsonl"),
)
TIMED = ("step_seconds", "tokens_per_second_per_gpu", "tflops_per_gpu")
FEWEST = 4  # runs of a kind that have a spread


@cache
def errors_of_kinds(backend: str = "") -> dict[JobKind, list[tuple[str, float]]]:
    """Return for each kind of job, or for those of one backend, the families of its timed records and the logarithms of
    measured over predicted seconds. Records whose step waits for a loader that makes masks are left out: no rendered
    job has such a loader, and hosts differ by a factor of two in it."""
    clusters = machines()
    kinds: dict[JobKind, list[tuple[str, float]]] = defaultdict(list)
    for name in FILES:
        for record in read_records(MEASUREMENTS / name):
            if any(record.get(figure) for figure in TIMED) and record["backend"].startswith(backend):
                _add(kinds, score(record, clusters))
    return kinds


def _add(kinds: dict[JobKind, list[tuple[str, float]]], scored: ScoredRecord) -> None:
    case, predicted = scored.case, scored.predicted_step_seconds
    if case is None or case.cluster is None or not predicted:
        return
    measured = measured_step_seconds(scored.record, case)
    job, cluster = case.timed_job or case.job, case.cluster
    columns = LayoutColumns.of([case.layout])
    terms = step_time(job, cluster, columns, np.array([case.num_microbatches])).terms
    if measured is None or float(terms.get("data_loading", np.zeros(1))[0]) > 0.0:
        return
    kind = job_kind(scored.record["backend"], job.shape, job.techniques, cluster.accelerator)
    if kind is not None:
        kinds[kind].append((scored.record["family"], math.log(measured / predicted)))


def step_time_table() -> str:
    """Return the file as text, a kind a line."""
    return '{"kinds": [\n' + ",\n".join(step_time_rows()) + "\n]}\n"


def step_time_rows(backend: str = "") -> list[str]:
    """Return the lines of the file, or those of one backend."""
    ordered = sorted(errors_of_kinds(backend).items(), key=lambda pair: str(pair[0]))
    return [json.dumps(_row(kind, found)) for kind, found in ordered]


def _row(kind: JobKind, found: Sequence[tuple[str, float]]) -> dict[str, object]:
    squares = [error * error for _, error in found]
    return {
        "backend": kind.backend,
        "training": kind.training,
        "model": kind.model,
        "runs": len(found),
        "spread": round(math.sqrt(sum(squares) / len(squares)), 2) if len(squares) >= FEWEST else None,
        "families": sorted({family for family, _ in found}),
    }


if __name__ == "__main__":
    TABLE.write_text(step_time_table(), encoding="utf-8")
