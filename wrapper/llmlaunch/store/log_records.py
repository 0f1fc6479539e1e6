"""What a log says of one run as measurement records, as `collect` writes them. Pure: no database, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmlaunch.calibration.records import Record
from llmlaunch.command_lines.training_log import LoggedDeath, LoggedPeak, TrainingLog

FAMILY = "imported"


def log_records(template: Record, log: TrainingLog, file: str) -> list[dict[str, Any]]:
    """Return one record for each kind of peak and pipeline rank, one for each rank that ran out of device memory, and
    one of kind `fits` for a log that has step times alone.

    `template` is the record of the job without its peak (rendering/run_json.py), `file` how the source names the log.
    """
    common = _common(template, log)
    by_place: dict[tuple[str, int | None], list[LoggedPeak]] = {}
    for peak in log.peaks:
        by_place.setdefault((peak.kind, _pipeline_rank(template, log, peak.rank)), []).append(peak)
    in_order = sorted(by_place.items(), key=lambda place: (-1 if place[0][1] is None else place[0][1], place[0][0]))
    records = [_peak_record(common, log, file, *place, peaks) for place, peaks in in_order]
    records += [_death_record(common, log, file, death) for death in log.deaths]
    if not records and log.step_seconds is not None:
        records = [_fits_record(common, log, file)]
    return records


def _common(template: Record, log: TrainingLog) -> dict[str, Any]:
    """Return what all records of a run have. A failed run's peaks are what it reached, not what it needs."""
    record = {**template, "schema": 1, "family": FAMILY}
    if log.deaths:
        record["run_state"] = "failed"
    if log.step_seconds is not None:
        record["step_seconds"] = log.step_seconds
    if log.tflops_per_gpu is not None:
        record["tflops_per_gpu"] = log.tflops_per_gpu
    return record


def _peak_record(
    common: Record, log: TrainingLog, file: str, kind: str, stage: int | None, peaks: Sequence[LoggedPeak]
) -> dict[str, Any]:
    """Return the record of the worst of these ranks, which are of one stage."""
    sizes = [_size(common, peak) for peak in peaks]
    worst = peaks[sizes.index(max(sizes))]
    steps = log.steps_run if worst.steps is None else worst.steps
    repeats = {"count": len(sizes), "min_bytes": min(sizes), "max_bytes": max(sizes), "what": "ranks of one stage"}
    return {
        **_identified(common, log, kind, "worst" if stage is None else f"stage{stage}", stage),
        "peak_bytes": max(sizes),
        "allocator_statistic": worst.statistic,
        "rounding_bytes": worst.rounding_bytes,
        "repeats": repeats if len(sizes) > 1 else None,
        "source": _source(log, file, worst.line, worst.note),
        "peak_source": worst.source,
        "global_rank": worst.rank,
        "observed": {} if steps is None else {"steps_run": steps},
    }


def _size(common: Record, peak: LoggedPeak) -> int:
    if peak.peak_bytes is not None:
        return peak.peak_bytes
    return int((peak.share or 0.0) * int(common.get("gpu_memory_bytes") or 0))


def _death_record(common: Record, log: TrainingLog, file: str, death: LoggedDeath) -> dict[str, Any]:
    place = "unknown" if death.rank is None else f"rank{death.rank}"
    return {
        **_identified(common, log, "oom", place, _pipeline_rank(common, log, death.rank)),
        "source": _source(log, file, death.line, None),
        "peak_source": "message",
        "global_rank": death.rank,
        "line": death.text,
        "numbers": dict(death.numbers),
    }


def _fits_record(common: Record, log: TrainingLog, file: str) -> dict[str, Any]:
    return {
        **_identified(common, log, "fits", "run", None),
        "source": _source(log, file, log.step_line or log.first_line, None),
        "observed": {} if log.steps_run is None else {"steps_run": log.steps_run},
    }


def _identified(common: Record, log: TrainingLog, kind: str, place: str, stage: int | None) -> dict[str, Any]:
    return {
        **common,
        "id": f"log/{log.identity}/{place}/{kind}",
        "peak_kind": kind,
        "pipeline_rank": stage,
        "rank_scope": "unknown" if stage is None else "stage",
    }


def _source(log: TrainingLog, file: str, line: int, note: str | None) -> dict[str, Any]:
    timed = None if log.step_note is None else f"step_seconds: {log.step_note}, line {log.step_line}"
    notes = [text for text in (note, timed, *log.notes) if text]
    return {
        "citation": f"{file}:{line}",
        "license": None,
        "evidence": "measured",
        "note": "; ".join(notes) or None,
    }


def _pipeline_rank(template: Record, log: TrainingLog, rank: int | None) -> int | None:
    """Return the pipeline rank of a global rank: pipeline is Megatron's outermost order unless data parallelism is."""
    sizes: Mapping[str, Any] = template["layout"]
    pipeline, world = int(sizes["pipeline"]), int(template["world_size"])
    if pipeline == 1:
        return 0
    if rank is None or rank >= world:
        return None
    if log.values.get("use_tp_pp_dp_mapping") is True:
        return rank // (int(sizes["tensor"]) * int(sizes["context"])) % pipeline
    return rank // (world // pipeline)
