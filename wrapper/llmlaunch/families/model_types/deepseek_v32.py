"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the keys that an indexer chooses (transformers/models/
deepseek_v32, 5.23)."""

from __future__ import annotations

from llmlaunch.families.family import Family
from llmlaunch.families.latent_attention import (
    DEEPSEEK_ROUTER,
    GROUPS,
    INDEXED_DEFAULTS,
    INDEXER,
    LATENT_MIXTURE,
    indexed_decoder,
    written_latent,
)

FAMILY = Family(
    read=indexed_decoder,
    write=written_latent,
    keys=(*LATENT_MIXTURE, *DEEPSEEK_ROUTER, *INDEXER),
    defaults={
        **INDEXED_DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "topk_group": 4,
        "index_n_heads": 64,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    other_keys=GROUPS,
    needs=("moe", "mla", "indexer"),
    mark=lambda shape: shape.indexer is not None,
    precedence=110,
    balances_experts=False,
)
