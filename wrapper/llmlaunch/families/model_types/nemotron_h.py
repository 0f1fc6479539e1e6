"""Nemotron-H and Nemotron 3: what a config.json of `nemotron_h` means (transformers/models/nemotron_h, 5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.family import SIZES, ConfigKey, ConfigReader, Family, positive, read_keys, short, up_to
from llmlaunch.families.latent_attention import DEEPSEEK_EXPERTS, DEEPSEEK_ROUTER, GROUPS, written_routed
from llmlaunch.models.sections import CONV_KERNEL, PARTS, Mamba
from llmlaunch.models.shape import SQUARED, ModelShape, MoeShape, Router

# the class's names of parts, and those it had before
NAMES = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
LETTERS: Mapping[str, str] = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}

MAMBA = (
    ConfigKey("mamba_num_heads", "mamba.num_heads", up_to(2**16)),
    ConfigKey("mamba_head_dim", "mamba.head_dim", up_to(2**24)),
    ConfigKey("ssm_state_size", "mamba.state_size", up_to(2**24)),
    ConfigKey("n_groups", "mamba.groups", up_to(2**16)),
)
DECODER_KEYS = (
    *SIZES,
    ConfigKey("head_dim", "head_dim"),
    ConfigKey("layer_norm_epsilon", "norm_epsilon", positive),
)
EXPERT_KEYS = (
    *DEEPSEEK_EXPERTS,
    ConfigKey("moe_shared_expert_intermediate_size", "moe.shared_expert_ffn_hidden_size"),
    ConfigKey(
        "moe_latent_size",
        "moe.latent_size",
        lambda reader, key: None if reader.get(key) is None else reader.size(key, largest=2**24),
    ),
)
ALONE = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), (False, "biases are not supported: must be false")),
    "use_conv_bias": (True, "the convolution has a bias: must be true"),
    "conv_kernel": (CONV_KERNEL, f"the convolution spans {CONV_KERNEL} tokens"),
    "mlp_hidden_act": ("relu2", "only relu2 (squared ReLU) is supported"),
    "mamba_hidden_act": ("silu", "only silu is supported"),
    "tie_word_embeddings": (False, "the class ties no embeddings: must be false"),
    "residual_in_fp32": (False, "a residual stream in fp32 is not supported: must be false"),
}


def read(reader: ConfigReader) -> ModelShape:
    """Layers of one part each. Released files name rotary positions, which the class reads none of, and a module for
    multi-token prediction, which transformers builds none of."""
    for name, (value, why) in ALONE.items():
        reader.only(name, value, why=why)
    pattern, mtp_pattern = _pattern(reader, ""), _pattern(reader, "mtp_")
    if not pattern:
        raise BadKey(("layers_block_type",), "is missing; give it, or hybrid_override_pattern")
    if reader.values.get("num_nextn_predict_layers"):
        reader.remark(
            f"num_nextn_predict_layers={reader.values['num_nextn_predict_layers']} is left out, as transformers does; "
            "model.mtp_num_layers and mtp_repeated train it with Megatron-LM"
        )
    mamba = Mamba(
        pattern=pattern,
        mtp_pattern=mtp_pattern or None,
        **read_keys(reader, MAMBA),
    )
    return ModelShape(
        name="",
        num_layers=len(pattern),
        **read_keys(reader, DECODER_KEYS),
        gated_mlp=False,
        activation=SQUARED,
        position_embedding="none",
        moe=_experts(reader, pattern) if "E" in pattern else None,
        mamba=mamba,
    )


def _pattern(reader: ConfigReader, prefix: str) -> str:
    """Return the letters of all layers, whichever of the keys says them; empty where none does."""
    names, letters = (
        reader.values.get(f"{prefix}layers_block_type"),
        reader.values.get(f"{prefix}hybrid_override_pattern"),
    )
    if names is None and letters is None:
        return ""
    if names is not None:
        if not isinstance(names, list) or any(not isinstance(name, str) or name not in NAMES for name in names):
            raise BadKey((f"{prefix}layers_block_type",), f"must be a list of {', '.join(LETTERS.values())}")
        return "".join(NAMES[name] for name in names)
    if not isinstance(letters, str) or not letters or set(letters) - set(PARTS):
        raise BadKey(
            (f"{prefix}hybrid_override_pattern",), f"must be letters of {''.join(PARTS)}, not {short(letters)}"
        )
    return letters


def _experts(reader: ConfigReader, pattern: str) -> MoeShape:
    """DeepSeek-V3's router; the shared expert has a width of its own whatever n_shared_experts says."""
    groups = reader.size("n_group")
    router = Router(
        "sigmoid",
        groups if groups > 1 else None,
        reader.size("topk_group") if groups > 1 else None,
        expert_bias=True,
        balancing="none",
        **read_keys(reader, DEEPSEEK_ROUTER),
    )
    return MoeShape(
        **read_keys(reader, EXPERT_KEYS),
        layer_pattern=tuple(int(letter == "E") for letter in pattern),
        router=router,
    )


def write(shape: ModelShape) -> dict[str, Any]:
    assert shape.mamba is not None
    mamba = shape.mamba
    config: dict[str, Any] = {"layers_block_type": [LETTERS.get(letter, letter) for letter in mamba.pattern]}
    if mamba.mtp_pattern is not None:
        config["mtp_layers_block_type"] = [LETTERS[letter] for letter in mamba.mtp_pattern]
    if shape.moe is None:
        return config
    routed = written_routed(replace(shape, moe=replace(shape.moe, shared_expert_ffn_hidden_size=0)))
    unsaid_there = ("n_shared_experts", "first_k_dense_replace", "aux_loss_alpha", "seq_aux")
    return config | {name: value for name, value in routed.items() if name not in unsaid_there}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*DECODER_KEYS, *MAMBA, *EXPERT_KEYS, *DEEPSEEK_ROUTER),
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "use_bias": False,
        "layers_block_type": None,
        "hybrid_override_pattern": None,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "conv_kernel": CONV_KERNEL,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": False,
    },
    aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    other_keys={**GROUPS, "mamba.pattern": "layers_block_type"},
    needs=("mamba",),
    mark=lambda shape: shape.mamba is not None,
    precedence=230,
    has_rotary=False,
    balances_experts=False,
)
