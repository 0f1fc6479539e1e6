"""What the shipped script trains: every family of models, the gallery's DeepSpeed recipes, shrunken, weights to begin
with, indexed datasets; and what it refuses, each with one message. Real DeepSpeed and Transformers on this machine's
CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_family_bytes import PRICED, small
from trainer_runner import Train, TrainerRuns, as_case, case

from llmlaunch.assets import asset
from llmlaunch.families.hub_ids import load_preset
from llmlaunch.families.registry import all_families
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.trainers import TRAINER
from llmlaunch.workload import Workload
from support.recipes import gallery_of
from support.soak import share

pytestmark = pytest.mark.frameworks

ALONE = Layout(micro_batch_size=8, zero_stage=1)
BASE: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 64},
}
WINDOWS = {"sliding_window": 32, "query_pre_attn_scalar": 16}
WIDER = {
    **{"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32},
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0},
}
LATENT = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
}
CONSTANTS = {
    **{"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
}
MIXERS = {
    **{"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16},
    **{"mamba_rms_norm": True, "mlp_multipliers": [0.9, 0.8], "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5]},
    **{"lm_head_multiplier": 2.0, "embedding_multiplier": 3.0, "key_multiplier": 0.5, "ssm_in_multiplier": 1.5},
}
# From configurations of Hugging Face's: families that the jobs below need, or that no recipe or preset trains there.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "mixtral": BASE | {"num_local_experts": 4, "output_router_logits": True, "sliding_window": None},
    "qwen3": BASE,
    "glm4_moe": LATENT | {"head_dim": 16, "attention_bias": True, "use_qk_norm": True, "rope_theta": 10000.0},
    "lfm2": BASE | {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [1]},
    "granite": BASE | CONSTANTS,
    "falcon_h1": BASE | MIXERS,
    "gemma": BASE,
    "gemma3_text": BASE | WINDOWS,
    "gemma4_text": BASE | WIDER,
    "deepseek_v2": LATENT | {"topk_method": "greedy"},
    "deepseek_v3": LATENT,
}
# those DeepSpeed splits otherwise than Llama, or initialises from other classes
ALSO_SPLIT = {
    "gemma3_text, tensor": Layout(tensor=2, micro_batch_size=8, zero_stage=1),
    "qwen3, tensor": Layout(tensor=2, micro_batch_size=8, zero_stage=3),
    "gemma3_text, zero 3": Layout(data=2, micro_batch_size=4, zero_stage=3),
    "lfm2, zero 3": Layout(data=2, micro_batch_size=4, zero_stage=3),
    "granite, tensor": Layout(tensor=2, micro_batch_size=8, zero_stage=1),
    "granite, zero 3": Layout(data=2, micro_batch_size=4, zero_stage=3),
    "falcon_h1, zero 3": Layout(data=2, micro_batch_size=4, zero_stage=3),
    "deepseek_v3, zero 3": Layout(data=2, micro_batch_size=4, zero_stage=3),
    "gemma, context": Layout(context=2, micro_batch_size=8, zero_stage=1),
}
# Trained in each `make test`.
TRAINED = share(FAMILIES, ("llama", "mixtral", "deepseek_v3"))
SPLIT = share(ALSO_SPLIT, ("deepseek_v3, zero 3",))
HALF_MIXTURE = ("model.moe={num_experts: 4, topk: 2, ffn_hidden_size: 96}", "training.precision=bf16")


def model(family: str) -> dict[str, Any]:
    return FAMILIES[family] | {"model_type": family}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def trained(train: Train, place: Path) -> TrainerRuns:
    steps = ("training.steps=2", "training.learning_rate=0.003")
    cases = [case(family, ALONE, *steps, model=model(family)) for family in TRAINED]
    cases += [case(name, ALSO_SPLIT[name], *steps, model=model(name.split(",")[0])) for name in SPLIT]
    half = Layout(data=2, micro_batch_size=4, zero_stage=2)
    cases.append(case("mixture in bf16", half, *HALF_MIXTURE, "training.steps=12"))
    return train(cases, place / "families")


@pytest.mark.parametrize("family", TRAINED)
def test_a_family_learns(trained: TrainerRuns, family: str) -> None:
    run = trained[family]
    assert run.codes == [0], run.said[-3000:]
    first, second = run.losses
    assert second < first - 0.05  # on the library of this Python, of which each release has another


@pytest.mark.parametrize("name", SPLIT)
def test_families_split_learn_the_same(trained: TrainerRuns, name: str) -> None:
    run = trained[name]
    assert set(run.codes) == {0}, run.said[-3000:]
    assert run.losses == pytest.approx(trained[name.split(",")[0]].losses, rel=1e-5)


def test_a_mixture_trains_in_bf16(trained: TrainerRuns) -> None:
    run = trained["mixture in bf16"]
    assert run.codes == [0, 0], run.said[-3000:]
    assert run.losses[-1] < run.losses[0] - 0.5


STEPS = 4
TINY = (
    *("cluster=cpu-x2", "nodes=1", "training.precision=fp32"),
    *("training.sequence_length=64", "training.global_batch_size=8", "training.learning_rate=0.01"),
    *(f"training.steps={STEPS}", "data={python_source: true}"),
)
BY_DATA = Layout(data=2, micro_batch_size=2, zero_stage=3, recompute=RECOMPUTE_FULL)
BY_SEQUENCE = Layout(context=2, micro_batch_size=2, zero_stage=3)
LAYOUTS = {"llama3.1-8b-ulysses": BY_SEQUENCE}
SIZES = {"llama3.1-8b-ulysses": ("layout.context=2",)}  # pinned for more ranks than there are here
RECIPES = [name for name in gallery_of("deepspeed") if name != "quickstart"]  # which trains as it is


def shrunken(name: str) -> Recipe:
    """A recipe of the gallery with a model of its family that has two small layers; what makes it that recipe stays."""
    recipe = load_recipe(asset("recipes", f"{name}.yaml"), (*TINY, *SIZES.get(name, ())))
    return replace(recipe, model=small(recipe.model, 2))


def recipe_of_a_family(preset: str) -> Recipe:
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), TINY)
    return replace(recipe, model=small(load_preset(preset), 2))


OF_RECIPES = {shrunken(name).model.family for name in RECIPES}
# Transformers has nothing that balances the experts of the others, and they are refused from nothing.
BALANCED = {name for name, family in all_families() if family.balances_experts}
OF_NO_RECIPE = [preset for preset in PRICED if load_preset(preset).family in BALANCED - OF_RECIPES]


SHRUNKEN = share(RECIPES, ("gemma2-9b", "llama3.1-70b-lora"))
OF_FAMILIES = share(OF_NO_RECIPE, ("gpt-oss-20b",))


@pytest.fixture(scope="module")
def gallery(train: Train, place: Path) -> TrainerRuns:
    recipes = {name: shrunken(name) for name in SHRUNKEN}
    recipes |= {preset: recipe_of_a_family(preset) for preset in OF_FAMILIES}
    cases = [
        as_case(name, DeepSpeed().render(recipe, LAYOUTS.get(name, BY_DATA)), ranks=2)
        for name, recipe in recipes.items()
    ]
    return train(cases, place / "gallery")


@pytest.mark.parametrize("name", [*SHRUNKEN, *OF_FAMILIES])
def test_a_recipe_of_the_gallery_learns(gallery: TrainerRuns, name: str) -> None:
    run = gallery[name]
    assert run.codes == [0, 0], run.said[-3000:]
    assert len(run.losses) == STEPS
    fall = 0.01 if name.endswith("lora") else 0.2
    assert run.losses[-1] < run.losses[0] - fall, run.losses


def test_the_workload_is_what_was_asked() -> None:
    assert all(shrunken(name).workload == Workload(64, 8, "fp32") for name in RECIPES)


def checkpoint(folder: Path, family: str) -> None:
    """A Hugging Face checkpoint of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model(family)))
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(5)  # so that its first loss is no other's
    made.save_pretrained(folder)


