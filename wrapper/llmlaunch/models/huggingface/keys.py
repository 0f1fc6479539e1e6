"""Keys of config.json that are one field of a shape: one row each, by which the key is read and written (transformers
4.53 to 5.23). Rows that families share stand in groups; KEYS_OF lists those of each family.

What several keys say together, such as the layers with a window, is a pair of functions in families.py and written.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.frozen import frozen
from llmlaunch.models.huggingface.reader import ConfigReader, rotary_percent
from llmlaunch.models.shape import ModelShape

__all__ = [
    "COMPRESSED", "DECODER", "DEEPSEEK_EXPERTS", "DEEPSEEK_ROUTER", "ENCODER", "GEMMA2_KEYS", "GEMMA4_KEYS", "GLM_KEYS",
    "GPT2_KEYS", "INDEXER", "KEYS_OF", "LATENT", "LFM2_DECODER", "LINEAR_ATTENTION", "LLAMA4_KEYS", "LOCAL_EXPERTS",
    "MAMBA", "NEMOTRON_DECODER", "NEMOTRON_EXPERTS", "POOLED_KEYS", "QKV_BIAS", "QWEN_EXPERTS", "SHARED_EXPERT",
    "SHORT_CONVOLUTION", "TURNED",
    "ConfigKey", "read_keys", "written_keys"
]  # fmt: skip

MOST_LAYERS = 10_000


@frozen
class ConfigKey:
    """A key of config.json that is one field of a shape, dotted below its part: "mla.kv_lora_rank". `read` returns the
    field's value from a reader and the key; what is written is the field as it is."""

    key: str
    field: str
    read: Callable[[ConfigReader, str], Any] = ConfigReader.size


def read_keys(reader: ConfigReader, rows: Iterable[ConfigKey]) -> dict[str, Any]:
    """Return what the keys of some rows say, by the fields of their part. Raises BadKey."""
    return {row.field.rpartition(".")[2]: row.read(reader, row.key) for row in rows}


def written_keys(shape: ModelShape, rows: Iterable[ConfigKey]) -> dict[str, Any]:
    """Return the keys of some rows with their values in a shape; none of a part that the shape does not have."""
    values = {}
    for row in rows:
        part: Any = shape
        *parts, name = row.field.split(".")
        for each in parts:
            part = None if part is None else getattr(part, each)
        if part is not None:
            values[row.key] = getattr(part, name)
    return values


def _up_to(largest: int) -> Callable[[ConfigReader, str], int]:
    return lambda reader, key: reader.size(key, largest=largest)


def _if_any(reader: ConfigReader, key: str) -> int | None:
    """Return a whole number, or None for null."""
    return None if reader.get(key) is None else reader.size(key)


def _positive(reader: ConfigReader, key: str) -> float:
    return reader.number(key, above=0.0)


def _groups(reader: ConfigReader, key: str) -> int:
    """Return the key/value heads: as many as query heads where the file has none."""
    return reader.size(key, otherwise=reader.size("num_attention_heads"))


def _head_dim(reader: ConfigReader, key: str) -> int:
    """Return the width of a head: its own key's, else a head's share of the width."""
    if reader.get(key) is not None:
        return reader.size(key)
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    if hidden % heads:
        raise BadKey(
            ("num_attention_heads",),
            f"hidden_size {hidden} is not divisible by {heads} heads; give head_dim, or a number that divides it",
        )
    return hidden // heads


def _four_times(reader: ConfigReader, key: str) -> int:
    return reader.size(key, otherwise=4 * reader.size("n_embd"))


