"""Techniques in a recipe: read into one type, refused where they contradict the rest, absent where nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_recipe
from llmlaunch.techniques import NO_TECHNIQUES, Adapters, Techniques

Write = Callable[[str | bytes], Path]


@pytest.fixture
def recipe(write: Write, good: str) -> Path:
    return write(good)


def test_a_recipe_that_names_none_has_none(recipe: Path) -> None:
    assert load_recipe(recipe).techniques == NO_TECHNIQUES


def test_every_key_arrives(recipe: Path) -> None:
    loaded = load_recipe(
        recipe,
        (
            "layout={tensor: 2, recompute: [selective, full], recompute_modules: [layernorm, mlp], "
            "recompute_method: block, recompute_layers: 4, offload_modules: [core_attn, attn_proj], "
            "offload_checkpoints: true, offload_optimizer: 0.5, offload_parameters: true, loss: tiled, loss_tiles: 16, "
            "mlp_chunks: 8, delay_weight_gradients: true}",
            "training.adapters={rank: 16, frozen_down: true}",
            "training.gradient_dtype=bf16",
            "what_if={swapped_share: 0.5, sampled_share: 0.3, weight_versions: 2}",
        ),
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
        adapters=Adapters(16, frozen_down=True),
        delay_weight_gradients=True,
        swapped_share=0.5,
        sampled_share=0.3,
        weight_versions=2,
    )
    assert loaded.training.gradient_dtype == "bf16"
    assert loaded.pins == {"tensor": 2, "recompute": ("selective", "full"), "recompute_layers": 4}


def test_layers_arrive_too(recipe: Path) -> None:
    loaded = load_recipe(recipe, ("layout={offload_layers: 3}", "training.trained_layers=8"))
    assert (loaded.pins["offload_layers"], loaded.techniques.trained_layers) == (3, 8)


def test_the_dispatcher_is_the_models(recipe: Path) -> None:
    loaded = load_recipe(recipe, ("model=mixtral-8x7b", "layout={token_dispatcher: allgather}"))
    assert loaded.model.moe is not None
    assert loaded.model.moe.token_dispatcher == "allgather"


def test_a_technique_changes_the_digest_and_its_neutral_value_does_not(recipe: Path) -> None:
    plain = load_recipe(recipe).digest
    assert load_recipe(recipe, ("layout={mlp_chunks: 1}", "what_if={weight_versions: 1}")).digest == plain
    assert load_recipe(recipe, ("layout={mlp_chunks: 2}",)).digest != plain
    assert load_recipe(recipe, ("training.gradient_dtype=bf16",)).digest != plain


CONTRADICTIONS = {
    "modules without selective": (
        ["layout={recompute_modules: [mlp]}"],
        "layout.recompute_modules: belongs to recompute: selective",
    ),
    "modules with full": (
        ["layout={recompute: full, recompute_modules: [mlp]}"],
        "layout.recompute_modules: belongs to recompute: selective",
    ),
    "a method without full": (
        ["layout={recompute: selective, recompute_method: block}"],
        "layout.recompute_method: belongs to recompute: full",
    ),
    "more layers than there are": (
        ["layout={recompute: full, recompute_layers: 33}"],
        "layout.recompute_layers: 33 of 32 layers",
    ),
    "checkpoints without full": (["layout={offload_checkpoints: true}"], "belongs to recompute: full"),
    "tiles of no tiled loss": (["layout={loss: native, loss_tiles: 4}"], "layout.loss_tiles: belongs to loss: tiled"),
    "layers and modules": (
        ["layout={offload_layers: 2, offload_modules: [core_attn]}"],
        "layout.offload_layers: offloads whole layers",
    ),
    "experts of a dense model": (
        ["layout={offload_modules: [expert_fc1]}"],
        "layout.offload_modules: expert_fc1 needs experts, and llama3-8b has none",
    ),
    "a shared expert there is none of": (
        ["model=mixtral-8x7b", "layout={recompute: selective, recompute_modules: [shared_experts]}"],
        "shared_experts needs a shared expert",
    ),
    "latents of plain attention": (
        ["layout={recompute: selective, recompute_modules: [mla_up_proj]}"],
        "mla_up_proj needs multi-latent attention",
    ),
    "a dispatcher of a dense model": (
        ["layout={token_dispatcher: alltoall}"],
        "layout.token_dispatcher: needs experts",
    ),
    "an unknown module": (
        ["layout={recompute: selective, recompute_modules: [attention]}"],
        "must be one of core_attn",
    ),
    "more than all": (["layout={offload_optimizer: 1.5}"], "at least 0 and at most 1"),
    "nothing sampled": (["what_if={sampled_share: 0.0}"], "above 0 and at most 1"),
    "no rank": (["training.adapters={}"], "training.adapters.rank: is missing"),
    "adapters and layers": (
        ["training.adapters={rank: 4}", "training.trained_layers=2"],
        "training.trained_layers: trains layers, and adapters freeze all of them",
    ),
    "more trained layers than there are": (["training.trained_layers=33"], "training.trained_layers: 33 of 32 layers"),
    "a tied head": (
        ["model={base: llama3-8b, tied_embeddings: true}", "training.trained_layers=2"],
        "training.trained_layers: llama3-8b changed ties its head to the embedding",
    ),
    "half gradients of whole numbers": (
        ["training.precision=fp16", "training.gradient_dtype=bf16"],
        "training.gradient_dtype: bf16 gradients need precision: bf16, not fp16",
    ),
}


@pytest.mark.parametrize(("overrides", "sentence"), CONTRADICTIONS.values(), ids=list(CONTRADICTIONS))
def test_what_contradicts_itself_is_told_with_its_key(recipe: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe, overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
