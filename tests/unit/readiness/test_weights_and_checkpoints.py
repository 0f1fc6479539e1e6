"""Weights to start from and folders of checkpoints are judged at the desk, and what a job would make of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from job_files import dataset, readiness, write

from llmlaunch.layout import Layout
from llmlaunch.readiness import checkpoints
from llmlaunch.readiness.readiness import Readiness
from llmlaunch.units import GIB
from support.recipes import recipe_text

SIZES = "num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 256"
MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
TRAINING = "sequence_length: 64, global_batch_size: 8, steps: 100"
TRACKER = "latest_checkpointed_iteration.txt"
TINY = {"model": f"{{{SIZES}}}", "nodes": "1"}
STARTED = {
    name: recipe_text(**TINY, backend=name, training=f"{{{TRAINING}, start_from: weights, learning_rate: 1e-5}}")
    for name in ("megatron-lm", "deepspeed")
}
SAVED = {
    name: recipe_text(**TINY, backend=name, training=f"{{{TRAINING}, save_interval: 10, checkpoint_path: saved}}")
    for name in ("megatron-lm", "deepspeed")
}
LAYOUTS = {"megatron-lm": Layout(data=8), "deepspeed": Layout(data=8, zero_stage=1)}
INDEX = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}

WEIGHTS = {
    "nothing": ("megatron-lm", {}, "weights is not there"),
    "a file": ("megatron-lm", {"weights": "x"}, "weights is a file; name the folder"),
    "no tracker": ("megatron-lm", {"weights/iter_0000010/x": "x"}, f"has no {TRACKER}"),
    "a Hugging Face folder": ("megatron-lm", {"weights/config.json": MODEL}, "convert it first"),
    "a tracker of words": ("megatron-lm", {f"weights/{TRACKER}": "newest"}, "holds 'newest' instead of an iteration"),
    "a lost iteration": ("megatron-lm", {f"weights/{TRACKER}": "20", "weights/iter_0000010/x": "x"},
        "names iter_0000020, which is missing or empty (there are iter_0000010)"),
    "no config.json": ("deepspeed", {"weights/model.safetensors": "x"}, "holds no config.json that can be read"),
    "adapters alone": ("deepspeed", {"weights/adapter_config.json": {}}, "holds the adapters of a model alone"),
    "another model": ("deepspeed",
        {"weights/config.json": MODEL | {"hidden_size": 128}, "weights/model.safetensors": "x"},
        "is another model than the recipe's: hidden_size is 128 there and 64 in"),
    "no weights": ("deepspeed", {"weights/config.json": MODEL}, "holds no weights: none of model.safetensors"),
    "a lost part": ("deepspeed",
        {"weights/config.json": MODEL, "weights/model.safetensors.index.json": INDEX, "weights/one.safetensors": "x"},
        "lacks two.safetensors, which its index names"),
    "a pointer of Git LFS": ("deepspeed",
        {"weights/config.json": MODEL, "weights/model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
        "model.safetensors is only a pointer of Git LFS"),
}  # fmt: skip


@pytest.mark.parametrize(("backend", "files", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_to_start_from_can_be_loaded(
    backend: str, files: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    (sentence,) = readiness(write(tmp_path, files), STARTED[backend]).missing
    assert sentence.startswith(f"{tmp_path}/recipe.yaml:7: training.start_from: {tmp_path}/weights")
    assert message in sentence


@pytest.mark.parametrize(
    ("backend", "files"),
    [
        ("megatron-lm", {f"weights/{TRACKER}": "10\n", "weights/iter_0000010/x": "x"}),
        ("megatron-lm", {f"weights/{TRACKER}": "release", "weights/release/x": "x"}),
        ("deepspeed", {"weights/config.json": MODEL, "weights/pytorch_model.bin": "x"}),
        (
            "deepspeed",
            {
                "weights/config.json": MODEL,
                "weights/model.safetensors.index.json": INDEX,
                "weights/one.safetensors": "x",
                "weights/two.safetensors": "x",
            },
        ),
    ],
)
def test_whole_weights_are_taken(backend: str, files: Mapping[str, object], tmp_path: Path) -> None:
    ready = readiness(write(tmp_path, files), STARTED[backend])
    assert (ready.missing, ready.doubtful) == ((), ())


def test_one_iteration_is_told_to_be_named_by_the_folder_above(tmp_path: Path) -> None:
    write(tmp_path, {f"weights/{TRACKER}": "10", "weights/iter_0000010/x": "x"})
    (sentence,) = readiness(
        tmp_path, STARTED["megatron-lm"], "training.start_from=" + str(tmp_path / "weights/iter_0000010")
    ).missing
    assert "is one iteration; name the folder above it" in sentence


def states(ranks: int) -> dict[str, str]:
    """Return a DeepSpeed checkpoint of so many ranks, of the size this model's has."""
    parts = {f"saved/step-20/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": "x" for rank in range(ranks)}
    return {"saved/latest": "step-20", "saved/step-20/mp_rank_00_model_states.pt": "x" * 2_000_000, **parts}


