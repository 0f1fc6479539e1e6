"""A model shape from a Hugging Face `config.json`.

Only what is read exactly is accepted: families whose layers `ModelShape` can say. A missing key takes the default of
the family's own configuration class, and the notes say which did, and what is left out and changes no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmlaunch.documents.json_strict import parse_object
from llmlaunch.documents.validate import BadKey
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.errors import UserError
from llmlaunch.models.huggingface.defaults import ALIASES, DEFAULTS
from llmlaunch.models.huggingface.families import BUILDERS
from llmlaunch.models.huggingface.reader import ConfigReader, short
from llmlaunch.models.huggingface.vision import DECODERS, inside, read_vision, text_values
from llmlaunch.models.shape import ModelShape, check_shape

__all__ = ["SAME", "SUPPORTED", "read_config", "shape_from_config"]


SUPPORTED = tuple(BUILDERS)
SAME = {"kimi_k2": "deepseek_v3"}  # model_type of a class of its own that is another family's, to the letter
STORED_FORMATS = ("fp8", "mxfp4")

_KEYS = {  # our name -> theirs, for messages about sizes that do not agree
    "num_query_groups": "num_key_value_heads",
    "linear_attention.num_value_heads": "linear_num_value_heads",
    "mamba.groups": "n_groups",
    "mamba.pattern": "layers_block_type",
    "moe.topk": "num_experts_per_tok",
    "moe.router.groups": "n_group",
    "moe.router.group_topk": "topk_group",
    "mla.qk_pos_emb_head_dim": "qk_rope_head_dim",
    "vision.num_attention_heads": "vision_config.num_heads",
    "vision.position_embeddings": "vision_config.num_position_embeddings",
    "vision.deepstack": "vision_config.deepstack_visual_indexes",
}


def read_config(path: Path) -> tuple[ModelShape, tuple[str, ...]]:
    """Return the shape in a `config.json` (or in the folder that holds one), and notes on what it leaves open.

    Raises `UserError` naming the file and the key for anything that is not such a file.
    """
    file = path / "config.json" if path.is_dir() else path
    values = parse_object(read_text(file), str(file), "a Hugging Face config.json")
    name = str(values.get("_name_or_path") or "") or (path.name if path.is_dir() else path.parent.name or path.stem)
    try:
        return shape_from_config(values, _printable(name))
    except BadKey as error:
        key = _KEYS.get(".".join(map(str, error.key)), ".".join(map(str, error.key)))
        raise UserError(f"{file}: {key}: {error.problem}") from None


def shape_from_config(values: Mapping[str, Any], name: str) -> tuple[ModelShape, tuple[str, ...]]:
    """Return the shape a config describes, and notes. Raises `BadKey` for a key that cannot be used."""
    family = SAME.get(str(values.get("model_type")), values.get("model_type"))
    if isinstance(family, str) and family in DECODERS:
        return _shape_with_vision(values, family, name)
    if not isinstance(family, str) or family not in BUILDERS:
        shown = "is missing" if family is None else f"{short(family)} is not supported"
        inside = values.get("text_config")
        hint = "; give its text_config as a file of its own" if isinstance(inside, Mapping) else ""
        raise BadKey(
            ("model_type",),
            f"{shown}{hint}; supported: {', '.join((*SUPPORTED, *DECODERS))}; or write the shape inline",
        )
    reader = ConfigReader(values, DEFAULTS[family], ALIASES.get(family, {}))
    _refuse_quantised(reader)
    shape = BUILDERS[family](reader)
    return check_shape(replace(shape, name=name, family=family)), reader.notes()


def _shape_with_vision(values: Mapping[str, Any], kind: str, name: str) -> tuple[ModelShape, tuple[str, ...]]:
    text, taken = text_values(values, kind)
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


def _printable(text: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= 120 else shown[:117] + "..."
