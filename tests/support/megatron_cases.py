"""Small jobs for Megatron core, legal and illegal: models of every kind, techniques, and every layout of a world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmlaunch.assets import asset
from llmlaunch.frameworks.argument import command_words
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.program import environment
from llmlaunch.frameworks.megatron.rules import requirements_for, rules_for
from llmlaunch.frameworks.megatron.sharding import FIRST_STAGE
from llmlaunch.frameworks.megatron.versions import rendered_arguments
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.models.checks import check_shape
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import SQUARED, LinearAttention, MlaShape, ModelShape, MoeShape, Router, SlidingWindow
from llmlaunch.planner.legality import situation
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import PagedStash
from llmlaunch.workload import NO_NUMBER_FORMATS, NumberFormats, OptimizerFormats

BASE = load_recipe(asset("recipes", "llama3-8b.yaml"), ())
WORLDS = (1, 2, 4, 6, 8, 12, 16)
SIZES = (1, 2, 3, 4, 6, 8)
MOST_PASSES = 3  # of layers in a step under fake tensors


@dataclass(frozen=True)
class Case:
    """One job: a recipe without its pins, and one layout of its devices. `rank` is the pipeline rank that trains."""

    recipe: Recipe
    layout: Layout
    rank: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        arguments, _ = rendered_arguments(self.recipe, planned_arguments(self.recipe, self.layout))
        return tuple(word for word in command_words(arguments) if isinstance(word, str))

    @property
    def until(self) -> str:
        """A whole step where it is short, else the first micro-batch's forward pass."""
        layout, layers = self.layout, self.recipe.model.num_layers
        passes = layers * layout.num_microbatches(self.recipe.workload.global_batch_size) / layout.pipeline
        return "step" if passes <= MOST_PASSES else "forward"

    @property
    def environment(self) -> Mapping[str, str]:
        return environment(self.recipe, self.layout)

    def __str__(self) -> str:
        ways, training = self.recipe.techniques.as_json(), self.recipe.training
        return f"{self.layout.describe()} {ways} {training.workload} {training.numbers} {self.recipe.model}"


