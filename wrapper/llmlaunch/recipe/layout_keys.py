"""The keys under `layout:` and `what_if:`: what a person fixes of the layout, and techniques beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema

from llmlaunch.documents.keys import form, key, key_names, keys_of, section
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.frameworks import FRAMEWORKS
from llmlaunch.rundir.values import counted
from llmlaunch.techniques import LAYOUT, SOLVED_SHARE, WHAT_IF, Techniques

__all__ = [
    "ASKED_ONLY",
    "BIT_EQUAL_ONLY",
    "CHOOSABLE",
    "RECOMPUTE_AND_OFFLOAD",
    "Pin",
    "fixed_names",
    "layout_form",
    "layout_problems",
    "pins_from",
    "techniques_from",
    "what_if_form",
]

Pin = int | str | bool | tuple[int | str | bool, ...]
Problem = tuple[KeyPath, str]
# Techniques a search may choose for each layout. All others hold for every layout, as the recipe has them.
RECOMPUTE_AND_OFFLOAD = (
    "recompute_modules",
    "recompute_method",
    "offload_modules",
    "offload_checkpoints",
    "offload_optimizer",
    "offload_parameters",
)
CHOOSABLE = (
    *RECOMPUTE_AND_OFFLOAD,
    "loss",
    "loss_tiles",
    "mlp_chunks",
    "delay_weight_gradients",
    "token_dispatcher",
    "flex_backend",
    "overlap_shared_expert",
    "overlap_expert_communication",
    "tp_comm_overlap",
    "context_comm",
    "cuda_graphs",
)
BIT_EQUAL_ONLY, ASKED_ONLY = "bit-equal", "asked"  # values of layout.techniques
NO_KERNEL = "none"  # of layout.loss: torch's own loss, whatever a search would choose


def _pin(allowed: Callable[[Any], bool], values: str, item: dict[str, Any]) -> Any:
    """Return the type of a pin: one value, a list of allowed ones, or `auto`, which becomes None.

    `values` describes the values in a message, `item` in the JSON Schema.
    """

    def validate(value: Any) -> Any:
        if value == "auto" and isinstance(value, str):
            return None
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ValueError(f"is an empty list; give {values}, a list of such, or auto")
        if not all(allowed(item) for item in items):
            raise ValueError(f"must be {values}, a list of such, or auto")
        return tuple(dict.fromkeys(items)) if isinstance(value, list) else value

    schema = {"anyOf": [item, {"type": "array", "items": item, "minItems": 1}, {"const": "auto"}]}
    return Annotated[Any, AfterValidator(validate), WithJsonSchema(schema)]


def _whole_number(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _stages(value: Any) -> Any:
    if value == "auto" and isinstance(value, str):
        return None
    if value == "even" and isinstance(value, str):
        return ()
    if not isinstance(value, list) or len(value) < 2 or not all(map(_whole_number(0, 10**9), value)):
        raise ValueError("must be auto, even, or the decoder layers of each stage in order, such as [21, 20, 20, 19]")
    return tuple(value)


Size: Any = _pin(
    _whole_number(1, 10**9), "a whole number, at least 1 and at most 1000000000", {"type": "integer", "minimum": 1}
)
Amount: Any = _pin(
    _whole_number(0, 10**9), "a whole number, at least 0 and at most 1000000000", {"type": "integer", "minimum": 0}
)
ZeroStage: Any = _pin(_whole_number(0, 3), "0, 1, 2 or 3", {"enum": [0, 1, 2, 3]})
Flag: Any = _pin(lambda value: isinstance(value, bool), "true or false", {"type": "boolean"})
Recompute: Any = _pin(
    lambda value: value in ("none", "selective", "full"),
    "none, selective or full",
    {"enum": ["none", "selective", "full"]},
)
LayersByStage = Annotated[
    Any,
    AfterValidator(_stages),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2},
                {"enum": ["auto", "even"]},
            ]
        }
    ),
]


@section
class _Pins:
    """What you fix of the layout: a value, a list of allowed values, or auto. Without a key, the search chooses."""

    tensor: Pin = key("Tensor parallel size", default=None, written=Size)
    pipeline: Pin = key("Pipeline parallel size", default=None, written=Size)
    virtual_pipeline: Pin = key("Model chunks of each pipeline rank; 1 = not interleaved", default=None, written=Size)
    context: Pin = key("Context parallel size", default=None, written=Size)
    data: Pin = key("Data parallel size, context parallelism not counted", default=None, written=Size)
    expert: Pin = key("Expert parallel size", default=None, written=Size)
    expert_tensor: Pin = key("Tensor parallel size inside experts", default=None, written=Size)
    micro_batch_size: Pin = key("Sequences in one micro-batch of one data parallel rank", default=None, written=Size)
    sequence_parallel: Pin = key("Sequence parallelism beside tensor parallelism", default=None, written=Flag)
    zero_stage: Pin = key(
        "ZeRO stage; for megatron-lm 1 is the distributed optimizer, 2 and 3 are Megatron-FSDP",
        default=None,
        written=ZeroStage,
    )
    distributed_optimizer: bool | None = key("megatron-lm: another way to say zero_stage 1 or 0", default=None)
    recompute: Pin = key("Activations recomputed in the backward pass", default=None, written=Recompute)
    recompute_layers: Pin = key(
        "recompute: full; uniform: layers in a group, block: layers of a model chunk that are recomputed",
        default=None,
        written=Size,
    )
    offload_layers: Pin = key(
        "First layers of each stage whose activations wait in host memory, whole; absent = searched",
        default=None,
        written=Amount,
    )
    layers_by_stage: Pin = key(
        "megatron-lm: decoder layers of each stage, virtual ones too, in order; even: the same everywhere; auto: "
        "searched",
        default=None,
        written=LayersByStage,
    )
    techniques: str | None = key(
        "What a search may turn on: bit-equal = only what changes not even a rounding; asked = beside recompute and "
        "offload only what the recipe names; absent = whatever keeps the mathematics",
        default=None,
        written=Literal["bit-equal", "asked"] | None,
    )

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError where the two names of the distributed optimizer contradict each other."""
        stage, flag = keys.get("zero_stage"), keys.get("distributed_optimizer")
        if flag is not None and stage is not None and stage not in (int(flag), (int(flag),)):
            raise ValueError(
                f"distributed_optimizer: {'true' if flag else 'false'} is zero_stage: {int(flag)}, which contradicts "
                "the zero_stage given; remove one of the two"
            )


