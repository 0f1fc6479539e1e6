"""The shape of a decoder: everything about a model that decides its bytes and its arithmetic, and the recipe's keys."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from llmlaunch.documents.keys import key, section
from llmlaunch.models.sections import (
    OF_MEMORY,
    OF_TIME,
    CompressedAttention,
    Count,
    Indexer,
    LinearAttention,
    Mamba,
    MlaShape,
    MoeShape,
    Multipliers,
    Positions,
    Positive,
    Rate,
    RopeScaling,
    Router,
    ShortConvolutionShape,
    Size,
    SlidingWindow,
    Vision,
)

__all__ = [
    "CLAMP",
    "CLAMPED",
    "MARKS",
    "OF_FAMILIES",
    "OF_MEMORY",
    "OF_TIME",
    "SQUARED",
    "CompressedAttention",
    "Indexer",
    "LinearAttention",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "Multipliers",
    "RopeScaling",
    "Router",
    "ShortConvolutionShape",
    "SlidingWindow",
    "kind_of",
    "natural_activation",
]

SQUARED = "squared_relu"
CLAMPED, CLAMP = "clamped_swiglu", 7.0  # gate x sigmoid(1.702 gate) x (up + 1), of a gate and an up within the clamp


def natural_activation(gated_mlp: bool) -> str:
    """Return the activation of an MLP where none is named: SwiGLU's, or GPT's."""
    return "silu" if gated_mlp else "gelu"


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
    rotary_percent: float = key("Share of each head that rotary positions turn", default=1.0, gt=0, le=1)
    qk_layernorm: bool = key("Norms on queries and keys of each head", default=False)
    qk_norm_of_all_heads: bool = key("Those norms are over all heads together (MiniMax-M2, OLMo)", default=False)
    qk_l2_norm: bool = key("Norms without a weight on queries and keys that are turned (Llama 4)", default=False)
    value_norm: bool = key("Norms without a weight on values (Gemma 4)", default=False)
    keys_are_values: bool = key(
        "Keys before their norm are the values; beside layers with a window, in those without one (Gemma 4)",
        default=False,
    )
    no_rope_every: int = key(
        "Every so many layers one has no rotary positions; 0 = all have them (Llama 4)", default=0, ge=0, le=10_000
    )
    temperature_tuning: bool = key(
        "Queries of layers without rotary positions grow with their position (Llama 4)", default=False
    )
    attention_dropout: Rate = key("Dropout on attention weights", default=0.0)
    hidden_dropout: Rate = key("Dropout on the residual stream", default=0.0)
    mtp_num_layers: int = key(
        "Multi-token-prediction modules after the last layer (DeepSeek-V3)", default=0, ge=0, le=100
    )
    mtp_repeated: bool = key("Those modules are one, run again and again (Nemotron 3 Super)", default=False)
    moe: MoeShape | None = key("Mixture of experts; absent = dense", default=None)
    mla: MlaShape | None = key("Multi-latent attention; absent = ordinary", default=None)
    indexer: Indexer | None = key(
        "What chooses the keys of latent attention; absent = all keys count (DeepSeek-V3.2)", default=None
    )
    family: str = key(
        "Hugging Face model_type that says this shape; absent = the first that can",
        default="llama",
    )
    activation: str = key(
        "Activation of the MLP; absent = silu where it is gated, else gelu (by tanh). clamped_swiglu is GPT-OSS's",
        default="silu",
        written=Literal["silu", "gelu", "clamped_swiglu", "squared_relu"] | None,
    )
    activation_limit: Positive | None = key(
        "SwiGLU's gate stays below it, and up within it; absent = no limit (DeepSeek-V4)", default=None
    )
    norm_epsilon: float = key("Added to a norm's variance", default=1e-5, gt=0, le=0.1)
    zero_centered_norm: bool = key("Norms multiply by 1 + weight (Gemma)", default=False)
    post_norms: bool = key("Norms after attention and MLP too, four in a layer (Gemma 2)", default=False)
    norms_after_alone: bool = key("Norms after attention and MLP, and none before (OLMo 2)", default=False)
    scaled_embedding: bool = key("Multiply the embedding by sqrt(hidden_size) (Gemma)", default=False)
    attention_scale: Positive | None = key(
        "Scores are divided by its square root; absent = the width of a query's head", default=None
    )
    attention_sinks: bool = key("A learned logit of each head joins the softmax of its scores (GPT-OSS)", default=False)
    # scores become cap x tanh(score / cap), and logits likewise
    attention_softcap: Positive | None = key("Cap on attention scores by tanh (Gemma 2)", default=None)
    logit_softcap: Positive | None = key("Cap on logits by tanh (Gemma 2)", default=None)
    attention_gate: bool = key("A sigmoid of the token weighs what attention puts out (Qwen3-Next)", default=False)
    rope_scaling: RopeScaling | None = key("Rotary frequencies for longer sequences", default=None)
    sliding_window: SlidingWindow | None = key(
        "Layers that attend to the last tokens alone; absent = all attend to everything", default=None
    )
    linear_attention: LinearAttention | None = key(
        "Layers with a gated delta net in place of attention; absent = none has", default=None
    )
    short_convolution: ShortConvolutionShape | None = key(
        "Layers with a gated short convolution in place of attention (LFM2); absent = none has", default=None
    )
    compressed_attention: CompressedAttention | None = key(
        "Attention to pooled keys; absent = all keys are a token's own (DeepSeek-V4)", default=None
    )
    residual_streams: int = key(
        "Residual streams, mixed before and behind each block (hyper-connections, DeepSeek-V4)",
        default=1,
        ge=1,
        le=64,
    )
    mamba: Mamba | None = key(
        "Layers of one part each, Mamba-2 mixers among them; absent = each has attention and an MLP", default=None
    )
    multipliers: Multipliers | None = key(
        "Constants that tensors are multiplied by (Granite, Falcon-H1); absent = none is", default=None
    )
    vision: Vision | None = key("Vision encoder before the decoder; absent = text alone (Qwen3-VL)", default=None)

    @property
    def linear_pattern(self) -> tuple[int, ...]:
        """1 for each layer with linear attention, 0 for each with ordinary attention."""
        linear = self.linear_attention
        if linear is None:
            return (0,) * self.num_layers
        return tuple(int(not linear.full_every or (i + 1) % linear.full_every > 0) for i in range(self.num_layers))

    @property
    def stream_width(self) -> int:
        """Columns of all residual streams together."""
        return self.residual_streams * self.hidden_size

    @property
    def query_width(self) -> int:
        """Columns of the query projection: heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Columns of the key (or of the value) projection: query groups x head_dim."""
        return self.num_query_groups * self.head_dim

    @property
    def expert_width(self) -> int:
        """Columns that an expert takes in and puts out."""
        return self.hidden_size if self.moe is None or self.moe.latent_size is None else self.moe.latent_size

    @property
    def mtp_modules(self) -> int:
        """Multi-token-prediction modules that have weights of their own."""
        return min(self.mtp_num_layers, 1) if self.mtp_repeated else self.mtp_num_layers

    @property
    def norm_vectors(self) -> int:
        """The vectors of a norm."""
        return 1 if self.normalization == "RMSNorm" else 2

    @property
    def norm_parameters(self) -> float:
        """The parameters of a norm as wide as the residual stream."""
        return float(self.hidden_size * self.norm_vectors)

    def padded_vocab_size(self, tensor: int, divisible_by: int = 128) -> int:
        """Vocabulary after Megatron's padding to a multiple of `divisible_by` x tensor
        (megatron/training/tokenizer, core 0.19)."""
        multiple = divisible_by * tensor
        return -(-self.vocab_size // multiple) * multiple


# Fields in which models of one family differ; a shape that differs from its base in any other may be of another family.
SIZES = frozenset(
    {
        *("name", "family", "num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "max_position_embeddings"),
        *("num_attention_heads", "num_query_groups", "head_dim", "rotary_base", "rope_scaling", "norm_epsilon"),
        *("tied_embeddings", "attention_dropout", "hidden_dropout", "mtp_num_layers", "mtp_repeated", "vision"),
        *("scaled_embedding", "attention_scale", "attention_softcap", "logit_softcap"),
    }
)
MARKS = frozenset(item.name for item in fields(ModelShape)) - SIZES
# Fields that every record of a measured run has, and those that change the arithmetic and no byte. The others are in
# the records of the models that have them.
RECORDED = frozenset(
    {
        *("name", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        *("head_dim", "vocab_size", "max_position_embeddings", "tied_embeddings", "gated_mlp", "linear_bias"),
        *("normalization", "position_embedding", "qk_layernorm", "attention_dropout", "hidden_dropout"),
        *("mtp_num_layers", "moe", "mla"),
    }
)
ARITHMETIC = frozenset(
    {
        *("rotary_base", "rotary_percent", "rope_scaling", "no_rope_every", "temperature_tuning", "norm_epsilon"),
        *("norms_after_alone", "scaled_embedding", "attention_scale"),
    }
)
OF_FAMILIES = frozenset(item.name for item in fields(ModelShape)) - RECORDED - ARITHMETIC


def kind_of(shape: ModelShape) -> str:
    """Return the kind of model within which prediction errors of measured runs are compared: attention, layers, MLP.

    It uses only what measured records contain (no biases, caps or norms of heads) and what decides memory. Errors of
    one kind say little about another.
    """
    layers, mlp = "mixture" if shape.moe else "dense", "gated" if shape.gated_mlp else "ungated"
    if shape.vision is not None:
        layers = f"vision {layers}"
    mixers = ("linear_attention", "short_convolution", "compressed_attention", "mamba")
    mixer = next((name for name in mixers if getattr(shape, name) is not None), None)
    if mixer is not None:
        return f"{'state-space' if mixer == 'mamba' else mixer.replace('_', '-')} {layers} {mlp}"
    attention = "latent-attention " if shape.mla else ""
    return f"{'sparse ' if shape.indexer else ''}{attention}{layers} {mlp}"
