"""How a model shape is written inline in a recipe, and the checks every shape must pass."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmlaunch.documents.text import Line
from llmlaunch.documents.validate import BadKey, StrictModel
from llmlaunch.models.families import Family
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.rundir.messages import counted

__all__ = ["MlaFile", "MoeFile", "RopeScalingFile", "RouterFile", "ShapeFile", "SlidingWindowFile", "check_shape"]

Size = Annotated[int, Field(ge=1, le=2**24)]
Positions = Annotated[int, Field(ge=1, le=2**28)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e12)]


class RouterFile(StrictModel):
    """How tokens choose their experts."""

    score_function: Literal["softmax", "sigmoid"] = Field("softmax", description="What makes scores of logits")
    groups: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="Groups the experts stand in; absent = one"
    )
    group_topk: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="Groups each token goes to, chosen before its experts"
    )
    scaling_factor: Positive = Field(1.0, description="Factor on the routed experts' output")
    expert_bias: bool = Field(False, description="Balance by a bias on each expert's score (DeepSeek-V3)")
    normalize_topk: bool = Field(True, description="Make the chosen scores sum to 1")
    balancing: Literal["aux_loss", "seq_aux_loss", "none"] = Field(
        "aux_loss", description="Auxiliary loss that keeps experts evenly used: over the batch, by sequence, or none"
    )
    aux_loss_coeff: Annotated[float, Field(ge=0, le=100)] = Field(0.01, description="Weight of that loss")


class MoeFile(StrictModel):
    """Mixture of experts. Over a base that is one, only what differs from it."""

    num_experts: Annotated[int, Field(ge=1, le=2**16)] | None = Field(None, description="Experts in one layer")
    topk: Annotated[int, Field(ge=1, le=2**16)] | None = Field(None, description="Experts each token goes to")
    ffn_hidden_size: Size | None = Field(None, description="Inner width of one expert")
    shared_expert_ffn_hidden_size: Annotated[int, Field(ge=0, le=2**24)] = Field(
        0, description="Inner width of the shared expert; 0 = none"
    )
    layer_pattern: list[Literal[0, 1]] | None = Field(
        None,
        description="1 for each mixture layer, 0 for each dense one; absent = as in the base, else all are mixtures",
    )
    capacity_factor: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        None, description="Tokens an expert takes, relative to an even share; absent = none is dropped"
    )
    shared_expert_gate: bool = Field(False, description="A sigmoid of the token weighs the shared expert (Qwen 2)")
    router: RouterFile | None = Field(None, description="How tokens choose their experts; absent = as Mixtral's do")


class MlaFile(StrictModel):
    """Multi-latent attention (DeepSeek-V2 and V3). Over a base that has it, only what differs."""

    q_lora_rank: Size | None = Field(None, description="Width of the queries' latent; absent = queries have none")
    kv_lora_rank: Size | None = Field(None, description="Width of the latent of keys and values")
    qk_head_dim: Size | None = Field(None, description="Width of a query's and a key's head, without rotary positions")
    qk_pos_emb_head_dim: Size | None = Field(None, description="Width of the part with rotary positions")
    v_head_dim: Size | None = Field(None, description="Width of a value's head")


class RopeScalingFile(StrictModel):
    """Rotary frequencies changed for longer sequences; sizes nothing, decides what is trained."""

    kind: Literal["linear", "llama3", "yarn"] = Field(description="Method")
    factor: Annotated[float, Field(ge=1, le=1e6)] = Field(description="How much longer sequences became")
    original_max_position_embeddings: Positions | None = Field(None, description="Longest sequence before")
    low_frequency_factor: Positive = Field(1.0, description="llama3: frequencies below this are divided by factor")
    high_frequency_factor: Positive = Field(4.0, description="llama3: frequencies above this stay")
    beta_fast: Positive = Field(32.0, description="yarn: rotations above which frequencies stay")
    beta_slow: Positive = Field(1.0, description="yarn: rotations below which they are divided by factor")
    mscale: Positive | None = Field(None, description="yarn: weight of the scores' scaling")
    mscale_all_dim: Positive | None = Field(None, description="yarn: the same over all of a head")
    attention_factor: Positive | None = Field(None, description="yarn: the scores' scaling itself")
    truncate: bool = Field(True, description="yarn: round the bounds between frequencies to whole ones")


class SlidingWindowFile(StrictModel):
    """Layers that attend to the last tokens alone."""

    tokens: Positions = Field(description="Tokens a windowed layer attends to")
    full_every: Annotated[int, Field(ge=0, le=10_000)] = Field(
        0, description="Every so many layers one attends to the whole sequence; 0 = none does"
    )
    rotary_base: Positive | None = Field(
        None, description="Rotary base of the windowed layers; absent = that of all layers"
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
    mtp_num_layers: Annotated[int, Field(ge=0, le=100)] = Field(
        0, description="Multi-token-prediction modules after the last layer (DeepSeek-V3)"
    )
    moe: MoeFile | None = Field(None, description="Mixture of experts; absent = dense")
    mla: MlaFile | None = Field(None, description="Multi-latent attention; absent = ordinary")
    family: Family | None = Field(
        None, description="Hugging Face model_type that says this shape; absent = the first that can"
    )
    activation: Literal["silu", "gelu"] | None = Field(
        None, description="Activation of the MLP; absent = silu where it is gated, else gelu (by tanh)"
    )
    norm_epsilon: Annotated[float, Field(gt=0, le=0.1)] = Field(1e-5, description="Added to a norm's variance")
    zero_centered_norm: bool = Field(False, description="Norms multiply by 1 + weight (Gemma)")
    post_norms: bool = Field(False, description="Norms after attention and MLP too, four in a layer (Gemma 2)")
    scaled_embedding: bool = Field(False, description="Multiply the embedding by sqrt(hidden_size) (Gemma)")
    attention_scale: Positive | None = Field(
        None, description="Scores are divided by its square root; absent = the width of a query's head"
    )
    attention_softcap: Positive | None = Field(None, description="Cap on attention scores by tanh (Gemma 2)")
    logit_softcap: Positive | None = Field(None, description="Cap on logits by tanh (Gemma 2)")
    rope_scaling: RopeScalingFile | None = Field(None, description="Rotary frequencies for longer sequences")
    sliding_window: SlidingWindowFile | None = Field(
        None, description="Layers that attend to the last tokens alone; absent = all attend to everything"
    )


def check_shape(shape: ModelShape) -> ModelShape:
    """`shape`, if its sizes agree with each other. Raises `BadKey` naming the size that does not."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        raise BadKey(
            ("num_query_groups",),
            f"{heads} attention heads cannot be shared evenly among {groups} query groups; "
            f"num_query_groups must divide num_attention_heads",
        )
    if shape.position_embedding == "rope" and shape.mla is None and shape.head_dim % 2:
        raise BadKey(("head_dim",), f"must be even for rotary positions, not {shape.head_dim}")
    if shape.mla is not None and shape.mla.qk_pos_emb_head_dim % 2:
        raise BadKey(
            ("mla", "qk_pos_emb_head_dim"), f"must be even for rotary positions, not {shape.mla.qk_pos_emb_head_dim}"
        )
    if shape.rope_scaling is not None and shape.position_embedding != "rope":
        raise BadKey(("rope_scaling",), f"scales rotary positions, and these are {shape.position_embedding}; remove it")
    window = shape.sliding_window
    if window is not None and window.full_every == 1:
        raise BadKey(("sliding_window", "full_every"), "1 leaves no windowed layer; remove sliding_window")
    if shape.moe is not None:
        _check_mixture(shape.moe, shape.num_layers)
    return shape


