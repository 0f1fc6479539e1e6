"""What a run of ours left, as a rendered directory holds it, scores the predictions it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.calibration.records import problem
from support.command_line import CommandLine
from support.store_run_dirs import GIB, STARTED, gpu

ATTEMPT = "local-1760000000-1.0"
RANKS = 2


@pytest.fixture
def collected(tmp_path: Path, llmlaunch: CommandLine) -> list[dict[str, Any]]:
    """The records of a two-GPU run, exported: probes, accounting, a log of steps, main memory."""
    run, exported = tmp_path / "run", tmp_path / "mine.jsonl"
    shape = ("nodes=1", "cluster={base: a100-80gb-x8, devices_per_node: 2}", "model={base: llama2-7b, num_layers: 4}")
    recipe = asset("recipes", "llama2-7b-deepspeed.yaml")
    llmlaunch("render", recipe, *shape, "layout={zero_stage: 2}", "-o", run)
    trained(run)
    llmlaunch("collect", run)
    llmlaunch("measurements", "export", exported)
    scored = {record["id"]: record for record in llmlaunch.json("accuracy", exported)["records"]}
    records = [json.loads(line) for line in exported.read_text().splitlines()]
    return [{**record, "scored": scored[record["id"]]} for record in records]


def trained(run: Path) -> None:
    attempt = run / "attempts" / ATTEMPT
    for folder in ("ranks", "memory", "done"):
        (attempt / folder).mkdir(parents=True)
    (run / "run.id").write_text("mine-1\n")
    (attempt / "done" / "n0").touch()
    (attempt / "progress.json").write_text(json.dumps({"step": 7, "steps": 7, "step_seconds": 1.5}))
    record: dict[str, Any] = {"node": "n0", "started_at": STARTED, "ended_at": STARTED + 9, "exit_code": 0}
    ranks = [
        {**record, "signal": None, "rank": rank, "local_rank": rank, "program_pid": 1000 + rank}
        for rank in range(RANKS)
    ]
    for rank in range(RANKS):
        (attempt / "ranks" / f"{rank}.json").write_text(json.dumps(ranks[rank]))
        device = {
            "device": rank, "uuid": f"GPU-n0-{rank}", "total_bytes": 79 * GIB,
            "allocated_peak_bytes": (30 + rank) * GIB, "active_peak_bytes": 33 * GIB,
            "reserved_peak_bytes": (35 + rank) * GIB, "reserved_bytes": (35 + rank) * GIB,
            "alloc_retries": 0, "ooms": 0, "device_used_bytes": 40 * GIB, "outside_bytes": 2 * GIB,
        }  # fmt: skip
        probe = {"v": 1, "rank": rank, "node": "n0", "pid": 1000 + rank, "at": STARTED, "ended": True}
        path = attempt / "memory" / f"{rank}.{1000 + rank}.json"
        path.write_text(json.dumps({**probe, "devices": [device]}))
    cards = [gpu(rank, accounting_peak_bytes={str(1000 + rank): (37 + rank) * GIB}) for rank in range(RANKS)]
    host = {"used_peak_bytes": 90 * GIB, "total_bytes": 500 * GIB}
    line = {"v": 1, "event": "end", "attempt": ATTEMPT, "node": "n0", "time": STARTED + 9, "gpus": cards, "host": host}
    (run / "peaks" / "n0.jsonl").write_text(json.dumps(line) + "\n")
    status = {"schema": 1, "attempt": ATTEMPT, "state": "succeeded", "exit_code": 0, "ended_at": STARTED + 9}
    (run / "status.json").write_text(json.dumps({**status, "ranks": ranks}))


def test_each_peak_is_a_record_of_its_kind(collected: list[dict[str, Any]]) -> None:
    begin = f"mine-1/{ATTEMPT}"
    assert {record["id"]: record["peak_bytes"] / GIB for record in collected} == {
        f"{begin}/rank0/device": 37,
        f"{begin}/rank1/device": 38,
        f"{begin}/stage0/allocated": 31,
        f"{begin}/stage0/reserved": 36,
        f"{begin}/n0/host": 90,
    }
    assert [problem(record) for record in collected] == [None] * 5


def test_each_is_scored_against_a_prediction_of_its_own_kind(collected: list[dict[str, Any]]) -> None:
    assert [record["scored"]["reason"] for record in collected] == [None] * 5
    predicted = {record["peak_kind"]: record["scored"]["predicted_bytes"] for record in collected}
    assert 0 < predicted["allocated"] < predicted["reserved"] < predicted["device"]
    assert predicted["host"] > 0
    planned = {record["peak_kind"]: record["predicted_bytes"] for record in collected}
    for kind in ("allocated", "reserved", "device"):  # the record prices the job that was planned, to the byte
        assert planned[kind] == predicted[kind], kind
    assert planned["host"] > 0


def test_a_stages_record_is_the_worst_ranks(collected: list[dict[str, Any]]) -> None:
    reserved = next(record for record in collected if record["peak_kind"] == "reserved")
    spread = {"count": 2, "min_bytes": 35 * GIB, "max_bytes": 36 * GIB, "what": "ranks of one stage"}
    assert (reserved["repeats"], reserved["global_rank"], reserved["gpu_uuid"]) == (spread, 1, "GPU-n0-1")
    assert (reserved["pipeline_rank"], reserved["rank_scope"]) == (0, "stage")
    assert (reserved["allocator_statistic"], reserved["peak_source"]) == ("reserved_bytes.all.peak", "torch probe")
    assert (reserved["observed"]["alloc_retries"], reserved["observed"]["steps_run"]) == (0, 7)  # for calibrations


def test_a_ranks_record_tells_all_that_was_seen(collected: list[dict[str, Any]]) -> None:
    first = collected[0]
    assert (first["peak_source"], first["step_seconds"]) == ("nvml accounting", 1.5)
    observed = first["observed"]
    assert (observed["reserved_peak_bytes"], observed["outside_torch_bytes"]) == (35 * GIB, 2 * GIB)
    assert (observed["steps_run"], observed["step_seconds"]) == (7, 1.5)
    assert (observed["sources"]["reserved_peak_bytes"], observed["sources"]["gpu_uuid"]) == ("torch probe", "torch")


def test_main_memory_is_of_the_node(collected: list[dict[str, Any]]) -> None:
    host = next(record for record in collected if record["peak_kind"] == "host")
    assert (host["node"], host["pipeline_rank"], host["peak_source"]) == ("n0", None, "MemTotal - MemAvailable")
    assert host["host_memory_bytes"] == 500 * GIB