@section
class _Choice:
    """How the search chooses among the layouts that are left."""

    preference: bool = key(
        "Of nearly equal layouts the one with fewer unusual parts; off = the fastest by the model of time",
        default=True,
    )


def layout_form() -> Any:
    """Return the type of the mapping `layout:`. What is named in it holds for every layout searched."""
    keys = keys_of(_Pins) | keys_of(_Choice) | keys_of(Techniques, place=LAYOUT)
    return form("Layout", keys, description=_Pins.__doc__, check=_Pins.check_keys)


def what_if_form() -> Any:
    """Return the type of the mapping `what_if:`: techniques that no backend runs, priced but never rendered."""
    return form("WhatIf", keys_of(Techniques, place=WHAT_IF), description="Techniques of papers that no backend runs.")


def pins_from(layout: Mapping[str, Any]) -> dict[str, Pin]:
    """Return what these keys fix of the layout, but for the split of the layers, by the names of `Layout`."""
    pins = {name: layout[name] for name in key_names(_Pins) if layout.get(name) is not None}
    for name in ("layers_by_stage", "techniques"):
        pins.pop(name, None)
    flag = pins.pop("distributed_optimizer", None)
    return pins if flag is None else pins | {"zero_stage": int(flag)}


def techniques_from(*mappings: Mapping[str, Any]) -> Techniques:
    """Return the techniques that are named in these mappings of the recipe, all others at their defaults."""
    keys = {name: value for mapping in mappings for name, value in mapping.items() if value not in (None, NO_KERNEL)}
    if keys.get("swapped_share") == "auto":
        keys["swapped_share"] = SOLVED_SHARE
    names = [name for place in (LAYOUT, "training", WHAT_IF) for name in key_names(Techniques, place)]
    return Techniques(**{name: keys[name] for name in names if name in keys})


