"""The sections of a recipe: every key arrives, a written default leaves the digest alone, paths become absolute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmlaunch.cluster.load import find_accelerator
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.datasets import BlendPart, Data
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.training import number_notes
from llmlaunch.recipe.types import OnBadLoss, OnOom, Restart, WatchdogPolicy
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.workload import NO_NUMBER_FORMATS, NumberFormats, OptimizerFormats
from support.recipes import recipe_text, small

CHECKPOINTS = ("training.save_interval=5", "training.checkpoint_path=/checkpoints/a")

# --- layout and techniques


def test_every_technique_arrives() -> None:
    loaded = small(
        "layout={tensor: 2, recompute: [selective, full], recompute_modules: [layernorm, mlp], "
        "recompute_method: block, recompute_layers: 4, offload_modules: [core_attn, attn_proj], "
        "offload_checkpoints: true, offload_optimizer: 0.5, offload_parameters: true, loss: tiled, loss_tiles: 16, "
        "mlp_chunks: 8, delay_weight_gradients: true}",
        "training.adapters={rank: 16, frozen_down: true, target_modules: [linear_qkv, o_proj]}",
        "training.gradient_dtype=bf16",
        "what_if={swapped_share: 0.5, sampled_share: 0.3, weight_versions: 2}",
    )
    assert loaded.techniques == Techniques(
        recompute_modules=("layernorm", "mlp"),
        recompute_method="block",
        offload_modules=("core_attn", "attn_proj"),
        offload_checkpoints=True,
        offload_optimizer=0.5,
        offload_parameters=True,
        loss="tiled",
        loss_tiles=16,
        mlp_chunks=8,
        adapters=Adapters(16, frozen_down=True, target_modules=("linear_qkv", "o_proj")),
        delay_weight_gradients=True,
        swapped_share=0.5,
        sampled_share=0.3,
        weight_versions=2,
    )
    assert loaded.training.gradient_dtype == "bf16"
    assert loaded.pins == {"tensor": 2, "recompute": ("selective", "full"), "recompute_layers": 4}
    assert small().techniques == NO_TECHNIQUES
    layers = small("layout={offload_layers: 3}", "training.trained_layers=8")
    assert (layers.pins["offload_layers"], layers.techniques.trained_layers) == (3, 8)


@pytest.mark.parametrize(
    ("value", "stages"), [("auto", None), ("even", ()), ("[7, 9, 9, 7]", (7, 9, 9, 7)), ("[16, 16]", (16, 16))]
)
def test_stages_are_searched_even_or_named(value: str, stages: object) -> None:
    recipe = small(f"layout={{tensor: 2, layers_by_stage: {value}}}")
    assert (recipe.layers_by_stage, recipe.pins) == (stages, {"tensor": 2})


@pytest.mark.parametrize(("flag", "stage"), [("true", 1), ("false", 0)])
def test_the_distributed_optimizer_is_zero_stage_one(flag: str, stage: int) -> None:
    named = f"layout={{distributed_optimizer: {flag}}}"
    assert small(named).pins == small(named, f"layout.zero_stage={stage}").pins == {"zero_stage": stage}


def test_the_dispatcher_is_a_technique() -> None:
    recipe = small("model=mixtral-8x7b", "layout={token_dispatcher: allgather}")
    assert recipe.techniques.token_dispatcher == "allgather"
    assert "token_dispatcher" in recipe.fixed


# --- training


def test_every_number_format_arrives() -> None:
    numbers = small(
        "training.fp8=mxfp8", "training.fp8_parameters=true", "training.optimizer={second_moment: bf16}"
    ).training.numbers
    assert numbers == NumberFormats("mxfp8", True, OptimizerFormats("fp32", "fp32", "bf16"))
    assert small("training.fp4=nvfp4").training.numbers == NumberFormats("nvfp4")
    assert small("training.optimizer={}").training.numbers.optimizer == OptimizerFormats()
    assert small().training.numbers == NO_NUMBER_FORMATS


def test_the_schedule_arrives() -> None:
    training = small(
        "training.warmup_steps=0",
        "training.learning_rate_decay=cosine",
        "training.minimum_learning_rate=0.0001",
        "training.weight_decay=0",
        "training.adam_betas=[0.5, 0.6]",
        "training.gradient_clipping=2",
    ).training
    assert (training.warmup_steps, training.learning_rate_decay, training.minimum_learning_rate) == (0, "cosine", 1e-4)
    assert (training.weight_decay, training.adam_betas, training.gradient_clipping) == (0.0, (0.5, 0.6), 2.0)


def test_a_device_whose_peak_is_not_known_is_told() -> None:
    h100 = find_accelerator("h100-80gb")
    other = replace(h100, name="mine", flops_per_second={"bf16": 9e14})
    assert number_notes(NumberFormats("delayed"), h100) == number_notes(NumberFormats(), other) == ()
    [note] = number_notes(NumberFormats("delayed"), other)
    assert note == "mine has no fp8_tflops: narrow products are timed as those of bf16"
    loaded = small("training.fp4=nvfp4", "cluster=b200-x8")
    assert "the fp4 peak of b200 is not known: twice its fp8 peak" in loaded.assumptions


def test_the_headline_names_all_formats() -> None:
    assert NO_NUMBER_FORMATS.beside("bf16") == "bf16"
    assert NumberFormats("blockwise").beside("bf16") == "bf16 and fp8 (blockwise)"
    assert NumberFormats("nvfp4").beside("bf16") == "bf16 and nvfp4"


# --- coming back


def test_a_job_comes_back_where_there_is_a_checkpoint_to_come_back_to() -> None:
    assert small().restart is None
    assert small(*CHECKPOINTS).restart == Restart(times=20, fruitless=2, backoff_seconds=60.0)
    assert small(*CHECKPOINTS, "restart=none").restart is None
    assert small(*CHECKPOINTS, "restart={times: 3, by: chain}").restart == Restart(times=3, by="chain")


def test_other_layouts_are_tried_only_where_asked_for() -> None:
    assert small().on_oom == OnOom(layouts=0)
    assert small("on_oom=fallback").on_oom == OnOom(layouts=2, after_checkpoint="reshard")
    assert small().on_bad_loss == OnBadLoss()
    assert small("on_bad_loss=stop").on_bad_loss == OnBadLoss("stop", spike=False, skip_batches=200, times=2)
    assert small("on_oom={layouts: 4, after_checkpoint: restart}").on_oom == OnOom(4, "restart")


def test_the_watchdog_can_be_told_its_patience_or_switched_off() -> None:
    assert small().watchdog == WatchdogPolicy()
    assert small("watchdog={floor_seconds: 5}").watchdog == WatchdogPolicy(5.0, 3600.0)
    assert small("watchdog=false").watchdog is None


def test_spare_nodes_are_what_a_preflight_is_for() -> None:
    assert not small().preflight
    spare = small("spare_nodes=2")
    assert (spare.preflight, spare.spare_nodes) == (True, 2)


# --- data


def test_a_blend_is_paths_and_weights() -> None:
    data = small("data={blend: [{path: /a, weight: 7}, {path: /b, weight: 0.5}]}").data
    assert data == Data(blend=(BlendPart("/a", 7.0), BlendPart("/b", 0.5)))
    assert data.datasets == ("/a", "/b")


def test_paths_start_where_the_recipe_lies_and_do_not_enter_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = recipe_text(
        backend="{name: deepspeed, script: code/train.py}",
        training="{sequence_length: 8192, global_batch_size: 512, steps: 10, save_interval: 5, checkpoint_path: ckpt, "
        "start_from: llama, learning_rate: 1.0e-5}",
        data="{path: text}",
    )
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "recipe.yaml").write_text(text)
    here, other = tmp_path / "one", load_recipe(tmp_path / "two" / "recipe.yaml")
    first = load_recipe(here / "recipe.yaml")
    assert (first.backend.script, first.data.path) == (str(here / "code" / "train.py"), str(here / "text"))
    assert (first.training.checkpoint_path, first.training.start_from) == (str(here / "ckpt"), str(here / "llama"))
    assert first.digest == other.digest
    monkeypatch.chdir(here)  # where paths of overrides start
    megatron = (here / "recipe.yaml", ["backend=megatron-lm"])
    blend = "data={blend: [{path: a, weight: 1}], cache_path: cache, tokenizer: meta-llama/Llama-3}"
    data = load_recipe(megatron[0], [*megatron[1], blend]).data
    assert data.blend == (BlendPart(str(here / "a"), 1.0),)
    assert (data.cache_path, data.tokenizer) == (str(here / "cache"), "meta-llama/Llama-3")
    in_a_file = "data={path: a, tokenizer: t.model, tokenizer_type: SentencePieceTokenizer}"
    assert load_recipe(megatron[0], [*megatron[1], in_a_file]).data.tokenizer == str(here / "t.model")


def test_rows_are_of_the_hub_where_no_file_is_beside_the_recipe(tmp_path: Path) -> None:
    rows = "{path: org/answers, format: chat, tokenizer: t, chat_template: c.jinja}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(backend="deepspeed", data=rows))
    data = load_recipe(recipe).data
    assert (data.path, data.datasets) == ("org/answers", (f"{tmp_path}/c.jinja",))
    recipe.write_text(recipe_text(backend="deepspeed", data=rows.replace("org/answers", "org/answers.jsonl")))
    assert load_recipe(recipe).data.datasets[0] == f"{tmp_path}/org/answers.jsonl"
    (tmp_path / "org" / "answers").mkdir(parents=True)
    recipe.write_text(recipe_text(backend="deepspeed", data=rows))
    assert load_recipe(recipe).data.path == f"{tmp_path}/org/answers"


# --- container


def container(keys: str, site: str = "{mpi: none}") -> Container:
    box = small(f"cluster={{base: h100-80gb-x8, {site[1:]}", f"container={keys}").container
    assert box is not None
    return box


def test_the_runtime_is_the_recipes_word_then_the_sites_then_pyxis() -> None:
    site = "{container: {runtime: apptainer}}"
    assert container("{image: /c/a.sqsh}").runtime == "pyxis"
    assert container("{image: /c/a.sif}", site).runtime == "apptainer"
    assert container("{image: /c/a.sqsh, runtime: pyxis}", site).runtime == "pyxis"
    assert container("{image: /c/a.sif, runtime: apptainer}", "{container: {runtime: none}}").image == "/c/a.sif"


def test_the_sites_mounts_come_first_and_give_way_to_the_recipes() -> None:
    site = "{container: {mounts: ['/lustre:/lustre', '/sw:/opt/sw:ro']}}"
    box = container("{image: /c/a.sqsh, mounts: ['/mine:/lustre']}", site)
    assert box.mounts == ("/sw:/opt/sw:ro", "/mine:/lustre")


PYXIS_IMAGES = ["nvcr.io#nvidia/pytorch:25.08-py3", "ubuntu:24.04", "registry:5000/a/b", "docker://ubuntu", "/c/a.sqsh"]
APPTAINER_IMAGES = [
    *("docker://nvcr.io/nvidia/pytorch:25.08-py3", "oras://ghcr.io/a/b:1"),
    *("/c/a.sif", "/c/sandbox", "docker-archive:a.tar"),
]


@pytest.mark.parametrize(
    ("runtime", "image"),
    [*(("pyxis", image) for image in PYXIS_IMAGES), *(("apptainer", image) for image in APPTAINER_IMAGES)],
)
def test_what_a_runtime_takes_reaches_it_as_it_is_written(runtime: str, image: str) -> None:
    assert container(f"{{image: '{image}', runtime: {runtime}}}").image == image


def test_an_image_of_the_working_directory_is_found_from_the_run_directory() -> None:
    folder = Path.cwd()  # the image is named in an override
    assert container("{image: images/a.sqsh}").image == str(folder / "images/a.sqsh")
    assert container("{image: ./box, runtime: apptainer}").image == str(folder / "box")


# --- what a digest sees


@pytest.mark.parametrize(
    ("before", "same", "others"),
    [
        ((), ("what_if={weight_versions: 1}",),
         ["layout={mlp_chunks: 2}", "layout={mlp_chunks: 1}", "layout.loss=none", "training.gradient_dtype=bf16"]),
        ((), ("training.weight_decay=0.1", "training.fp8_parameters=false"),
         ["training.fp8=delayed", "training.optimizer={}", "training.weight_decay=0.2", "training.warmup_steps=10"]),
        (CHECKPOINTS, ("on_oom=stop", "watchdog=true", "restart={times: 20}"), ["restart={times: 3}"]),
        (CHECKPOINTS, ("restart=none",), ["restart={times: 3}"]),
        (CHECKPOINTS, ("on_bad_loss=tell",), ["on_bad_loss=stop", "on_bad_loss=rollback", "on_bad_loss={spike: true}"]),
        (("data={path: /a}",), (), ["data.cache_path=/c"]),
        ((), ("budget.days=14", "cluster.exclude=[n1, 'n[4-5]']"), ["cluster.modules=[cuda/12.4]", "memory.limit=0.8"]),
        (("nodes=auto",), (), ["budget.days=14"]),
        ((), (), ["nodes=8", "training.seed=1", "model.num_layers=31", "cluster.devices_per_node=4"]),
        ((), (), ["layout.tensor=2", "slurm.qos=b"]),
        ((), (), ["model.sliding_window={tokens: 512}", "model.sliding_window={tokens: 1024}"]),
        ((), ("backend.libraries=[]",), ["backend.libraries=[deepep]", "backend.libraries=[hybridep]"]),
    ],
)  # fmt: skip
def test_a_digest_changes_with_the_meaning_and_not_with_a_default_that_is_written(
    before: tuple[str, ...], same: tuple[str, ...], others: list[str]
) -> None:
    plain = small(*before).digest
    assert small(*before, *same).digest == plain
    assert len({small(*before, other).digest for other in others} - {plain}) == len(others)
