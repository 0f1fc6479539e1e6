"""Parameters of every rank against a list of the model's weight tensors, written down one by one: how many elements a
device holds, trains, adapts and keeps in a narrower format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
from random_jobs import GEMMA, GPT, LATENT, SHAPES, SHARED, SINKS
from shapes import LLAMA3_8B, MIXTRAL, job_of

from llmlaunch.effects.adapters import adapter_parameters
from llmlaunch.effects.weight_versions import WeightVersionsEffect
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.states import states
from llmlaunch.memory.weights import (
    largest_parameter,
    linear_weights,
    rank_parameters,
    trained_parameters,
)
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import SQUARED, LinearAttention, MlaShape, ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters

QUERY_LATENT = replace(LATENT, name="query-latent", mla=MlaShape(1536, 512, 128, 64, 128), mtp_num_layers=0)
BIASED = replace(LLAMA3_8B, name="biased", linear_bias=True, qk_layernorm=True)
WHOLE_NORMS = replace(LLAMA3_8B, name="whole-norms", qk_layernorm=True, qk_norm_of_all_heads=True)
GATED = replace(LLAMA3_8B, name="gated", attention_gate=True, qkv_bias=True)
HYBRID = replace(SHARED, name="hybrid", qkv_bias=False, attention_gate=True, linear_attention=LinearAttention(3, 8, 16))
STATE_SPACES = replace(
    SHARED, name="state-spaces", num_layers=8, qkv_bias=False, gated_mlp=False, activation=SQUARED,
    position_embedding="none", mamba=Mamba("M*E-ME*M", 32, 64, 128, 4, mtp_pattern="*E"),
    moe=replace(SHARED.moe or MIXTRAL.moe, layer_pattern=(0, 0, 1, 0, 0, 1, 0, 0), latent_size=512),
)  # fmt: skip
ADAPTED_SHAPES = (*SHAPES, QUERY_LATENT, BIASED, SINKS, WHOLE_NORMS, GATED, HYBRID)
ALL_SHAPES = (*ADAPTED_SHAPES, STATE_SPACES)
LAYOUTS = (
    Layout(tensor=4, pipeline=2, data=2, expert=2, expert_tensor=2, sequence_parallel=1),
    Layout(tensor=2, pipeline=2, data=4, expert=4, layers_by_stage=(3, 5)),
)


@dataclass(frozen=True)
class Weight:
    """One weight tensor of a layer on one device. A linear layer multiplies `inputs` columns to `outputs` rows."""

    outputs: float
    inputs: float = 1.0
    is_linear: bool = True
    is_expert: bool = False

    @property
    def elements(self) -> float:
        return self.outputs * self.inputs


other = partial(Weight, is_linear=False)


def layer_weights(shape: ModelShape, layout: Layout, mixture: bool, linear: bool = False) -> Iterator[Weight]:
    """Yield the weights of one layer. First linears are split over tensor ranks by output, second ones by input."""
    h, t = shape.hidden_size, layout.tensor
    norm = h * (2 if shape.normalization == "LayerNorm" else 1)
    yield from (other(norm) for _ in range(4 if shape.post_norms else 2))
    yield from delta_net_weights(shape, t) if linear else attention_weights(shape, t)
    yield from mixture_weights(shape, layout) if mixture else mlp_weights(shape, shape.ffn_hidden_size, t)


def part_weights(shape: ModelShape, layout: Layout, letter: str) -> Iterator[Weight]:
    """Yield the weights of a layer of one part."""
    yield other(shape.hidden_size)
    if letter == "M":
        yield from mamba_weights(shape.hidden_size, layout.tensor)
    elif letter == "*":
        yield from attention_weights(shape, layout.tensor)
    else:
        mlp = letter == "-"
        yield from mlp_weights(shape, shape.ffn_hidden_size, layout.tensor) if mlp else mixture_weights(shape, layout)


def mamba_weights(h: int, t: int) -> Iterator[Weight]:
    """32 heads of 64 columns, their gates, 4 groups of heads that write to and read from 128 entries, and a step."""
    inner, convolved = 32 * 64, 32 * 64 + 2 * 4 * 128
    yield Weight((inner + convolved + 32) / t, h)
    yield Weight(h, inner / t)
    yield other(convolved / t, 4)
    yield other(convolved / t)  # the convolution's biases
    yield from (other(32 / t) for _ in range(3))  # decay, bias of the step, direct share
    yield other(inner / t)  # the norm behind the scan


def mixture_weights(shape: ModelShape, layout: Layout) -> Iterator[Weight]:
    moe, h, t = shape.moe, shape.hidden_size, layout.tensor
    assert moe is not None
    yield other(moe.num_experts, h)
    if shape.linear_bias:
        yield other(moe.num_experts)
    if moe.shared_expert_gate:
        yield other(1, h)
    if moe.shared_expert_ffn_hidden_size:
        yield from mlp_weights(shape, moe.shared_expert_ffn_hidden_size, t)
    if moe.latent_size:
        yield Weight(moe.latent_size, h)
        yield Weight(h, moe.latent_size)
    for _ in range(moe.num_experts // layout.expert):
        for weight in mlp_weights(shape, moe.ffn_hidden_size, layout.expert_tensor, moe.latent_size):
            yield replace(weight, is_expert=True)


def delta_net_weights(shape: ModelShape, t: int) -> Iterator[Weight]:
    """Queries and keys of 8 heads, values and gates of 16, all 128 wide; two rates of each value head."""
    h, keys, values = shape.hidden_size, 8 * 128, 16 * 128
    yield Weight((2 * keys + 2 * values + 2 * 16) / t, h)
    yield Weight(h, values / t)
    yield other((2 * keys + values) / t, 4)  # the convolution
    yield other(2 * 16 / t)
    yield other(128)


def attention_weights(shape: ModelShape, t: int) -> Iterator[Weight]:
    h, heads, mla = shape.hidden_size, shape.num_attention_heads, shape.mla
    if mla is None:
        groups = max(shape.num_query_groups, t)
        queries = heads * shape.head_dim / t
        outputs = (queries * (1 + shape.attention_gate), *(groups * shape.head_dim / t,) * 2)
        yield from (Weight(columns, h) for columns in outputs)
        yield Weight(h, queries)
        if shape.linear_bias or shape.qkv_bias:
            yield from map(other, outputs)
        if shape.linear_bias:
            yield other(h)
        if shape.attention_sinks:
            yield other(heads / t)
        if shape.qk_norm_of_all_heads:
            yield from map(other, outputs[:2])
        elif shape.qk_layernorm:
            yield from (other(shape.head_dim), other(shape.head_dim))
        return
    queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim) / t
    if mla.q_lora_rank is None:
        yield Weight(queries, h)
        yield other(h)  # core 0.19 has a norm before queries without a latent
    else:
        yield Weight(mla.q_lora_rank, h)
        yield other(mla.q_lora_rank)
        yield Weight(queries, mla.q_lora_rank)
    yield Weight(mla.kv_lora_rank + mla.qk_pos_emb_head_dim, h)
    yield other(mla.kv_lora_rank)
    yield Weight(heads * (mla.qk_head_dim + mla.v_head_dim) / t, mla.kv_lora_rank)
    yield Weight(h, heads * mla.v_head_dim / t)


def mlp_weights(shape: ModelShape, width: int, t: int, outer: int | None = None) -> Iterator[Weight]:
    h, firsts = outer or shape.hidden_size, 2 if shape.gated_mlp else 1
    yield from (Weight(width / t, h) for _ in range(firsts))
    yield Weight(h, width / t)
    if shape.linear_bias:
        yield from (other(width / t) for _ in range(firsts))
        yield other(h)


def rank_weights(shape: ModelShape, layout: Layout, rank: int) -> list[Weight]:
    """Return all weights of a pipeline rank's layers."""
    split = layout.layers_by_stage or (shape.num_layers // layout.pipeline,) * layout.pipeline
    start = sum(split[:rank])
    return [weight for layer in range(start, start + split[rank]) for weight in weights_of_layer(shape, layout, layer)]


def weights_of_layer(shape: ModelShape, layout: Layout, layer: int) -> Iterator[Weight]:
    if shape.mamba is not None:
        return part_weights(shape, layout, shape.mamba.pattern[layer])
    mixture = shape.moe is not None and bool(shape.moe.layer_pattern[layer])
    return layer_weights(shape, layout, mixture, is_linear(shape, layer))


def is_linear(shape: ModelShape, layer: int) -> bool:
    return shape.linear_attention is not None and layer % 3 < 2


def priced(shape: ModelShape, layout: Layout, techniques: Techniques = NO_TECHNIQUES) -> tuple[Job, RankColumns]:
    job = job_of(shape, layout, techniques=techniques)
    return job, all_ranks(job, LayoutColumns.of([layout]))


def fitting(shape: ModelShape, layout: Layout) -> Layout:
    """Return the layout as the model allows it: uneven stages are of eight layers."""
    if layout.layers_by_stage and shape.num_layers != sum(layout.layers_by_stage):
        half = shape.num_layers // 2
        layout = replace(layout, layers_by_stage=(half - 1, shape.num_layers - half + 1))
    return layout if shape.moe else replace(layout, expert=1, expert_tensor=1)


def elements(weights: list[Weight], *, is_expert: bool) -> float:
    return sum(weight.elements for weight in weights if weight.is_expert == is_expert)


each_shape = pytest.mark.parametrize("shape", ALL_SHAPES, ids=lambda shape: shape.name)
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())


