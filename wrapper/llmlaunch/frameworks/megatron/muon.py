"""Muon on Megatron core: what it cannot be combined with, and what of it is not priced, as data."""

from __future__ import annotations

from llmlaunch.frameworks.base import Requirement
from llmlaunch.frameworks.megatron.parser import rendered_version
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding
from llmlaunch.layers.model import model_of
from llmlaunch.recipe.types import Recipe

KEY = "training.optimizer"
FACTORY = "megatron/core/optimizer/__init__.py _get_megatron_emerging_optimizer, core 0.19"
LAYER_WISE = "megatron/core/optimizer/layer_wise_optimizer.py LayerWiseDistributedOptimizer, core 0.19"
PRICED = {"Attention", "LatentAttention", "Mixture", "Mlp"}  # kinds of blocks


def _unpriced(recipe: Recipe) -> bool:
    shape, model = recipe.model, model_of(recipe.model)
    other = {type(block).__name__ for block in model.blocks} - PRICED
    several = model.heads_differ or shape.residual_streams > 1
    learned = shape.position_embedding == "learned_absolute"
    return bool(other or model.predicts) or several or learned or recipe.training.fp8_parameters


MUON_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "muon-in-bf16",
        KEY,
        "muon is for precision: bf16: Megatron core refuses fp16, and nobody has priced fp32",
        FACTORY,
        lambda r: r.training.muon and r.workload.precision != "bf16",
    ),
    Requirement(
        "muon-priced",
        KEY,
        "muon is not priced with gated delta nets, Mamba-2, sparse or pooled attention, heads of several widths, "
        "several residual streams, prediction heads, learned positions and fp8_parameters; remove it, or take another "
        "model",
        LAYER_WISE,
        lambda r: r.training.muon and _unpriced(r),
    ),
    Requirement(
        "muon-on-the-device",
        "layout.offload_optimizer",
        "the optimizer that steps on the host is AdamW; remove it, or training.optimizer: muon",
        "megatron/core/optimizer/__init__.py, core 0.19",
        lambda r: r.training.muon and r.techniques.offload_optimizer > 0,
    ),
    Requirement(
        "muon-expert-biases",
        KEY,
        "muon leaves biases to AdamW, and of experts core 0.19 cannot shard those; remove it, or take a model without "
        "biases",
        FACTORY,
        lambda r: r.training.muon and r.model.moe is not None and r.model.linear_bias,
    ),
    Requirement(
        "muon-one-instance",
        "layout.optimizer_instances",
        "with muon all data-parallel ranks share one optimizer; remove it",
        LAYER_WISE,
        lambda r: r.training.muon and r.techniques.optimizer_instances > 1,
    ),
    Requirement(
        "muon-not-sharded",
        "layout.zero_stage",
        "muon needs zero_stage 0 or 1: Megatron-FSDP, which is 2 and 3, has no matrix whole",
        "megatron/training/arguments.py validate_args, core 0.19",
        lambda r: r.training.muon and asks_for_sharding(r),
    ),
    Requirement(
        "muon-since-0.19",
        KEY,
        "muon of core 0.16 takes no --use-distributed-optimizer; name a newer backend.version",
        "megatron/training/arguments.py validate_args, core 0.16",
        lambda r: r.training.muon and rendered_version(r) == "0.16",
    ),
)
