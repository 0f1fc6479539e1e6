"""`accuracy` answers for every measured record: a prediction of the same kind of peak, or the reason there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.accuracy.scoring import ScoredRecord, score_all
from llmlaunch.accuracy.summary import by_size, families
from llmlaunch.calibration.records import read_records
from llmlaunch.cluster.cards import machines
from llmlaunch.errors import UserError
from support.measured_runs import run
from support.soak import SOAK
from validation.scoring import score

DATA = Path(__file__).parents[2] / "data" / "measurements"


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return [*read_records(DATA / "fit.jsonl"), *read_records(DATA / "outcomes.jsonl")]


@pytest.fixture(scope="module")
def results(records: list[dict[str, Any]]) -> list[ScoredRecord]:
    """In make test of every eighth record."""
    clusters = machines()
    return [score(record, clusters) for record in (records if SOAK else records[::8])]


def test_a_record_is_priced_or_refused_with_a_reason_and_never_half(
    records: list[dict[str, Any]], results: list[ScoredRecord]
) -> None:
    assert len(records) == 363 + 324
    for result in results:
        record = result.record
        assert result.supported == (result.predicted_bytes is not None) == (result.reason is None)
        if result.supported and record["gpu_memory_bytes"]:
            assert result.verdict in ("safe", "tight", "unsafe")
            assert 0.6 * record["gpu_memory_bytes"] < result.limit_bytes < record["gpu_memory_bytes"]


def test_step_time_is_predicted_where_the_batch_is_known(results: list[ScoredRecord]) -> None:
    grid = [r for r in results if r.record["family"] == "fujii-grid-A100-40GB"]
    assert grid
    assert all(r.predicted_step_seconds and r.predicted_tokens_per_second_per_gpu for r in grid)


def test_peaks_of_hybrids_that_nothing_was_fitted_on_are_met() -> None:
    """Megatron-LM's own runs: ordinary hybrids within a percent, Nemotron 3 with its mixtures within a tenth."""
    clusters = machines()
    hybrids = [record for record in read_records(DATA / "families.jsonl") if record["family"] == "megatron-lm-hybrids"]
    scores = [score(record, clusters) for record in hybrids]
    errors = [abs(s.predicted_bytes / s.measured_bytes - 1) for s in scores if s.predicted_bytes and s.measured_bytes]
    dense = [record["model"]["moe"] is None for record in hybrids]
    assert len(errors) == len(hybrids) == 8
    assert max(error for error, plain in zip(errors, dense, strict=True) if plain) < 0.01
    assert max(errors) < 0.1


def test_offload_of_an_unknown_amount_is_refused(records: list[dict[str, Any]]) -> None:
    sharded = (record for record in records if record["backend"] == "megatron-fsdp")
    offloading = [record for record in sharded if record["implementation"]["cpu_activation_offload"]]
    assert offloading
    for record in offloading:
        reason = str(score(record, {}).reason)
        assert "of how many layers the activations leave the device is not recorded" in reason


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no record"),
        (b"[1]\n", "not a JSON object"),
        (b"{\n", "is not JSON"),
        (b'{"id": "x"}\n', "lacks family"),
        (b'{"id": NaN}\n', "NaN is not a number JSON knows"),
        (b'{"id": 1e999}', ":1: "),
        (b'{"id": ' + b"9" * 5000 + b"}", ":1: "),
        (b"[" * 5000, ":1: "),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_holds_no_measurements_is_refused_by_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as refused:
        read_records(path)
    assert str(path) in str(refused.value)


def test_a_folder_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.jsonl"):
        with pytest.raises(UserError, match="cannot be read"):
            read_records(path)


def test_host_memory_is_priced_by_the_node(records: list[dict[str, Any]]) -> None:
    record = json.loads(json.dumps(next(r for r in records if r["family"] == "SimuMax")))
    clusters = machines()
    record |= {"peak_kind": "host", "peak_bytes": 30 * 2**30, "gpu": "H100"}
    eight = score(record, clusters)
    assert eight.supported
    assert eight.predicted_bytes == 8 * score({**record, "devices_per_node": 1}, clusters).predicted_bytes
    assert eight.limit_bytes == int(0.8 * clusters["h100-80gb"].host_memory_bytes)
    died = score({**record, "peak_kind": "host_oom", "peak_bytes": None, "host_memory_bytes": 2**30}, clusters)
    assert died.verdict == "unsafe"


