"""CUDA graphs on Megatron-LM: which scopes each core captures, what it refuses beside them, and how they are asked for.

Core 0.16 names both in `--cuda-graph-scope`: the whole iteration is a scope of its own implementation, "local". Core
0.19 has an implementation "full_iteration" and names the parts of a layer in `--cuda-graph-modules`. Parts of a layer
are captured by Transformer Engine in both; no modules are the whole layer.
"""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.argument import expands_segments
from llmlaunch.frameworks.base import Requirement, implies, of_techniques
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Rule, Situation
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.switches import FULL_ITERATION, WHOLE_LAYER

KEY = "layout.cuda_graphs"
CONFIG = "megatron/core/transformer/transformer_config.py, core 0.16 and 0.19"
ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.16 and 0.19"
MODULES_SINCE = "0.19"  # --cuda-graph-modules beside --cuda-graph-impl full_iteration
ALONE = (FULL_ITERATION, WHOLE_LAYER)
OF_MIXTURES = frozenset({"moe_router", "moe_preprocess"})


def _scopes(recipe: Recipe) -> tuple[str, ...]:
    return recipe.techniques.cuda_graphs


def _has_dense_layers(recipe: Recipe) -> bool:
    return recipe.model.moe is None or not all(recipe.model.moe.layer_pattern)


def _asking(recipe: Recipe) -> set[str]:
    """Return the scopes in which the host asks for the tokens of each expert. Where a device's experts have a fixed
    number of rows, it asks for none (megatron/core/transformer/moe/token_dispatcher.py _HybridEPManager, core 0.19)."""
    fixed = recipe.techniques.expert_rank_capacity_factor is not None
    return {WHOLE_LAYER} if fixed else set(ALONE)


def _unpriced(shape: ModelShape) -> bool:
    return any(part is not None for part in (shape.linear_attention, shape.mamba, shape.compressed_attention))


GRAPH_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "graphs-one-kind",
        KEY,
        "full_iteration and layer hold every part of a layer already; write one of them alone, or parts of a layer",
        CONFIG,
        lambda r: len(_scopes(r)) > 1 and bool(set(ALONE) & set(_scopes(r))),
    ),
    Requirement(
        "graphs-of-a-device",
        KEY,
        "CUDA graphs need GPUs; remove it",
        CONFIG,
        lambda r: bool(_scopes(r)) and r.cluster.accelerator.kind != "gpu",
    ),
    Requirement(
        "graphs-whole-mixture",
        KEY,
        "full_iteration and layer cannot hold a mixture that drops no token: the host asks the device how many tokens "
        "each expert gets; write [attn, moe_router, moe_preprocess], or full_iteration with "
        "layout.expert_rank_capacity_factor",
        CONFIG,
        lambda r: r.model.moe is not None and bool(_asking(r) & set(_scopes(r))),
    ),
    Requirement(
        "graphs-mixture-parts",
        KEY,
        "moe_router and moe_preprocess need a model with experts; remove them",
        CONFIG,
        lambda r: r.model.moe is None and bool(OF_MIXTURES & set(_scopes(r))),
    ),
    Requirement(
        "graphs-dense-mlp",
        KEY,
        "mlp needs dense layers, and every layer of this model is a mixture; remove it",
        CONFIG,
        lambda r: "mlp" in _scopes(r) and not _has_dense_layers(r),
    ),
    Requirement(
        "graphs-preprocess-router",
        KEY,
        "moe_preprocess needs moe_router beside it",
        CONFIG,
        lambda r: "moe_preprocess" in _scopes(r) and "moe_router" not in _scopes(r),
    ),
    Requirement(
        "graphs-without-recurrence",
        KEY,
        "graphs of models with gated delta nets, Mamba-2 mixers or attention to pooled keys are not priced; remove it",
        "megatron/core/ssm, core 0.19",
        lambda r: bool(_scopes(r)) and _unpriced(r.model),
    ),
    Requirement(
        "graphs-without-sharding",
        KEY,
        "graphs of Megatron-FSDP (zero_stage 2 and 3) are not priced; take zero_stage 1, or remove it",
        "megatron/training/training.py get_model, core 0.19",
        lambda r: bool(_scopes(r)) and asks_for_sharding(r),
    ),
)


def _graphed(s: Situation, *scopes: str) -> bool:
    return bool(set(scopes) & set(s.techniques.cuda_graphs))


def _full_recompute(s: Situation) -> BoolColumn:
    parts = bool(s.techniques.cuda_graphs) and not _graphed(s, FULL_ITERATION)
    return implies(parts, np.not_equal(s.layouts.recompute, RECOMPUTE_FULL))


def _recomputed_mixture(s: Situation) -> BoolColumn:
    both = _graphed(s, "moe_router") and "moe" in s.techniques.recompute_modules
    return implies(both, np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE))


