"""The Hugging Face configuration of the model the shipped script builds."""

from __future__ import annotations

from typing import Any

from llmlaunch.recipe.types import Recipe

__all__ = ["model_config"]

Json = dict[str, Any]


def model_config(recipe: Recipe) -> Json:
    """The model as a Hugging Face configuration of Llama or Mixtral (transformers/models, 4.53 to 5.23)."""
    shape, moe = recipe.model, recipe.model.moe
    config: Json = {
        "model_type": "llama" if moe is None else "mixtral",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size if moe is None else moe.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max(shape.max_position_embeddings, recipe.workload.sequence_length),
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rotary_base,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_dropout": shape.attention_dropout,
    }
    if moe is None:
        return config | {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}
    return config | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
    }
