"""The keys under `layout:` and `what_if:`: what a person fixes of the layout, and techniques beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema

from llmlaunch.documents.keys import form, key, key_names, keys_of, section
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.frameworks import FRAMEWORKS
from llmlaunch.rundir.values import counted
from llmlaunch.techniques import CHOOSABLE, NO_TECHNIQUES, Techniques
from llmlaunch.techniques.technique import (
    EXPERTS,
    LATENT_ATTENTION,
    LAYOUT,
    PREDICTION_HEADS,
    SHARED_EXPERT,
    WHAT_IF,
    declarations,
    key_of,
)
from llmlaunch.techniques.treatments import ModuleOffload

Pin = int | str | bool | tuple[int | str | bool, ...]
Problem = tuple[KeyPath, str]
BIT_EQUAL_ONLY, ASKED_ONLY = "bit-equal", "asked"  # values of layout.techniques


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
    declared = declarations(Techniques)
    keys = {name: value for mapping in mappings for name, value in mapping.items() if name in declared}
    values = {name: _meaning(value, declared[name].words) for name, value in keys.items()}
    return Techniques(**{name: value for name, value in values.items() if value is not None})


def _meaning(value: Any, words: Mapping[str, Any]) -> Any:
    """Return the value that a word stands for, and what is no such word as it is."""
    return words.get(value, value) if isinstance(value, str) else value


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
    yield from _technique_problems(layout, model)
    layers = layout.get("recompute_layers")
    most = max(layers if isinstance(layers, tuple) else (layers or 0,))
    if most > model.num_layers:
        yield (
            ("layout", "recompute_layers"),
            f"{most} of {counted(model.num_layers, 'layer')}; use at most {model.num_layers}",
        )
    if layout.get("offload_layers") and layout.get(key_of(ModuleOffload)) is not None:
        yield (
            ("layout", "offload_layers"),
            f"offloads whole layers and {key_of(ModuleOffload)} parts of them; remove one of the two",
        )


def _of_megatron(layout: Mapping[str, Any], backend: str) -> Iterator[Problem]:
    if layout.get("distributed_optimizer") is not None:
        yield ("layout", "distributed_optimizer"), f"is a word of megatron-lm; for {backend} write zero_stage"
    if layout.get("layers_by_stage"):
        yield ("layout", "layers_by_stage"), f"{backend} runs without pipeline stages here; remove it"
    for name, declared in declarations(Techniques).items():
        if declared.elsewhere and layout.get(name):
            yield ("layout", name), f"is a word of megatron-lm; remove it for backend: {backend}, {declared.elsewhere}"


def _technique_problems(layout: Mapping[str, Any], model: ModelShape) -> Iterator[Problem]:
    """Yield every technique that means nothing without the value of another key, or needs what the model has not."""
    for name, (owner, value) in belonging().items():
        stated, pinned = layout.get(name), layout.get(owner)
        if value is None:
            if stated not in (None, getattr(NO_TECHNIQUES, name)) and not pinned:
                yield ("layout", name), f"is of {owner}; write those too, or remove {name}"
        elif stated and value not in (pinned if isinstance(pinned, tuple) else (pinned,)):
            yield ("layout", name), f"belongs to {owner}: {value}; write that too, or remove {name}"
    parts = {
        EXPERTS: model.moe is not None,
        SHARED_EXPERT: model.moe is not None and model.moe.shared_expert_ffn_hidden_size > 0,
        LATENT_ATTENTION: model.mla is not None,
        PREDICTION_HEADS: model.mtp_num_layers > 0,
    }
    for name, declared in declarations(Techniques).items():
        stated, needs = layout.get(name), declared.needs
        if isinstance(needs, str):
            if stated not in (None, False) and not parts[needs]:
                yield ("layout", name), f"needs {needs}, and {model.name} has none; remove it"
            continue
        for item in stated if isinstance(stated, tuple) else (stated,):
            if needs and item in needs and not parts[needs[item]]:
                yield ("layout", name), f"{item} needs {needs[item]}, and {model.name} has none; remove it"


@cache
def belonging() -> Mapping[str, tuple[str, str | None]]:
    """Return the keys under `layout:` that mean nothing without another one: that one, and its value, None for any."""
    techniques = {name: each.belongs for name, each in declarations(Techniques).items() if each.belongs is not None}
    return {**techniques, "recompute_layers": ("recompute", "full")}