def iteration(step: int, *names: str) -> dict[str, str]:
    return {f"saved/{TRACKER}": str(step), **{f"saved/iter_{step:07d}/{name}": "x" * 900_000 for name in names}}


RESUMED = {
    "goes on": ("megatron-lm", iteration(20, "metadata.json"), "notes",
        "holds step 20: the job goes on from there, to"),
    "at its end": ("megatron-lm", iteration(100, "metadata.json"), "doubtful",
        "holds step 100, and the training has 100"),
    "a lost folder": ("megatron-lm", {f"saved/{TRACKER}": "20"}, "doubtful", "names iter_0000020, which is missing"),
    "no step": ("megatron-lm", {f"saved/{TRACKER}": "x"}, "doubtful", "names no step"),
    "another format": ("megatron-lm", iteration(20, "mp_rank_00/x"), "notes",
        "is of the format torch, and this job writes torch_dist: the job reads it"),
    "DCP": ("megatron-lm", iteration(20, ".metadata"), "doubtful",
        "is of the format fsdp_dtensor, and this job writes"),
    "another framework's": ("megatron-lm", {"saved/latest": "step-20"}, "doubtful", "holds checkpoints of deepspeed"),
    "Megatron's": ("deepspeed", {f"saved/{TRACKER}": "20"}, "doubtful", "holds checkpoints of megatron-lm, which"),
    "other ranks": ("deepspeed", states(4), "notes",
        "the optimizer states of 4 ranks, and this job has 8: the job conv"),
    "another split": ("megatron-lm", iteration(20, "mp_rank_00/model.pt", "mp_rank_01/model.pt"), "missing",
        "is split by tensor 2 and pipeline 1, and this plan by tensor 1 and pipeline 1"),
    "another model": ("megatron-lm", {f"saved/{TRACKER}": "20", "saved/iter_0000020/metadata.json": "x" * 9_000_000},
        "doubtful", "it may be another model's"),
}  # fmt: skip


@pytest.mark.parametrize(("backend", "files", "kind", "message"), RESUMED.values(), ids=RESUMED)
def test_what_a_job_makes_of_checkpoints_that_are_there(
    backend: str, files: Mapping[str, object], kind: str, message: str, tmp_path: Path
) -> None:
    ready = readiness(write(tmp_path, files), SAVED[backend], layout=LAYOUTS[backend])
    sentences = getattr(ready, kind)
    assert any(message in sentence for sentence in sentences), ready
    assert all(": training.checkpoint_path: " in sentence for sentence in sentences)
    if kind != "missing":
        assert ready.missing == ()


def test_checkpoints_of_the_same_job_are_only_noted(tmp_path: Path) -> None:
    for backend, files in (("megatron-lm", iteration(20, "metadata.json")), ("deepspeed", states(8))):
        folder = write(tmp_path / backend, files)
        ready = readiness(folder, SAVED[backend], layout=LAYOUTS[backend])
        assert (ready.missing, ready.doubtful) == ((), ())
    split = write(tmp_path / "split", iteration(20, "mp_rank_00/model.pt", "mp_rank_01/model.pt"))
    torch = "training.checkpoint_format=torch"
    assert readiness(split, SAVED["megatron-lm"], torch, layout=Layout(tensor=2)).doubtful == ()


def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"file": "x"})
    (sentence,) = readiness(tmp_path, SAVED["megatron-lm"], "training.checkpoint_path=file/saved").missing
    assert "file is a file, so no folder can be there" in sentence
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path)))
    (sentence,) = readiness(tmp_path, SAVED["megatron-lm"]).missing
    assert f"training.checkpoint_path: {tmp_path}/saved: you may not make it in {tmp_path}" in sentence
    (tmp_path / "saved").mkdir()
    assert "you may not write into it" in readiness(tmp_path, SAVED["megatron-lm"]).missing[0]


@pytest.mark.parametrize("key", ["training.tensorboard", "tracking.tensorboard", "data.cache_path"])
def test_other_folders_the_job_writes_are_looked_at_too(key: str, tmp_path: Path) -> None:
    dataset(write(tmp_path, {"file": "x"}), "text")
    (sentence,) = readiness(tmp_path, recipe_text(data="{path: text}"), f"{key}=file/inside").missing
    assert f"{key}: {tmp_path}/file is a file" in sentence