def _check_mixture(moe: MoeShape, layers: int) -> None:
    router = moe.router
    if moe.topk > moe.num_experts:
        raise BadKey(("moe", "topk"), f"must be at most num_experts ({moe.num_experts}), not {moe.topk}")
    if len(moe.layer_pattern) != layers:
        raise BadKey(
            ("moe", "layer_pattern"),
            f"has {len(moe.layer_pattern)} entries for {counted(layers, 'layer')}; give one per layer",
        )
    if moe.shared_expert_gate and not moe.shared_expert_ffn_hidden_size:
        raise BadKey(
            ("moe", "shared_expert_gate"), "there is no shared expert to weigh; give shared_expert_ffn_hidden_size"
        )
    if (router.groups is None) != (router.group_topk is None):
        missing = "group_topk" if router.group_topk is None else "groups"
        raise BadKey(("moe", "router", missing), "groups and group_topk go together; give both or neither")
    if router.groups is not None and router.group_topk is not None:
        _check_groups(moe, router.groups, router.group_topk)


def _check_groups(moe: MoeShape, groups: int, group_topk: int) -> None:
    if moe.num_experts % groups:
        raise BadKey(
            ("moe", "router", "groups"), f"must divide the {moe.num_experts} experts into equal groups, not {groups}"
        )
    if group_topk > groups or group_topk * (moe.num_experts // groups) < moe.topk:
        raise BadKey(
            ("moe", "router", "group_topk"),
            f"{group_topk} of {groups} groups of {moe.num_experts // groups} experts cannot hold {moe.topk} choices",
        )
