"""A null is "not known": what the framework does instead is taken in the open, and nothing known is ever replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.calibration.records import read_records
from llmlaunch.calibration.stated.completion import DEFAULTS, defaults_of, with_defaults
from llmlaunch.frameworks.recorded import TABLES
from support.soak import SOAK
from validation.cases import case_of
from validation.scoring import score

DATA = Path(__file__).parents[2] / "data" / "measurements"
RECORDS = [r for name in ("fit", "outcomes") for r in read_records(DATA / f"{name}.jsonl") if r["backend"] in TABLES]


def forgotten(record: dict[str, Any], *fields: str) -> dict[str, Any]:
    changed = copy.deepcopy(record)
    for field in fields:
        section, name = field.split(".")
        changed[section][name] = None
    return changed


def one_of(backend: str, precision: str = "bf16") -> dict[str, Any]:
    same = next((r for r in RECORDS if r["backend"] == backend), None)  # or of a trainer priced by the same table
    record = copy.deepcopy(same or next(r for r in RECORDS if TABLES[r["backend"]] == TABLES[backend]))
    record["backend"] = backend
    record["precision"].update(compute=precision, fp8_recipe=None)
    record["optimizer"].update(parameter_dtype=precision)
    return record


def test_what_is_known_stays_and_what_was_filled_is_said() -> None:
    for record in RECORDS:
        before = copy.deepcopy(record)
        filled, assumed = with_defaults(record, defaults_of(record["backend"]))
        assert record == before
        for field, value in assumed.items():
            section, name = field.split(".")
            assert record[section].get(name) is None
            assert filled[section][name] == value
            filled[section] = {**filled[section], name: None}
        assert {k: _known(v) for k, v in filled.items()} == {k: _known(v) for k, v in record.items()}


def _known(section: Any) -> Any:
    return {k: v for k, v in section.items() if v is not None} if isinstance(section, dict) else section


@pytest.mark.parametrize(
    ("backend", "precision", "field", "value"),
    [
        ("megatron-lm", "bf16", "recompute.granularity", "none"),
        ("megatron-lm", "bf16", "optimizer.gradient_dtype", "fp32"),
        ("megatron-lm", "fp16", "optimizer.gradient_dtype", "fp16"),
        ("megatron-lm", "bf16", "implementation.gradient_accumulation_fusion", True),
        ("megatron-lm", "bf16", "implementation.cross_entropy_fusion", "none"),
        ("megatron-bridge", "bf16", "implementation.cross_entropy_fusion", "native"),
        ("deepspeed", "bf16", "optimizer.gradient_dtype", "bf16"),
        ("deepspeed", "bf16", "optimizer.zero_stage", 0),
    ],
)
def test_a_null_becomes_the_frameworks_own_default(backend: str, precision: str, field: str, value: object) -> None:
    assert score(forgotten(one_of(backend, precision), field), {}).assumed[field] == value


def test_a_null_that_changes_no_byte_is_left_alone() -> None:
    record = forgotten(one_of("megatron-lm"), "implementation.cp_comm_type", "recompute.modules")
    record["parallelism"]["context"], record["recompute"]["granularity"] = 1, "none"
    rows = defaults_of("megatron-lm")
    assert not {"implementation.cp_comm_type", "recompute.modules"} & set(with_defaults(record, rows)[1])
    record["parallelism"]["context"], record["recompute"]["granularity"] = 2, "selective"
    assumed = with_defaults(record, rows)[1]
    assert (assumed["implementation.cp_comm_type"], assumed["recompute.modules"]) == ("p2p", ["core_attn"])


def test_one_row_alone_answers_for_each_null_and_names_its_source() -> None:
    fields = sorted({row.field for row in DEFAULTS})
    for record in RECORDS:
        empty = forgotten(record, *(field for field in fields if field != "recompute.granularity"))
        for field in fields:
            rows = [row for row in DEFAULTS if row.field == field and record["backend"] in row.backends]
            assert sum(row.applies(empty) for row in rows) <= 1, (record["backend"], field)
    assert all(any(mark in row.source for mark in (".py", "not called")) for row in DEFAULTS)


@pytest.mark.parametrize("backend", sorted(TABLES))
def test_a_record_that_says_nothing_is_still_priced(backend: str) -> None:
    record = forgotten(one_of(backend), *{row.field for row in DEFAULTS})
    assert score(record, {}).supported


def _bridge(flag: str | None = None, **changes: Any) -> dict[str, Any]:
    """A record of NVIDIA's performance summary in 8 or 4 bits; with `flag`, one that somebody else wrote down."""
    record = one_of("megatron-bridge")
    record["precision"].update(fp8_recipe=changes.pop("recipe", "fp8_mx"), fp8_param_gather=False)
    if flag is not None:
        record["source"] = {**record["source"], "citation": "our own run"}
        record["precision"][flag] = changes.pop("gathers")
    record["model"]["name"] = changes.pop("model", record["model"]["name"])
    return {**record, **changes}