@pytest.fixture
def on_a_cpu(records: list[dict[str, Any]]) -> dict[str, Any]:
    """A DeepSpeed run of two processes on a CPU-only machine."""
    record = next(r for r in records if r["backend"] == "deepspeed" and not r["optimizer"]["offload"])
    alone = {**record, "world_size": 2, "parallelism": {**record["parallelism"], "data": 2}}
    return {**alone, "gpu": "cpu", "peak_kind": "resident", "baseline_bytes": 2**29, "gpu_memory_bytes": 2**32}


def test_resident_memory_stands_on_the_idle_trainer_of_its_machine(on_a_cpu: dict[str, Any]) -> None:
    known, heavier = score(on_a_cpu, {}), score({**on_a_cpu, "baseline_bytes": 2**30}, {})
    assert heavier.predicted_bytes == (known.predicted_bytes or 0) + 2**29
    assert "baseline_bytes" in score({**on_a_cpu, "baseline_bytes": None}, {}).assumed
    node = score({**on_a_cpu, "peak_kind": "host", "devices_per_node": 2}, {})
    assert node.predicted_bytes == 2 * (known.predicted_bytes or 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "H100"}, "resident memory is predicted on CPU-only machines"),
        ({"backend": "megatron-lm"}, "what a process of megatron-lm holds on a CPU-only machine is not known"),
        ({"backend": "keras"}, "backend 'keras' is shown as it was measured, and not priced"),
        ({"peak_kind": "swap"}, "peak_kind 'swap' is not predicted"),
        ({"micro_batch_size": 0}, "its sizes make no layout"),
        ({"micro_batch_size": "one"}, "its value is of another type"),
        ({"gpu": "H200", "peak_kind": "device", "precision": {"compute": "bf16", "fp8_recipe": "fp8"}}, "'fp8': not"),
        ({"techniques": {"cuda_graphs": ["attn", "vision"]}}, "techniques.cuda_graphs ['vision']"),
    ],
)
def test_a_refusal_says_what_and_why(on_a_cpu: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    result = score({**on_a_cpu, **changes}, {})
    assert not result.supported
    assert reason in str(result.reason)


def test_ranks_of_one_run_are_priced_once_and_as_each_alone() -> None:
    some = [{**run(number, 1.0), "id": f"{number}/{rank}"} for number in (1, 2) for rank in (1, 2)]
    together = score_all(some, machines())
    alone = [score for record in some for score in score_all([record], machines())]
    assert together == alone
    assert together[0].case is together[1].case is not together[2].case


def test_a_peak_that_was_not_reached_is_no_error(on_a_cpu: dict[str, Any]) -> None:
    lived = {**on_a_cpu, "run_state": "succeeded", "observed": {"steps_run": 9}}
    scores = [
        score({**lived, **changes}, {}) for changes in ({}, {"run_state": "failed"}, {"observed": {"steps_run": 1}})
    ]
    (family,) = families(scores).values()
    assert family["not_compared"] == {"failed": 1, "fewer than 2 steps": 1}
    assert family["mape"] == families(scores[:1])[next(iter(families(scores)))]["mape"]
    assert by_size(scores)[0]["records"] == 1


def test_a_record_that_offloads_its_optimizer_holds_it_on_the_host(records: list[dict[str, Any]]) -> None:
    record = next(r for r in records if r["backend"] == "deepspeed" and r["optimizer"].get("offload"))
    host = {**record, "peak_kind": "host", "devices_per_node": record["world_size"]}
    kept = {**host, "optimizer": {**record["optimizer"], "offload": None}}
    offloads, keeps = score(host, {}).predicted_bytes, score(kept, {}).predicted_bytes
    assert offloads is not None
    assert keeps is not None
    parameters = record["model"]["num_layers"] * 12 * record["model"]["hidden_size"] ** 2  # within a few per cent
    assert 16 * 0.7 * parameters < offloads - keeps < 2 * 20 * 1.3 * parameters