@each_shape
@each_layout
def test_a_rank_holds_its_layers_its_tables_and_the_last_norm(shape: ModelShape, layout: Layout) -> None:
    shape = replace(shape, mtp_num_layers=0)
    layout = fitting(shape, layout)
    job, rows = priced(shape, layout)
    counts = rank_parameters(job, rows)
    table = shape.padded_vocab_size(layout.tensor) // layout.tensor * shape.hidden_size
    positions = (
        shape.max_position_embeddings * shape.hidden_size if shape.position_embedding == "learned_absolute" else 0
    )
    last_norm = shape.hidden_size * (2 if shape.normalization == "LayerNorm" else 1)
    outside = (table + positions, table + last_norm)
    for rank in range(2):
        weights = rank_weights(shape, layout, rank)
        assert counts.dense[rank] == pytest.approx(elements(weights, is_expert=False) + outside[rank], rel=1e-12)
        assert counts.expert[rank] == pytest.approx(elements(weights, is_expert=True), rel=1e-12)
    largest = max(sum(w.elements for w in weights_of_layer(shape, layout, layer)) for layer in range(shape.num_layers))
    assert counts.largest_layer[0] >= max(largest, table) * (1 - 1e-12)


@each_shape
@each_layout
def test_linear_layers_of_the_blocks_are_what_is_kept_narrow(shape: ModelShape, layout: Layout) -> None:
    """Norms of latents, which are fused into projections, are not."""
    shape = replace(shape, linear_bias=False, qkv_bias=False, mtp_num_layers=0)
    layout = fitting(shape, layout)
    job, rows = priced(shape, layout)
    dense, expert = (rows.sum_of(weights) for weights in linear_weights(job, rows))
    for rank in range(2):
        linears = [w for w in rank_weights(shape, layout, rank) if w.is_linear]
        assert dense[rank] == pytest.approx(elements(linears, is_expert=False), rel=1e-12)
        assert expert[rank] == pytest.approx(elements(linears, is_expert=True), rel=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", ADAPTED_SHAPES, ids=lambda shape: shape.name)
@each_layout
def test_adapters_have_both_sides_of_every_linear_layer(shape: ModelShape, layout: Layout, frozen: bool) -> None:
    layout = fitting(shape, layout)
    job, rows = priced(shape, layout, Techniques(adapters=Adapters(16)))
    dense, expert = adapter_parameters(job, rows, frozen)
    for rank in range(2):
        for is_expert, counted in ((False, dense), (True, expert)):
            linears = [w for w in rank_weights(shape, layout, rank) if w.is_linear and w.is_expert == is_expert]
            sides = sum(w.outputs + (0.0 if frozen else w.inputs) for w in linears)
            assert counted[rank] == pytest.approx(16 * sides, rel=1e-12)


@pytest.mark.parametrize("shape", [MIXTRAL, LATENT, SHARED, QUERY_LATENT], ids=lambda shape: shape.name)
def test_last_layers_that_are_trained_have_states_with_head_and_norm(shape: ModelShape) -> None:
    layout = Layout(tensor=2, data=4, expert=4)
    job, rows = priced(replace(shape, mtp_num_layers=0), layout, Techniques(trained_layers=2))
    trained = trained_parameters(job, rows, rank_parameters(job, rows))
    weights = [
        w
        for kind in (shape.moe.layer_pattern if shape.moe else ())[-2:]
        for w in layer_weights(shape, layout, bool(kind))
    ]
    table = shape.padded_vocab_size(2) // 2 * shape.hidden_size
    assert trained.dense[0] == pytest.approx(elements(weights, is_expert=False) + table + shape.hidden_size, rel=1e-12)
    assert trained.expert[0] == pytest.approx(elements(weights, is_expert=True), rel=1e-12)


@pytest.mark.parametrize("repeated", [False, True])
def test_modules_for_prediction_have_layers_of_their_own_and_may_share_them(repeated: bool) -> None:
    layout = Layout(tensor=2, pipeline=2, data=4, expert=4)
    shapes = [replace(STATE_SPACES, mtp_num_layers=n, mtp_repeated=repeated and n > 0) for n in (0, 2)]
    none, two = (rank_parameters(*priced(shape, layout)) for shape in shapes)
    module = [weight for letter in "*E" for weight in part_weights(STATE_SPACES, layout, letter)]
    h, table = STATE_SPACES.hidden_size, STATE_SPACES.padded_vocab_size(2) // 2 * STATE_SPACES.hidden_size
    dense = elements(module, is_expert=False) + 2 * h**2 / 2 + 3 * h
    modules = 1 if repeated else 2
    assert (two.dense - none.dense)[1] == pytest.approx(modules * dense + table, rel=1e-12)
    assert (two.expert - none.expert)[1] == pytest.approx(modules * elements(module, is_expert=True), rel=1e-12)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [LLAMA3_8B, MIXTRAL, GPT, GEMMA, SHARED], ids=lambda shape: shape.name)