def _gathers(record: dict[str, Any]) -> bool:
    quantized = case_of(record).job.facts.layer.quantized
    assert quantized is not None
    return quantized.replaces_parameters


def test_a_record_that_says_that_parameters_stay_wide_is_believed_and_a_summary_that_says_nothing_is_not() -> None:
    assert _gathers(_bridge())
    assert not _gathers(_bridge("fp8_param_gather", gathers=False))
    assert _gathers(_bridge("fp8_param_gather", gathers=True))
    assert not _gathers(_bridge(recipe="fp8_sc"))  # blockwise: the number format does not gather
    # Megatron-Bridge's perf_recipes/kimi says `fp8_param_gather = False`
    assert not _gathers(_bridge(model="kimi_k2", gpu="GB200"))
    assert _gathers(_bridge(model="kimi_k2", gpu="B200"))


def test_four_bit_parameters_are_gathered_since_bridge_26_06_or_where_a_record_says_so() -> None:
    assert _gathers(_bridge(recipe="nvfp4", backend_version="release 26.06"))
    assert not _gathers(_bridge(recipe="nvfp4", backend_version="release 26.04.01"))
    assert _gathers(_bridge("fp4_param_gather", gathers=True, recipe="nvfp4"))
    assert not _gathers(_bridge("fp4_param_gather", gathers=False, recipe="nvfp4", backend_version="release 26.06"))
    assert not _gathers(_bridge("fp8_param_gather", gathers=True, recipe="nvfp4"))


@pytest.mark.parametrize(
    ("layers", "pipeline", "chunks", "split"),
    [
        (126, 8, 8, (1, *(2,) * 62, 1)),  # Llama 3.1 405B: embedding and head are two of 128 layers
        (126, 16, 8, (0, *(1,) * 126, 0)),
        (94, 8, 4, (2, *(3,) * 30, 2)),  # Qwen3 235B
        (126, 1, 1, ()),
        (128, 8, 8, ()),
        (125, 8, 8, ()),  # not even so: nobody knows
    ],
)
def test_embedding_and_head_stand_for_layers_where_stages_divide_them_only_so(
    layers: int, pipeline: int, chunks: int, split: tuple[int, ...]
) -> None:
    record = one_of("megatron-bridge")
    record["model"]["num_layers"] = layers
    record["parallelism"].update(pipeline=pipeline, virtual_pipeline=chunks, layers_per_pipeline_rank=None)
    assert case_of(record).layout.layers_by_stage == split


TOLD = ("id", "family", "peak_kind", "backend", "source", "repeats")


def one_of_each_backend() -> list[dict[str, Any]]:
    """A record of every backend, with and without experts; in a long test also of every kind of peak and attention."""
    records: dict[object, dict[str, Any]] = {}
    for file in ("fit.jsonl", "outcomes.jsonl"):
        for line in (DATA / file).read_text("utf-8").splitlines():
            record = json.loads(line)
            key = (record["backend"], bool(record["model"]["moe"]))
            more = (record["peak_kind"], bool(record["model"]["mla"]))
            records.setdefault((key, more) if SOAK else key, record)
    return list(records.values())