SHARDED = Layout(data=2, micro_batch_size=4, zero_stage=3)
BEGUN = {
    "llama, zero 3": SHARDED,
    "mixtral, zero 3": SHARDED,
    "llama, tensor": Layout(tensor=2, micro_batch_size=8, zero_stage=3),
}
BEGUN_SPLIT = share(BEGUN, ("llama, zero 3",))


@pytest.fixture(scope="module")
def begun(train: Train, place: Path) -> TrainerRuns:
    """Jobs that begin with weights, all with the same data."""
    start = {family: f"training.start_from={place / 'weights' / family}" for family in ("llama", "mixtral")}
    for family in start:
        checkpoint(place / "weights" / family, family)
    jobs = [("llama", ALONE), ("mixtral", ALONE), *((name, BEGUN[name]) for name in BEGUN_SPLIT)]
    cases = []
    for name, layout in jobs:
        family = name.partition(",")[0]
        cases.append(case(name, layout, start[family], "training.steps=2", model=model(family)))
    other = model("llama") | {"intermediate_size": 128}
    cases.append(case("llama, other", ALONE, start["llama"], "training.steps=2", model=other))
    return train(cases, place / "begun")


def test_it_begins_with_given_weights_whatever_the_split(begun: TrainerRuns, trained: TrainerRuns) -> None:
    for family in ("llama", "mixtral"):
        whole = begun[family]
        assert whole.codes == [0], whole.said[-3000:]
        assert abs(whole.losses[0] - trained[family].losses[0]) > 0.02, "the weights are its own"
    for name in BEGUN_SPLIT:
        assert set(begun[name].codes) == {0}, begun[name].said[-3000:]
        assert begun[name].losses == pytest.approx(begun[name.split(",")[0]].losses, rel=1e-4)


