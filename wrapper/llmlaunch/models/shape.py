"""The shape of a decoder: everything about a model that decides its bytes and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "OF_MEMORY",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "RopeScaling",
    "Router",
    "SlidingWindow",
    "natural_activation",
]


def natural_activation(gated_mlp: bool) -> str:
    """The activation of an MLP of which nothing else is said: SwiGLU's, or GPT's."""
    return "silu" if gated_mlp else "gelu"


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for sequences longer than the first training saw, in the words of
    transformers 5.23 (modeling_rope_utils.py). The last six are of "yarn" (None where the framework works it out)."""

    kind: str  # "linear", "llama3" or "yarn"
    factor: float
    original_max_position_embeddings: int | None = None
    low_frequency_factor: float = 1.0  # of "llama3"
    high_frequency_factor: float = 4.0  # of "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class SlidingWindow:
    """Layers whose tokens attend to the last `tokens` alone. Every `full_every`-th layer attends to all (0 = none
    does); `rotary_base` is that of the windowed layers (None = as everywhere)."""

    tokens: int
    full_every: int = 0
    rotary_base: float | None = None


OF_MEMORY = ("score_function", "normalize_topk")  # of a router: whether scores of all experts are kept


@dataclass(frozen=True)
class Router:
    """How a mixture of experts chooses: all of it changes what is trained, and OF_MEMORY what a step holds."""

    score_function: str = "softmax"  # or "sigmoid"
    groups: int | None = None  # experts stand in so many groups, of which group_topk are chosen first
    group_topk: int | None = None
    scaling_factor: float = 1.0  # of the routed experts' output
    expert_bias: bool = False  # balanced by a bias on the choice, which is a buffer and no parameter
    normalize_topk: bool = True  # the chosen scores are made to sum to 1
    balancing: str = "aux_loss"  # or "seq_aux_loss", "none"
    aux_loss_coeff: float = 0.01


@dataclass(frozen=True)
class MoeShape:
    """Mixture of experts. `layer_pattern[i]` is 1 where layer i is a mixture, 0 where it is dense."""

    num_experts: int
    topk: int
    ffn_hidden_size: int  # of one expert
    shared_expert_ffn_hidden_size: int  # 0 = no shared expert
    layer_pattern: tuple[int, ...]
    capacity_factor: float | None = None  # None = dropless
    token_dispatcher: str | None = None  # None = the backend's choice
    grouped_gemm: bool | None = None
    shared_expert_gate: bool = False  # a sigmoid of the token weighs the shared expert (Qwen 2)
    router: Router = Router()


@dataclass(frozen=True)
class MlaShape:
    """Multi-latent attention (DeepSeek-V2/V3), in Megatron's names."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Sizes are element counts; nothing here depends on how it is split."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads; equal to num_attention_heads without GQA
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool = False
    gated_mlp: bool = True  # SwiGLU and kin: gate, up and down
    linear_bias: bool = False  # biases on every linear layer of the block
    qkv_bias: bool = False  # biases on query, key and value alone (Qwen 2)
    normalization: str = "RMSNorm"  # or "LayerNorm"
    position_embedding: str = "rope"  # or "learned_absolute", "alibi", "none"
    rotary_base: float = 10000.0
    qk_layernorm: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    mtp_num_layers: int = 0
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    family: str = "llama"  # the Hugging Face model_type that says this shape (models/families.py)
    activation: str = "silu"  # or "gelu" (by tanh)
    norm_epsilon: float = 1e-5
    zero_centered_norm: bool = False  # norms multiply by 1 + weight (Gemma)
    post_norms: bool = False  # norms after attention and after the MLP too: four in a layer (Gemma 2)
    scaled_embedding: bool = False  # the embedding's output is multiplied by sqrt(hidden_size) (Gemma)
    attention_scale: float | None = None  # scores are divided by its square root; None = the width of a query's head
    attention_softcap: float | None = None  # scores become cap x tanh(score / cap) (Gemma 2)
    logit_softcap: float | None = None  # and logits
    rope_scaling: RopeScaling | None = None
    sliding_window: SlidingWindow | None = None

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
