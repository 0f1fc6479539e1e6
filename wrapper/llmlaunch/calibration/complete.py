"""A measured record with every size the estimator needs: what follows from others is worked out, what follows from
nothing makes the record unsupported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.calibration.defaults import with_defaults

__all__ = ["Unsupported", "complete", "with_every_field"]

Record = Mapping[str, Any]

# Nothing stands in for these: without one of them a record is not priced. "a.b" is a field of a section, and a field of
# the optional sections `moe` and `mla` is asked for only where there is one.
NEEDED = (
    "sequence_length",
    "micro_batch_size",
    "precision.compute",
    "parallelism.tensor",
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.ffn_hidden_size",
    "model.normalization",
    "model.position_embedding",
)
# Fields a record may leave out; absent is as unknown as null.
OPTIONAL = {
    "model": ("name", "tied_embeddings", "gated_mlp", "linear_bias", "normalization", "position_embedding"),
    "parallelism": ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data"),
    "optimizer": ("name", "zero_stage", "gradient_dtype", "parameter_dtype"),
    "recompute": ("granularity", "method", "num_layers", "modules"),
    "precision": ("compute", "fp8_recipe", "fp8_param_gather", "fp4_param_gather"),
}
NEEDED_OF = {
    "moe": ("num_experts", "topk"),
    "mla": ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
}


class Unsupported(Exception):
    """This record uses something the estimator does not express; the message says what."""


def with_every_field(record: Record) -> dict[str, Any]:
    """The record with null for what it leaves out."""
    return {**record, **{part: {**dict.fromkeys(names), **record[part]} for part, names in OPTIONAL.items()}}


def complete(record: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record with the framework's defaults and with sizes worked out, and what was filled in, by field.

    Raises:
        Unsupported: a size that follows from nothing is not recorded.
    """
    filled, assumed = with_defaults(record)
    for field in NEEDED:
        if _value(filled, field) is None:
            raise Unsupported(f"{field} is not recorded")
    for part, names in NEEDED_OF.items():
        for name in names:
            if filled["model"].get(part) and filled["model"][part].get(name) is None:
                raise Unsupported(f"model.{part}.{name} is not recorded")
    for field, value in _worked_out(filled).items():
        section, name = field.split(".")
        if filled[section].get(name) is None:
            filled[section] = {**filled[section], name: value}
            assumed[field] = value
    return filled, assumed


def _value(record: Record, field: str) -> Any:
    value: Any = record
    for name in field.split("."):
        value = value.get(name)
    return value


def _worked_out(record: Record) -> dict[str, Any]:
    """What sizes are where they are null: one head of keys and values to each query head, heads that share the hidden
    size, no padding, no parallelism of a kind nobody named, and data parallelism over the devices that are left."""
    model, split = record["model"], record["parallelism"]
    vocabulary = model.get("padded_vocab_size") or model.get("vocab_size")
    if vocabulary is None:
        raise Unsupported("model.vocab_size is not recorded")
    ranks = split["tensor"] * (split.get("pipeline") or 1) * (split.get("context") or 1)
    return {
        "model.padded_vocab_size": vocabulary,
        "model.num_query_groups": model["num_attention_heads"],
        "model.head_dim": model["hidden_size"] // model["num_attention_heads"],
        "parallelism.pipeline": 1,
        "parallelism.context": 1,
        "parallelism.expert": 1,
        "parallelism.expert_tensor": split["tensor"] if model.get("moe") else 1,
        "parallelism.data": split.get("data") or _data(record, ranks),
    }


def _data(record: Record, ranks: int) -> int:
    world = record.get("world_size")
    if not world:
        raise Unsupported("parallelism.data and world_size are not recorded")
    return max(int(world) // ranks, 1)
