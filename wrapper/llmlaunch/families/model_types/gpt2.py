"""GPT-2 and models of GPT-3's shape (transformers/models/gpt2, 5.23)."""

from __future__ import annotations

from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.family import MOST_LAYERS, ConfigKey, ConfigReader, Family, positive, read_keys, up_to
from llmlaunch.models.shape import ModelShape

KEYS = (
    ConfigKey("n_layer", "num_layers", up_to(MOST_LAYERS)),
    ConfigKey("n_embd", "hidden_size"),
    ConfigKey("n_inner", "ffn_hidden_size", lambda reader, key: reader.size(key, otherwise=4 * reader.size("n_embd"))),
    ConfigKey("n_head", "num_attention_heads"),
    ConfigKey("vocab_size", "vocab_size"),
    ConfigKey("n_positions", "max_position_embeddings"),
    ConfigKey("tie_word_embeddings", "tied_embeddings", ConfigReader.flag),
    ConfigKey("attn_pdrop", "attention_dropout", ConfigReader.rate),
    ConfigKey("resid_pdrop", "hidden_dropout", ConfigReader.rate),
    ConfigKey("layer_norm_epsilon", "norm_epsilon", positive),
)


def read(reader: ConfigReader) -> ModelShape:
    reader.only("activation_function", "gelu_new", "gelu_pytorch_tanh", why="only gelu_new (by tanh) is supported")
    reader.only("scale_attn_weights", True, why="scores are always scaled here: must be true")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        reader.only(key, False, why="is not supported: must be false")
    values = read_keys(reader, KEYS)
    if reader.rate("embd_pdrop") != values["hidden_dropout"]:
        raise BadKey(("embd_pdrop",), "must be equal to resid_pdrop: one rate drops out of the residual stream here")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        raise BadKey(("n_head",), f"n_embd {hidden} is not divisible by {heads} heads; give a number that divides it")
    return ModelShape(
        name="",
        **values,
        num_query_groups=heads,
        head_dim=hidden // heads,
        gated_mlp=False,
        linear_bias=True,
        normalization="LayerNorm",
        position_embedding="learned_absolute",
        activation="gelu",
    )


def write(shape: ModelShape) -> dict[str, Any]:
    return {"activation_function": "gelu_new", "embd_pdrop": shape.hidden_dropout}


FAMILY = Family(
    read=read,
    write=write,
    keys=KEYS,
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    mark=lambda shape: shape.position_embedding == "learned_absolute",
    precedence=260,
    has_rotary=False,
    fuses_linears=True,
    torch_norms=True,
)