def test_weights_of_another_model_are_refused(begun: TrainerRuns) -> None:
    refused = begun["llama, other"]
    assert refused.codes == [1]
    assert "model.layers.0.mlp.gate_proj.weight is 160x64 in the checkpoint and 128x64 in the recipe" in refused.said
    assert "Traceback" not in refused.said


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the script by name."""
    monkeypatch.syspath_prepend(str(TRAINER.parent))
    return importlib.import_module


def test_indexed_datasets_are_read_as_megatron_writes_them(dataset: Path, script: Callable[[str], Any]) -> None:
    import numpy as np

    tokens, random = script("indexed").IndexedTokens(dataset), np.random.RandomState(0)
    written = np.concatenate([random.randint(0, 1000, size=random.randint(20, 400)) for _ in range(300)])
    assert len(tokens) == len(written)
    assert tokens.read(1000, 3000).tolist() == written[1000:3000].tolist()


def test_a_blend_has_of_each_dataset_what_its_weight_says(place: Path, script: Callable[[str], Any]) -> None:
    index(place / "ones", [1] * 100)
    index(place / "twos", [2] * 100)
    import torch

    data, split = script("data"), script("parallel").RankSplit(rank=1, ranks=2)
    words = ["3", str(place / "ones"), "1", str(place / "twos")]
    args = argparse.Namespace(data=words, sequence_length=8, seed=7, tokenizer=None, weights=None)
    batches = data.make_batches(args, 256, 4, split)
    drawn = torch.stack([batches(number).inputs for number in range(250)])
    assert drawn.shape == (250, 4, 8)
    assert float((drawn == 1).float().mean()) == pytest.approx(0.75, abs=0.05)
    # a job of one rank has the same samples in the same step
    whole = data.make_batches(args, 256, 8, script("parallel").RankSplit())
    assert whole(3).targets[4:].tolist() == batches(3).targets.tolist()


def index(prefix: Path, tokens: list[int]) -> None:
    """One document of 16-bit tokens."""
    prefix.with_name(prefix.name + ".bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    prefix.with_name(prefix.name + ".idx").write_bytes(head + struct.pack("<iqqq", len(tokens), 0, 0, 1))


@pytest.fixture(scope="module")
def odd(train: Train, place: Path) -> TrainerRuns:
    """Other data, and jobs that cannot be."""
    index(place / "high", [250, 251] * 200)
    index(place / "strange", [7, 300] * 200)
    (place / "torn.idx").write_bytes(b"no index")
    blend = f"data={{blend: [{{path: {place / 'high'}, weight: 3}}, {{path: {place / 'strange'}, weight: 1}}]}}"
    one = {name: f"data={{path: {place / name}}}" for name in ("high", "torn")}
    tensor, context = Layout(tensor=2, micro_batch_size=8), Layout(context=2, micro_batch_size=8)
    both = json.dumps({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2})
    cases = [
        case("one", ALONE, one["high"]),
        case("blend", ALONE, blend),
        case("torn", ALONE, one["torn"]),
        case("mixture, tensor", tensor, model=model("mixtral")),
        case("window, context", context, model=model("gemma3_text")),
        case("latents, context", context, model=model("deepseek_v3")),
        case("adapters, tensor", tensor, words=("--adapter-rank", "4")),
        case("unknown", ALONE, model={"model_type": "elephant"}),
    ]
    cases.append(case("both", tensor))
    cases[-1]["files"]["ds_config.json"] = both
    return train(cases, place / "odd")


def test_it_learns_from_an_indexed_dataset(odd: TrainerRuns) -> None:
    assert odd["one"].codes == [0], odd["one"].said[-3000:]
    assert odd["one"].losses[-1] < odd["one"].losses[0] - 2.0, "there are two tokens to learn"


REFUSED = {
    "blend": "has token 300, the model only 256: enlarge vocab_size",
    "torn": "torn.idx: is no index of a Megatron dataset",
    "mixture, tensor": "tensor_parallel: a mixtral model cannot be split so: AutoTP has a plan for dense",
    "window, context": "a gemma3_text model cannot be split so: its attention window of 32 tokens",
    "latents, context": "sequence_parallel_size: a deepseek_v3 model cannot be split so",
    "adapters, tensor": "adapters cannot be split with tensor_parallel",
    "unknown": "Transformers cannot build it",
    "both": "tensor_parallel and sequence_parallel_size together",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_one_message(odd: TrainerRuns, name: str) -> None:
    refused = odd[name]
    assert 0 not in refused.codes
    assert refused.said.count(REFUSED[name]) == 1, refused.said[-2000:]
    assert "Traceback" not in refused.said
