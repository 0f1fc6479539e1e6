"""How a model shape is written inline in a recipe, and the checks every shape must pass."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmlaunch.documents.text import Line
from llmlaunch.documents.validate import BadKey, StrictModel
from llmlaunch.models.shape import ModelShape

__all__ = ["MoeFile", "ShapeFile", "check_shape"]

Size = Annotated[int, Field(ge=1, le=2**24)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class MoeFile(StrictModel):
    """Mixture of experts."""

    num_experts: Annotated[int, Field(ge=1, le=2**16)] = Field(description="Experts in one layer")
    topk: Annotated[int, Field(ge=1, le=2**16)] = Field(description="Experts each token goes to")
    ffn_hidden_size: Size = Field(description="Inner width of one expert")
    shared_expert_ffn_hidden_size: Annotated[int, Field(ge=0, le=2**24)] = Field(
        0, description="Inner width of the shared expert; 0 = none"
    )
    layer_pattern: list[Literal[0, 1]] | None = Field(
        None, description="1 for each mixture layer, 0 for each dense one; absent = every layer is a mixture"
    )
    capacity_factor: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        None, description="Tokens an expert takes, relative to an even share; absent = none is dropped"
    )


class ShapeFile(StrictModel):
    """A decoder-only model. With `base`, only what differs from it."""

    base: Line | None = Field(None, description="Preset or config.json this shape starts from")
    num_layers: Annotated[int, Field(ge=1, le=10_000)] | None = Field(None, description="Transformer layers")
    hidden_size: Size | None = Field(None, description="Width of the residual stream")
    ffn_hidden_size: Size | None = Field(None, description="Inner width of the MLP")
    num_attention_heads: Annotated[int, Field(ge=1, le=2**16)] | None = Field(None, description="Query heads")
    num_query_groups: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="Key/value heads; absent = as many as query heads"
    )
    head_dim: Size | None = Field(None, description="Width of one head; absent = hidden_size / num_attention_heads")
    vocab_size: Size | None = Field(None, description="Tokens in the vocabulary, before padding")
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**28)] | None = Field(
        None, description="Longest sequence the model is built for; absent = training.sequence_length"
    )
    tied_embeddings: bool = Field(False, description="The output layer shares the embedding's weights")
    gated_mlp: bool = Field(True, description="SwiGLU and kin: gate, up and down")
    linear_bias: bool = Field(False, description="Biases on every linear layer of the block")
    qkv_bias: bool = Field(False, description="Biases on query, key and value alone")
    normalization: Literal["RMSNorm", "LayerNorm"] = Field("RMSNorm", description="Kind of the norms")
    position_embedding: Literal["rope", "learned_absolute", "alibi", "none"] = Field(
        "rope", description="Kind of the position information"
    )
    rotary_base: Annotated[float, Field(gt=0, le=1e12)] = Field(10000.0, description="Base of the rotary frequencies")
    qk_layernorm: bool = Field(False, description="Norms on queries and keys of each head")
    attention_dropout: Rate = Field(0.0, description="Dropout on attention weights")
    hidden_dropout: Rate = Field(0.0, description="Dropout on the residual stream")
    moe: MoeFile | None = Field(None, description="Mixture of experts; absent = dense")


def check_shape(shape: ModelShape) -> ModelShape:
    """`shape`, if its sizes agree with each other. Raises `BadKey` naming the size that does not."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        raise BadKey(
            ("num_query_groups",),
            f"{heads} attention heads cannot be shared evenly among {groups} query groups; "
            f"num_query_groups must divide num_attention_heads",
        )
    if shape.position_embedding == "rope" and shape.head_dim % 2:
        raise BadKey(("head_dim",), f"must be even for rotary positions, not {shape.head_dim}")
    if shape.moe is not None:
        if shape.moe.topk > shape.moe.num_experts:
            raise BadKey(
                ("moe", "topk"), f"must be at most num_experts ({shape.moe.num_experts}), not {shape.moe.topk}"
            )
        if len(shape.moe.layer_pattern) != shape.num_layers:
            raise BadKey(
                ("moe", "layer_pattern"),
                f"has {len(shape.moe.layer_pattern)} entries for {shape.num_layers} layers; give one per layer",
            )
    return shape
