"""What a config.json of DeepSeek-V4 means (transformers/models/deepseek_v4, 5.23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import (
    COMMON,
    NO_BIAS,
    WINDOWED,
    auxiliary,
    mixture_of,
    only_if_given,
    refuse_jitter,
    silu_decoder,
    written_auxiliary,
)
from llmlaunch.families.family import (
    SCALED,
    ConfigKey,
    ConfigReader,
    Family,
    as_number,
    decoder_without,
    positive,
    read_keys,
    short,
)
from llmlaunch.families.latent_attention import DEEPSEEK_EXPERTS
from llmlaunch.models.sections import CompressedAttention
from llmlaunch.models.shape import ModelShape, MoeShape, Router

COMPRESSED = (
    ConfigKey("q_lora_rank", "compressed_attention.q_lora_rank"),
    ConfigKey("o_groups", "compressed_attention.output_groups"),
    ConfigKey("o_lora_rank", "compressed_attention.output_rank"),
    ConfigKey("index_n_heads", "compressed_attention.index_heads"),
    ConfigKey("index_head_dim", "compressed_attention.index_head_dim"),
    ConfigKey("index_topk", "compressed_attention.index_topk"),
    ConfigKey("sliding_window", "compressed_attention.window"),
    ConfigKey("compress_rope_theta", "compressed_attention.rotary_base", positive),
)
POOLED_KEYS = (
    ConfigKey("hc_mult", "residual_streams", lambda reader, key: reader.size(key, least=2, largest=64)),
    ConfigKey("swiglu_limit", "activation_limit", positive),
)
DEFAULT_TURNED = 64 / 512
POOLED = {WINDOWED: 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
RATES = {kind: ratio for kind, ratio in POOLED.items() if ratio}
HASHED, SCORED = "hash_moe", "moe"
HASH_LAYERS = 3  # where a file does not say


def read(reader: ConfigReader) -> ModelShape:
    """Every layer is a mixture, so that there is no width of a dense MLP. Multi-token prediction stands in the file,
    and transformers builds none of it. Positions are scaled in layers that pool alone."""
    reader.only("attention_bias", False, why=NO_BIAS)
    reader.only("mlp_bias", False, why=NO_BIAS)
    reader.only("num_key_value_heads", 1, why="all heads share one key: must be 1")
    reader.only("norm_topk_prob", True, why="the class makes the chosen scores sum to 1: must be true")
    only_if_given(reader, "topk_method", "noaux_tc")
    refuse_jitter(reader)
    if reader.values.get("num_nextn_predict_layers"):
        reader.remark("multi-token prediction is left out, as transformers does; model.mtp_num_layers prices it")
    width = reader.size("moe_intermediate_size")
    reader.values = {**reader.values, "intermediate_size": width, **_pooled_positions(reader)}
    shape = silu_decoder(reader)
    router = Router(
        reader.get("scoring_func"),
        expert_bias=True,
        **read_keys(reader, (SCALED,)),
        hash_layers=_hash_layers(reader, shape.num_layers),
        **auxiliary(reader),
    )
    reader.only("scoring_func", "sqrtsoftplus", "sigmoid", why="must be sqrtsoftplus or sigmoid")
    moe = MoeShape(
        **read_keys(reader, DEEPSEEK_EXPERTS),
        shared_expert_ffn_hidden_size=reader.size("n_shared_experts", least=0) * width,
        layer_pattern=(1,) * shape.num_layers,
        router=router,
    )
    return replace(
        shape,
        moe=moe,
        rotary_percent=_turned(reader, shape.head_dim),
        **read_keys(reader, POOLED_KEYS),
        compressed_attention=_compressed(reader, shape.num_layers),
    )


def _compressed(reader: ConfigReader, layers: int) -> CompressedAttention:
    return CompressedAttention(ratios=_ratios(reader, layers), **read_keys(reader, COMPRESSED))


def _ratios(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Return how many tokens each layer pools into one: as kinds of layers, or as numbers, of which one more is that of
    multi-token prediction. Without either the first two layers pool by 128, and the others by 4 and 128 in turn."""
    rates: Any = reader.get("compress_rates")
    for key, rate in ((kind, RATES[kind]) for kind in RATES if isinstance(rates, Mapping) and kind in rates):
        if rates[key] != rate:
            raise BadKey(("compress_rates",), f"{key} must pool {rate} tokens into one, not {short(rates[key])}")
    kinds, numbers = reader.get("layer_types"), reader.values.get("compress_ratios")
    if kinds is None and numbers is None:
        heavy, sparse = RATES["heavily_compressed_attention"], RATES["compressed_sparse_attention"]
        return ((heavy, heavy) + (heavy, sparse) * layers)[:layers]
    key = "compress_ratios" if kinds is None else "layer_types"
    written = _each(key, numbers if kinds is None else kinds, layers)
    known: Mapping[Any, int] = {ratio: ratio for ratio in POOLED.values()} if kinds is None else POOLED
    for value in written:
        if isinstance(value, bool) or not isinstance(value, int | str) or value not in known:
            raise BadKey((key,), f"each must be one of {', '.join(map(str, known))}, not {short(value)}")
    return tuple(known[value] for value in written)


