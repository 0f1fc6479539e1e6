"""Small jobs for Megatron core, legal and illegal: models of every kind, techniques, and every layout of a world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmlaunch.assets import asset
from llmlaunch.backends.argument import words_of
from llmlaunch.backends.megatron.arguments import planned_arguments
from llmlaunch.backends.megatron.environment import environment
from llmlaunch.backends.megatron.legality import ALL_REQUIREMENTS, ALL_RULES
from llmlaunch.backends.megatron.versions import spoken_words
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, Layout, LayoutColumns, Situation
from llmlaunch.models.schema import check_shape
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload

__all__ = ["Case", "cases", "refusals"]

BASE = load_recipe(asset("recipes", "llama3-8b.yaml"), ())
WORLDS = (1, 2, 4, 6, 8, 12, 16)
SIZES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Case:
    """One job: a recipe without its pins, and one layout of its devices. `rank` is the pipeline rank that trains."""

    recipe: Recipe
    layout: Layout
    rank: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        spoken = spoken_words(self.recipe, planned_arguments(self.recipe, self.layout))
        return tuple(word for word in words_of(spoken.arguments) if isinstance(word, str))

    @property
    def environment(self) -> Mapping[str, str]:
        return environment(self.recipe, self.layout)

    def __str__(self) -> str:
        ways = self.recipe.techniques.as_json()
        return f"{self.recipe.model.name} {self.recipe.workload} {self.layout.describe()} {ways}"


def situation(recipe: Recipe, layouts: LayoutColumns) -> Situation:
    return Situation(layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes, techniques=recipe.techniques)


def refusals(case: Case) -> list[str]:
    """The keys of all requirements and rules of ours that refuse a job."""
    one = situation(case.recipe, LayoutColumns.of([case.layout]))
    broken = [requirement.key for requirement in ALL_REQUIREMENTS if requirement.broken(case.recipe)]
    return broken + [rule.key for rule in ALL_RULES if not rule.allows(one)[0]]


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Dense models as Llama, GPT and Qwen are, and mixtures of experts."""
    kind = draw(st.sampled_from(["llama", "gpt", "qwen", "mixture", "mixture"]))
    heads = draw(st.sampled_from([4, 6, 8, 12]))
    layers = draw(st.integers(1, 8))
    shape = ModelShape(
        name=kind,
        num_layers=layers,
        hidden_size=heads * 8,
        ffn_hidden_size=draw(st.sampled_from([48, 96, 100])),
        num_attention_heads=heads,
        num_query_groups=draw(st.sampled_from([groups for groups in (1, 2, 3, 4, 6, 8, 12) if heads % groups == 0])),
        head_dim=8,
        vocab_size=draw(st.sampled_from([500, 512])),
        max_position_embeddings=256,
        tied_embeddings=draw(st.booleans()),
        mtp_num_layers=draw(st.sampled_from([0, 0, 0, 1])),
    )
    if kind == "gpt":
        learned = draw(st.sampled_from(["learned_absolute", "learned_absolute", "none"]))
        shape = replace(
            shape, gated_mlp=False, linear_bias=True, normalization="LayerNorm", position_embedding=learned,
            num_query_groups=heads, attention_dropout=0.1, hidden_dropout=0.1,
        )  # fmt: skip
    if kind == "qwen":
        shape = replace(shape, qkv_bias=True, qk_layernorm=True)
    if kind == "mixture":
        shape = replace(shape, moe=draw(mixtures(layers)), linear_bias=draw(st.sampled_from([False, False, True])))
    return check_shape(shape)


@st.composite
def mixtures(draw: st.DrawFn, layers: int) -> MoeShape:
    given_ones = [(1,) * layers, tuple(int(i > 0) for i in range(layers)), tuple(i % 2 for i in range(layers))]
    return MoeShape(
        num_experts=draw(st.sampled_from([4, 8])),
        topk=draw(st.sampled_from([1, 2, 2, 2])),
        ffn_hidden_size=draw(st.sampled_from([32, 36])),
        shared_expert_ffn_hidden_size=draw(st.sampled_from([0, 0, 64, 66])),
        layer_pattern=draw(st.sampled_from([pattern for pattern in given_ones if any(pattern)])),
        capacity_factor=draw(st.sampled_from([None, None, 1.5])),
        token_dispatcher=draw(st.sampled_from([None, "alltoall", "allgather"])),
    )