ONE_OF_EACH = one_of_each_backend()
ONE_IN = 10  # fields of a record in `make test`; the next record has the next ones


def without_one(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The record with each field set to null in turn."""
    for number, one in enumerate(every_one_null(record)):
        if SOAK or number % ONE_IN == ONE_OF_EACH.index(record) % ONE_IN:
            yield one


def every_one_null(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in record.items():
        if name in TOLD:
            continue
        if not isinstance(value, dict):
            yield name, {**record, name: None}
            continue
        for part, inner in value.items():
            yield f"{name}.{part}", {**record, name: {**value, part: None}}
            if isinstance(inner, dict):
                for size in inner:
                    yield f"{name}.{part}.{size}", {**record, name: {**value, part: {**inner, size: None}}}


@pytest.mark.parametrize("record", ONE_OF_EACH, ids=[f"{r['backend']}-{r['id']}" for r in ONE_OF_EACH])
def test_any_field_may_be_null_and_one_of_a_section_as_well_absent(record: dict[str, Any]) -> None:
    for field, incomplete in without_one(record):
        result = score(incomplete, {}).as_json()
        assert result["predicted_bytes"] > 0 if result["supported"] else result["reason"], field
        section, _, name = field.partition(".")
        if name and "." not in name:
            absent = {**record, section: {key: value for key, value in record[section].items() if key != name}}
            assert score(absent, {}).as_json() == result, field


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"])
def test_a_size_that_follows_from_nothing_is_asked_for_by_name(field: str) -> None:
    record = ONE_OF_EACH[0]
    result = score({**record, "model": {**record["model"], field: None}}, {}).as_json()
    assert result["reason"] == f"model.{field} is not recorded, and nothing stands in for it"


def test_what_is_worked_out_is_said() -> None:
    record = next(r for r in ONE_OF_EACH if r["backend"] == "megatron-lm")
    unknown = {**record, "parallelism": {**record["parallelism"], "data": None, "context": None}}
    result = score(unknown, {}).as_json()
    assert result["assumed"]["parallelism.context"] == 1
    assert result["assumed"]["parallelism.data"] == record["parallelism"]["data"] * record["parallelism"]["context"]


def measured(name: str) -> dict[str, Any]:
    """The released record of that id."""
    lines = (DATA / "released.jsonl").read_text(encoding="utf-8").splitlines()
    return next(record for record in map(json.loads, lines) if record["id"] == name)


def test_a_benchmark_of_megatron_bridge_reduces_in_bf16_and_gathers_narrow_parameters() -> None:
    case = case_of(measured("megatron-bridge-03270"))
    assert case.assumed["optimizer.gradient_dtype"] == "bf16"
    assert case.assumed["precision.fp8_param_gather"] is True
    assert case.job.facts.states.gradient_bytes == 2
    assert case.assumed["implementation.expandable_segments"] is False  # its card names the runs that switch it on
    assert case_of(measured("megatron-bridge-03266")).job.facts.allocator.whole_segments  # which died of fragmentation


def test_flagperfs_llama_2_ran_megatrons_own_layers_of_2023() -> None:
    """Its norms keep fp32 inputs, its activation silu(gate), and its loss makes two copies of the logits: what fused
    layers do not."""
    case = case_of(measured("FlagPerf-03882"))
    facts = case.job.facts
    assert case.assumed["implementation.legacy_models"] is True
    assert (facts.layer.norm_extra_bytes, facts.layer.gated_activation_fused, facts.attention.key_values_expanded) == (
        4,
        False,
        True,
    )
    assert facts.loss.logit_bytes == 2 + 4 + 4
    assert case_of(measured("FlagPerf-03884")).job.facts.layer.norm_extra_bytes == 0
