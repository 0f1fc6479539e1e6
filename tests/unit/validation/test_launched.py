"""Records of the frameworks that a recipe can name are priced under the names they were stored with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from llmlaunch.calibration.records import read_records
from llmlaunch.calibration.stated.trainers import TRAINERS
from llmlaunch.frameworks.recorded import RECORDED_TRAINERS, TABLES
from llmlaunch.recipe.frameworks import FRAMEWORKS
from validation.cases import case_of
from validation.scoring import score

DATA = Path(__file__).parents[2] / "data" / "measurements"
RECORDS = [r for name in ("fit", "outcomes") for r in read_records(DATA / f"{name}.jsonl")]


def of_table(table: str) -> dict[str, Any]:
    return copy.deepcopy(next(r for r in RECORDS if TABLES.get(r["backend"]) == table))


def changed(record: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    section, name = field.split(".")
    return {**record, section: {**record[section], name: value}}


def test_records_and_calibrations_are_found_under_the_names_they_were_stored_with() -> None:
    assert TABLES == {
        "megatron-lm": "megatron",
        "megatron-bridge": "megatron",
        "megatron-fsdp": "megatron-fsdp",
        "deepspeed": "deepspeed",
    }
    assert {backend: trainer.table for backend, trainer in TRAINERS.items()} == TABLES


def test_runs_of_every_framework_are_recorded_under_a_name_that_is_priced() -> None:
    assert set(FRAMEWORKS) <= set(RECORDED_TRAINERS)
    assert all(
        trainer.framework == FRAMEWORKS.get(name, trainer.framework) for name, trainer in RECORDED_TRAINERS.items()
    )


def test_a_distributed_optimizer_is_zero_1_where_no_stage_is_recorded() -> None:
    record = next(r for r in RECORDS if r["backend"] == "megatron-lm" and r["optimizer"]["zero_stage"] == 1)
    assert record["optimizer"]["distributed_optimizer"]
    case = case_of(changed(record, "optimizer.zero_stage", None))
    assert (case.layout.zero_stage, case.assumed["optimizer.zero_stage"]) == (1, 1)


def test_a_run_of_a_megatron_deepspeed_script_is_not_taken_for_one_of_a_hugging_face_model() -> None:
    result = score(changed(of_table("deepspeed"), "implementation.trainer", "megatron-deepspeed"), {})
    assert not result.supported
    assert "Megatron-DeepSpeed" in str(result.reason)
    assert result.measured_bytes is not None
