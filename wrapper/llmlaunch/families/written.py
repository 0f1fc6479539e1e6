"""A model shape from a Hugging Face `config.json`, and as the `config.json` of its family, with what of it that family
cannot say (transformers 4.53 to 5.23).

Only what is read exactly is accepted: families whose layers `ModelShape` can say. A missing key takes the default of
the family's own configuration class, and the notes say which did, and what is left out and changes no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmlaunch.documents.json_strict import cut_to_a_line, parse_object
from llmlaunch.documents.validate import BadKey
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.errors import UserError
from llmlaunch.families.decoder import written_positions
from llmlaunch.families.family import ConfigReader, VisionClass, keys_by_field, short, written_keys
from llmlaunch.families.registry import family_named, family_names, same_family, vision_classes
from llmlaunch.families.vision import ENCODER_NAMES, config_with_vision, inside, read_vision, text_values
from llmlaunch.models.checks import check_shape
from llmlaunch.models.shape import ModelShape

STORED_FORMATS = ("fp8", "mxfp4")


def read_config(path: Path) -> tuple[ModelShape, tuple[str, ...]]:
    """Return the shape in a `config.json` (or in the folder that holds one), and notes on what it leaves open.

    Raises `UserError` naming the file and the key for anything that is not such a file.
    """
    file = path / "config.json" if path.is_dir() else path
    values = parse_object(read_text(file), str(file), "a Hugging Face config.json")
    name = str(values.get("_name_or_path") or "") or (path.name if path.is_dir() else path.parent.name or path.stem)
    try:
        return shape_from_config(values, cut_to_a_line(name))
    except BadKey as error:
        raise UserError(f"{file}: {_key_of(values, error)}: {error.problem}") from None


def _key_of(values: Mapping[str, Any], error: BadKey) -> str:
    """Return the key of the file that an error is about, also where sizes do not agree and it names a field."""
    field = ".".join(map(str, error.key))
    kind = str(values.get("model_type"))
    name = vision_classes()[kind][0] if kind in vision_classes() else same_family(kind)
    if name not in family_names():
        return field
    family = family_named(name)
    return {**keys_by_field(family.keys), **family.other_keys, **ENCODER_NAMES}.get(field, field)


def shape_from_config(values: Mapping[str, Any], name: str) -> tuple[ModelShape, tuple[str, ...]]:
    """Return the shape a config describes, and notes. Raises `BadKey` for a key that cannot be used."""
    kind = values.get("model_type")
    family = same_family(kind) if isinstance(kind, str) else None
    if family in family_names():
        return _shape_of_family(values, str(family), name)
    if family is not None and family in vision_classes():
        return _shape_with_vision(values, *vision_classes()[family], name)
    shown = "is missing" if kind is None else f"{short(kind)} is not supported"
    hint = "; give its text_config as a file of its own" if isinstance(values.get("text_config"), Mapping) else ""
    raise BadKey(
        ("model_type",),
        f"{shown}{hint}; supported: {', '.join((*family_names(), *vision_classes()))}; or write the shape inline",
    )


def _shape_of_family(values: Mapping[str, Any], name_of_family: str, name: str) -> tuple[ModelShape, tuple[str, ...]]:
    family = family_named(name_of_family)
    reader = ConfigReader(values, family.defaults, family.aliases)
    _refuse_quantised(reader)
    shape = family.read(reader)
    return check_shape(replace(shape, name=name, family=name_of_family)), reader.notes()


def _shape_with_vision(
    values: Mapping[str, Any], family: str, kind: VisionClass, name: str
) -> tuple[ModelShape, tuple[str, ...]]:
    text, taken = text_values(values, family, kind)
    decoder, notes = inside("text_config", lambda: shape_from_config(text, name))
    vision, of_vision = read_vision(values, kind, decoder.hidden_size)
    return check_shape(replace(decoder, vision=vision)), (*taken, *notes, *of_vision)


def _refuse_quantised(reader: ConfigReader) -> None:
    """Raise BadKey for a quantised checkpoint, except DeepSeek-V3's and GPT-OSS': blocks of fp8 and of mxfp4 are how
    their weights are published, not how they are trained. Others were quantised after training.
    """
    quantization = reader.group("quantization_config")
    if quantization is None and reader.values.get("quantization_config") is None:
        return
    method = None if quantization is None else quantization.get("quant_method")
    if method not in STORED_FORMATS:
        raise BadKey(("quantization_config",), "a quantised checkpoint is not trained; use the original config.json")
    reader.remark(
        f"quantization_config says how the weights are stored ({method}); training takes the recipe's precision"
    )


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
