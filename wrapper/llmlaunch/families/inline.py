"""A model shape written inline, whole or over a base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired

from llmlaunch.documents.keys import form, keys_of
from llmlaunch.documents.text import Line
from llmlaunch.documents.validate import BadKey
from llmlaunch.families.hub_ids import shape_of
from llmlaunch.families.registry import family_names
from llmlaunch.models.checks import check_shape
from llmlaunch.models.sections import Mamba, Vision, required_keys
from llmlaunch.models.shape import MARKS, MlaShape, ModelShape, MoeShape, Multipliers, Router

PARTS = {"moe": MoeShape, "mla": MlaShape, "mamba": Mamba, "multipliers": Multipliers, "vision": Vision}
"""Sections that are written over those of a base; the others replace them."""
_literal: Any = Literal  # mypy knows only values that are written out


@cache
def model_form() -> Any:
    """Return the type of a model written inline: over a `base`, only what differs from it is given."""
    base = Annotated[Line | None, Field(description="Preset or config.json this shape starts from")]
    router = form("Router", keys_of(Router, over_base=True), description=Router.__doc__)
    written: dict[str, Any] = {"family": _literal[family_names()] | None}
    for name, section in PARTS.items():
        within = {"router": router | None} if section is MoeShape else {}
        description = None if section is MoeShape else section.__doc__
        section_keys = keys_of(section, over_base=True, written=within)
        written[name] = form(section.__name__, section_keys, description=description) | None
    keys = {"base": NotRequired[base], **keys_of(ModelShape, over_base=True, written=written)}
    return form("Model", keys, description="A decoder-only model. With `base`, only what differs from it.")


_REQUIRED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def with_dense_layers(shape: ModelShape) -> tuple[ModelShape, tuple[str, ...]]:
    """Return a plain mixture that has dense layers, too, as the class of Transformers that builds such a model, with a
    note; any other shape as it is."""
    from llmlaunch.families.written import unsaid

    if shape.moe is None or "moe.layer_pattern" not in unsaid(replace(shape, mtp_num_layers=0)):
        return shape, ()
    from llmlaunch.families.registry import all_families

    changes = {name: family.plain_mixture for name, family in all_families() if family.plain_mixture is not None}
    for name, change in changes.items():
        built = replace(shape, family=name, **change)
        if not unsaid(replace(built, mtp_num_layers=0)):
            return built, (
                f"a mixture with dense layers is built as Transformers' {name}, which has norms on queries and keys "
                "(model.qk_layernorm: true): no class of its builds this one without them",
            )
    return shape, ()


def complete_shape(
    values: dict[str, Any], written: dict[str, Any], base: str | None, default_positions: int | None
) -> ModelShape:
    """Return the shape of the written values over the base's, with what follows from them."""
    base_moe = values.get("moe")
    parts = [name for name in PARTS if written.get(name) is not None]
    written = written | {name: _part(name, values.get(name), written[name]) for name in parts}
    values = values | {key: value for key, value in written.items() if value is not None}
    if "head_dim" in written and written["head_dim"] is None:
        raise BadKey(("head_dim",), "is empty; write a number, or remove the line: then heads share hidden_size evenly")
    for key in _REQUIRED:
        if key not in values:
            raise BadKey((), f"is missing `{key}`; give it, or `base:` with a preset that has it")
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    values.setdefault("num_query_groups", heads)
    latent = values.get("mla")
    if "head_dim" not in written and latent is not None:
        values["head_dim"] = latent["qk_head_dim"] + latent["qk_pos_emb_head_dim"]
    elif "head_dim" not in written and (
        "head_dim" not in values or {"hidden_size", "num_attention_heads"} & written.keys()
    ):
        if hidden % heads:
            raise BadKey(
                ("num_attention_heads",),
                f"hidden_size {hidden} is not divisible by {heads} heads; "
                f"give head_dim, or a number of heads that divides it",
            )
        values["head_dim"] = hidden // heads
    if "max_position_embeddings" not in values:
        if default_positions is None:
            raise BadKey((), "is missing `max_position_embeddings`")
        values["max_position_embeddings"] = default_positions
    moe, mamba = values.get("moe"), values.get("mamba")
    if mamba is not None and (written.get("mamba") or {}).get("pattern") is None:
        mamba = values["mamba"] = mamba | {"pattern": _letters(mamba["pattern"], values["num_layers"])}
    if mamba is not None and moe is not None and (written.get("moe") or {}).get("layer_pattern") is None:
        moe = values["moe"] = moe | {"layer_pattern": ()}  # the letters E of the layers
    elif moe is not None and base_moe is not None and moe.get("layer_pattern") == base_moe["layer_pattern"]:
        values["moe"] = moe | {"layer_pattern": _as_deep(base_moe["layer_pattern"], values["num_layers"])}
    pooled = values.get("compressed_attention")
    if pooled is not None and "compressed_attention" not in written:
        values["compressed_attention"] = pooled | {"ratios": pooled["ratios"][: values["num_layers"]]}
    if written.get("activation") is None and "gated_mlp" in written:
        values.pop("activation", None)
    if written.get("family") is None and MARKS & written.keys():  # the base's family may not be able to say it
        values.pop("family", None)
    values["name"] = f"{base} changed" if base else "inline"
    shape = shape_of(values)
    if values.get("family") is None and not _is_plain(shape):
        from llmlaunch.families.registry import family_of

        shape = replace(shape, family=family_of(shape))
    return check_shape(shape)


def _is_plain(shape: ModelShape) -> bool:
    """Whether a shape has no mark of a family, so that it is taken for the default one without asking all of them."""
    return all(getattr(shape, item.name) == item.default for item in fields(ModelShape) if item.name in MARKS)


def _part(name: str, below: Mapping[str, Any] | None, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a part of the model, such as "moe": those that are written, over the base's."""
    whole = {**(below or {}), **written}
    if below is not None and written.get("router") is not None:
        whole["router"] = {**below["router"], **written["router"]}
    if written.get("layer_pattern") is None and below is not None and "layer_pattern" in below:
        whole["layer_pattern"] = below["layer_pattern"]
    for key in required_keys(PARTS[name]):
        if whole.get(key) is None:
            raise BadKey((name,), f"is missing `{key}`; give it, or `base:` with a preset that has it")
    return whole


def _letters(pattern: str, layers: int) -> str:
    """Return the letters for a number of layers: cut, or continued if all are alike."""
    return pattern[:1] * layers if len(set(pattern)) == 1 else pattern[:layers]


def _as_deep(pattern: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the layer pattern for a number of layers: cut, or continued if mixtures follow dense layers.

    Any other pattern stays as it is, and the person must write a new one.
    """
    if len(pattern) >= layers:
        return tuple(pattern[:layers])
    more = (pattern[-1],) * (layers - len(pattern)) if list(pattern) == sorted(pattern) else ()
    return (*pattern, *more)
