"""A checkpoint that does not match the job is told from its own files, before the job waits in a queue; what cannot be
told for certain is not said."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import (
    DATA,
    ITERATION,
    TRACKER,
    WEIGHT,
    archive,
    bridge_folder,
    common_state,
    deepspeed_folder,
    megatron_folder,
    zero_names,
)
from job_files import readiness

from llmlaunch.findings import Finding
from llmlaunch.frameworks.megatron.saved_job import megatron_job
from llmlaunch.frameworks.pickle_outline import Outline, read_outline
from llmlaunch.layout import Layout
from llmlaunch.readiness import checkpoints
from llmlaunch.readiness.checkpoints import mismatches
from llmlaunch.recipe.load import load_recipe
from support.recipes import recipe_text

MODEL = "{num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 256}"
EXPERTS = (
    "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 256, "
    "moe: {num_experts: 4, topk: 2, ffn_hidden_size: 32}}"
)
TRAINING = "{sequence_length: 64, global_batch_size: 8, steps: 1000, save_interval: 10, checkpoint_path: saved}"
ARGUMENTS: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2, "num_layers": 2, "hidden_size": 64,
    "ffn_hidden_size": 128, "num_attention_heads": 4, "num_experts": None, "padded_vocab_size": 256,
    "make_vocab_size_divisible_by": 128, "optimizer": "adam", "no_save_optim": None,
}  # fmt: skip
SHARED = Layout(tensor=2, data=4, zero_stage=1)
PLAIN = Layout(tensor=2, data=4)
STAGES = {"max_lr": 3e-4, "min_lr": 0.0, "lr_warmup_steps": 80, "lr_decay_steps": 8000}


def found(folder: Path, backend: str, layout: Layout, *overrides: str) -> list[Finding]:
    """Return what a job of the tiny model makes of the checkpoint in `folder`/saved."""
    path = folder / "recipe.yaml"
    path.write_text(recipe_text(model=MODEL, backend=backend, nodes="1", training=TRAINING))
    return list(mismatches(load_recipe(path, overrides), layout))


def megatron(tmp_path: Path, state: Any, layout: Layout, *overrides: str) -> list[Finding]:
    megatron_folder(tmp_path / "saved", state)
    return found(tmp_path, "megatron-lm", layout, *overrides)


def only(findings: list[Finding]) -> str:
    """Return the one sentence; it is a warning that names a way out."""
    (finding,) = findings
    assert finding.kind == "doubtful"
    assert "name a new folder" in finding.sentence or "--override-opt" in finding.sentence
    return finding.sentence


def test_the_arguments_of_a_real_checkpoint_are_found_among_its_tensors(tmp_path: Path) -> None:
    """Core 0.19 has no common.pt: what all ranks have in common is an object in a file of tensors."""
    saved = megatron_folder(tmp_path / "saved", None, old=False)
    job = megatron_job(saved, [path.name for path in saved.iterdir()])
    assert job is not None
    assert job.split == {"tensor": 2, "pipeline": 1, "virtual_pipeline": 1}
    assert job.sizes == {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 160, "num_experts": 0,
        "vocab_size": 256, "vocab_padding": 256,
    }  # fmt: skip
    assert (job.optimizer, job.sharding) == ("adam", "dp_reshardable")
    assert job.schedule == {"max_lr": 0.005, "min_lr": 0.0005, "lr_warmup_steps": 0, "lr_decay_steps": 16}


@pytest.mark.parametrize(
    ("layout", "both"),
    [
        (Layout(tensor=4, data=2, zero_stage=1), "was saved with tensor 2, and this plan has tensor 4"),
        (
            Layout(tensor=1, pipeline=2, data=4, zero_stage=1),
            "was saved with tensor 2 and pipeline 1, and this plan has tensor 1 and pipeline 2",
        ),
    ],
)
def test_bucketed_optimizer_states_are_of_one_split(layout: Layout, both: str, tmp_path: Path) -> None:
    """Tried with core 0.19.2: it ends with "(TP, PP) mismatch after resume"."""
    sentence = only(megatron(tmp_path, common_state(ARGUMENTS), layout))
    assert f"{tmp_path}/saved/{ITERATION} {both}" in sentence
    assert "the optimizer states are cut for that split alone (dp_reshardable)" in sentence
    for way_out in (
        "pin layout.tensor: 2",
        "add --no-load-optim",
        "--dist-ckpt-optim-fully-reshardable load under any",
    ):
        assert way_out in sentence


@pytest.mark.parametrize(
    ("split", "layout", "both"),
    [
        ({"expert_model_parallel_size": 4}, SHARED, "with expert 4, and this plan has expert 1"),
        (
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            Layout(tensor=2, pipeline=2, data=2, zero_stage=1),
            "with virtual pipeline 2, and this plan has virtual pipeline 1",
        ),
    ],
)
def test_experts_and_interleaved_pipelines_are_of_the_split_too(
    split: dict[str, int], layout: Layout, both: str, tmp_path: Path
) -> None:
    """Tried with core 0.19.2: a missing bucket, and one of another size."""
    arguments = ARGUMENTS | {"num_experts": 4, "expert_tensor_parallel_size": 1} | split
    assert both in only(megatron(tmp_path, common_state(arguments), layout, EXPERTS))


LOADABLE: dict[str, tuple[Any, Layout, tuple[str, ...]]] = {
    "the same split": (common_state(ARGUMENTS), SHARED, ()),
    "other data parallel ranks": (common_state(ARGUMENTS | {"data_parallel_size": 64}), SHARED, ()),
    "fully reshardable": (common_state(ARGUMENTS, "fully_reshardable"), Layout(pipeline=2, data=4, zero_stage=1), ()),
    "no distributed optimizer": (common_state(ARGUMENTS, None), Layout(tensor=4, data=2), ()),
    "no optimizer saved": (common_state(ARGUMENTS | {"no_save_optim": True}), Layout(tensor=4, data=2, zero_stage=1),
        ()),
    "no optimizer loaded": (common_state(ARGUMENTS), Layout(tensor=4, data=2, zero_stage=1),
        ("backend.extra_args=[--no-load-optim]",)),
    "another checkpoint loaded": (common_state(ARGUMENTS | {"hidden_size": 128}), SHARED,
        ("backend.extra_args=[--ckpt-step, '10']",)),
    "a vocabulary with padding": (common_state(ARGUMENTS | {"padded_vocab_size": 511}), SHARED, ()),
    "the same schedule": (common_state(ARGUMENTS, opt_param_scheduler=STAGES), SHARED, ()),
    "numbers that are none": (common_state(ARGUMENTS | {"tensor_model_parallel_size": "4"}), SHARED, ()),
    "arguments of another kind": ({"args": {"hidden_size": 128}}, SHARED, ()),
    "no mapping": ([1, 2], SHARED, ()),
}  # fmt: skip


@pytest.mark.parametrize(("state", "layout", "overrides"), LOADABLE.values(), ids=LOADABLE)
def test_nothing_is_said_of_what_loads_or_may_load(
    state: Any, layout: Layout, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    assert megatron(tmp_path, state, layout, *overrides) == []


MISMATCHES: dict[str, tuple[Any, Layout, tuple[str, ...], str]] = {
    "no distributed optimizer any more": (common_state(ARGUMENTS), PLAIN, (), "pin layout.zero_stage: 1"),
    "a distributed optimizer now": (common_state(ARGUMENTS, None), SHARED, (),
        "holds optimizer states that were not distributed, and this plan has a distributed optimizer"),
    "an old core's form": (common_state(ARGUMENTS, "fully_sharded_model_space"), SHARED, (),
        "optimizer states of the type fully_sharded_model_space"),
    "another optimizer": (common_state(ARGUMENTS | {"optimizer": "sgd"}), SHARED, (),
        "the states of the optimizer sgd, and this job has adam"),
    "wider": (common_state(ARGUMENTS | {"hidden_size": 128, "num_layers": 4}), SHARED, (),
        "num_layers is 4 there and 2 in the recipe; hidden_size is 128 there and 64 in the recipe"),
    "experts": (common_state(ARGUMENTS | {"num_experts": 8}), SHARED, (), "num_experts is 8 there and 0 in"),
    "a smaller vocabulary": (common_state(ARGUMENTS | {"padded_vocab_size": 128}), SHARED, (),
        "vocab_size is 128 there, with padding, and 256 in the recipe"),
    "another learning rate": (common_state(ARGUMENTS, opt_param_scheduler=STAGES | {"max_lr": 1e-3}), SHARED, (),
        "learning_rate was 0.001 and is 0.0003"),
    "fewer steps": (
        common_state(ARGUMENTS, opt_param_scheduler=STAGES | {"lr_decay_steps": 800, "lr_warmup_steps": 8}), SHARED, (),
        "the warm-up took 8 samples and takes 80 and the learning rate fell over 800 samples and takes 8000"),
}  # fmt: skip


@pytest.mark.parametrize(("state", "layout", "overrides", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_optimizer_model_and_schedule_are_those_of_the_checkpoint(
    state: Any, layout: Layout, overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Each was tried with core 0.19.2, which ended."""
    assert message in only(megatron(tmp_path, state, layout, *overrides))