_SIZES = (
    ConfigKey("hidden_size", "hidden_size"),
    ConfigKey("num_attention_heads", "num_attention_heads"),
    ConfigKey("intermediate_size", "ffn_hidden_size"),
    ConfigKey("num_key_value_heads", "num_query_groups", _groups),
    ConfigKey("vocab_size", "vocab_size"),
    ConfigKey("max_position_embeddings", "max_position_embeddings"),
    ConfigKey("attention_dropout", "attention_dropout", ConfigReader.rate),
)
DECODER = (
    *_SIZES,
    ConfigKey("head_dim", "head_dim", _head_dim),
    ConfigKey("num_hidden_layers", "num_layers", _up_to(MOST_LAYERS)),
    ConfigKey("tie_word_embeddings", "tied_embeddings", ConfigReader.flag),
    ConfigKey("rms_norm_eps", "norm_epsilon", _positive),
)
NEMOTRON_DECODER = (
    *_SIZES,
    ConfigKey("head_dim", "head_dim"),
    ConfigKey("layer_norm_epsilon", "norm_epsilon", _positive),
)
GPT2_KEYS = (
    ConfigKey("n_layer", "num_layers", _up_to(MOST_LAYERS)),
    ConfigKey("n_embd", "hidden_size"),
    ConfigKey("n_inner", "ffn_hidden_size", _four_times),
    ConfigKey("n_head", "num_attention_heads"),
    ConfigKey("vocab_size", "vocab_size"),
    ConfigKey("n_positions", "max_position_embeddings"),
    ConfigKey("tie_word_embeddings", "tied_embeddings", ConfigReader.flag),
    ConfigKey("attn_pdrop", "attention_dropout", ConfigReader.rate),
    ConfigKey("resid_pdrop", "hidden_dropout", ConfigReader.rate),
    ConfigKey("layer_norm_epsilon", "norm_epsilon", _positive),
)
LATENT = (
    ConfigKey("q_lora_rank", "mla.q_lora_rank", _if_any),
    ConfigKey("kv_lora_rank", "mla.kv_lora_rank"),
    ConfigKey("qk_nope_head_dim", "mla.qk_head_dim"),
    ConfigKey("qk_rope_head_dim", "mla.qk_pos_emb_head_dim"),
    ConfigKey("v_head_dim", "mla.v_head_dim"),
)
INDEXER = (
    ConfigKey("index_n_heads", "indexer.heads"),
    ConfigKey("index_head_dim", "indexer.head_dim"),
    ConfigKey("index_topk", "indexer.topk"),
)
LINEAR_ATTENTION = (
    ConfigKey("linear_num_key_heads", "linear_attention.num_key_heads"),
    ConfigKey("linear_num_value_heads", "linear_attention.num_value_heads"),
    ConfigKey("linear_key_head_dim", "linear_attention.key_head_dim"),
    ConfigKey("linear_value_head_dim", "linear_attention.value_head_dim"),
    ConfigKey("linear_conv_kernel_dim", "linear_attention.conv_kernel", _up_to(64)),
)
SHORT_CONVOLUTION = (
    ConfigKey("conv_L_cache", "short_convolution.kernel", _up_to(64)),
    ConfigKey("conv_bias", "short_convolution.bias", ConfigReader.flag),
)
COMPRESSED = (
    ConfigKey("q_lora_rank", "compressed_attention.q_lora_rank"),
    ConfigKey("o_groups", "compressed_attention.output_groups"),
    ConfigKey("o_lora_rank", "compressed_attention.output_rank"),
    ConfigKey("index_n_heads", "compressed_attention.index_heads"),
    ConfigKey("index_head_dim", "compressed_attention.index_head_dim"),
    ConfigKey("index_topk", "compressed_attention.index_topk"),
    ConfigKey("sliding_window", "compressed_attention.window"),
    ConfigKey("compress_rope_theta", "compressed_attention.rotary_base", _positive),
)
MAMBA = (
    ConfigKey("mamba_num_heads", "mamba.num_heads", _up_to(2**16)),
    ConfigKey("mamba_head_dim", "mamba.head_dim", _up_to(2**24)),
    ConfigKey("ssm_state_size", "mamba.state_size", _up_to(2**24)),
    ConfigKey("n_groups", "mamba.groups", _up_to(2**16)),
)
ENCODER = (  # of `vision_config`
    ConfigKey("depth", "vision.depth", _up_to(10_000)),
    ConfigKey("hidden_size", "vision.hidden_size"),
    ConfigKey("intermediate_size", "vision.ffn_hidden_size"),
    ConfigKey("num_heads", "vision.num_attention_heads"),
    ConfigKey("patch_size", "vision.patch_size", _up_to(2**16)),
    ConfigKey("temporal_patch_size", "vision.temporal_patch_size", _up_to(2**16)),
    ConfigKey("spatial_merge_size", "vision.merge_size", _up_to(2**16)),
    ConfigKey("num_position_embeddings", "vision.position_embeddings", _up_to(2**24)),
)

_TOPK = ConfigKey("num_experts_per_tok", "moe.topk")
_WIDTH = ConfigKey("moe_intermediate_size", "moe.ffn_hidden_size")
LOCAL_EXPERTS = (
    ConfigKey("num_local_experts", "moe.num_experts"),
    _TOPK,
    ConfigKey("intermediate_size", "moe.ffn_hidden_size"),
)
QWEN_EXPERTS = (ConfigKey("num_experts", "moe.num_experts"), _TOPK, _WIDTH)
DEEPSEEK_EXPERTS = (ConfigKey("n_routed_experts", "moe.num_experts"), _TOPK, _WIDTH)
SHARED_EXPERT = (ConfigKey("shared_expert_intermediate_size", "moe.shared_expert_ffn_hidden_size"),)
NEMOTRON_EXPERTS = (
    *DEEPSEEK_EXPERTS,
    ConfigKey("moe_shared_expert_intermediate_size", "moe.shared_expert_ffn_hidden_size"),
    ConfigKey(
        "moe_latent_size",
        "moe.latent_size",
        lambda reader, key: None if reader.get(key) is None else reader.size(key, largest=2**24),
    ),
)
NORMALIZED = ConfigKey("norm_topk_prob", "moe.router.normalize_topk", ConfigReader.flag)
SCALED = ConfigKey("routed_scaling_factor", "moe.router.scaling_factor", _positive)
DEEPSEEK_ROUTER = (NORMALIZED, SCALED)

