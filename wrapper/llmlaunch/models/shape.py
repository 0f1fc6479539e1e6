"""The shape of a decoder: everything about a model that decides its bytes and its arithmetic, and the recipe's keys."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from typing_extensions import NotRequired

from llmlaunch.documents.keys import form, key, keys_of, section
from llmlaunch.documents.text import Line

__all__ = [
    "FAMILIES",
    "OF_MEMORY",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "RopeScaling",
    "Router",
    "SlidingWindow",
    "model_form",
    "natural_activation",
]

Family = Literal[
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
    "gpt2",
]
FAMILIES: tuple[str, ...] = get_args(Family)

Size = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=1, le=2**16)]
Positions = Annotated[int, Field(ge=1, le=2**28)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e12)]


def natural_activation(gated_mlp: bool) -> str:
    """Return the activation of an MLP where none is named: SwiGLU's, or GPT's."""
    return "silu" if gated_mlp else "gelu"


@section
class RopeScaling:
    """Rotary frequencies changed for sequences longer than those of the first training, in the words of transformers
    5.23 (modeling_rope_utils.py). None where the framework works a value out."""

    kind: str = key("Method", written=Literal["linear", "llama3", "yarn"])
    factor: float = key("How much longer sequences became", ge=1, le=1e6)
    original_max_position_embeddings: Positions | None = key("Longest sequence before", default=None)
    low_frequency_factor: Positive = key("llama3: frequencies below this are divided by factor", default=1.0)
    high_frequency_factor: Positive = key("llama3: frequencies above this stay", default=4.0)
    beta_fast: Positive = key("yarn: rotations above which frequencies stay", default=32.0)
    beta_slow: Positive = key("yarn: rotations below which they are divided by factor", default=1.0)
    mscale: Positive | None = key("yarn: weight of the scores' scaling", default=None)
    mscale_all_dim: Positive | None = key("yarn: the same over all of a head", default=None)
    attention_factor: Positive | None = key("yarn: the scores' scaling itself", default=None)
    truncate: bool = key("yarn: round the bounds between frequencies to whole ones", default=True)


@section
class SlidingWindow:
    """Layers that attend to the last tokens alone."""

    tokens: Positions = key("Tokens a windowed layer attends to")
    full_every: int = key(
        "Every so many layers one attends to the whole sequence; 0 = none does", default=0, ge=0, le=10_000
    )
    rotary_base: Positive | None = key("Rotary base of the windowed layers; absent = that of all layers", default=None)


OF_MEMORY = ("score_function", "normalize_topk")  # of a router: whether scores of all experts are kept


@section
class Router:
    """How tokens choose their experts. All of it changes what is trained, and OF_MEMORY what a step holds."""

    score_function: str = key("What makes scores of logits", default="softmax", written=Literal["softmax", "sigmoid"])
    groups: Count | None = key("Groups the experts stand in; absent = one", default=None)
    group_topk: Count | None = key("Groups each token goes to, chosen before its experts", default=None)
    scaling_factor: Positive = key("Factor on the routed experts' output", default=1.0)
    # a buffer and no parameter
    expert_bias: bool = key("Balance by a bias on each expert's score (DeepSeek-V3)", default=False)
    normalize_topk: bool = key("Make the chosen scores sum to 1", default=True)
    balancing: str = key(
        "Auxiliary loss that keeps experts evenly used: over the batch, by sequence, or none",
        default="aux_loss",
        written=Literal["aux_loss", "seq_aux_loss", "none"],
    )
    aux_loss_coeff: float = key("Weight of that loss", default=0.01, ge=0, le=100)


@section
class MoeShape:
    """Mixture of experts. `token_dispatcher` None is the backend's choice."""

    num_experts: Count = key("Experts in one layer")
    topk: Count = key("Experts each token goes to")
    ffn_hidden_size: Size = key("Inner width of one expert")
    shared_expert_ffn_hidden_size: int = key("Inner width of the shared expert; 0 = none", default=0, ge=0, le=2**24)
    layer_pattern: tuple[int, ...] = key(
        "1 for each mixture layer, 0 for each dense one; absent = as in the base, else all are mixtures",
        default=(),
        written=tuple[Literal[0, 1], ...] | None,
    )
    capacity_factor: float | None = key(
        "Tokens an expert takes, relative to an even share; absent = none is dropped", default=None, gt=0, le=1000
    )
    token_dispatcher: str | None = key(
        "How tokens reach their experts; absent = alltoall",
        default=None,
        place="layout",
        written=Literal["alltoall", "allgather", "flex"] | None,
    )
    grouped_gemm: bool | None = None
    shared_expert_gate: bool = key("A sigmoid of the token weighs the shared expert (Qwen 2)", default=False)
    router: Router = key("How tokens choose their experts; absent = as Mixtral's do", default=Router())