def _dropped_attention(s: Situation) -> BoolColumn:
    recomputed = "core_attn" in (s.techniques.recompute_modules or ("core_attn",))
    random = s.shape.attention_dropout > 0 and recomputed and _graphed(s, FULL_ITERATION, WHOLE_LAYER, "attn")
    return implies(random, np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE))


def _dropped_mlp(s: Situation) -> BoolColumn:
    recomputed = "mlp" in s.techniques.recompute_modules
    random = s.shape.hidden_dropout > 0 and recomputed and _graphed(s, FULL_ITERATION, WHOLE_LAYER, "mlp")
    return implies(random, np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE))


def _counted_on_the_host(s: Situation) -> bool:
    """Whether an alltoall with a capacity copies how many tokens each expert gets to the host."""
    capacity = s.shape.moe is not None and s.shape.moe.capacity_factor is not None
    return capacity and s.techniques.token_dispatcher in (None, "alltoall")


def _none(s: Situation) -> BoolColumn:
    return np.zeros(len(s.layouts), dtype=np.bool_)


GRAPH_RULES: tuple[Rule, ...] = of_techniques(
    Rule(
        "graphs-capacity",
        "cuda_graphs: moe_preprocess cannot hold an alltoall with model.moe.capacity_factor, which copies counts "
        "to the host",
        CONFIG,
        lambda s: implies(_graphed(s, "moe_preprocess") and _counted_on_the_host(s), _none(s)),
    ),
    Rule(
        "graphs-delayed-bias",
        "cuda_graphs: attn beside delay_weight_gradients needs attention without biases",
        "megatron/training/arguments.py validate_args, core 0.19",
        lambda s: implies(
            _graphed(s, "attn") and s.techniques.delay_weight_gradients and (s.shape.linear_bias or s.shape.qkv_bias),
            _none(s),
        ),
    ),
    Rule(
        "graphs-no-full-recompute",
        "cuda_graphs of parts of a layer need recompute none or selective; full needs full_iteration",
        CONFIG,
        _full_recompute,
    ),
    Rule(
        "graphs-no-recomputed-mixture",
        "cuda_graphs: moe_router excludes recompute_modules: moe",
        CONFIG,
        _recomputed_mixture,
    ),
    Rule(
        "graphs-attention-dropout",
        "cuda_graphs of attention that recomputes core_attn need model.attention_dropout: 0",
        CONFIG,
        _dropped_attention,
    ),
    Rule(
        "graphs-hidden-dropout",
        "cuda_graphs of an MLP that is recomputed need model.hidden_dropout: 0",
        CONFIG,
        _dropped_mlp,
    ),
    Rule(
        "graphs-no-offloaded-layers",
        "cuda_graphs exclude offload_layers",
        CONFIG,
        lambda s: implies(bool(s.techniques.cuda_graphs), np.equal(s.layouts.offload_layers, 0)),
    ),
    Rule(
        "graphs-no-offloaded-modules",
        "cuda_graphs: full_iteration excludes offload_modules, whose copies in flight core 0.19 wants counted "
        "(--fine-grained-offloading-max-inflight-offloads)",
        "megatron/core/transformer/transformer_config.py, core 0.19",
        lambda s: implies(_graphed(s, FULL_ITERATION) and bool(s.techniques.offload_modules), _none(s)),
    ),
    Rule(
        "graphs-hidden-exchange",
        "cuda_graphs: mlp excludes overlap_expert_communication and delay_weight_gradients",
        CONFIG,
        lambda s: implies(
            _graphed(s, "mlp") and s.techniques.overlaps_experts,
            _none(s),
        ),
    ),
)


def graph_scopes(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """Return the sets of scopes worth a search for this model, growing, without the empty one: for mixtures what runs
    before tokens travel and what their attention adds, for dense models attention, whole layers and the iteration."""
    if recipe.cluster.accelerator.kind != "gpu" or asks_for_sharding(recipe):
        return ()
    moe = recipe.model.moe
    if moe is None:
        return (("attn",), (WHOLE_LAYER,), (FULL_ITERATION,))
    counted = moe.capacity_factor is not None and recipe.techniques.token_dispatcher in (None, "alltoall")
    mixture = ("moe_router",) if counted else ("moe_router", "moe_preprocess")
    return (mixture, ("attn", *mixture))


def graph_implementation(techniques: Techniques) -> str | None:
    """Return the implementation that captures, as core 0.19 calls it; None where nothing is captured."""
    if not techniques.cuda_graphs:
        return None
    return FULL_ITERATION if FULL_ITERATION in techniques.cuda_graphs else "transformer_engine"


def graph_environment(recipe: Recipe) -> dict[str, str]:
    """Return the variables that graphs need. NCCL registers buffers of a graph by their address, which expandable
    segments unmap: arguments.py refuses the two together for Transformer Engine's graphs (core 0.16 and 0.19)."""
    return {"NCCL_GRAPH_REGISTER": "0"} if _scopes(recipe) and expands_segments(recipe) else {}