TURNED = (ConfigKey("partial_rotary_factor", "rotary_percent", lambda reader, key: rotary_percent(reader)),)
QKV_BIAS = (ConfigKey("qkv_bias", "qkv_bias", ConfigReader.flag),)
GLM_KEYS = (
    ConfigKey("attention_bias", "qkv_bias", ConfigReader.flag),
    ConfigKey("use_qk_norm", "qk_layernorm", ConfigReader.flag),
    *TURNED,
)
LLAMA4_KEYS = (
    ConfigKey("intermediate_size_mlp", "ffn_hidden_size"),
    ConfigKey("use_qk_norm", "qk_l2_norm", ConfigReader.flag),
    ConfigKey("attn_temperature_tuning", "temperature_tuning", ConfigReader.flag),
)
_CAPPED_LOGITS = ConfigKey("final_logit_softcapping", "logit_softcap", ConfigReader.optional_number)
GEMMA2_KEYS = (ConfigKey("attn_logit_softcapping", "attention_softcap", ConfigReader.optional_number), _CAPPED_LOGITS)
GEMMA4_KEYS = (ConfigKey("attention_k_eq_v", "keys_are_values", ConfigReader.flag), _CAPPED_LOGITS)
POOLED_KEYS = (
    ConfigKey("hc_mult", "residual_streams", lambda reader, key: reader.size(key, least=2, largest=64)),
    ConfigKey("swiglu_limit", "activation_limit", _positive),
)


def _without(*keys: str) -> tuple[ConfigKey, ...]:
    """Return the rows of a decoder but for those of keys that have another meaning in a family, or one value alone."""
    return tuple(row for row in DECODER if row.key not in keys)


LFM2_DECODER = (
    *_without("rms_norm_eps", "attention_dropout"),
    ConfigKey("norm_eps", "norm_epsilon", _positive),
)
_MIXTURE = _without("intermediate_size")
_LATENT_MIXTURE = (*_without("head_dim", "num_key_value_heads"), *LATENT, *DEEPSEEK_EXPERTS)
KEYS_OF: Mapping[str, tuple[ConfigKey, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo3"), DECODER),
    "phi3": (*DECODER, *TURNED),
    "lfm2": (*LFM2_DECODER, *SHORT_CONVOLUTION),
    **dict.fromkeys(("mixtral", "gpt_oss"), (*_MIXTURE, *LOCAL_EXPERTS)),
    "minimax_m2": (*_MIXTURE, *LOCAL_EXPERTS, *TURNED),
    "llama4_text": (*_MIXTURE, *LOCAL_EXPERTS, *LLAMA4_KEYS),
    "qwen2_moe": (*DECODER, *QWEN_EXPERTS, *SHARED_EXPERT, NORMALIZED, *QKV_BIAS),
    "qwen3_moe": (*DECODER, *QWEN_EXPERTS, NORMALIZED),
    "qwen3_next": (*DECODER, *TURNED, *LINEAR_ATTENTION, *QWEN_EXPERTS, *SHARED_EXPERT, NORMALIZED),
    "qwen3_5_text": (*DECODER, *TURNED, *LINEAR_ATTENTION),
    "qwen3_5_moe_text": (*_MIXTURE, *TURNED, *LINEAR_ATTENTION, *QWEN_EXPERTS, *SHARED_EXPERT),
    **dict.fromkeys(("gemma2", "gemma3_text"), (*DECODER, *GEMMA2_KEYS)),
    "gemma4_text": (*DECODER, *GEMMA4_KEYS),
    "glm4_moe": (*DECODER, *DEEPSEEK_EXPERTS, *DEEPSEEK_ROUTER, *GLM_KEYS),
    "deepseek_v2": (*_LATENT_MIXTURE, SCALED),
    "deepseek_v3": (*_LATENT_MIXTURE, *DEEPSEEK_ROUTER),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), (*_LATENT_MIXTURE, *DEEPSEEK_ROUTER, *INDEXER)),
    "deepseek_v4": (
        *_without("intermediate_size", "num_key_value_heads"),
        *(*DEEPSEEK_EXPERTS, SCALED, *COMPRESSED, *POOLED_KEYS),
    ),
    "nemotron_h": (*NEMOTRON_DECODER, *MAMBA, *NEMOTRON_EXPERTS, *DEEPSEEK_ROUTER),
    "gpt2": GPT2_KEYS,
}
"""The rows of each family."""