def test_the_way_out_is_silent(tmp_path: Path) -> None:
    state = common_state(ARGUMENTS, opt_param_scheduler=STAGES | {"lr_decay_steps": 800})
    assert megatron(tmp_path, state, SHARED, "backend.extra_args=[--override-opt_param-scheduler]") == []


FORMATS = {
    "ours": (("metadata.json",), "torch_dist", ""),
    "torch reads its own alone": (
        ("metadata.json",),
        "torch",
        "is of the format torch_dist, and this job writes torch",
    ),
    "DCP": ((".metadata",), "torch_dist", "is of the format fsdp_dtensor, and this job writes torch_dist"),
}


@pytest.mark.parametrize(("names", "form", "message"), FORMATS.values(), ids=FORMATS)
def test_a_format_that_megatron_cannot_read(names: tuple[str, ...], form: str, message: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved" / ITERATION
    saved.mkdir(parents=True)
    (tmp_path / "saved" / TRACKER).write_text("20")
    for name in names:
        (saved / name).write_bytes(WEIGHT)
    findings = found(tmp_path, "megatron-lm", PLAIN, f"training.checkpoint_format={form}")
    assert message in only(findings) if message else findings == []


RANKS: dict[str, tuple[list[str], Layout, tuple[str, ...], str]] = {
    "tensor": (["mp_rank_00", "mp_rank_01"], Layout(tensor=4, data=2), (), "split by tensor 2 and pipeline 1"),
    "pipeline": (["mp_rank_00_000", "mp_rank_00_001"], Layout(data=8), (), "split by tensor 1 and pipeline 2"),
    "experts": (["mp_rank_00_000", "mp_rank_00_001"], Layout(data=8, expert=2), (EXPERTS,), ""),
    "the same": (["mp_rank_00_000", "mp_rank_00_001"], Layout(pipeline=2, data=4), (), ""),
    "pipeline or experts": (["mp_rank_00_000", "mp_rank_00_001"], Layout(data=8), (EXPERTS,), ""),
    "all three": (
        ["mp_rank_00_000_000", "mp_rank_00_001_000", "mp_rank_00_000_001", "mp_rank_00_001_001"],
        Layout(data=8),
        (EXPERTS,),
        "tensor 1, pipeline 2 and expert 2, and this plan by tensor 1, pipeline 1 and expert 1",
    ),
    "a rank is lost": (["mp_rank_00_000", "mp_rank_01_001"], Layout(tensor=2, pipeline=2, data=2), (), ""),
}


@pytest.mark.parametrize(("names", "layout", "overrides", "message"), RANKS.values(), ids=RANKS)
def test_a_checkpoint_of_the_format_torch_is_of_the_split_its_folders_name(
    names: list[str], layout: Layout, overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Without a pipeline the second number is the experts' (get_checkpoint_name, core 0.19)."""
    for name in names:
        rank = tmp_path / "saved" / ITERATION / name
        rank.mkdir(parents=True)
        (rank / "model_optim_rng.pt").write_bytes(WEIGHT)
    (tmp_path / "saved" / TRACKER).write_text("20")
    findings = found(tmp_path, "megatron-lm", layout, "training.checkpoint_format=torch", *overrides)
    assert [message in finding.sentence for finding in findings] == ([True] if message else [])
    assert all(finding.kind == "missing" for finding in findings)


def test_arguments_tell_a_pipeline_from_experts(tmp_path: Path) -> None:
    arguments = ARGUMENTS | {"tensor_model_parallel_size": 1, "num_experts": 4, "expert_model_parallel_size": 2}
    for name in ("mp_rank_00_000", "mp_rank_00_001"):
        rank = tmp_path / "saved" / ITERATION / name
        rank.mkdir(parents=True)
        (rank / "model_optim_rng.pt").write_bytes(archive(common_state(arguments)))
    (tmp_path / "saved" / TRACKER).write_text("20")
    (finding,) = found(tmp_path, "megatron-lm", Layout(data=8), "training.checkpoint_format=torch", EXPERTS)
    assert "tensor 1, pipeline 1 and expert 2, and this plan by tensor 1, pipeline 1 and expert 1" in finding.sentence


BRIDGE_MODEL = f"{EXPERTS[:-1]}, num_query_groups: 2}}"
ON_BRIDGE = Layout(data=8, zero_stage=1)
BRIDGE: dict[str, tuple[tuple[tuple[str, str], ...], Layout, tuple[str, ...], str]] = {
    "the same": ((), ON_BRIDGE, (), ""),
    "tensor": (((" tensor_model_parallel_size: 1", " tensor_model_parallel_size: 4"),), ON_BRIDGE, (),
        "was saved with tensor 4, and this plan has tensor 1"),
    "reshardable": (
        (
            (" tensor_model_parallel_size: 1", " tensor_model_parallel_size: 4"),
            ("optim_fully_reshardable: false", "optim_fully_reshardable: true"),
        ),
        ON_BRIDGE,
        (),
        "",
    ),
    "no optimizer loaded": (((" tensor_model_parallel_size: 1", " tensor_model_parallel_size: 4"),), ON_BRIDGE,
        ("backend.extra_args=[checkpoint.load_optim=false]",), ""),
    "no optimizer saved": (
        (
            ("save_optim: true", "save_optim: false"),
            (" pipeline_model_parallel_size: 1", " pipeline_model_parallel_size: 2"),
        ),
        ON_BRIDGE,
        (),
        "",
    ),
    "not distributed": ((), Layout(data=8), (), "holds the states of a distributed optimizer"),
    "another optimizer": ((("\n  optimizer: adam", "\n  optimizer: sgd"),), ON_BRIDGE, (),
        "states of the optimizer sgd, and this job has adam"),
    "layers": ((("\n  num_layers: 2", "\n  num_layers: 4"),), ON_BRIDGE, (),
        "num_layers is 4 there and 2 in the recipe"),
    "anchors are not read": ((("\n  num_layers: 2", "\n  num_layers: &a 4"),), ON_BRIDGE, (), ""),
    "another format": ((), Layout(data=8, zero_stage=3), (),
        "is of the format torch_dist, and this job writes fsdp_dtensor"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "layout", "overrides", "message"), BRIDGE.values(), ids=BRIDGE)
def test_the_settings_of_megatron_bridge_tell_the_same(
    changes: tuple[tuple[str, str], ...], layout: Layout, overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    bridge_folder(tmp_path / "saved", *changes)
    findings = found(tmp_path, "megatron-bridge", layout, BRIDGE_MODEL, *overrides)
    assert message in only(findings) if message else findings == []


def test_megatron_lm_finds_no_arguments_in_a_checkpoint_of_bridge(tmp_path: Path) -> None:
    bridge_folder(tmp_path / "saved")
    assert "was saved by megatron-bridge" in only(found(tmp_path, "megatron-lm", ON_BRIDGE, BRIDGE_MODEL))


def test_bridge_reads_what_megatron_lm_has_saved(tmp_path: Path) -> None:
    megatron_folder(tmp_path / "saved", common_state(ARGUMENTS))
    sentence = only(found(tmp_path, "megatron-bridge", Layout(tensor=4, data=2, zero_stage=1)))
    assert "was saved with tensor 2, and this plan has tensor 4" in sentence
    assert "add checkpoint.load_optim=false to backend.extra_args" in sentence


STAGE_2, STAGE_3 = Layout(data=8, zero_stage=2), Layout(data=8, zero_stage=3)
DEEPSPEED: dict[str, tuple[list[str], Layout, str, str]] = {
    "the same": (zero_names(8), STAGE_2, "", ""),
    "stage 1 for stage 2": (zero_names(8), Layout(data=8, zero_stage=1), "", ""),
    "stage 3": (zero_names(8, sharded=True), STAGE_3, "", ""),
    "fewer ranks": (zero_names(4), STAGE_2, "note",
        "the optimizer states of 4 ranks, and this job has 8: the job conv"),
    "fewer ranks, and one is lost": (zero_names(4)[:3], STAGE_2, "note", "of 2 ranks"),
    "stage 3 for stage 2": (zero_names(8, sharded=True), STAGE_2, "doubtful",
        "by stage 3 of ZeRO, and this plan has stage 2"),
    "stage 2 for stage 3": (zero_names(8), STAGE_3, "doubtful",
        "by a stage of ZeRO below 3, and this plan has stage 3"),
    "no ZeRO": (["mp_rank_00_model_states.pt"], STAGE_2, "doubtful", "holds no optimizer states of ZeRO"),
    "ZeRO for none": (zero_names(8), Layout(data=8), "doubtful", "and this plan is without, which cannot load them"),
    "no ZeRO for none": (["mp_rank_00_model_states.pt"], Layout(data=8), "", ""),
    "tensor": (zero_names(4, tensor=2), STAGE_2, "doubtful", "is cut by tensor 2, and this plan by tensor 1"),
    "tensor of other ranks": (zero_names(2, tensor=2), STAGE_2, "note", "of 4 ranks, and this job has 8: the job conv"),
    "tensor now": (zero_names(8), Layout(tensor=2, data=4, zero_stage=1), "doubtful", "and this plan by tensor 2"),
    "a pipeline": (["mp_rank_00_model_states.pt", "layer_01-model_00-model_states.pt"], STAGE_2, "doubtful",
        "of a pipeline"),
    "universal": (["mp_rank_00_model_states.pt", "zero"], STAGE_2, "doubtful", "is a universal checkpoint"),
    "something else": (["weights.bin"], STAGE_2, "", ""),
}  # fmt: skip


@pytest.mark.parametrize(("names", "layout", "kind", "message"), DEEPSPEED.values(), ids=DEEPSPEED)
def test_the_files_of_deepspeed_tell_ranks_stage_and_kind(
    names: list[str], layout: Layout, kind: str, message: str, tmp_path: Path
) -> None:
    deepspeed_folder(tmp_path / "saved", *names)
    findings = found(tmp_path, "deepspeed", layout)
    assert [finding.kind for finding in findings] == ([kind] if kind else [])
    assert all(message in finding.sentence for finding in findings)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), ""),
        (("model.vocab_size=300",), "vocab_size is 256 there and 300 in the recipe"),
        (("model.hidden_size=128",), "hidden_size is 64 there and 128 in the recipe"),
        (("model.num_layers=3", "backend={name: deepspeed, script: own.py}"), ""),
    ],
)
def test_the_shapes_of_a_real_checkpoint_are_those_of_the_model(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    model = (DATA / "deepspeed-0.19-zero1.model_states").read_bytes()
    deepspeed_folder(tmp_path / "saved", *zero_names(8), model=model)
    findings = found(tmp_path, "deepspeed", STAGE_2, *overrides)
    assert message in only(findings) if message else findings == []


HOSTILE: dict[str, bytes] = {
    "no archive": b"x" * 100,
    "cut short": archive(common_state(ARGUMENTS))[:400],
    "packed": archive(common_state(ARGUMENTS)).replace(
        b"PK\x03\x04\x00\x00\x08\x08\x00\x00", b"PK\x03\x04\x00\x00\x08\x08\x08\x00"
    ),
    "a key that cannot be one": archive(b"\x80\x02}]K\x01s."),
    "too much popped": archive(b"\x80\x020."),
    "endless": archive(b"\x80\x02" + b"N" * 400_000),
    "a number of a million digits": archive(b"I" + b"9" * 1_000_000 + b"\n."),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_files_that_cannot_be_read_are_passed_over(content: bytes, tmp_path: Path) -> None:
    saved = megatron_folder(tmp_path / "saved", common_state(ARGUMENTS))
    (saved / "common.pt").write_bytes(content)
    assert found(tmp_path, "megatron-lm", Layout(data=8, zero_stage=1)) == []


def test_weights_to_start_from_are_of_the_model(tmp_path: Path) -> None:
    """Another split or optimizer does not matter to them: the weights alone are loaded."""
    arguments = ARGUMENTS | {"tensor_model_parallel_size": 8, "optimizer": "sgd"}
    megatron_folder(tmp_path / "weights", common_state(arguments))
    start = ("training.start_from=" + str(tmp_path / "weights"), "training.learning_rate=1e-5")
    text = recipe_text(model=MODEL, backend="megatron-lm", nodes="1", training=TRAINING)
    assert readiness(tmp_path, text, *start, layout=SHARED).doubtful == ()
    (sentence,) = readiness(tmp_path, text, *start, "model.num_layers=3", layout=SHARED).doubtful
    assert "training.start_from: " in sentence
    assert "is another model than the recipe's: num_layers is 2 there and 3 in the recipe" in sentence


class Call:
    """Makes a pickle that calls `open` when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_nothing_that_a_checkpoint_names_is_called(tmp_path: Path) -> None:
    outline = read_outline(pickle.dumps(Call(tmp_path / "called"), protocol=2))
    assert isinstance(outline, Outline)
    assert (outline.name, outline.arguments) == ("io.open", (str(tmp_path / "called"), "w"))
    assert megatron(tmp_path, common_state(ARGUMENTS | {"call": Call(tmp_path / "called")}), SHARED) == []
    assert not (tmp_path / "called").exists()


def test_a_folder_of_very_many_files_is_not_walked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = megatron_folder(tmp_path / "saved", [])
    (saved / "__1_0.distcp").unlink()
    assert "it may be another model's" in only(found(tmp_path, "megatron-lm", SHARED))
    monkeypatch.setattr(checkpoints, "MOST_WEIGHED_FILES", 1)
    assert found(tmp_path, "megatron-lm", SHARED) == []
    monkeypatch.setattr(checkpoints, "MOST_ENTRIES", 2)
    assert found(tmp_path, "megatron-lm", Layout(data=8)) == []


def test_without_a_checkpoint_nothing_is_read(tmp_path: Path) -> None:
    assert found(tmp_path, "megatron-lm", SHARED) == []
    (tmp_path / "saved").mkdir()
    assert found(tmp_path, "megatron-lm", SHARED) == []
    (tmp_path / "saved" / TRACKER).write_text("release")
    assert found(tmp_path, "megatron-lm", SHARED) == []