def test_states_are_shared_by_those_that_hold_the_same_parameters(shape: ModelShape, zero_stage: int) -> None:
    """Of an expert there are fewer copies: tensor x context x data ranks, divided by the expert ranks."""
    layout = fitting(shape, Layout(tensor=2, context=2, data=8, expert=4, expert_tensor=2, zero_stage=zero_stage))
    job, rows = priced(shape, layout)
    dense, expert = (column[0] for column in (rank_parameters(job, rows).dense, rank_parameters(job, rows).expert))
    sharded = dense / 16 + expert / (32 / 8)
    state = states(job, rows)
    assert state.optimizer[0] == pytest.approx(12 * (sharded if zero_stage >= 1 else dense + expert))
    assert state.gradients[0] == pytest.approx(4 * (sharded if zero_stage >= 2 else dense + expert))
    largest = min(dense + expert, rank_parameters(job, rows).largest_layer[0])
    gathered = 2 * sharded + 2 * largest
    assert state.parameters[0] == pytest.approx(gathered if zero_stage >= 3 else 2 * (dense + expert))


def test_narrow_weights_of_experts_rest_beside_the_wide_ones_or_in_their_place() -> None:
    layout = Layout(tensor=2, data=4, expert=4, zero_stage=1)
    weights = [w for w in rank_weights(MIXTRAL, layout, 0) if w.is_linear]
    for instead in (False, True):
        facts = megatron_facts(MegatronOptions(fp8_recipe="tensorwise", fp8_parameters=instead))
        job = job_of(MIXTRAL, layout, facts)
        rows = all_ranks(job, LayoutColumns.of([layout]))
        counts, state = rank_parameters(job, rows), states(job, rows)
        narrow = sum(w.elements for w in weights)
        assert state.weight_copies[0] == pytest.approx(narrow)
        wide = counts.dense[0] + counts.expert[0] - narrow * instead
        assert state.parameters[0] == pytest.approx(2 * wide)


