"""Random recipes of every backend: models, clusters, pins and techniques that a person might combine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.recipe.load import load_recipe

MODELS: Mapping[str, Sequence[str]] = {
    "megatron-lm": (
        "llama3-8b",
        "llama3.2-1b",
        "qwen3-30b-a3b",
        "deepseek-v2-lite",
        "mixtral-8x7b",
        "qwen3-next-80b-a3b",
        "nemotron-3-nano",
        "moonlight-16b-a3b",
        "qwen3-vl-8b",
        "olmo3-7b",
        "gpt-oss-20b",
    ),
    "megatron-bridge": ("llama3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma3-1b", "qwen2.5-7b"),
    "deepspeed": ("llama3-8b", "llama3.2-1b", "qwen3-8b", "gemma2-9b", "mistral-7b", "mixtral-8x7b", "gpt-oss-20b"),
}
CLUSTERS = ("a100-40gb-x8", "h100-80gb-x8", "h100-94gb-sxm-x4", "b200-x8", "h200-141gb-x8", "gb200-nvl72")
# values of a key, and how often it is pinned
Values = Mapping[str, tuple[Sequence[Any], float]]
PINS: Values = {
    "tensor": ((1, 1, 2, 4), 0.6),
    "pipeline": ((1, 1, 2, 4), 0.6),
    "virtual_pipeline": ((1, 2), 0.4),
    "context": ((1, 1, 2), 0.7),
    "micro_batch_size": ((1, 2, 4), 0.7),
    "zero_stage": ((0, 1, 2, 3, 3), 0.4),
    "recompute": (("none", "selective", "full", "full"), 0.5),
}
TECHNIQUES: Values = {
    "offload_optimizer": ((0.0, 0.5, 1.0), 0.25),
    "offload_parameters": ((True,), 0.1),
    "loss": (("native", "te", "tiled"), 0.1),
    "mlp_chunks": ((4,), 0.08),
    "offload_modules": ((["core_attn"], ["qkv_linear"], ["attn_norm", "mlp_norm"]), 0.1),
    "offload_layers": ((1, 2), 0.08),
    "offload_checkpoints": ((True,), 0.1),
    "recompute_layers": ((1, 2), 0.1),
    "delay_weight_gradients": ((True,), 0.08),
    "overlap_expert_communication": ((True,), 0.08),
    "overlap_shared_expert": ((True,), 0.08),
    "token_dispatcher": (("allgather", "flex"), 0.08),
    "tp_comm_overlap": ((True,), 0.08),
    "cuda_graphs": ((["attn"], ["full_iteration"]), 0.08),
    "optimizer_instances": ((2,), 0.1),
    "techniques": (("asked", "asked", "bit-equal"), 0.9),
}
TRAINING: Values = {
    "optimizer": (("muon",), 0.2),
    "adapters": (({"rank": 16}, {"rank": 8, "target_modules": ["q_proj", "v_proj"]}), 0.2),
    "trained_layers": ((1, 2, 3), 0.2),
    "precision": (("fp16", "fp8", "fp32"), 0.15),
}
WHAT_IF: Values = {"zero_bubble": ((True,), 0.05), "weight_versions": ((2,), 0.05), "sampled_share": ((0.5,), 0.05)}
ATTEMPTS = 12  # keys taken away until a recipe is one


def random_searches(seed: int, folder: Path) -> Iterator[tuple[Setting, SearchResult]]:
    """Yield the search of one random recipe, with as few of its random keys taken away as make it a recipe that has a
    layout; nothing where no such recipe is near."""
    rnd = random.Random(seed)
    recipe = _random_recipe(rnd)
    for _ in range(ATTEMPTS):
        found = searched(recipe, folder)
        if found is not None:
            yield found
            return
        parts = ("layout", "training", "what_if", "model")
        extra = [(part, key) for part in parts for key in _extra_keys(recipe, part)]
        if not extra:
            return
        part, key = rnd.choice(extra)
        del recipe[part][key]


def searched(recipe: Mapping[str, Any], folder: Path) -> tuple[Setting, SearchResult] | None:
    """Return the setting of a recipe and what its search found; None where it is no recipe or has no legal layout."""
    path = folder / "random.yaml"
    path.write_text(yaml.safe_dump(dict(recipe)))
    try:
        loaded = load_recipe(path, ())
        setting = setting_of(loaded, backend_for(loaded))
        result = search(setting)
    except UserError:
        return None
    return (setting, result) if len(result.points) else None


def _extra_keys(recipe: Mapping[str, Any], part: str) -> list[str]:
    values = recipe.get(part)
    known = {**PINS, **TECHNIQUES, **TRAINING, **WHAT_IF, **dict.fromkeys(OPTIONAL_MODEL_KEYS)}
    return [key for key in values if key in known] if isinstance(values, dict) else []


def _random_recipe(rnd: random.Random) -> dict[str, Any]:
    backend = rnd.choice(("megatron-lm", "megatron-lm", "megatron-bridge", "deepspeed", "deepspeed", "deepspeed"))
    training = {
        "sequence_length": rnd.choice((1024, 4096, 4096, 8192, 32768)),
        "global_batch_size": rnd.choice((16, 32, 80, 128, 256)),
        "steps": 100,
        **_some(rnd, TRAINING),
    }
    recipe = {
        "schema": 1,
        "name": "random",
        "backend": backend,
        "model": rnd.choice(MODELS[backend]) if rnd.random() < 0.5 else _random_model(rnd),
        "cluster": rnd.choice(CLUSTERS),
        "nodes": rnd.choice((1, 1, 2, 2, 4, 5)),
        "training": training,
        "layout": {**_some(rnd, PINS), **_some(rnd, TECHNIQUES)},
        "what_if": _some(rnd, WHAT_IF),
    }
    if "adapters" in training:
        training |= {"start_from": "/weights", "learning_rate": 1e-4}
    return recipe | {"data": {"mock": True}}


OPTIONAL_MODEL_KEYS = ("num_query_groups", "tied_embeddings", "mtp_num_layers", "sliding_window", "moe")


def _random_model(rnd: random.Random) -> dict[str, Any]:
    hidden, layers = rnd.choice((1024, 2048, 4096, 12288)), rnd.choice((1, 2, 4, 8, 12, 14, 32))
    experts: dict[str, Any] = {"num_experts": rnd.choice((4, 8, 16)), "topk": 2, "ffn_hidden_size": hidden}
    if rnd.random() < 0.3:
        experts["layer_pattern"] = [0] + [1] * (layers - 1)
    optional: Values = {
        "num_query_groups": ((2, 4, 8), 0.5),
        "tied_embeddings": ((True,), 0.3),
        "mtp_num_layers": ((1,), 0.2),
        "sliding_window": (({"tokens": 1024, "full_every": 6},), 0.2),
        "moe": ((experts,), 0.3),
    }
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": rnd.choice((8, 16, 32)),
        "vocab_size": rnd.choice((50257, 128256)),
        **_some(rnd, optional),
    }


def _some(rnd: random.Random, values: Values) -> dict[str, Any]:
    return {key: rnd.choice(of_key) for key, (of_key, share) in values.items() if rnd.random() < share}
