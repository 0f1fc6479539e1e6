"""The gallery's Megatron-LM recipes, small enough for this machine: the same kind of model, the same kind of split."""

from __future__ import annotations

from pathlib import Path

from cpu_training import CpuJob, cpu_job

from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape
from llmlaunch.recipe.load import load_recipe

__all__ = ["LAYOUTS", "OBSTACLES", "STEPS", "gallery_jobs"]

STEPS = 3
LAYERS = 4
TRAINING = (
    "layout=auto",
    "training.sequence_length=64",
    "training.global_batch_size=8",
    f"training.steps={STEPS}",
    "training.learning_rate=0.005",
    "training.log_interval=1",
)
SHARED = Layout(data=2, zero_stage=1)
TENSOR = Layout(tensor=2, sequence_parallel=1, zero_stage=1)
STAGES = Layout(pipeline=2, zero_stage=1)
BOTH = Layout(tensor=2, pipeline=2, sequence_parallel=1, zero_stage=1)
EXPERTS = Layout(data=2, expert=2, zero_stage=1)

# Split in the ways their plans are split, each by two where it is split at all. Context parallelism needs Transformer
# Engine's attention.
LAYOUTS = {
    "deepseek-v3": Layout(pipeline=2, data=2, expert=2, zero_stage=1),
    "gpt3-175b": Layout(tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=1, zero_stage=1),
    "llama3-405b": Layout(tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=1, zero_stage=1),
    "llama3-405b-b200": BOTH,
    "llama3-70b": BOTH,
    "llama3-8b": SHARED,
    "llama3.1-70b-h200": Layout(tensor=2, sequence_parallel=1, zero_stage=1, recompute=RECOMPUTE_SELECTIVE),
    "llama3.1-8b-128k": Layout(tensor=2, sequence_parallel=1, recompute=RECOMPUTE_FULL, recompute_layers=1),
    "llama3.1-8b-a100-40gb": STAGES,
    "mixtral-8x22b": Layout(tensor=2, data=2, expert=2, sequence_parallel=1, zero_stage=1),
    "mixtral-8x7b": EXPERTS,
    "qwen2.5-72b": TENSOR,
    "qwen3-235b-a22b": Layout(pipeline=2, data=2, expert=2, zero_stage=1),
    "qwen3-30b-a3b": EXPERTS,
    "qwen3-32b": TENSOR,
    "qwen3-8b": SHARED,
}

OBSTACLES = {
    "deepseek-v2-lite": "the local layers refuse norms of a latent without a latent of the queries: `q_layernorm` is "
    "'non-trivial, but `q_lora_rank is None`' (multi_latent_attention.py, core 0.19.2); Transformer Engine fuses them",
}


def _model(shape: ModelShape) -> dict[str, object]:
    """The sizes of the shape, made small; what kind of model it is stays as it is."""
    groups = 4 if shape.num_query_groups == shape.num_attention_heads else 2
    small: dict[str, object] = {
        "num_layers": LAYERS,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": groups,
        "vocab_size": 250,
        "head_dim": 16,
    }
    if shape.sliding_window is not None:
        small["sliding_window.tokens"] = 16
        small["sliding_window.full_every"] = 2 if shape.sliding_window.full_every else 0
    return small | _latent(shape.mla) | _mixture(shape.moe)


def _latent(mla: MlaShape | None) -> dict[str, object]:
    if mla is None:
        return {}
    small: dict[str, object] = {"kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    if mla.q_lora_rank:
        small["q_lora_rank"] = 32
    return {f"mla.{name}": size for name, size in small.items()}


def _mixture(moe: MoeShape | None) -> dict[str, object]:
    if moe is None:
        return {}
    dense_first = 0 in moe.layer_pattern
    small: dict[str, object] = {
        "num_experts": 8,
        "topk": 2,
        "ffn_hidden_size": 48,
        "layer_pattern": [0 if dense_first else 1, *[1] * (LAYERS - 1)],
    }
    if moe.shared_expert_ffn_hidden_size:
        small["shared_expert_ffn_hidden_size"] = 48
    if moe.router.groups:
        small |= {"router.groups": 4, "router.group_topk": 2}
    return {f"moe.{name}": size for name, size in small.items()}


def gallery_jobs(recipes: list[Path]) -> list[CpuJob]:
    """Those that have no obstacle."""
    jobs = []
    for path in recipes:
        if path.stem in OBSTACLES:
            continue
        sizes = _model(load_recipe(path).model)
        model = tuple(f"model.{name}={value}" for name, value in sizes.items())
        recipe = load_recipe(path, (*model, *TRAINING))
        jobs.append(cpu_job(path.stem, recipe, LAYOUTS[path.stem]))
    return jobs