@section
class MlaShape:
    """Multi-latent attention (DeepSeek-V2 and V3), in Megatron's names."""

    q_lora_rank: Size | None = key("Width of the queries' latent; absent = queries have none")
    kv_lora_rank: Size = key("Width of the latent of keys and values")
    qk_head_dim: Size = key("Width of a query's and a key's head, without rotary positions")
    qk_pos_emb_head_dim: Size = key("Width of the part with rotary positions")
    v_head_dim: Size = key("Width of a value's head")


@section
class ModelShape:
    """A decoder-only model. Sizes are element counts; nothing here depends on how the model is split."""

    name: str
    num_layers: int = key("Transformer layers", ge=1, le=10_000)
    hidden_size: Size = key("Width of the residual stream")
    ffn_hidden_size: Size = key("Inner width of the MLP")
    num_attention_heads: Count = key("Query heads")
    num_query_groups: Count = key("Key/value heads; absent = as many as query heads")
    head_dim: Size = key("Width of one head; absent = hidden_size / num_attention_heads")
    vocab_size: Size = key("Tokens in the vocabulary, before padding")
    max_position_embeddings: Positions = key(
        "Longest sequence the model is built for; absent = training.sequence_length"
    )
    tied_embeddings: bool = key("The output layer shares the embedding's weights", default=False)
    gated_mlp: bool = key("SwiGLU and kin: gate, up and down", default=True)
    linear_bias: bool = key("Biases on every linear layer of the block", default=False)
    qkv_bias: bool = key("Biases on query, key and value alone", default=False)
    normalization: str = key("Kind of the norms", default="RMSNorm", written=Literal["RMSNorm", "LayerNorm"])
    position_embedding: str = key(
        "Kind of the position information",
        default="rope",
        written=Literal["rope", "learned_absolute", "alibi", "none"],
    )
    rotary_base: Positive = key("Base of the rotary frequencies", default=10000.0)
    qk_layernorm: bool = key("Norms on queries and keys of each head", default=False)
    attention_dropout: Rate = key("Dropout on attention weights", default=0.0)
    hidden_dropout: Rate = key("Dropout on the residual stream", default=0.0)
    mtp_num_layers: int = key(
        "Multi-token-prediction modules after the last layer (DeepSeek-V3)", default=0, ge=0, le=100
    )
    moe: MoeShape | None = key("Mixture of experts; absent = dense", default=None)
    mla: MlaShape | None = key("Multi-latent attention; absent = ordinary", default=None)
    family: str = key(
        "Hugging Face model_type that says this shape; absent = the first that can",
        default="llama",
        written=Family | None,
    )
    activation: str = key(
        "Activation of the MLP; absent = silu where it is gated, else gelu (by tanh)",
        default="silu",
        written=Literal["silu", "gelu"] | None,
    )
    norm_epsilon: float = key("Added to a norm's variance", default=1e-5, gt=0, le=0.1)
    zero_centered_norm: bool = key("Norms multiply by 1 + weight (Gemma)", default=False)
    post_norms: bool = key("Norms after attention and MLP too, four in a layer (Gemma 2)", default=False)
    scaled_embedding: bool = key("Multiply the embedding by sqrt(hidden_size) (Gemma)", default=False)
    attention_scale: Positive | None = key(
        "Scores are divided by its square root; absent = the width of a query's head", default=None
    )
    # scores become cap x tanh(score / cap), and logits likewise
    attention_softcap: Positive | None = key("Cap on attention scores by tanh (Gemma 2)", default=None)
    logit_softcap: Positive | None = key("Cap on logits by tanh (Gemma 2)", default=None)
    rope_scaling: RopeScaling | None = key("Rotary frequencies for longer sequences", default=None)
    sliding_window: SlidingWindow | None = key(
        "Layers that attend to the last tokens alone; absent = all attend to everything", default=None
    )

    @property
    def query_width(self) -> int:
        """Columns of the query projection: heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Columns of the key (or of the value) projection: query groups x head_dim."""
        return self.num_query_groups * self.head_dim

    @property
    def norms_per_layer(self) -> int:
        """Norms as wide as the residual stream in one layer."""
        return 4 if self.post_norms else 2

    def padded_vocab_size(self, tensor: int, divisible_by: int = 128) -> int:
        """Vocabulary after Megatron's padding to a multiple of `divisible_by` x tensor
        (megatron/training/tokenizer, core 0.19)."""
        multiple = divisible_by * tensor
        return -(-self.vocab_size // multiple) * multiple


@cache
def model_form() -> Any:
    """Return the type of a model written inline: over a `base`, only what differs from it is given."""
    base = Annotated[Line | None, Field(description="Preset or config.json this shape starts from")]
    router = form("Router", keys_of(Router, over_base=True), description=Router.__doc__)
    moe = form("MoeShape", keys_of(MoeShape, over_base=True, written={"router": router | None}))
    mla = form("MlaShape", keys_of(MlaShape, over_base=True), description=MlaShape.__doc__)
    parts = {"moe": moe | None, "mla": mla | None}
    keys = {"base": NotRequired[base], **keys_of(ModelShape, over_base=True, written=parts)}
    return form("Model", keys, description="A decoder-only model. With `base`, only what differs from it.")
