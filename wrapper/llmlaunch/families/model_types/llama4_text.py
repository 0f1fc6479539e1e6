"""The language models of Llama 4 by themselves (transformers/models/llama4, 5.23)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import (
    CHUNKED,
    COMMON,
    FULL,
    LOCAL_EXPERTS,
    NO_BIAS,
    auxiliary,
    mixture_of,
    refuse_jitter,
    silu_decoder,
    written_auxiliary,
)
from llmlaunch.families.family import MIXTURE_DECODER, ConfigKey, ConfigReader, Family, read_keys
from llmlaunch.models.shape import ModelShape, MoeShape, Router, SlidingWindow

KEYS = (
    ConfigKey("intermediate_size_mlp", "ffn_hidden_size"),
    ConfigKey("use_qk_norm", "qk_l2_norm", ConfigReader.flag),
    ConfigKey("attn_temperature_tuning", "temperature_tuning", ConfigReader.flag),
)


def read(reader: ConfigReader) -> ModelShape:
    reader.only("attention_bias", False, why=NO_BIAS)
    refuse_jitter(reader)
    if reader.flag("attn_temperature_tuning"):
        reader.only("floor_scale", 8192, why="positions count by 8192 tokens")
        reader.only("attn_scale", 0.1, why="queries grow by a tenth of a logarithm")
    shape = silu_decoder(reader)
    layers, every, step = (
        shape.num_layers,
        reader.size("no_rope_layer_interval"),
        reader.size("interleave_moe_layer_step"),
    )
    turned = [int((i + 1) % every != 0) for i in range(layers)]
    mixtures = list(range(step - 1, layers, step))
    kinds = [CHUNKED if with_positions else FULL for with_positions in turned]
    for key, value in (("no_rope_layers", turned), ("moe_layers", mixtures), ("layer_types", kinds)):
        written = reader.get(key)
        if written and written != value:
            raise BadKey((key,), "other layers than at even distances are not supported; remove it")
    experts = MoeShape(
        **read_keys(reader, LOCAL_EXPERTS),
        shared_expert_ffn_hidden_size=shape.ffn_hidden_size,
        layer_pattern=tuple(int(i in mixtures) for i in range(layers)),
        router=Router("sigmoid", normalize_topk=False, weighted_inputs=True, **auxiliary(reader)),
    )
    return replace(
        shape,
        **read_keys(reader, KEYS),
        no_rope_every=every,
        sliding_window=_chunks(reader, every),
        moe=experts,
    )


def _chunks(reader: ConfigReader, every: int) -> SlidingWindow | None:
    if reader.get("attention_chunk_size") is None:
        return None
    return SlidingWindow(reader.size("attention_chunk_size"), every, chunked=True)


def write(shape: ModelShape) -> dict[str, Any]:
    window = shape.sliding_window
    return {
        **written_auxiliary(shape),
        "interleave_moe_layer_step": (*mixture_of(shape).layer_pattern, 1).index(1) + 1,
        "no_rope_layer_interval": shape.no_rope_every or shape.num_layers + 1,
        "attention_chunk_size": None if window is None else window.tokens,
    }


FAMILY = Family(
    read=read,
    write=write,
    keys=(*MIXTURE_DECODER, *LOCAL_EXPERTS, *KEYS),
    defaults={
        **COMMON,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "layer_types": None,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    needs=("moe",),
    mark=lambda shape: shape.no_rope_every > 0,
    precedence=180,
)
