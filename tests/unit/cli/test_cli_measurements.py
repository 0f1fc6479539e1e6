"""`runs`, `collect` and `measurements` as a person types them: the result alone on stdout, the rest on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.calibration.records import problem
from llmlaunch.node.finish import Ending, finish
from support.command_line import CommandLine
from support.store_run_dirs import ATTEMPT, GIB, RUN_ID, STARTED, RunDir, finished_cpu_run, gpu

FIT = Path(__file__).resolve().parents[2] / "data" / "measurements" / "fit.jsonl"


def test_where_nothing_ever_ran_nothing_is_made(llmlaunch: CommandLine, store_file: Path) -> None:
    assert llmlaunch.json("runs") == {"runs": []}
    assert llmlaunch.json("measurements", "list") == {"measurements": []}
    assert llmlaunch.json("collect") == {"runs": []}
    assert llmlaunch("measurements", "export") == ("", "")
    assert llmlaunch("runs").stdout == ""
    assert not store_file.exists()


def test_imported_records_come_back_equal(llmlaunch: CommandLine, tmp_path: Path) -> None:
    assert "363 added" in llmlaunch("measurements", "import", FIT).stdout
    again = llmlaunch.json("measurements", "import", FIT)
    assert (again["added"], again["replaced"], again["unchanged"]) == (0, 0, 363)
    records = [json.loads(line) for line in FIT.read_text().splitlines()]
    assert [json.loads(line) for line in llmlaunch("measurements", "export").stdout.splitlines()] == records
    assert llmlaunch.json("measurements", "list") == {"measurements": records}
    out = tmp_path / "out.jsonl"
    assert llmlaunch.json("measurements", "export", out) == {"exported": 363, "file": str(out)}
    assert [json.loads(line) for line in out.read_text().splitlines()] == records


def test_the_list_is_a_table_that_filters_narrow(llmlaunch: CommandLine) -> None:
    llmlaunch("measurements", "import", FIT)
    out, err = llmlaunch("measurements", "list", "--gpu", "h100", "--kind", "allocated")
    lines = out.splitlines()
    assert lines[0].split()[:5] == ["id", "family", "backend", "gpu", "kind"]
    assert len(lines) > 10
    assert all(" H100 " in line and " allocated " in line for line in lines[1:])
    assert err == ""
    assert llmlaunch("measurements", "list", "--family", "nobody") == ("", "no measurements\n")


def test_bad_lines_are_left_out_where_one_asks_for_it(llmlaunch: CommandLine, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a"}\n{"id": NaN}\n{"id": "b", "peak_bytes"\n{"id": "c"}\n')
    out, err = llmlaunch("measurements", "import", bad, "--skip-bad")
    assert out.startswith("2 added, 0 replaced, 0 unchanged, 2 bad in ")
    assert err.startswith(f"warning: {bad}, line 2: NaN")
    assert [line.endswith("; left out") for line in err.splitlines()] == [True, True]
    again = llmlaunch.json("measurements", "import", bad, "--skip-bad")
    assert (again["added"], again["unchanged"], [line["number"] for line in again["bad"]]) == (0, 2, [2, 3])
    assert [record["id"] for record in llmlaunch.json("measurements", "list")["measurements"]] == ["a", "c"]


def test_an_export_is_for_its_owner_alone_or_as_open_as_it_was(llmlaunch: CommandLine, tmp_path: Path) -> None:
    llmlaunch("measurements", "import", FIT)
    out = tmp_path / "out.jsonl"
    llmlaunch("measurements", "export", out)
    assert out.stat().st_mode & 0o777 == 0o600
    out.chmod(0o664)
    llmlaunch("measurements", "export", out)
    assert out.stat().st_mode & 0o777 == 0o664


def test_a_changed_record_needs_replace(llmlaunch: CommandLine, tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text('{"id": "a", "x": 1}\n')
    second.write_text('{"id": "a", "x": 2}\n')
    llmlaunch("measurements", "import", first)
    assert "--replace" in llmlaunch("measurements", "import", second, code=2).stderr
    assert llmlaunch.json("measurements", "import", second, "--replace")["replaced"] == 1
    assert llmlaunch.json("measurements", "list") == {"measurements": [{"id": "a", "x": 2}]}


def test_a_named_directory_is_collected_and_listed(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    out, err = llmlaunch("collect", run.path)
    assert (out, err) == (f"{RUN_ID} (succeeded): collected, 2 measurements\n", "")
    assert llmlaunch.json("collect", RUN_ID)["runs"][0]["did"] == "unchanged"
    (listed,) = llmlaunch.json("runs")["runs"]
    assert (listed["run_id"], listed["recipe"], listed["state"]) == (RUN_ID, "tiny", "succeeded")
    assert (listed["predicted_bytes"], listed["measured_bytes"]) == (10 * GIB, 2 * GIB)
    assert listed["directory"] == str(run.path)
    row = llmlaunch("runs").stdout.splitlines()[1].split()
    assert row[:8] == [RUN_ID, "succeeded", "-", "2.00", "10.0", "resident", "-", "1"]
    assert row[-1] == str(run.path)
    assert len(llmlaunch.json("measurements", "list", "--run", RUN_ID)["measurements"]) == 2


def test_what_is_no_run_is_named_and_the_others_are_collected(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    out, err = llmlaunch("collect", tmp_path / "empty", run.path, code=2)
    assert "collected, 2 measurements" in out
    assert err == f"error: {tmp_path / 'empty'}: no run directory (it has no run.json)\n"
    assert "no run 'nobody'" in llmlaunch("collect", "nobody", code=2).stderr


def test_control_characters_of_a_record_do_not_reach_the_terminal(llmlaunch: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a\\u001b[31m", "gpu": "x\\ny"}\n')
    llmlaunch("measurements", "import", path)
    out, _ = llmlaunch("measurements", "list")
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2


def test_a_password_in_the_url_is_not_printed(llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMLAUNCH_STORE", "postgresql://ada:hush@127.0.0.1:1/llm")
    for command in (["runs"], ["measurements", "import", str(FIT)]):
        out, err = llmlaunch(*command, code=2)
        assert "hush" not in out + err
        assert "ada@127.0.0.1:1/llm" in err


RECIPE = str(asset("recipes", "llama3-8b.yaml"))
FEW = "layout={context: 1, micro_batch_size: 1, layers_by_stage: even, recompute: none, techniques: asked}"


@pytest.fixture
def ended(llmlaunch: CommandLine, tmp_path: Path) -> RunDir:
    """A run that the store knows of, and that has ended since."""
    run = RunDir(tmp_path / "run")
    llmlaunch("collect", run.path)
    run.ranks()
    run.line("n0", processes=[{"rank": 0, "pid": 1000, "resident_bytes": 5, "resident_peak_bytes": 3 * GIB}])
    run.write(f"attempts/{ATTEMPT}/done/n0", "")
    finish(Ending(run.path, ATTEMPT, nodes=1, code=0))
    assert (run.path / "attempts" / ATTEMPT / "summary.json").exists()
    return run


@pytest.mark.parametrize(
    "command",
    [
        ["runs"],
        ["measurements", "list"],
        ["check", RECIPE, FEW, "memory.risk=0.05", "setup=[MEGATRON_LM_PATH=/m]"],
        ["nodes"],
    ],
    ids=["runs", "list", "check", "nodes"],
)
def test_whatever_reads_the_store_next_collects_the_run(
    llmlaunch: CommandLine, ended: RunDir, command: list[str]
) -> None:
    for said in (f"{RUN_ID} (succeeded): collected, 2 measurements\n", ""):
        out, err = llmlaunch(*command, "--json")
        assert err == said
        assert json.loads(out)
    records = llmlaunch.json("measurements", "list")["measurements"]
    assert [record["peak_bytes"] for record in records] == [3 * GIB, 2 * GIB]


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


def trained(path: Path) -> None:
    run = RunDir.rendered(path, devices=RANKS)
    (path / "run.id").write_text("mine-1\n")
    run.ranks(ended_at=STARTED + 9, resident_peak_bytes=None)
    run.write(f"attempts/{ATTEMPT}/done/n0", "")
    run.write(f"attempts/{ATTEMPT}/progress.json", {"step": 7, "steps": 7, "step_seconds": 1.5})
    for rank in range(RANKS):
        device = {
            "device": rank, "uuid": f"GPU-n0-{rank}", "total_bytes": 79 * GIB,
            "allocated_peak_bytes": (30 + rank) * GIB, "active_peak_bytes": 33 * GIB,
            "reserved_peak_bytes": (35 + rank) * GIB, "reserved_bytes": (35 + rank) * GIB,
            "alloc_retries": 0, "ooms": 0, "device_used_bytes": 40 * GIB, "outside_bytes": 2 * GIB,
        }  # fmt: skip
        probe = {"v": 1, "rank": rank, "node": "n0", "pid": 1000 + rank, "at": STARTED, "ended": True}
        run.write(f"attempts/{ATTEMPT}/memory/{rank}.{1000 + rank}.json", {**probe, "devices": [device]})
    cards = [gpu(rank, accounting_peak_bytes={str(1000 + rank): (37 + rank) * GIB}) for rank in range(RANKS)]
    run.line("n0", gpus=cards, host={"used_peak_bytes": 90 * GIB, "total_bytes": 500 * GIB})
    run.status()


def test_each_peak_is_a_record_of_its_kind_scored_against_a_prediction_of_that_kind(
    collected: list[dict[str, Any]],
) -> None:
    begin = f"mine-1/{ATTEMPT}"
    assert {record["id"]: record["peak_bytes"] / GIB for record in collected} == {
        f"{begin}/rank0/device": 37,
        f"{begin}/rank1/device": 38,
        f"{begin}/stage0/allocated": 31,
        f"{begin}/stage0/reserved": 36,
        f"{begin}/n0/host": 90,
    }
    assert [problem(record) for record in collected] == [None] * 5
    assert [record["scored"]["reason"] for record in collected] == [None] * 5
    predicted = {record["peak_kind"]: record["scored"]["predicted_bytes"] for record in collected}
    assert 0 < predicted["allocated"] < predicted["reserved"] < predicted["device"]
    assert predicted["host"] > 0
    planned = {record["peak_kind"]: record["predicted_bytes"] for record in collected}
    for kind in ("allocated", "reserved", "device"):  # the record prices the job that was planned, to the byte
        assert planned[kind] == predicted[kind], kind
    assert planned["host"] > 0
    # of a stage the worst rank's
    reserved = next(record for record in collected if record["peak_kind"] == "reserved")
    spread = {"count": 2, "min_bytes": 35 * GIB, "max_bytes": 36 * GIB, "what": "ranks of one stage"}
    assert (reserved["repeats"], reserved["global_rank"], reserved["gpu_uuid"]) == (spread, 1, "GPU-n0-1")
    assert (reserved["pipeline_rank"], reserved["rank_scope"]) == (0, "stage")
    assert (reserved["allocator_statistic"], reserved["peak_source"]) == ("reserved_bytes.all.peak", "torch probe")
    assert (reserved["observed"]["alloc_retries"], reserved["observed"]["steps_run"]) == (0, 7)  # for calibrations
    # of a rank all that was seen
    first = collected[0]
    assert (first["peak_source"], first["step_seconds"]) == ("nvml accounting", 1.5)
    observed = first["observed"]
    assert (observed["reserved_peak_bytes"], observed["outside_torch_bytes"]) == (35 * GIB, 2 * GIB)
    assert (observed["steps_run"], observed["step_seconds"]) == (7, 1.5)
    assert (observed["sources"]["reserved_peak_bytes"], observed["sources"]["gpu_uuid"]) == ("torch probe", "torch")
    # of main memory the node's
    host = next(record for record in collected if record["peak_kind"] == "host")
    assert (host["node"], host["pipeline_rank"], host["peak_source"]) == ("n0", None, "MemTotal - MemAvailable")
    assert host["host_memory_bytes"] == 500 * GIB
