"""GLM-5: latent attention with an indexer whose rotary positions turn neighbours (transformers/models/glm_moe_dsa,
5.23)."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import only_if_given
from llmlaunch.families.family import ConfigReader, Family
from llmlaunch.families.latent_attention import (
    DEEPSEEK_ROUTER,
    GROUPS,
    INDEXED_DEFAULTS,
    INDEXER,
    LATENT_MIXTURE,
    indexed_decoder,
    written_latent,
)
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    shape = indexed_decoder(reader)
    assert shape.indexer is not None
    only_if_given(reader, "indexer_rope_interleave", True)
    return replace(shape, indexer=replace(shape.indexer, interleaved=True))


FAMILY = Family(
    read=read,
    write=written_latent,
    keys=(*LATENT_MIXTURE, *DEEPSEEK_ROUTER, *INDEXER),
    defaults={
        **INDEXED_DEFAULTS,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    other_keys=GROUPS,
    needs=("moe", "mla", "indexer"),
    mark=lambda shape: shape.indexer is not None and shape.indexer.interleaved,
    precedence=120,
    balances_experts=False,
)
