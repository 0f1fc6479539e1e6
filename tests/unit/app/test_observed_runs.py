"""An observed command becomes a run like any other: a recipe, a plan with the layout that ran, its peaks beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.command_line import CommandLine

GIB = 2**30
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--seq-length 4096 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 "
    "--lr 3e-4 --bf16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --attention-dropout 0 --hidden-dropout 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128255"
)
GPU = {"total_bytes": 85_045_084_160, "name": "NVIDIA H100 80GB HBM3"}


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def observed(tmp_path: Path) -> Callable[..., Path]:
    """What an observer of one node with eight ranks leaves, each on a GPU of its own."""

    def make(command: str, ranks: int = 8, earlier: bool = False, **gpu: Any) -> Path:
        directory = tmp_path / "observed" / "gpt-17"
        folder = directory / "attempts" / "17.0"
        write(directory / "run.json", {"schema": 1, "name": "gpt", "observed": True, "nodes": 1, "peak_kind": "device"})
        write(directory / "run.id", "gpt-20261123T100000Z-abcd\n")
        begun = {"schema": 1, "attempt": "17.0", "nodes": ["n1"], "started_at": 1.8e9}
        environment = {"SLURM_JOB_NAME": "gpt"}
        described = {"command": command.split(), "environment": environment, "files": {}, "folder": str(tmp_path)}
        write(folder / "attempt.json", begun if earlier else {**begun, "observed": described})
        if earlier:  # as the version before wrote it
            write(folder / "observed.json", {"schema": 1, **described})
        write(folder / "versions.json", {"megatron-core": "0.19.2"})
        gpus = []
        for rank in range(ranks):
            times = {"started_at": 1.8e9, "ended_at": 1.8e9 + 60}
            place = {"rank": rank, "local_rank": rank, "node": "n1", "pid": 100 + rank, "program_pid": 100 + rank}
            write(folder / "ranks" / f"{rank}.json", {"v": 1, "world_size": ranks, "exit_code": 0, **place, **times})
            peaks = {"device_peak_bytes": 40 * GIB, "process_peak_bytes": {str(100 + rank): 39 * GIB}}
            card = {"index": rank, "uuid": f"GPU-{rank}", "pci": f"0000:0{rank}:00.0", **GPU, **gpu, **peaks}
            gpus.append({"baseline_bytes": 0, "used_bytes": 0, "accounting_peak_bytes": {}, "lost": None, **card})
        line = {"v": 1, "event": "end", "attempt": "17.0", "node": "n1", "time": 1.8e9 + 60, "gpus": gpus}
        write(directory / "peaks" / "n1.jsonl", json.dumps(line) + "\n")
        write(directory / "status.json", {"schema": 1, "attempt": "17.0", "state": "succeeded", "exit_code": 0})
        return directory

    return make


def test_a_megatron_command_becomes_a_recipe_on_the_machine_that_was_seen(
    observed: Callable[..., Path], llmlaunch: CommandLine
) -> None:
    directory = observed(MEGATRON)
    llmlaunch("collect", directory.parent)
    recipe = (directory / "recipe.yaml").read_text()
    assert "cluster: h100-80gb-x8\n" in recipe
    assert "version: 0.19.2\n" in recipe
    run = json.loads((directory / "run.json").read_text())
    assert (run["observed"], run["pipeline"], run["nodes"]) == (True, 2, 1)
    plan = json.loads((directory / "plan.json").read_text())
    assert (plan["layout"]["tensor"], plan["layout"]["pipeline"], plan["layout"]["zero_stage"]) == (4, 2, 1)
    records = llmlaunch.json("measurements", "list")["measurements"]
    device = [record for record in records if record["peak_kind"] == "device"]
    assert [(record["global_rank"], record["pipeline_rank"]) for record in device] == [
        (rank, rank // 4) for rank in range(8)
    ]
    assert {record["gpu"] for record in device} == {"h100-80gb"}
    assert all(record["predicted_bytes"] for record in device)


def test_the_next_check_of_its_recipe_shows_what_it_used(observed: Callable[..., Path], llmlaunch: CommandLine) -> None:
    directory = observed(MEGATRON, earlier=True)
    llmlaunch("collect", directory)
    check = llmlaunch("check", "-v", directory / "recipe.yaml", code=(0, 3))
    assert "This recipe ran " in check.stdout
    assert "gpt-20261123T100000Z-abcd" in check.stdout
    assert "rank 0 device: " in check.stdout


def test_calibrate_counts_it_among_the_runs_that_it_learns_from(
    observed: Callable[..., Path], llmlaunch: CommandLine
) -> None:
    llmlaunch("collect", observed(MEGATRON))
    assert "the store holds 1" in llmlaunch("calibrate", "--dry-run").stdout


def test_a_command_that_is_no_recipe_is_collected_all_the_same_and_completed_by_hand(
    observed: Callable[..., Path], llmlaunch: CommandLine
) -> None:
    directory = observed(MEGATRON.replace("--global-batch-size 64 ", "").replace("--seq-length 4096 ", ""))
    done = llmlaunch("collect", directory)
    assert "training.sequence_length" in done.stderr
    assert "(succeeded): collected, " in done.stdout
    again = llmlaunch("collect", directory, "training.sequence_length=4096")
    assert "training.sequence_length" not in again.stderr
    assert json.loads((directory / "run.json").read_text())["pipeline"] == 2


def test_an_unknown_card_is_asked_for(observed: Callable[..., Path], llmlaunch: CommandLine) -> None:
    directory = observed(MEGATRON, name="Card of Tomorrow")
    assert "cluster: the card of its ranks" in llmlaunch("collect", directory).stderr
    assert "warning" not in llmlaunch("collect", directory, "cluster=h200-141gb-x8").stderr


def test_fewer_devices_than_the_profile_has_are_said(observed: Callable[..., Path], llmlaunch: CommandLine) -> None:
    directory = observed(MEGATRON.replace("--tensor-model-parallel-size 4", "--tensor-model-parallel-size 2"), ranks=4)
    llmlaunch("collect", directory)
    assert "devices_per_node: 4" in (directory / "recipe.yaml").read_text()


def test_a_recipe_without_a_run_is_a_mistake(llmlaunch: CommandLine) -> None:
    assert llmlaunch("collect", "cluster=h100-80gb-x8", code=2).stderr.count("error: ") == 1