def _hash_layers(reader: ConfigReader, layers: int) -> int:
    kinds = reader.get("mlp_layer_types")
    if kinds is None:
        first = reader.values.get("num_hash_layers", HASH_LAYERS)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise BadKey(("num_hash_layers",), f"must be a whole number, not {short(first)}")
        return min(first, layers)
    kinds = _each("mlp_layer_types", kinds, layers)
    hashed = kinds.count(HASHED)
    if kinds != (HASHED,) * hashed + (SCORED,) * (layers - hashed):
        raise BadKey(("mlp_layer_types",), f"must be {HASHED} in the first layers and {SCORED} in all others")
    return hashed


def _each(key: str, values: Any, layers: int) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < layers:
        raise BadKey((key,), f"must name one for each of {layers} layers, not {short(values)}")
    return tuple(values[:layers])


def _turned(reader: ConfigReader, width: int) -> float:
    """Return the share of each head that is turned: its own key's, or the older one's columns."""
    share, columns = reader.get("partial_rotary_factor"), reader.values.get("qk_rope_head_dim")
    if share is None and columns is None:
        share = DEFAULT_TURNED
    if share is None:
        share = reader.size("qk_rope_head_dim", largest=width) / width
    turned = as_number("partial_rotary_factor", share, above=0.0)
    if turned > 1:
        raise BadKey(("partial_rotary_factor",), f"must be at most 1, not {turned:g}")
    return turned


def _pooled_positions(reader: ConfigReader) -> dict[str, Any]:
    """Return `rope_scaling` of the layers that pool, where the file has parameters for both kinds, or all of them have
    the share that is turned among them. The class scales no scores, whatever the factor."""
    key = "rope_scaling" if reader.values.get("rope_scaling") else "rope_parameters"
    parameters = reader.group(key) or {}
    main, pooled = parameters.get("main", {}), parameters.get("compress", parameters)
    if not isinstance(pooled, Mapping) or not isinstance(main, Mapping):
        raise BadKey((key,), "main and compress must be objects")
    left_out = ("main", "partial_rotary_factor", "rope_theta", "attention_factor")
    values = {
        "rope_parameters": None,
        "rope_scaling": {name: value for name, value in pooled.items() if name not in left_out} or None,
    }
    if main:
        values |= {name: main[name] for name in ("rope_theta", "partial_rotary_factor") if name in main}
        values |= {"compress_rope_theta": pooled["rope_theta"]} if "rope_theta" in pooled else {}
    return values


def write(shape: ModelShape) -> dict[str, Any]:
    """Keys that other families have as well, and their own; `topk_method` and the like have no other value."""
    moe, compressed = mixture_of(shape), shape.compressed_attention
    assert compressed is not None
    kinds, layers, hashed = {ratio: kind for kind, ratio in POOLED.items()}, shape.num_layers, moe.router.hash_layers
    return {
        **written_auxiliary(shape),
        "intermediate_size": moe.ffn_hidden_size,
        "num_key_value_heads": shape.num_query_groups,
        "n_shared_experts": moe.shared_expert_ffn_hidden_size // moe.ffn_hidden_size,
        "scoring_func": moe.router.score_function,
        "norm_topk_prob": moe.router.normalize_topk,
        "mlp_layer_types": ([HASHED] * hashed + [SCORED] * layers)[:layers],
        "layer_types": [kinds[ratio] for ratio in compressed.ratios],
        "partial_rotary_factor": shape.rotary_percent,
    }


FAMILY = Family(
    read=read,
    write=write,
    keys=(
        *decoder_without("intermediate_size", "num_key_value_heads"),
        *(*DEEPSEEK_EXPERTS, SCALED, *COMPRESSED, *POOLED_KEYS),
    ),
    defaults={
        **COMMON,
        "vocab_size": 129280,
        "intermediate_size": 2048,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "max_position_embeddings": 1048576,
        "attention_bias": False,
        "mlp_bias": False,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "layer_types": None,
        "mlp_layer_types": None,
        "compress_rates": None,
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "partial_rotary_factor": None,
    },
    aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
    needs=("moe", "compressed_attention"),
    mark=lambda shape: shape.compressed_attention is not None or shape.residual_streams > 1,
    precedence=250,
)