def test_muon_spares_a_state_of_the_matrices_of_the_last_layers_where_these_alone_are_trained() -> None:
    layout, last = Layout(tensor=2, data=4, expert=4, zero_stage=1), Techniques(trained_layers=2)
    weights = [w for w in layer_weights(MIXTRAL, layout, mixture=True) if w.is_linear] * 2
    facts = [megatron_facts(MegatronOptions(muon=muon)) for muon in (False, True)]
    rows = all_ranks(job_of(MIXTRAL, layout), LayoutColumns.of([layout]))
    adam, muon = (states(job_of(MIXTRAL, layout, each, last), rows) for each in facts)
    spared = 4 * (elements(weights, is_expert=False) / 4 + elements(weights, is_expert=True) / 2)
    assert (adam.optimizer - muon.optimizer)[0] == pytest.approx(spared)


def test_a_second_version_of_a_mixture_has_its_experts_too() -> None:
    layout = Layout(tensor=2, data=4, expert=4, zero_stage=1)
    job, rows = priced(MIXTRAL, layout, Techniques(weight_versions=3))
    counts = rank_parameters(job, rows)
    assert WeightVersionsEffect().lasting_states(job, rows)["weight_versions"][0] == pytest.approx(
        8 * (counts.dense + counts.expert)[0]
    )


def test_the_largest_parameter_is_a_table_or_the_first_linear_of_an_mlp_or_of_all_experts() -> None:
    layout = Layout(tensor=2, pipeline=2, data=4, expert=4)
    table = LLAMA3_8B.padded_vocab_size(2) // 2 * 4096
    assert largest_parameter(*priced(LLAMA3_8B, layout))[0] == table
    small = replace(LLAMA3_8B, vocab_size=1024)
    assert largest_parameter(*priced(small, layout))[1] == 2 * 4096 * 14336 / 2
    assert largest_parameter(*priced(MIXTRAL, layout))[0] == 2 * 2 * 4096 * 14336
