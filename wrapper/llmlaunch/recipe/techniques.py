"""Techniques as a recipe says them: from its keys to the type all rooms share, and what contradicts itself.

What a backend can run is for the backend's own requirements and rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import given
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.schema import LayoutFile, PinsFile, RecipeFile
from llmlaunch.rundir.messages import counted
from llmlaunch.techniques import Adapters, Techniques

__all__ = ["dispatched", "fixed_words", "technique_problems", "techniques"]

Problem = tuple[KeyPath, str]
# Techniques a search may choose for each layout. All others hold for every layout, as the recipe has them.
CHOOSABLE = (
    "recompute_modules",
    "recompute_method",
    "offload_modules",
    "offload_checkpoints",
    "offload_optimizer",
    "offload_parameters",
)
_OF_THE_MODEL = frozenset({"token_dispatcher"})


def techniques(file: RecipeFile) -> Techniques:
    """All techniques a recipe asks for; what is left out changes nothing."""
    said = given(file.layout) if isinstance(file.layout, LayoutFile) else {}
    said |= given(file.what_if)
    held: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in said.items()
        if key not in PinsFile.model_fields and key not in _OF_THE_MODEL and value is not None
    }
    adapters = file.training.adapters
    return Techniques(
        **held,
        adapters=None if adapters is None else Adapters(adapters.rank, adapters.frozen_down),
        trained_layers=file.training.trained_layers,
    )


def fixed_words(file: RecipeFile) -> tuple[str, ...]:
    """Of the words that can be chosen for each layout, those the recipe chooses itself. What changes the numbers a
    model learns from is never chosen unasked: gradient_dtype is free only where it says auto."""
    said = given(file.layout) if isinstance(file.layout, LayoutFile) else {}
    dtype = () if file.training.gradient_dtype == "auto" else ("gradient_dtype",)
    return (*(word for word in CHOOSABLE if said.get(word) is not None), *dtype)


def dispatched(file: RecipeFile, model: ModelShape) -> ModelShape:
    """The model with the token dispatcher the recipe names."""
    if model.moe is None or not isinstance(file.layout, LayoutFile) or file.layout.token_dispatcher is None:
        return model
    return replace(model, moe=replace(model.moe, token_dispatcher=file.layout.token_dispatcher))


def technique_problems(file: RecipeFile, model: ModelShape) -> list[Problem]:
    """Every technique that contradicts the rest of the recipe, whatever the backend."""
    layout = file.layout if isinstance(file.layout, LayoutFile) else LayoutFile.model_construct()
    return [
        *_recompute(layout, model),
        *_offload_and_loss(layout),
        *_model(layout, model),
        *_exchange(file, layout),
        *_trained(file, model),
    ]


def _recompute(layout: LayoutFile, model: ModelShape) -> Iterator[Problem]:
    pinned = layout.recompute if isinstance(layout.recompute, tuple) else (layout.recompute,)
    belongs = {
        "recompute_modules": "selective",
        "recompute_method": "full",
        "recompute_layers": "full",
        "offload_checkpoints": "full",
    }
    for key, granularity in belongs.items():
        if getattr(layout, key) and granularity not in pinned:
            yield ("layout", key), f"belongs to recompute: {granularity}; write that too, or remove {key}"
    pin = layout.recompute_layers
    most = max(pin if isinstance(pin, tuple) else (pin or 0,))
    if most > model.num_layers:
        yield (
            ("layout", "recompute_layers"),
            f"{most} of {counted(model.num_layers, 'layer')}; use at most {model.num_layers}",
        )


def _offload_and_loss(layout: LayoutFile) -> Iterator[Problem]:
    if layout.offload_layers and layout.offload_modules is not None:
        yield (
            ("layout", "offload_layers"),
            "offloads whole layers and offload_modules parts of them; remove one of the two",
        )
    if layout.loss_tiles is not None and layout.loss != "tiled":
        yield ("layout", "loss_tiles"), "belongs to loss: tiled; write that too, or remove loss_tiles"


def _model(layout: LayoutFile, model: ModelShape) -> Iterator[Problem]:
    modules: list[tuple[str, str]] = [("recompute_modules", name) for name in layout.recompute_modules or ()]
    modules += [("offload_modules", name) for name in layout.offload_modules or ()]
    has = {
        "experts": model.moe is not None,
        "a shared expert": model.moe is not None and model.moe.shared_expert_ffn_hidden_size > 0,
        "multi-latent attention": model.mla is not None,
    }
    needs = {
        "moe": "experts",
        "moe_act": "experts",
        "expert_fc1": "experts",
        "shared_experts": "a shared expert",
        "mla_up_proj": "multi-latent attention",
    }
    for key, name in modules:
        if name in needs and not has[needs[name]]:
            yield ("layout", key), f"{name} needs {needs[name]}, and {model.name} has none; remove it"
    if layout.token_dispatcher is not None and model.moe is None:
        yield ("layout", "token_dispatcher"), f"needs experts, and {model.name} has none; remove it"
    if layout.overlap_shared_expert and not has["a shared expert"]:
        yield ("layout", "overlap_shared_expert"), f"needs a shared expert, and {model.name} has none; remove it"


def _exchange(file: RecipeFile, layout: LayoutFile) -> Iterator[Problem]:
    backend = file.backend if isinstance(file.backend, str) else file.backend.name
    if layout.flex_backend is not None and layout.token_dispatcher != "flex":
        yield ("layout", "flex_backend"), "belongs to token_dispatcher: flex; write that too, or remove flex_backend"
    if layout.overlap_shared_expert and backend != "megatron-lm":
        yield (
            ("layout", "overlap_shared_expert"),
            f"is a word of megatron-lm; remove it for backend: {backend}, where no token travels to its experts",
        )


def _trained(file: RecipeFile, model: ModelShape) -> Iterator[Problem]:
    training = file.training
    if training.gradient_dtype == "bf16" and training.precision != "bf16":
        yield (
            ("training", "gradient_dtype"),
            f"bf16 gradients need precision: bf16, not {training.precision}; remove it",
        )
    last = training.trained_layers
    if last is None:
        return
    key = ("training", "trained_layers")
    if training.adapters is not None:
        yield key, "trains layers, and adapters freeze all of them; remove one of the two"
    if last > model.num_layers:
        yield key, f"{last} of {counted(model.num_layers, 'layer')}; use at most {model.num_layers}"
    if model.tied_embeddings:
        yield (
            key,
            f"{model.name} ties its head to the embedding: training the head would send gradients through every layer; "
            "set model.tied_embeddings: false, or remove it",
        )
