"""What a record says and its formula does not read is refused by the field's name, never passed over."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.calibration.records import read_records
from llmlaunch.calibration.stated.trainers import TRAINERS, UNREAD, Unread
from llmlaunch.frameworks.recorded import RECORDED_TRAINERS, TABLES
from llmlaunch.recipe.frameworks import FRAMEWORKS
from validation.cases import case_of
from validation.scoring import score

DATA = Path(__file__).parents[2] / "data" / "measurements"
RECORDS = [r for name in ("fit", "outcomes") for r in read_records(DATA / f"{name}.jsonl")]
ODD = {
    "optimizer.state_bytes_per_parameter": 6,
    "optimizer.state_dtype": "fp16",
    "optimizer.parameter_dtype": "fp64",
    "optimizer.optimizer_instances": 2,
    "recompute.granularity": "selective",
    "implementation.cross_entropy_fusion": "somebody's",
    "implementation.cuda_graph": "local",
    "implementation.trainer": "megatron-deepspeed",
}
FLAGS = ("precision.fp8_param_gather", "parallelism.sequence_parallel", "implementation.")


def of_table(table: str) -> dict[str, Any]:
    return copy.deepcopy(next(r for r in RECORDS if TABLES.get(r["backend"]) == table))


def odd(field: str) -> Any:
    return ODD.get(field, True if field.startswith(FLAGS) else 2)


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


@pytest.mark.parametrize(
    ("table", "unread"),
    [(table, unread) for unread in UNREAD for table in unread.tables],
    ids=lambda value: value if isinstance(value, str) else value.field,
)
def test_a_field_that_is_not_read_is_refused_by_name(table: str, unread: Unread) -> None:
    record = of_table(table)
    if unread.field == "parallelism.sequence_parallel":
        record["parallelism"]["tensor"] = 2
    if unread.field == "recompute.num_layers":
        record["recompute"]["granularity"] = "full"
    result = score(changed(record, unread.field, odd(unread.field)), {})
    assert not result.supported
    assert str(result.reason).startswith(
        f"{unread.field} {odd(unread.field)!r} is not priced for {record['backend']}: "
    )
    assert score(changed(record, unread.field, None), {}).supported


def test_no_measured_run_is_refused_for_a_field_it_has_always_had() -> None:
    reasons = {str(score(record, {}).reason) for record in RECORDS}
    assert not [reason for reason in reasons if "is not priced for" in reason]


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