def test_an_export_replaces_an_earlier_one_alone(tmp_path: Path) -> None:
    recipe = SAVED["deepspeed"]
    write(tmp_path, {"tuned/notes.txt": "mine"})
    (sentence,) = readiness(tmp_path, recipe, "training.export=tuned").missing
    assert "training.export: " in sentence
    assert "is no export of an earlier run; name a new folder" in sentence
    write(tmp_path, {"tuned/trained.json": "{}"})
    assert readiness(tmp_path, recipe, "training.export=tuned").missing == ()


def test_the_folder_of_weights_and_biases_is_looked_at_too(tmp_path: Path) -> None:
    run = "tracking={wandb: {project: mine, mode: offline, save_dir: file/inside}}"
    (sentence,) = readiness(write(tmp_path, {"file": "x"}), recipe_text(), run).missing
    assert f"tracking.wandb.save_dir: {tmp_path}/file is a file" in sentence


def test_a_dataset_in_a_folder_of_somebody_else_needs_a_cache_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset(tmp_path, "theirs/text")
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path))
    recipe = recipe_text(data="{path: theirs/text}")
    assert "name a folder of yours in data.cache_path" in readiness(tmp_path, recipe).doubtful[0]
    assert readiness(tmp_path, recipe, "data.cache_path=mine").doubtful == ()


def test_rows_that_are_packed_lie_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else has packed may be all that the job wants."""
    rows = f"{{path: {write(tmp_path, {'rows/training.jsonl': '{}'})}/rows, format: chat, tokenizer: t, packed: true}}"
    words = (f"data={rows}", "backend=megatron-bridge", "training.start_from=/weights", "training.learning_rate=1.0e-5")
    monkeypatch.setattr(os, "access", lambda path, mode: "rows" not in str(path))
    missing = readiness(tmp_path, recipe_text(), *words).missing
    assert f"data.packed: {tmp_path}/rows/packed: you may not make it in {tmp_path}/rows" in str(missing)
    (tmp_path / "rows" / "packed").mkdir()
    assert "data.packed" not in str(readiness(tmp_path, recipe_text(), *words).missing)


def test_the_folder_of_slurms_output_is_there(tmp_path: Path) -> None:
    (sentence,) = readiness(tmp_path, recipe_text(), f"slurm.output={tmp_path}/logs/%j.out").missing
    assert f"slurm.output: the folder {tmp_path}/logs is not there, and SLURM makes none" in sentence
    (tmp_path / "logs").mkdir()
    assert readiness(tmp_path, recipe_text(), f"slurm.output={tmp_path}/logs/%j.out").missing == ()


@pytest.mark.parametrize(
    ("free_gib", "kind", "message"),
    [
        (50, "missing", "GiB are free on"),
        (300, "doubtful", "2 of the 10 that will be written fit, and none is deleted"),
        (2000, "", ""),
    ],
)
def test_there_is_room_for_the_checkpoints(
    free_gib: int, kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = with_free(tmp_path, monkeypatch, free_gib)
    assert [name for name in ("missing", "doubtful") if getattr(ready, name)] == ([kind] if kind else [])
    if kind:
        assert message in getattr(ready, kind)[0]


def test_where_old_ones_are_removed_room_is_needed_for_those_that_stay_and_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sentence,) = with_free(tmp_path, monkeypatch, 300, ", keep_checkpoints: 2").doubtful
    assert "2 of the 3 that will be written before one is removed fit (2 and the next one)" in sentence
    assert with_free(tmp_path, monkeypatch, 300, ", keep_checkpoints: 1").doubtful == ()
    (tmp_path / "saved" / "iter_0000010").mkdir(parents=True)
    assert with_free(tmp_path, monkeypatch, 300, ", keep_checkpoints: 2").doubtful == ()  # one is there already


def with_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, more: str = "") -> Readiness:
    here = os.statvfs(tmp_path)
    free = os.statvfs_result((*here[:4], free_gib * GIB // here.f_frsize, *here[5:]))
    monkeypatch.setattr(checkpoints.os, "statvfs", lambda _: free)
    length = "sequence_length: 8192, global_batch_size: 512, steps: 100"
    training = f"{{{length}, save_interval: 10, checkpoint_path: saved{more}}}"
    return readiness(tmp_path, recipe_text(training=training))


def test_non_persistent_ones_take_room_too_and_may_be_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = ", non_persistent_save_interval: 5"
    assert with_free(tmp_path, monkeypatch, 2000, often).doubtful == ()
    (sentence,) = with_free(tmp_path, monkeypatch, 1150, often).doubtful
    assert "8 of the 10 that will be written fit" in sentence
