"""The families of models that are known: Hugging Face's model types, and which of them can say a shape."""

from __future__ import annotations

from llmlaunch.models.shape import ModelShape

__all__ = ["MARKS", "OF_FAMILIES", "family_of", "kind_of"]

# What few families have and memory depends on: records of measured runs tell it where a model has it, by these names.
OF_FAMILIES = (
    *("family", "qkv_bias", "zero_centered_norm", "post_norms", "attention_softcap", "logit_softcap", "sliding_window"),
)
# the fields families differ in; sizes are everybody's
MARKS = frozenset(
    {
        *("position_embedding", "normalization", "gated_mlp", "activation", "linear_bias", "qkv_bias", "qk_layernorm"),
        *("moe", "mla", "zero_centered_norm", "post_norms", "sliding_window"),
    }
)


def family_of(shape: ModelShape) -> str:
    """The family whose models look like `shape`, where nobody named one: the mark that only one of them bears."""
    marks = {
        "gpt2": shape.position_embedding == "learned_absolute",
        "gemma3_text": shape.post_norms and shape.qk_layernorm,
        "gemma2": shape.post_norms,
        "gemma": shape.zero_centered_norm,
        "deepseek_v3": shape.mla is not None and shape.moe is not None and shape.moe.router.expert_bias,
        "deepseek_v2": shape.mla is not None,
        "qwen3_moe": shape.moe is not None and shape.qk_layernorm,
        "qwen2_moe": shape.moe is not None and (shape.qkv_bias or shape.moe.shared_expert_ffn_hidden_size > 0),
        "mixtral": shape.moe is not None,
        "qwen3": shape.qk_layernorm,
        "qwen2": shape.qkv_bias,
        "mistral": shape.sliding_window is not None,
    }
    return next((family for family, bears in marks.items() if bears), "llama")


def kind_of(shape: ModelShape) -> str:
    """The family as far as measured records tell it too (they know no biases, caps or norms of heads), and as far as
    it decides what is in memory: what runs of one kind were off by says little of another kind."""
    layers, mlp = "mixture" if shape.moe else "dense", "gated" if shape.gated_mlp else "ungated"
    return f"latent-attention {layers} {mlp}" if shape.mla else f"{layers} {mlp}"
