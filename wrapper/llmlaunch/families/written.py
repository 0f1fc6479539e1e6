"""A shape as the `config.json` of its family, and what of it that family cannot say (transformers 4.53 to 5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.config import shape_from_config
from llmlaunch.families.config_keys import written_keys
from llmlaunch.families.registry import family_named
from llmlaunch.families.rotary import written_positions
from llmlaunch.families.vision import config_with_vision
from llmlaunch.models.shape import ModelShape

Json = dict[str, Any]

# of training, not of the model: a configuration says none of it
_NOT_OF_THE_MODEL = ("capacity_factor", "grouped_gemm")
_NOT_OF_THE_ENCODER = ("image_size", "images_per_sample", "frozen")


def config_of(shape: ModelShape) -> Json:
    """The values of the configuration class of `shape.family`. Says what the family can say; `unsaid` tells the rest.

    Raises ValueError where the family has experts or latent attention and `shape` has none.
    """
    if missing := _needed(shape):
        raise ValueError(f"the family {shape.family} needs {missing[0]}")
    family = family_named(shape.family)
    config = {"model_type": shape.family, **written_keys(shape, family.keys)}
    config |= written_positions(shape) if family.has_rotary else {}
    config |= family.write(shape) if family.write is not None else {}
    if shape.vision is None or family.vision is None:
        return config
    return config_with_vision(config, shape, shape.vision, family.vision)


def unsaid(shape: ModelShape) -> tuple[str, ...]:
    """Return the fields of `shape` that its family cannot express: those that differ when its config is read back."""
    if missing := _needed(shape):
        return missing
    try:
        back, _ = shape_from_config(config_of(shape), shape.name)
    except BadKey as error:
        return (".".join(map(str, error.key)),)
    return tuple(_differences(_comparable(shape), _comparable(back), ""))


def _needed(shape: ModelShape) -> tuple[str, ...]:
    """Return the sections that the family needs and `shape` lacks; an encoder that no class has before the family."""
    family = family_named(shape.family)
    missing = tuple(name for name in family.needs if getattr(shape, name) is None)
    return (*missing, "vision") if shape.vision is not None and family.vision is None else missing


def _comparable(shape: ModelShape) -> Json:
    """Without loss there is no weight of it, without dense layers no width of theirs, and a distance beyond the last
    layer is none."""
    values = asdict(replace(shape, name=""))
    if shape.indexer is not None:
        del values["indexer"]["loss_coeff"]  # of training, as those below are
    if shape.compressed_attention is not None:
        del values["compressed_attention"]["index_loss_coeff"]
    if shape.sliding_window is not None and shape.sliding_window.full_every > shape.num_layers:
        values["sliding_window"]["full_every"] = 0
    if shape.linear_attention is not None and shape.linear_attention.full_every > shape.num_layers:
        values["linear_attention"]["full_every"] = 0
    if shape.no_rope_every > shape.num_layers:
        values["no_rope_every"] = 0
    if values["vision"] is not None:
        for name in _NOT_OF_THE_ENCODER:
            del values["vision"][name]
    if values["moe"] is not None:
        for name in _NOT_OF_THE_MODEL:
            del values["moe"][name]
        if all(values["moe"]["layer_pattern"]):
            del values["ffn_hidden_size"]
        router = values["moe"]["router"]
        router["hash_layers"] = min(router["hash_layers"], shape.num_layers)
        if router["balancing"] == "none" or router["aux_loss_coeff"] == 0:
            router |= {"balancing": "none", "aux_loss_coeff": 0.0}
    return values


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the names in which the two differ. A width of dense layers that one alone has follows from its layer
    pattern, which is named."""
    differences = []
    for name, value in mine.items():
        if name not in theirs:
            continue
        other = theirs[name]
        if isinstance(value, dict) and isinstance(other, dict):
            differences += _differences(value, other, f"{prefix}{name}.")
        elif value != other:
            differences.append(prefix + name)
    return differences
