"""What a log says, as measurement records: one of each kind and stage, with an honest name for what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.command_lines.training_log import LoggedPeak, TrainingLog
from llmlaunch.store.log_records import log_records

GIB = 2**30
TEMPLATE: dict[str, Any] = {
    "id": None,
    "family": "llmlaunch",
    "backend": "megatron-lm",
    "gpu": "h100-80gb",
    "gpu_memory_bytes": 80 * GIB,
    "world_size": 8,
    "layout": {"tensor": 2, "pipeline": 2, "context": 1, "data": 2},
    "peak_kind": "device",
    "peak_bytes": None,
}
LOG = TrainingLog(
    frozenset({"Megatron-LM"}), "abc", 1, (), (), steps_run=6, step_seconds=2.5, step_note="median", step_line=50
)


def peak(kind: str, size: int | None, rank: int | None, **fields: Any) -> LoggedPeak:
    return LoggedPeak(kind, size, 40, "Megatron-LM report_memory", rank, **fields)


def test_the_worst_rank_of_each_stage_has_a_record_of_each_kind() -> None:
    peaks = [peak("allocated", GIB * n, rank, steps=2) for n, rank in ((50, 0), (51, 1), (40, 4), (39, 5))]
    records = log_records(TEMPLATE, replace(LOG, peaks=(*peaks, peak("reserved", 60 * GIB, 0))), "/a/slurm-1.out")
    assert [(record["peak_kind"], record["pipeline_rank"], record["peak_bytes"] // GIB) for record in records] == [
        ("allocated", 0, 51),
        ("reserved", 0, 60),
        ("allocated", 1, 40),
    ]
    first = records[0]
    assert first["id"] == "log/abc/stage0/allocated"
    assert (first["rank_scope"], first["global_rank"]) == ("stage", 1)
    assert first["repeats"]["count"] == 2
    assert first["source"]["citation"] == "/a/slurm-1.out:40"
    assert first["source"]["evidence"] == "measured"
    assert "line 50" in first["source"]["note"]
    assert first["observed"] == {"steps_run": 2}  # when it was measured, however long the run went on
    assert records[1]["observed"] == {"steps_run": 6}
    assert first["step_seconds"] == 2.5
    assert "predicted_bytes" not in first
    assert "run_state" not in first


def test_data_parallelism_may_be_the_outermost_order() -> None:
    log = replace(LOG, values={"use_tp_pp_dp_mapping": True}, peaks=tuple(peak("allocated", GIB, n) for n in range(8)))
    by_stage = {record["pipeline_rank"]: record["global_rank"] for record in log_records(TEMPLATE, log, "log")}
    assert by_stage == {0: 0, 1: 2}


def test_where_the_stage_is_not_known_the_record_does_not_claim_one() -> None:
    [record] = log_records(
        TEMPLATE, replace(LOG, peaks=(peak("device", None, None, share=0.5, note="sampled"),)), "log"
    )
    assert (record["pipeline_rank"], record["rank_scope"]) == (None, "unknown")
    assert record["peak_bytes"] == 40 * GIB
    assert record["source"]["note"].startswith("sampled")
    alone = {**TEMPLATE, "layout": {**TEMPLATE["layout"], "pipeline": 1}}
    [record] = log_records(alone, replace(LOG, peaks=(peak("device", GIB, None),)), "log")
    assert record["pipeline_rank"] == 0