def fixed_names(layout: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of those techniques a search could choose that the recipe chooses itself.

    What changes the numbers a model learns from is never chosen unasked: gradient_dtype is free only if it is auto.
    """
    dtype = () if training.get("gradient_dtype") == "auto" else ("gradient_dtype",)
    return (*(name for name in CHOOSABLE if layout.get(name) is not None), *dtype)


def layout_problems(layout: Mapping[str, Any], model: ModelShape, backend: str) -> Iterator[Problem]:
    """Yield every key under `layout:` that contradicts another one, the model or the backend. What a backend can run
    is for its own requirements and rules."""
    if not FRAMEWORKS[backend].on_megatron_core:
        yield from _of_megatron(layout, backend)
    yield from _recompute_problems(layout, model)
    if layout.get("offload_layers") and layout.get("offload_modules") is not None:
        yield (
            ("layout", "offload_layers"),
            "offloads whole layers and offload_modules parts of them; remove one of the two",
        )
    if (layout.get("offload_fraction") or 1.0) < 1.0 and not layout.get("offload_modules"):
        yield ("layout", "offload_fraction"), "is of offload_modules; write those too, or remove offload_fraction"
    if layout.get("loss_tiles") is not None and layout.get("loss") != "tiled":
        yield ("layout", "loss_tiles"), "belongs to loss: tiled; write that too, or remove loss_tiles"
    yield from _model_problems(layout, model)
    if layout.get("flex_backend") is not None and layout.get("token_dispatcher") != "flex":
        yield ("layout", "flex_backend"), "belongs to token_dispatcher: flex; write that too, or remove flex_backend"


def _of_megatron(layout: Mapping[str, Any], backend: str) -> Iterator[Problem]:
    if layout.get("distributed_optimizer") is not None:
        yield ("layout", "distributed_optimizer"), f"is a word of megatron-lm; for {backend} write zero_stage"
    if layout.get("layers_by_stage"):
        yield ("layout", "layers_by_stage"), f"{backend} runs without pipeline stages here; remove it"
    if layout.get("overlap_shared_expert"):
        yield (
            ("layout", "overlap_shared_expert"),
            f"is a word of megatron-lm; remove it for backend: {backend}, where no token travels to its experts",
        )


def _recompute_problems(layout: Mapping[str, Any], model: ModelShape) -> Iterator[Problem]:
    pin = layout.get("recompute")
    pinned = pin if isinstance(pin, tuple) else (pin,)
    granularity_of = {
        "recompute_modules": "selective",
        "recompute_method": "full",
        "recompute_layers": "full",
        "offload_checkpoints": "full",
    }
    for name, granularity in granularity_of.items():
        if layout.get(name) and granularity not in pinned:
            yield ("layout", name), f"belongs to recompute: {granularity}; write that too, or remove {name}"
    layers = layout.get("recompute_layers")
    most = max(layers if isinstance(layers, tuple) else (layers or 0,))
    if most > model.num_layers:
        yield (
            ("layout", "recompute_layers"),
            f"{most} of {counted(model.num_layers, 'layer')}; use at most {model.num_layers}",
        )


def _model_problems(layout: Mapping[str, Any], model: ModelShape) -> Iterator[Problem]:
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
    for name in ("recompute_modules", "offload_modules"):
        for module in layout.get(name) or ():
            if module in needs and not has[needs[module]]:
                yield ("layout", name), f"{module} needs {needs[module]}, and {model.name} has none; remove it"
    for name in ("token_dispatcher", "expert_rank_capacity_factor", "paged_stash"):
        if layout.get(name) is not None and model.moe is None:
            yield ("layout", name), f"needs experts, and {model.name} has none; remove it"
    if layout.get("mtp_stage") == "before-last" and not model.mtp_num_layers:
        yield ("layout", "mtp_stage"), f"is of prediction heads, and {model.name} has none; remove it"
    if layout.get("overlap_shared_expert") and not has["a shared expert"]:
        yield ("layout", "overlap_shared_expert"), f"needs a shared expert, and {model.name} has none; remove it"
