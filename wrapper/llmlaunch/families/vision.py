"""A config.json with a `vision_config`: a decoder of a family that is read anyway, and an encoder as Qwen3-VL's
(transformers/models/qwen3_vl, qwen3_vl_moe, qwen3_5 and qwen3_5_moe, 5.23). Positions are in three parts, which are one
in text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.family import (
    ConfigKey,
    ConfigReader,
    VisionClass,
    keys_by_field,
    read_keys,
    short,
    up_to,
    written_keys,
)
from llmlaunch.models.sections import Vision
from llmlaunch.models.shape import ModelShape

Values = Mapping[str, Any]

ENCODER = (  # of `vision_config`
    ConfigKey("depth", "vision.depth", up_to(10_000)),
    ConfigKey("hidden_size", "vision.hidden_size"),
    ConfigKey("intermediate_size", "vision.ffn_hidden_size"),
    ConfigKey("num_heads", "vision.num_attention_heads"),
    ConfigKey("patch_size", "vision.patch_size", up_to(2**16)),
    ConfigKey("temporal_patch_size", "vision.temporal_patch_size", up_to(2**16)),
    ConfigKey("spatial_merge_size", "vision.merge_size", up_to(2**16)),
    ConfigKey("num_position_embeddings", "vision.position_embeddings", up_to(2**24)),
)
TEXT_DEFAULTS: Values = {
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-6,
}
"""Defaults of decoders beside an encoder, where they are not those of their family."""
VISION_DEFAULTS: Values = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
_DEEPSTACK = "deepstack_visual_indexes"
ENCODER_NAMES = {
    field: f"vision_config.{key}" for field, key in {**keys_by_field(ENCODER), "vision.deepstack": _DEEPSTACK}.items()
}
"""Fields of an encoder, and the key that messages name for each."""


def text_values(values: Values, family: str, kind: VisionClass) -> tuple[Values, tuple[str, ...]]:
    """Return the keys of the decoder, by the names of its `family`, and a note of the defaults that were taken. Raises
    `BadKey`."""
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        raise BadKey(("text_config",), f"must be an object, not {short(text)}")
    experts = {"num_experts"} if "num_local_experts" in text else set()
    defaults_used = {key: value for key, value in kind.text_defaults.items() if key not in text.keys() | experts}
    if isinstance(text.get("rope_parameters"), Mapping):
        defaults_used.pop("rope_theta", None)
    whole = {
        **defaults_used,
        **kind.text_values,
        **text,
        "model_type": family,
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
    }
    if values.get("quantization_config") is not None:
        whole["quantization_config"] = values["quantization_config"]
    listed = ", ".join(f"{key}={value}" for key, value in sorted(defaults_used.items()))
    first = f"absent from text_config, taken from the defaults of its class in transformers: {listed}"
    return whole, (first,) if defaults_used else ()


def read_vision(values: Values, kind: VisionClass, hidden_size: int) -> tuple[Vision, tuple[str, ...]]:
    """Return the encoder of a `vision_config` before a decoder that is `hidden_size` wide, and notes. Raises `BadKey`
    for what is not built so."""
    stated = values.get("vision_config")
    if not isinstance(stated, Mapping):
        raise BadKey(("vision_config",), f"must be an object, not {short(stated)}")
    defaults = {**VISION_DEFAULTS, _DEEPSTACK: [8, 16, 24] if kind.deepstack else []}
    aliases = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
    reader = ConfigReader(stated, defaults, aliases)
    return inside("vision_config", lambda: _encoder(reader, kind, hidden_size)), reader.notes()


def _encoder(reader: ConfigReader, kind: VisionClass, hidden_size: int) -> Vision:
    reader.only("hidden_act", "gelu_pytorch_tanh", why="only gelu_pytorch_tanh is supported")
    reader.only("in_channels", 3, why="images have three channels")
    reader.only("out_hidden_size", hidden_size, why=f"projectors put out what the decoder takes in, {hidden_size}")
    if not kind.deepstack and reader.values.get(_DEEPSTACK):
        raise BadKey((_DEEPSTACK,), "only [] is supported")
    deepstack = reader.get(_DEEPSTACK)
    if not isinstance(deepstack, list) or not all(type(block) is int for block in deepstack):
        raise BadKey((_DEEPSTACK,), f"must be a list of blocks, not {short(deepstack)}")
    vision = Vision(
        **read_keys(reader, ENCODER),
        deepstack=tuple(deepstack),
    )
    reader.remark(
        "each sequence is taken to have one image, of as many patches as there are learned positions; "
        "model.vision.images_per_sample and model.vision.image_size say others"
    )
    return vision


def inside(section: str, read: Callable[[], Any]) -> Any:
    """Return what `read` returns; a `BadKey` that it raises names the key below `section`."""
    try:
        return read()
    except BadKey as error:
        raise BadKey((section, *error.key), error.problem) from None


def config_with_vision(text: Values, shape: ModelShape, vision: Vision, kind: VisionClass) -> dict[str, Any]:
    """Return the config.json of a decoder's `text` with the encoder before it."""
    encoder = {
        **written_keys(shape, ENCODER),
        "out_hidden_size": shape.hidden_size,
        **({_DEEPSTACK: list(vision.deepstack)} if kind.deepstack else {}),
    }
    return {
        "model_type": kind.model_type,
        "tie_word_embeddings": shape.tied_embeddings,
        "text_config": {**text, "model_type": f"{kind.model_type}_text"},
        "vision_config": encoder,
    }
