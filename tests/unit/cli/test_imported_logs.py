"""`llmlaunch measurements import` of logs: what it asks for and refuses, and that one learns from what it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.calibration.pool import gather
from llmlaunch.calibration.records import problem
from support.command_line import CommandLine
from support.training_logs import LLAMA, LOGS, OOM, megatron_log, megatron_memory

MIB = 2**20
H100 = ("--cluster", "h100-80gb-x8")
DEEPSPEED = str(asset("recipes", "llama2-7b-deepspeed.yaml"))
PINNED = "layout={tensor: 1, context: 1, micro_batch_size: 2, zero_stage: 3, recompute: none}"
MEMORY = [megatron_memory(rank, 40000 + rank, 45000 + rank) for rank in (0, 1, 4, 5)]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def log(text: str, name: str = "slurm-1.out") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return log


def records(llmlaunch: CommandLine) -> list[dict[str, Any]]:
    return list(llmlaunch.json("measurements", "list")["measurements"])


def test_a_megatron_log_becomes_records_of_its_job(llmlaunch: CommandLine, write: Write) -> None:
    log = write(megatron_log(memory=MEMORY))
    assert llmlaunch("measurements", "import", log, *H100).stdout.startswith("4 added, 0 replaced, 0 unchanged in ")
    imported = records(llmlaunch)
    assert [problem(record) for record in imported] == [None] * 4
    record = imported[0]
    assert (record["backend"], record["gpu"], record["world_size"]) == ("megatron-lm", "h100-80gb", 8)
    assert (record["recipe"]["model"]["num_layers"], record["recipe"]["model"]["vocab_size"]) == (32, 128256)
    split = record["layout"]
    assert (split["tensor"], split["pipeline"], split["data"], split["sequence_parallel"]) == (2, 2, 2, True)
    assert (record["micro_batch_size"], record["global_batch_size"], record["num_microbatches"]) == (1, 64, 32)
    assert split["zero_stage"] == 1
    assert "expandable_segments:False" in json.dumps(record["recipe"]["environment"])  # the log does not say
    assert record["source"]["citation"] == f"{log}:{log.read_text().splitlines().index(MEMORY[1]) + 1}"
    assert record["step_seconds"] == pytest.approx(2.5, abs=0.01)
    peaks = {(record["peak_kind"], record["pipeline_rank"]): record["peak_bytes"] for record in imported}
    assert peaks == {
        ("allocated", 0): 40001 * MIB,
        ("reserved", 0): 45001 * MIB,
        ("allocated", 1): 40005 * MIB,
        ("reserved", 1): 45005 * MIB,
    }


def test_importing_twice_changes_nothing_and_a_log_that_grew_replaces(llmlaunch: CommandLine, write: Write) -> None:
    log = write(megatron_log(memory=MEMORY))
    llmlaunch("measurements", "import", log, *H100)
    before = records(llmlaunch)
    assert llmlaunch.json("measurements", "import", log, *H100)["unchanged"] == 4
    assert records(llmlaunch) == before
    log.write_text(log.read_text() + megatron_memory(0, 41000, 46000, 500) + "\n")
    done = llmlaunch.json("measurements", "import", log, *H100)
    assert (done["added"], done["replaced"], done["unchanged"]) == (0, 2, 2)


def test_what_is_missing_is_named_with_how_to_give_it(llmlaunch: CommandLine, write: Write, store_file: Path) -> None:
    log = write(megatron_log(memory=MEMORY))
    message = llmlaunch("measurements", "import", log, code=2).stderr
    assert message == (
        f"error: {log}: does not say on which machine it ran; name it: "
        f"llmlaunch measurements import {log} --cluster NAME\n"
    )
    alone = write("\n".join(MEMORY), "rank.log")
    assert "--recipe RECIPE.yaml" in llmlaunch("measurements", "import", alone, *H100, code=2).stderr
    open_layout = llmlaunch("measurements", "import", alone, "--recipe", DEEPSPEED, code=2).stderr
    assert "layouts open" in open_layout
    assert "micro_batch_size, zero_stage" in open_layout
    other = write(megatron_log({**LLAMA, "world_size": 12}), "other.log")
    assert "12 ranks do not fill nodes of 8" in llmlaunch("measurements", "import", other, *H100, code=2).stderr
    fork = write(megatron_log({**LLAMA, "deepspeed": True}), "fork.log")
    for words in (H100, ("--recipe", DEEPSPEED, PINNED)):
        refusal = llmlaunch("measurements", "import", fork, *words, code=2).stderr
        assert "was printed by Megatron-DeepSpeed, whose memory and step times are not predicted" in refusal
    assert "holds no log" in llmlaunch("measurements", "import", write("hello\n"), *H100, code=2).stderr
    assert not store_file.exists()


def test_deepspeed_takes_its_job_from_a_recipe_that_must_agree(llmlaunch: CommandLine, write: Write) -> None:
    text = (LOGS / "deepspeed-0.19.log").read_text()
    for ours, theirs in (
        (": 8,", ": 64,"),
        ("_size ............. 8", "_size ............. 64"),
        (": 4,", ": 2,"),
        ('stage": 2', 'stage": 3'),
    ):
        text = text.replace(ours, theirs)
    log = write(
        text.replace("_gpu  4", "_gpu  2")
        .replace("_stage ...... 2", "_stage ...... 3")
        .replace("world_size ................... 1", "world_size ................... 16")
    )
    command = ("measurements", "import", log, "--recipe", DEEPSPEED)
    refusal = llmlaunch(*command, PINNED, code=2).stderr
    assert "says training.global_batch_size 64, the recipe 256; give the recipe of the job that wrote it" in refusal
    # what the log says of the layout need not be pinned
    llmlaunch(*command, "layout={recompute: none}", "training.global_batch_size=64")
    [record] = records(llmlaunch)
    assert (record["backend"], record["gpu"], record["peak_kind"]) == ("deepspeed", "a100-80gb", "allocated")
    assert (record["layout"]["zero_stage"], record["recipe"]["backend"]["script"]) == (3, "train.py")
    assert record["rounding_bytes"] == 2**30 // 100


def test_metrics_of_the_trainer_and_of_wandb_join_it(llmlaunch: CommandLine, write: Write) -> None:
    rows = [{"_timestamp": 15.0 * n, "system.gpu.0.memoryAllocated": 50.0 + n} for n in range(3)]
    events = write("".join(json.dumps(row) + "\n" for row in rows), "events")
    llmlaunch("measurements", "import", events, "--recipe", DEEPSPEED, PINNED)
    [record] = records(llmlaunch)
    assert (record["peak_kind"], record["peak_bytes"]) == ("device", int(0.52 * record["gpu_memory_bytes"]))
    assert "or more" in record["source"]["note"]
    results = {"train_runtime": 90.0, "train_steps_per_second": 0.5}
    llmlaunch("measurements", "import", write(json.dumps(results), "r"), "--recipe", DEEPSPEED, PINNED)
    record = records(llmlaunch)[1]
    assert (record["peak_kind"], record["step_seconds"]) == ("fits", 2.0)
    assert record["recipe"]["backend"]["script_kind"] == "hugging-face"


def test_a_log_that_ends_for_lack_of_memory_is_an_oom(llmlaunch: CommandLine, write: Write) -> None:
    text = megatron_log(memory=MEMORY) + f"[rank4]: {OOM}\n"
    llmlaunch("measurements", "import", write(text), *H100)
    oom = records(llmlaunch)[-1]
    assert (oom["peak_kind"], oom["peak_bytes"], oom["pipeline_rank"], oom["global_rank"]) == ("oom", None, 1, 4)
    assert oom["numbers"]["asked_bytes"] == 2 * 2**30
    assert {record["run_state"] for record in records(llmlaunch)} == {"failed"}
    [configuration], left_out = gather(records(llmlaunch))
    assert configuration.needs == [("reserved", 1, 72 * 2**30)]
    assert left_out == {"failed": 4}


def test_files_of_the_ranks_of_one_job(llmlaunch: CommandLine, write: Write) -> None:
    first = write(megatron_log(memory=MEMORY[:2]), "rank0.log")
    second = write("\n".join(MEMORY[2:]), "rank4.log")
    pattern = first.with_name("rank*.log")
    assert "--one-job" in llmlaunch("measurements", "import", pattern, *H100, code=2).stderr
    llmlaunch("measurements", "import", pattern, *H100, "--one-job")
    assert {record["pipeline_rank"] for record in records(llmlaunch)} == {0, 1}
    assert (
        "2 of the files print" in llmlaunch("measurements", "import", first, first, *H100, "--one-job", code=2).stderr
    )
    left_out = llmlaunch("measurements", "import", pattern, *H100, "--skip-bad")
    assert left_out.stderr.count("warning: ") == 1
    assert f"{second}: says what was measured" in left_out.stderr


def test_records_and_logs_come_in_together(llmlaunch: CommandLine, write: Write) -> None:
    llmlaunch("measurements", "import", write(megatron_log(memory=MEMORY)), *H100)
    exported = write("", "all.jsonl")
    llmlaunch("measurements", "export", exported)
    again = llmlaunch.json("measurements", "import", exported, exported.with_name("slurm-1.out"), *H100)
    assert (again["added"], again["unchanged"]) == (0, 8)
    assert "leave out" in llmlaunch("measurements", "import", exported, "--recipe", DEEPSPEED, code=2).stderr
