"""The shape of a decoder: everything about a model that decides its bytes and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MlaShape", "ModelShape", "MoeShape"]


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

    @property
    def query_width(self) -> int:
        """Columns of the query projection: heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Columns of the key (or of the value) projection: query groups x head_dim."""
        return self.num_query_groups * self.head_dim

    def padded_vocab_size(self, tensor: int, divisible_by: int = 128) -> int:
        """Vocabulary after Megatron's padding to a multiple of `divisible_by` x tensor
        (megatron/training/tokenizer, core 0.19)."""
        multiple = divisible_by * tensor
        return -(-self.vocab_size // multiple) * multiple