@st.composite
def techniques(draw: st.DrawFn, shape: ModelShape) -> Techniques:
    """At most two at a time; modules are those the model has, as a recipe is held to."""
    mixture = shape.moe is not None
    recomputed = ["core_attn", "layernorm", "mlp", *(["moe", "moe_act"] if mixture else [])]
    offloaded = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
    offloaded += ["expert_fc1", "moe_act"] if mixture else []
    if shape.moe is not None and shape.moe.shared_expert_ffn_hidden_size:
        recomputed.append("shared_experts")
    ways = {
        "offload_modules": st.lists(st.sampled_from(offloaded), min_size=1, max_size=3, unique=True).map(tuple),
        "offload_optimizer": st.sampled_from([0.5, 1.0]),
        "loss": st.just("native"),
        "mlp_chunks": st.just(2),
        "delay_weight_gradients": st.just(True),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(ways)), max_size=2, unique=True))
    modules = draw(st.lists(st.sampled_from(recomputed), max_size=2, unique=True).map(tuple))
    method = draw(st.sampled_from(["uniform", "block"]))
    held = {name: draw(ways[name]) for name in chosen}
    return Techniques(recompute_modules=modules, recompute_method=method, **held)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    shape = draw(shapes())
    world = draw(st.sampled_from(WORLDS))
    precision = draw(st.sampled_from(["bf16", "bf16", "bf16", "fp16", "fp32"]))
    workload = Workload(
        draw(st.sampled_from([64, 64, 72, 96, 100])), draw(st.sampled_from([4, 8, 8, 12, 16, 24, 5])), precision
    )
    dtype = draw(st.sampled_from([None, None, "fp32", "bf16"] if precision == "bf16" else [None, "fp32"]))
    accelerator = replace(BASE.cluster.accelerator, compute_capability=draw(st.sampled_from(["8.0", "9.0", "10.0"])))
    return replace(
        BASE,
        model=shape,
        cluster=replace(BASE.cluster, devices_per_node=world, accelerator=accelerator),
        nodes=1,
        training=replace(BASE.training, workload=workload, gradient_dtype=dtype),
        techniques=draw(techniques(shape)),
        pins={},
    )


def every_layout(recipe: Recipe) -> LayoutColumns:
    """All even layouts of the recipe's devices over small sizes, legal or not."""
    world = recipe.world_size
    outer = np.array(
        [(t, p, c, world // (t * p * c)) for t, p, c in product(SIZES, repeat=3) if world % (t * p * c) == 0]
    )
    inner = INNER[recipe.model.moe is not None]
    tensor, pipeline, context, data = np.repeat(outer, len(inner), axis=0).T
    virtual, expert, expert_tensor, batch, sequence, zero, recompute, layers, offload = np.tile(
        inner, (len(outer), 1)
    ).T
    partition = np.zeros(len(tensor), dtype=np.int64)
    return LayoutColumns(
        tensor, pipeline, virtual, context, data, expert, expert_tensor, batch, sequence, zero, recompute, layers,
        offload, partition,
    )  # fmt: skip


RECOMPUTED = (
    (RECOMPUTE_NONE, 0),
    (RECOMPUTE_SELECTIVE, 0),
    (RECOMPUTE_FULL, 0),
    (RECOMPUTE_FULL, 1),
    (RECOMPUTE_FULL, 3),
)


def _inner(expert: tuple[int, ...], expert_tensor: tuple[int, ...]) -> NDArray[np.int64]:
    """All that can be said of a layout beside the outer sizes, in the order `every_layout` reads them."""
    ways = product((1, 2, 3), expert, expert_tensor, (1, 2), (0, 1), (0, 1), RECOMPUTED, (0, 1))
    return np.array([(*first, *recompute, offload) for *first, recompute, offload in ways], dtype=np.int64)


INNER = {True: _inner((1, 2, 3, 4, 8), (1, 2, 4)), False: _inner((1,), (1,))}


def with_stages(layouts: LayoutColumns, split: tuple[int, ...]) -> LayoutColumns:
    """Those layouts with as many stages as `split` names, with its layers in each."""
    kept = layouts.take(layouts.pipeline * layouts.virtual_pipeline == len(split))
    return replace(kept, partition=np.ones(len(kept), dtype=np.int64), partitions=((), split))


@st.composite
def splits(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """All layers of a model in some stages, of which some may be empty."""
    stages = draw(st.sampled_from([2, 3, 4, 6]))
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return tuple(b - a for a, b in pairwise([0, *cuts, layers]))


def refused_by(recipe: Recipe, layouts: LayoutColumns) -> NDArray[np.bool_]:
    """A row for each rule, True where it refuses the layout of the column."""
    asked = situation(recipe, layouts)
    return np.stack([~rule.allows(asked) for rule in ALL_RULES])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Half of them legal by our rules; of the others most break one rule and no other."""
    recipe, legal = draw(recipes()), draw(st.booleans())
    if legal and any(requirement.broken(recipe) for requirement in ALL_REQUIREMENTS):
        recipe = replace(recipe, techniques=NO_TECHNIQUES)
    layouts = every_layout(recipe)
    if draw(st.sampled_from([False, False, True])):
        layouts = with_stages(layouts, draw(splits(recipe.model.num_layers))) or layouts
    failed = refused_by(recipe, layouts)
    number = failed.sum(axis=0)
    broken = [place for place in range(len(ALL_RULES)) if np.any(failed[place])]
    if (legal and np.any(number == 0)) or not broken:
        rows = np.flatnonzero(number == 0)
    else:
        rule = failed[draw(st.sampled_from(broken))]
        rows = np.flatnonzero(rule & (number == number[rule].min()))
    layout = layouts.row(int(rows[draw(st.integers(0, len(rows) - 1))]))
    return Case(recipe, layout, draw(st.integers(0, layout.pipeline - 1)))
