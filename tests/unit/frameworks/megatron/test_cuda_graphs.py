"""`layout.cuda_graphs` becomes each core's own flags, and what a core refuses beside graphs is refused before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.cuda_graphs import GRAPH_RULES, graph_scopes
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.recipe.types import Recipe
from support.backend_output import refused_by, render, words_of
from support.recipes import recipe_of

DENSE, MIXTURE = "llama3-8b", "mixtral-8x7b"
LAYOUT = Layout(4, 1, data=8, sequence_parallel=1, zero_stage=1)


MOE = "layout.recompute=selective; layout.recompute_modules=[moe]"


def graphed(scopes: str, *overrides: str, name: str = DENSE, version: str = "0.19") -> Recipe:
    backend = f'backend={{name: megatron-lm, version: "{version}"}}'
    return recipe_of(name, f"layout.cuda_graphs=[{scopes}]", backend, *overrides)


FLAGS = [
    ("0.16", "full_iteration", "--cuda-graph-impl local --cuda-graph-scope full_iteration"),
    ("0.19", "full_iteration", "--cuda-graph-impl full_iteration"),
    ("0.16", "attn, mlp", "--cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp"),
    ("0.19", "attn, mlp", "--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp"),
    ("0.16", "layer", "--cuda-graph-impl transformer_engine"),
    ("0.19", "layer", "--cuda-graph-impl transformer_engine"),
]


@pytest.mark.parametrize(("version", "scopes", "flags"), FLAGS)
def test_each_core_is_told_in_its_own_flags(version: str, scopes: str, flags: str) -> None:
    command = " ".join(words_of(graphed(scopes, version=version), LAYOUT))
    assert f" {flags} --te-rng-tracker " in command
    assert ("--no-check-for-nan-in-loss-and-grad" in command) is (scopes == "full_iteration")


def test_what_nobody_asked_for_is_not_captured() -> None:
    assert "--cuda-graph-impl" not in words_of(recipe_of(DENSE), LAYOUT)
    assert "NCCL_GRAPH_REGISTER" not in render(recipe_of(DENSE), LAYOUT).environment


def test_nccl_registers_no_buffers_that_expandable_segments_may_move() -> None:
    assert render(graphed("attn"), LAYOUT).environment["NCCL_GRAPH_REGISTER"] == "0"
    whole = graphed("attn", "environment={PYTORCH_CUDA_ALLOC_CONF: 'max_split_size_mb:512'}")
    assert "NCCL_GRAPH_REGISTER" not in render(whole, LAYOUT).environment
    with pytest.raises(UserError, match="NCCL_GRAPH_REGISTER"):
        render(graphed("attn", "environment={NCCL_GRAPH_REGISTER: '1'}"), LAYOUT)


def test_a_mixture_that_counts_tokens_on_the_host_captures_no_preparation() -> None:
    counted = "model={base: mixtral-8x7b, moe: {capacity_factor: 1.5}}"
    both = graphed("moe_router, moe_preprocess", counted, name=MIXTURE)
    assert "graphs-capacity" in refused_by(both, LAYOUT, GRAPH_RULES)
    gathering = graphed("moe_router, moe_preprocess", counted, "layout.token_dispatcher=allgather", name=MIXTURE)
    assert "graphs-capacity" not in refused_by(gathering, LAYOUT, GRAPH_RULES)
    assert graph_scopes(recipe_of(MIXTURE, counted)) == (("moe_router",), ("attn", "moe_router"))


def test_a_graph_may_hold_a_mixture_with_a_fixed_number_of_rows() -> None:
    rows = "layout.token_dispatcher=flex", "layout.flex_backend=hybridep", "layout.expert_rank_capacity_factor=1.5"
    fixed = ("cluster=b200-x8", "training.fp8=mxfp8", *rows)
    assert MegatronLM().rules(graphed("full_iteration", *fixed, name=MIXTURE))
    with pytest.raises(UserError, match="full_iteration and layer cannot hold a mixture"):
        MegatronLM().rules(graphed("layer", *fixed, name=MIXTURE))


FULL, SELECTIVE = replace(LAYOUT, recompute=RECOMPUTE_FULL), replace(LAYOUT, recompute=RECOMPUTE_SELECTIVE)
BIASED = "layout.delay_weight_gradients=true; model={base: qwen3-30b-a3b, qkv_bias: true}"
DROPPED = "layout.recompute=selective; layout.recompute_modules=[mlp]; model={base: llama3-8b, hidden_dropout: 0.1}"
REFUSED = [
    ("graphs-no-full-recompute", DENSE, "attn", "layout.recompute=full", FULL, "full_iteration"),
    ("graphs-no-recomputed-mixture", MIXTURE, "moe_router", MOE, SELECTIVE, "attn"),
    ("graphs-attention-dropout", DENSE, "attn", "model={base: llama3-8b, attention_dropout: 0.1}", SELECTIVE, "mlp"),
    ("graphs-delayed-bias", "qwen3-30b-a3b", "attn", BIASED, LAYOUT, "moe_router"),
    ("graphs-hidden-exchange", "qwen3-30b-a3b", "mlp", "layout.overlap_expert_communication=true", LAYOUT, "attn"),
    ("graphs-hidden-dropout", DENSE, "mlp", DROPPED, SELECTIVE, "attn"),
    ("graphs-no-offloaded-layers", DENSE, "attn", "layout.offload_layers=3", replace(LAYOUT, offload_layers=3), ""),
    ("graphs-no-offloaded-modules", DENSE, "full_iteration", "layout.offload_modules=[core_attn]", LAYOUT, "attn"),
]


@pytest.mark.parametrize(
    ("rule", "name", "scopes", "overrides", "layout", "other"), REFUSED, ids=[r[0] for r in REFUSED]
)
def test_what_a_core_asserts_of_a_layout(
    rule: str, name: str, scopes: str, overrides: str, layout: Layout, other: str
) -> None:
    assert rule in refused_by(graphed(scopes, *overrides.split("; "), name=name), layout, GRAPH_RULES)
    if other:
        assert rule not in refused_by(graphed(other, *overrides.split("; "), name=name), layout, GRAPH_RULES)


@pytest.mark.parametrize("name", [DENSE, MIXTURE, "deepseek-v3"])
def test_every_scope_a_search_may_try_is_legal(name: str) -> None:
    recipe = recipe_of(MIXTURE, f"model={name}") if name == "deepseek-v3" else recipe_of(name)
    assert graph_scopes(recipe)
    for scopes in graph_scopes(recipe):
        techniques = replace(recipe.techniques, cuda_graphs=scopes)
        assert MegatronLM().rules(replace(recipe, techniques=techniques))