def refusals(case: Case) -> list[str]:
    """The keys of all requirements and rules of ours that refuse a job."""
    one = situation(case.recipe, LayoutColumns.of([case.layout]))
    broken = [requirement.key for requirement in requirements_for() if requirement.broken(case.recipe)]
    return broken + [rule.key for rule in rules_for(case.recipe) if not rule.allows(one)[0]]


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Dense models as Llama, GPT and Qwen are, mixtures of experts, DeepSeek's latent attention with either, and layers
    of one part each."""
    kind = draw(st.sampled_from(["llama", "gpt", "qwen", "latent", "mixture", "mixture", "hybrid"]))
    heads, layers = draw(st.sampled_from([4, 6, 8, 12])), draw(st.integers(1, 6))
    shape = ModelShape(
        name=kind,
        num_layers=layers,
        hidden_size=heads * 16,
        ffn_hidden_size=draw(st.sampled_from([96, 128, 192, 100])),
        num_attention_heads=heads,
        num_query_groups=draw(st.sampled_from([groups for groups in (1, 2, 3, 4, 6, 8, 12) if heads % groups == 0])),
        head_dim=16,
        vocab_size=draw(st.sampled_from([500, 512])),
        max_position_embeddings=256,
        tied_embeddings=draw(st.booleans()),
        mtp_num_layers=draw(st.sampled_from([0, 0, 0, 1])),
    )
    if kind == "hybrid":
        return check_shape(draw(hybrids(shape)))
    if kind == "gpt":
        learned = draw(st.sampled_from(["learned_absolute", "learned_absolute", "none"]))
        shape = replace(
            shape, gated_mlp=False, activation="gelu", linear_bias=True, normalization="LayerNorm",
            position_embedding=learned, num_query_groups=heads, attention_dropout=0.1, hidden_dropout=0.1,
        )  # fmt: skip
    if kind == "qwen":
        shape = replace(shape, qkv_bias=True, qk_layernorm=True)
    if kind == "latent":
        ranks = MlaShape(draw(st.sampled_from([None, 48])), 32, 16, 16, draw(st.sampled_from([16, 32])))
        shape = replace(shape, num_query_groups=heads, mla=ranks, qk_layernorm=True)
    if kind == "mixture" or (kind == "latent" and draw(st.booleans())):
        shape = replace(shape, moe=draw(mixtures(layers)), linear_bias=draw(st.sampled_from([False] * 5 + [True])))
    if kind != "latent" and draw(st.sampled_from([False] * 5 + [True])):
        shape = replace(shape, attention_sinks=True, sliding_window=draw(st.sampled_from([None, SlidingWindow(16, 2)])))
    if kind in ("llama", "mixture") and not (shape.linear_bias or shape.sliding_window):
        shape = replace(shape, attention_gate=draw(st.sampled_from([False, False, True])))
        if draw(st.sampled_from([False] * 3 + [True])):
            shape = replace(shape, linear_attention=draw(delta_nets(layers)))
    if kind in ("llama", "mixture") and not (shape.attention_gate or shape.linear_attention):
        how = draw(st.sampled_from([{}, {}, {}, {"qk_l2_norm": True}, {"no_rope_every": 2}]))
        shape = replace(shape, **how)
    if shape.linear_bias and shape.gated_mlp and draw(st.booleans()):
        shape = replace(shape, activation="clamped_swiglu")
    return check_shape(shape)


@st.composite
def hybrids(draw: st.DrawFn, shape: ModelShape) -> ModelShape:
    """Mamba-2 mixers among layers of other parts; some modules of multi-token prediction are one."""
    count = shape.num_layers - 1
    others = "".join(draw(st.lists(st.sampled_from("M*-E"), min_size=count, max_size=count)))
    pattern = draw(st.sampled_from(["M" + others, others + "M"]))
    module = draw(st.sampled_from(["*E", "M-", "E"])) if shape.mtp_num_layers else None
    moe = None
    if "E" in pattern + (module or ""):
        moe = replace(draw(mixtures(shape.num_layers)), grouped_gemm=None)
        moe = replace(moe, latent_size=draw(st.sampled_from([None, None, 32])))
        moe = replace(moe, layer_pattern=tuple(int(letter == "E") for letter in pattern))
    groups = draw(st.sampled_from([1, 2, 4]))
    return replace(
        shape,
        mamba=Mamba(pattern, draw(st.sampled_from([4, 8])), 16, 16, groups, mtp_pattern=module),
        moe=moe,
        position_embedding=draw(st.sampled_from(["none", "none", "rope"])),
        mtp_repeated=module is not None and draw(st.booleans()),
        **draw(st.sampled_from([{}, {"gated_mlp": False, "activation": SQUARED}])),
    )


def delta_nets(layers: int) -> st.SearchStrategy[LinearAttention]:
    every = st.sampled_from([every for every in (0, 2, 3) if every <= layers])
    return st.builds(LinearAttention, every, st.sampled_from([2, 4]), st.sampled_from([4, 8]), st.just(16), st.just(16))


@st.composite
def mixtures(draw: st.DrawFn, layers: int) -> MoeShape:
    given_ones = [(1,) * layers, tuple(int(i > 0) for i in range(layers)), tuple(i % 2 for i in range(layers))]
    return MoeShape(
        num_experts=draw(st.sampled_from([4, 8])),
        topk=draw(st.sampled_from([1, 2, 2, 2])),
        ffn_hidden_size=draw(st.sampled_from([32, 64, 36])),
        shared_expert_ffn_hidden_size=draw(st.sampled_from([0, 0, 64, 66])),
        layer_pattern=draw(st.sampled_from([pattern for pattern in given_ones if any(pattern)])),
        capacity_factor=draw(st.sampled_from([None, None, 1.5])),
        grouped_gemm=draw(st.sampled_from([None, None, None, False])),
        router=draw(routers()),
    )


@st.composite
def routers(draw: st.DrawFn) -> Router:
    grouped = draw(st.sampled_from([False, False, True]))
    return Router(
        score_function=draw(st.sampled_from(["softmax", "softmax", "sigmoid"])),
        groups=2 if grouped else None,
        group_topk=1 if grouped else None,
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        expert_bias=draw(st.sampled_from([False, False, True])),
        normalize_topk=draw(st.sampled_from([True, True, False])),
        balancing=draw(st.sampled_from(["aux_loss", "seq_aux_loss", "none"])),
    )


@st.composite
def techniques(draw: st.DrawFn, shape: ModelShape) -> Techniques:
    """At most two at a time; modules are those the model has, as a recipe is held to."""
    moe = shape.moe
    shared = moe is not None and moe.shared_expert_ffn_hidden_size > 0
    recomputed = ["core_attn", "layernorm", "mlp", *(["moe", "moe_act"] if moe else [])]
    recomputed += ["shared_experts"] * shared + ["mla_up_proj"] * (shape.mla is not None)
    offloaded = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
    offloaded += ["expert_fc1", "moe_act"] if moe else []
    ways = {
        "offload_modules": st.lists(st.sampled_from(offloaded), min_size=1, max_size=3, unique=True).map(tuple),
        "offload_optimizer": st.sampled_from([0.5, 1.0]),
        "optimizer_instances": st.sampled_from([2, 3]),
        "loss": st.just("native"),
        "mlp_chunks": st.just(2),
        **({"delay_weight_gradients": st.just(True)} if moe else {}),
        **({"token_dispatcher": st.sampled_from(["alltoall", "allgather"])} if moe else {}),
        **({"overlap_shared_expert": st.just(True)} if shared else {}),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(ways)), max_size=2, unique=True))
    modules = draw(st.lists(st.sampled_from(recomputed), max_size=2, unique=True).map(tuple))
    method = draw(st.sampled_from(["uniform", "block"]))
    held = {name: draw(ways[name]) for name in chosen}
    return Techniques(recompute_modules=modules, recompute_method=method, **held)


@st.composite
def fixed_rows(draw: st.DrawFn, beside: Techniques) -> Techniques:
    """A fixed number of rows for experts, mostly with what it needs, and pages for what they save."""
    stashes = (PagedStash(), PagedStash(32, 1.0, 0.5), PagedStash(device_factor=0.5))
    return replace(
        beside,
        token_dispatcher="flex",
        flex_backend=draw(st.sampled_from(["hybridep"] * 4 + ["deepep"])),
        expert_rank_capacity_factor=draw(st.sampled_from([1.0, 1.5, 1.5, 1.5, None])),
        paged_stash=draw(st.sampled_from([None, PagedStash(), *stashes])),
    )


def wide_experts(shape: ModelShape) -> ModelShape:
    """The model with experts that one kernel takes."""
    assert shape.moe is not None
    moe = replace(shape.moe, ffn_hidden_size=64, capacity_factor=None, grouped_gemm=None, router=Router())
    silu = replace(shape, gated_mlp=True, activation="silu", linear_bias=False)
    return replace(silu, hidden_size=128, ffn_hidden_size=128, moe=moe)


@st.composite
def number_formats(draw: st.DrawFn) -> NumberFormats:
    """Of a recipe in bf16."""
    narrow = draw(st.sampled_from([None, "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]))
    kept = narrow not in (None, "nvfp4") and draw(st.booleans())
    dtype = st.sampled_from(["fp32", "bf16", "fp16", "fp8"])
    optimizer = draw(st.none() | st.builds(OptimizerFormats, st.sampled_from(["fp32", "fp16"]), dtype, dtype))
    return NumberFormats(narrow, kept, optimizer)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    shape = draw(shapes())
    world = draw(st.sampled_from(WORLDS))
    precision = draw(st.sampled_from(["bf16", "bf16", "bf16", "fp16", "fp32"]))
    length, sequences = draw(st.sampled_from([64, 64, 72, 96, 100])), draw(st.sampled_from([2, 4, 6, world, 2 * world]))
    dtype = draw(st.sampled_from([None, None, "fp32", "bf16"] if precision == "bf16" else [None, "fp32"]))
    numbers = draw(st.just(NO_NUMBER_FORMATS) | number_formats()) if precision == "bf16" else NO_NUMBER_FORMATS
    capability = draw(st.sampled_from(["8.0", "9.0", "9.0", "10.0", "10.0"]))
    accelerator = replace(BASE.cluster.accelerator, compute_capability=capability)
    ways = draw(techniques(shape))
    if shape.moe is not None and precision == "bf16" and draw(st.sampled_from([False] * 3 + [True])):
        shape = draw(st.sampled_from([wide_experts(shape)] * 3 + [shape]))
        ways = draw(fixed_rows(draw(st.sampled_from([NO_TECHNIQUES, ways]))))
        accelerator = replace(accelerator, compute_capability="10.0")
        numbers = draw(st.sampled_from([NumberFormats("mxfp8", False, None)] * 4 + [numbers]))
    return replace(
        BASE,
        model=shape,
        cluster=replace(BASE.cluster, devices_per_node=world, accelerator=accelerator),
        nodes=1,
        training=replace(
            BASE.training,
            sequence_length=length,
            global_batch_size=sequences,
            precision=precision,
            gradient_dtype=dtype,
            fp8=None if numbers.narrow == "nvfp4" else numbers.narrow,
            fp4="nvfp4" if numbers.narrow == "nvfp4" else None,
            fp8_parameters=numbers.narrow_parameters,
            optimizer=numbers.optimizer,
        ),
        techniques=ways,
        pins={},
    )


@st.composite
def words_of_a_layout(draw: st.DrawFn) -> Layout:
    """What is said of a layout beside its sizes."""
    recompute = draw(st.sampled_from([RECOMPUTE_NONE, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL]))
    layers = draw(st.sampled_from([0, 1, 3])) if recompute == RECOMPUTE_FULL else 0
    zero = draw(st.sampled_from([0, 1, 1, 1, 2, 3]))
    offload = draw(st.sampled_from([0, 0, 0, 1, 6]))
    return Layout(zero_stage=zero, recompute=recompute, recompute_layers=layers, offload_layers=offload)


NO_WORDS = Layout(zero_stage=1)


def every_layout(recipe: Recipe, words: Layout) -> LayoutColumns:
    """All even layouts of the recipe's devices over small sizes, legal or not, with these words."""
    world = recipe.world_size
    outer = np.array(
        [(t, p, c, world // (t * p * c)) for t, p, c in product(SIZES, repeat=3) if world % (t * p * c) == 0]
    )
    inner = INNER[recipe.model.moe is not None]
    tensor, pipeline, context, data = np.repeat(outer, len(inner), axis=0).T
    virtual, expert, expert_tensor, batch, sequence = np.tile(inner, (len(outer), 1)).T
    none = np.zeros(len(tensor), dtype=np.int64)
    sizes = LayoutColumns(
        tensor, pipeline, virtual, context, data, expert, expert_tensor, batch, sequence, none, none, none, none, none
    )
    if recipe.model.mamba is not None:  # whose stages are written out, and hold whole layers
        sizes = sizes.take(recipe.model.num_layers % (sizes.pipeline * sizes.virtual_pipeline) == 0)
    return sizes.with_techniques(words.zero_stage, words.recompute, words.recompute_layers, words.offload_layers)


def _inner(expert: tuple[int, ...], expert_tensor: tuple[int, ...]) -> NDArray[np.int64]:
    """The sizes that are free beside the outer ones, in the order `every_layout` reads them."""
    return np.array(list(product((1, 2, 3), expert, expert_tensor, (1, 2), (0, 1))), dtype=np.int64)


INNER = {True: _inner((1, 2, 3, 4, 8), (1, 2, 4)), False: _inner((1,), (1,))}


@st.composite
def splits(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """All layers of a model in some stages, of which some may be empty."""
    stages = draw(st.sampled_from([2, 3, 4, 6]))
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return tuple(b - a for a, b in pairwise([0, *cuts, layers]))


def refused_by(recipe: Recipe, layouts: LayoutColumns) -> NDArray[np.bool_]:
    """A row for each rule, True where it refuses the layout of the column."""
    asked = situation(recipe, layouts)
    return np.stack([~rule.allows(asked) for rule in rules_for(recipe)])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """About a third of them legal by our rules; of the others most break one rule and no other."""
    recipe, words, legal = draw(recipes()), draw(words_of_a_layout()), draw(st.booleans())
    split = draw(st.none() | splits(recipe.model.num_layers))
    if legal and any(requirement.broken(recipe) for requirement in requirements_for()):
        recipe = plain(recipe)
    layouts = in_stages(every_layout(recipe, words), split)
    failed = refused_by(recipe, layouts)
    if legal and not np.any(~failed.any(axis=0)):
        recipe = plain(recipe)
        layouts = every_layout(recipe, NO_WORDS)
        failed = refused_by(recipe, layouts)
    number = failed.sum(axis=0)
    broken = [place for place in range(len(failed)) if np.any(failed[place])]
    if (legal and np.any(number == 0)) or not broken:
        rows = np.flatnonzero(number == 0)
    else:
        rule = failed[draw(st.sampled_from(broken))]
        rows = np.flatnonzero(rule & (number == number[rule].min()))
    layout = layouts.row(int(rows[draw(st.integers(0, len(rows) - 1))]))
    if layout.zero_stage >= FIRST_STAGE:  # these are taken only where a recipe pins them
        recipe = replace(recipe, pins={"zero_stage": layout.zero_stage})
    held = layout.layers_by_rank  # a rank without layers would show nothing of them
    ranks = [rank for rank in range(layout.pipeline) if not held or held[rank]]
    return Case(recipe, layout, draw(st.sampled_from(ranks or [0])))


def plain(recipe: Recipe) -> Recipe:
    """Without techniques, number formats and words of a model that forbid most layouts, or all."""
    model, training = recipe.model, replace(recipe.training, fp8=None, fp4=None, fp8_parameters=False, optimizer=None)
    if model.moe is not None:
        activation = "silu" if model.gated_mlp else model.activation
        model = replace(model, linear_bias=False, activation=activation, moe=replace(model.moe, router=Router()))
    if model.position_embedding == "learned_absolute":
        model = replace(model, mtp_num_layers=0)
    return replace(recipe, model=model, techniques=NO_TECHNIQUES, training=training)


def in_stages(layouts: LayoutColumns, split: tuple[int, ...] | None) -> LayoutColumns:
    """Those layouts with as many stages as `split` names, with its layers in each; all of them where there are none."""
    if split is None:
        return layouts
    kept = layouts.take(layouts.pipeline * layouts.virtual_pipeline == len(split))
    return replace(kept, partition=np.ones(len(kept), dtype=np.int64), partitions=((), split)) if len(kept) else layouts
