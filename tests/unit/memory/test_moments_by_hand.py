"""What is alive at each moment, what the allocator and the driver add, and what a node's host holds, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_jobs import LATENT, SHARED
from shapes import LLAMA3_8B, MIXTRAL, job_of
from test_grouped_pricing import PAIRS

from llmlaunch.effects.recompute import recomputed_layer
from llmlaunch.facts import Gathering, MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, ZeroSettings, deepspeed_facts
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.sharding_rules import megatron_fsdp_facts
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.memory.activations import kept_activations, kept_embedding, largest_layer
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.memory.grouped_pricing import distinct_states, model_state_bytes, transient_bytes, worst_of_sums
from llmlaunch.memory.guard import least_torch_bytes
from llmlaunch.memory.host import HostNode, host_terms
from llmlaunch.memory.job import Correction, Job, RankColumns, all_ranks
from llmlaunch.memory.loss import final_norm, logits, saved_by_heads, waiting_logits
from llmlaunch.memory.moments import MomentTerms, state_terms, transient_terms
from llmlaunch.memory.peak import _other_streams
from llmlaunch.memory.states import States, least_state_bytes, states
from llmlaunch.memory.weights import layer_parameters, rank_parameters
from llmlaunch.memory.workspace import (
    embedding_backward,
    head_backward,
    layer_backward,
    mixture_forward,
)
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.units import GIB
from support.changed_facts import changed
from validation.fsdp import torchtitan_facts
from validation.megatron_deepspeed import megatron_deepspeed_facts

LOSS, HEAD, LAYER, FIRST_LAYER, STEP = range(5)
PARAMETERS = 8_030_261_248
EXPERTS_SPLIT = Layout(tensor=2, data=8, expert=4, sequence_parallel=1, zero_stage=1)
NODE = HostNode(processes=8, checkpoints=True)


def job_and_rows(
    shape: ModelShape,
    layout: Layout,
    facts: MemoryFacts,
    techniques: Techniques = NO_TECHNIQUES,
    microbatches: int = 8,
    length: int = 4096,
) -> tuple[Job, RankColumns]:
    job = job_of(shape, layout, facts, techniques, length, microbatches)
    return job, all_ranks(job, LayoutColumns.of([layout]))


def held(*arguments: Any, **more: Any) -> tuple[States, MomentTerms]:
    job, rows = job_and_rows(*arguments, **more)
    state = states(job, rows)
    return state, state_terms(job, rows, state)


def at(terms: MomentTerms, name: str, rank: int = 0) -> list[float]:
    return [float(moment[name][rank]) if name in moment else 0.0 for moment in terms.moments]


BUCKETS = 2 * 2 * 500_000_000  # two, of bf16 gradients


@pytest.mark.parametrize(
    ("zero_stage", "microbatches", "buffers"),
    [
        # whole gradients are accumulated, so they lie beside every later forward pass
        (1, 8, [2, 2, 2, 2 + 2 / 8]),
        (1, 1, [0, 0, 0, 2 + 2 / 8]),
        # shards are; at the end those of earlier micro-batches beside the last one's
        (2, 8, [2 / 8, 2 / 8, 2 / 8, 2 * 2 / 8]),
        (2, 1, [0, 0, 0, 2 / 8]),
    ],
)
def test_gradients_of_zero_are_alive_from_the_first_backward_pass_on(
    zero_stage: int, microbatches: int, buffers: list[float]
) -> None:
    _, terms = held(LLAMA3_8B, Layout(data=8, zero_stage=zero_stage), deepspeed_facts(), microbatches=microbatches)
    # a bucket that is collected beside one that only the table fills; ZeRO 1 keeps one between micro-batches
    kept, filling = BUCKETS / 2 * (zero_stage == 1 and microbatches > 1), 2 * (500_000_000 + 128256 * 4096)
    filled = [kept, filling, filling, BUCKETS]
    expected = [each * PARAMETERS + bucket for each, bucket in zip(buffers, filled, strict=True)]
    assert at(terms, "gradient_buffers")[:STEP] == pytest.approx(expected)


def test_without_zero_the_last_gradients_are_flattened_a_bucket_at_a_time() -> None:
    _, terms = held(LLAMA3_8B, Layout(data=8), deepspeed_facts())
    assert at(terms, "gradient_buffers")[FIRST_LAYER] == 2 * PARAMETERS + 1e9


def test_a_bucket_of_zero_3_is_there_all_the_time_and_a_flat_copy_while_it_runs_backward() -> None:
    _, terms = held(LLAMA3_8B, Layout(data=8, zero_stage=3), deepspeed_facts(DeepSpeedOptions(split_from_start=True)))
    accumulated = at(terms, "gradient_buffers")
    assert accumulated[LAYER] == BUCKETS
    assert accumulated[LOSS] == accumulated[STEP] == BUCKETS / 2


def test_gradients_that_backward_makes_narrow_beside_wide_ones() -> None:
    """Megatron-DeepSpeed with bf16: 2 bytes while it runs backward, beside 4 from start to end."""
    _, terms = held(LLAMA3_8B, Layout(data=8), megatron_deepspeed_facts("bf16"))
    assert at(terms, "gradient_buffers") == [2 * PARAMETERS] * 3 + [0]
    assert at(terms, "gradients") == [4 * PARAMETERS] * 4


def test_norms_are_taken_of_the_largest_gradient_in_double_precision_just_before_the_step() -> None:
    facts = megatron_deepspeed_facts("fp16")
    state, terms = held(LLAMA3_8B, Layout(data=1024, zero_stage=1), facts)
    shard = PARAMETERS / 1024
    assert state.norm[0] == pytest.approx(8 * shard)
    assert at(terms, "gradient_norm")[-1] == pytest.approx(8 * shard, abs=1)
    assert at(terms, "optimizer_step")[-1] == 0
    assert state.flat[0] == max(8 * shard, 1e9)
    few, _ = held(LLAMA3_8B, Layout(data=4, zero_stage=1), facts)
    table = LLAMA3_8B.padded_vocab_size(1) * 4096
    assert few.norm[0] == 8 * table
    assert few.flat[0] == few.step[0] == pytest.approx(6 * PARAMETERS / 4)


def test_blocks_of_a_mixture_are_gathered_and_reduced_with_their_experts() -> None:
    """torchtitan's pipeline keeps the whole stage gathered and reduces once; one stage keeps three blocks."""
    facts = torchtitan_facts(True, True, False, 1)
    layout = Layout(data=8, expert=4, zero_stage=3)
    counts = rank_parameters(*job_and_rows(MIXTRAL, layout, facts))
    table = 32000 * 4096
    root = 2 * table + 4096
    block = (counts.dense[0] + counts.expert[0] - root) / 32
    state, terms = held(MIXTRAL, layout, facts)
    assert state.gathered[0] == pytest.approx(2 * (3 * block + root))
    assert state.unreduced[0] == pytest.approx(2 * (block + table) + 4 * block)
    assert at(terms, "gathered_parameters") == pytest.approx([state.gathered[0]] * 4 + [0], abs=1)
    assert at(terms, "unreduced_gradients") == pytest.approx([0, 0, *[state.unreduced[0]] * 2, 0], abs=1)
    piped, _ = held(MIXTRAL, replace(layout, pipeline=2), facts)
    assert piped.gathered[0] == pytest.approx(2 * (16 * block + table))
    assert piped.unreduced[0] == pytest.approx(2 * block + 4 * 16 * block)


def test_a_mixture_is_set_up_with_its_experts_beside_their_buffers_or_with_clones() -> None:
    facts = megatron_facts()
    counts = rank_parameters(*job_and_rows(MIXTRAL, EXPERTS_SPLIT, facts))
    dense, expert = counts.dense[0], counts.expert[0]
    state, _ = held(MIXTRAL, EXPERTS_SPLIT, facts)
    assert state.placed[0] == pytest.approx(6 * (dense + expert) + 2 * expert)
    half, _ = held(MIXTRAL, EXPERTS_SPLIT, facts, Techniques(offload_optimizer=0.5))
    shards = dense / 8 + expert / 4
    assert half.placed[0] == pytest.approx(6 * (dense + expert) + 0.5 * 4 * (dense + expert + shards))
    wide = replace(EXPERTS_SPLIT, expert=8, expert_tensor=2)  # few experts a rank: the others move while those wait
    counts = rank_parameters(*job_and_rows(SHARED, replace(wide, expert=4, expert_tensor=4), facts))
    state, _ = held(SHARED, replace(wide, expert=4, expert_tensor=4), facts)
    moved = max(2 * counts.expert[0], 2 * counts.dense[0] - 4 * counts.expert[0])
    assert state.placed[0] == pytest.approx(6 * (counts.dense[0] + counts.expert[0]) + moved)


def test_a_step_that_runs_partly_on_the_host_brings_one_parameter_back_in_fp32() -> None:
    facts = megatron_facts(MegatronOptions(gradient_dtype="bf16"))
    layout = Layout(data=8, zero_stage=1)
    table = LLAMA3_8B.padded_vocab_size(1) * 4096
    for share in (0.25, 1.0):
        state, _ = held(LLAMA3_8B, layout, facts, Techniques(offload_optimizer=share))
        assert state.step[0] == pytest.approx((1 - share) * 4 * PARAMETERS / 8 + 4 * table)


def test_the_moments_of_a_step() -> None:
    """The loss, the head's backward pass, a layer's, where gradients come and go the first layer's, and the step."""
    facts = changed(megatron_facts(), expert_imbalance=1.0)
    layout = Layout(tensor=2, data=4, sequence_parallel=1)
    job, rows = job_and_rows(LLAMA3_8B, layout, facts)
    terms = transient_terms(job, rows)
    activations, embedding = (round(float(f(job, rows)[0])) for f in (kept_activations, kept_embedding))
    assert at(terms, "activations") == [activations] * 3 + [0]
    assert at(terms, "embedding") == [embedding] * 3 + [0]
    norm = float(final_norm(job, rows)[0])
    assert at(terms, "logits_and_loss") == [norm + float(logits(job, rows)[0]), norm, 0, 0]
    assert at(terms, "head_backward") == [0, float(head_backward(job, rows)[0]), 0, 0]
    assert at(terms, "layer_backward")[LAYER] == float(layer_backward(job, rows)[0])
    assert terms.lasting["workspace"][0] == (72 + 32) * 2**20
    titan = torchtitan_facts(True, True, False, 1)
    job, rows = job_and_rows(MIXTRAL, Layout(data=8, zero_stage=3), titan)
    terms = transient_terms(job, rows)
    assert at(terms, "activations")[FIRST_LAYER] == float(largest_layer(job, rows)[0])
    assert at(terms, "embedding")[FIRST_LAYER] == at(terms, "embedding")[LAYER] > 0


def test_a_grouped_product_has_workspaces_of_its_own() -> None:
    shape = replace(MIXTRAL, moe=replace(MIXTRAL.moe, grouped_gemm=True))
    terms = transient_terms(*job_and_rows(shape, EXPERTS_SPLIT, megatron_facts()))
    assert terms.lasting["workspace"][0] == (72 + 5 * 32) * 2**20


@pytest.mark.parametrize("length", [64, 1024])  # the tables' gradients outweigh the layers, or wait beside them
def test_a_prediction_heads_layer_runs_backward_first_beside_the_last_norm_and_the_waiting_table(length: int) -> None:
    facts = changed(megatron_facts(), expert_imbalance=1.0)
    layout = Layout(tensor=2, data=4, sequence_parallel=1)
    shape = replace(LATENT, mtp_num_layers=1)
    job, rows = job_and_rows(shape, layout, facts, length=length)
    terms = transient_terms(job, rows)
    norm, heads = (float(f(job, rows)[0]) for f in (final_norm, saved_by_heads))
    assert at(terms, "logits_and_loss")[LAYER] == norm
    assert at(terms, "logits_and_loss")[HEAD] == norm + float(waiting_logits(job, rows)[0])
    assert at(terms, "logits_and_loss")[LOSS] == norm + float(logits(job, rows)[0])
    embedded, table = 2 * length * 2048 / 2, 102400 / 2 * 2048 * 2
    backward = float(layer_backward(job, rows)[0])
    kept = float(kept_activations(job, rows)[0]) + heads
    # the embedding's own gradient, the sum of both, and its output's, less what the layers have freed
    tables = 2 * table + embedded - kept
    expected = max(
        backward, backward + table - heads - embedded - norm, float(np.max(mixture_forward(job, rows))), tables
    )
    assert at(terms, "layer_backward")[LAYER] == pytest.approx(expected, abs=1)
    assert at(terms, "activations")[LOSS] == pytest.approx(kept, abs=1)
    assert at(terms, "embedding")[LOSS] == length * 32 + embedded
    assert (
        at(transient_terms(*job_and_rows(replace(shape, mtp_num_layers=0), layout, facts)), "logits_and_loss")[LAYER]
        == 0
    )


def test_tables_of_prediction_heads_on_the_last_stage_are_the_peak_of_short_sequences() -> None:
    layout = Layout(pipeline=2, data=4)
    job, rows = job_and_rows(replace(LATENT, mtp_num_layers=2), layout, megatron_facts(), length=64)
    heads = float(saved_by_heads(job, rows)[1])
    assert at(transient_terms(job, rows), "layer_backward", 1)[LAYER] == pytest.approx(
        2 * 102400 * 2048 * 2 - heads, abs=1
    )


def test_a_mixture_that_runs_forward_again_has_what_is_recomputed_besides() -> None:
    shape = replace(SHARED, moe=replace(SHARED.moe, ffn_hidden_size=64))
    for recompute in (0, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL):
        layout = replace(EXPERTS_SPLIT, recompute=recompute)
        techniques = Techniques(recompute_modules=("moe_act",), delay_weight_gradients=True)
        job, rows = job_and_rows(shape, layout, megatron_facts(), techniques)
        terms = transient_terms(job, rows)
        again = at(terms, "recomputed_layer")[LAYER]
        forward = float(np.max(mixture_forward(job, rows)))
        backward = float(layer_backward(job, rows)[0])
        expected = max(backward, forward if recompute == RECOMPUTE_FULL else forward - again)
        assert (again > 0) == bool(recompute)
        assert at(terms, "layer_backward")[LAYER] == pytest.approx(expected, abs=2)
        assert at(terms, "recomputed_layer")[LAYER] == pytest.approx(float(recomputed_layer(job, rows)[0]), abs=1)


@pytest.mark.parametrize("backend", PAIRS)
def test_peaks_of_ranks_of_layouts_and_of_halves_are_one(backend: str) -> None:
    """And what is reserved is what is alive at the worst moment, the cache's share, and what lies free beside it."""
    facts = PAIRS[backend][1]
    for shape, layout in (
        (LLAMA3_8B, Layout(data=8, zero_stage=1)),
        (MIXTRAL, Layout(2, 2, data=8, expert=4, zero_stage=3)),
    ):
        correction = Correction(torch_share=0.1, outside_bytes=GIB)
        job = replace(job_of(shape, layout, facts), correction=correction)
        columns = LayoutColumns.of([layout])
        one = estimate(job, layout, node=NODE)
        state_columns, of = distinct_states(job, columns)
        halves = worst_of_sums(transient_bytes(job, columns, NODE), model_state_bytes(job, state_columns, NODE), of)
        assert one.worst.device_bytes == worst_ranks(job, columns).device_bytes[0] == halves.device_bytes[0]
        assert one.host_bytes_per_node == halves.host_bytes[0]
        plain = estimate(replace(job, correction=Correction()), layout).ranks
        for before, after in zip(plain, one.ranks, strict=True):
            assert after.terms["measured_residual"] == pytest.approx(0.1 * before.allocated_bytes, abs=2)
            assert after.terms["allocator_cache"] == pytest.approx(1.1 * before.terms["allocator_cache"], abs=3)
            assert after.reserved_bytes == pytest.approx(1.1 * before.reserved_bytes, abs=2)
            assert after.device_bytes - after.reserved_bytes - before.device_bytes + before.reserved_bytes == GIB


def test_pieces_that_lie_free_are_reserved_beside_what_is_alive() -> None:
    """Of eager logits in a loss of torch's, a third of what there was; of FSDP's streams, what they gathered and
    reduced while another moment is the worst."""
    facts = changed(torchtitan_facts(False, False, False, 1), cache_share=0.0)
    layout = Layout(data=8, zero_stage=3)
    [rank] = estimate(job_of(LLAMA3_8B, layout, facts, length=65536), layout).ranks
    gradients = 4 * PARAMETERS / 8
    assert rank.terms["gradients"] == pytest.approx(gradients, rel=1e-6)
    assert rank.terms["allocator_cache"] == 2 * 65536 * 128256
    [short] = estimate(job_of(LLAMA3_8B, layout, facts, length=8), layout).ranks
    block, head = 218_112_000, 128256 * 4096
    unreduced = 2 * (block + head) + 4 * block
    assert short.terms["unreduced_gradients"] == unreduced  # the worst moment is a layer's backward pass
    running = unreduced + short.terms["activations"] + short.terms["layer_backward"] + short.terms["embedding"]
    stepping = 4 * PARAMETERS / 8  # beside it lies what was gathered before
    assert short.terms["allocator_cache"] == pytest.approx(stepping - running, abs=2)


def test_communicators_are_one_for_every_group_and_neighbour() -> None:
    """world, tensor, data twice, pipeline twice, the model, the shares of outputs, one or two neighbours; ends of a
    model with tied tables have one more."""
    facts = megatron_deepspeed_facts("fp16")
    layout = Layout(tensor=2, pipeline=4, data=2)
    for tied in (False, True):
        ranks = estimate(job_of(replace(LLAMA3_8B, tied_embeddings=tied), layout, facts), layout).ranks
        each = facts.exchange.communicator_bytes
        counts = [rank.terms["communicators"] / each for rank in ranks]
        assert counts == pytest.approx([9 + tied, 10, 10, 9 + tied], rel=1e-6)
        assert all(
            rank.device_bytes - rank.reserved_bytes == rank.terms["context"] + rank.terms["communicators"]
            for rank in ranks
        )


def test_a_nodes_host_holds_states_of_a_mixture_and_its_adapters() -> None:
    facts = deepspeed_facts(DeepSpeedOptions(split_from_start=True))
    layout = Layout(data=8, expert=4, zero_stage=3)
    techniques = Techniques(offload_optimizer=0.5, offload_parameters=True)
    resident = HostNode(processes=8, resident=True)
    job, rows = job_and_rows(MIXTRAL, layout, facts, techniques)
    counts = rank_parameters(job, rows)
    shards = counts.dense[0] / 8 + counts.expert[0] / 2
    host = host_terms(job, rows, resident)
    assert host["offloaded_optimizer"][0] == pytest.approx(0.5 * 18 * shards)
    assert host["offloaded_parameters"][0] == pytest.approx(2 * shards)
    adapted = replace(techniques, adapters=Adapters(16))
    job, rows = job_and_rows(MIXTRAL, layout, facts, adapted)
    h, ffn = 4096, 14336
    adapters = 16 * 32 * ((3 * h + 6144 + 4096 + h) / 8 + 2 * (3 * h + 3 * ffn) / 2)
    host = host_terms(job, rows, resident)
    assert host["offloaded_optimizer"][0] == pytest.approx(0.5 * 18 * adapters)
    assert host["offloaded_parameters"][0] == pytest.approx(2 * (shards + adapters))
    stages = job_and_rows(MIXTRAL, replace(layout, zero_stage=1), facts)
    saved = host_terms(*stages, NODE)["checkpoint"][0]
    assert saved == pytest.approx(max(2 * (counts.dense[0] + counts.expert[0]), 4 * shards))
    half = host_terms(*job_and_rows(MIXTRAL, layout, facts, Techniques(offload_optimizer=0.75)), NODE)["checkpoint"][0]
    assert half == pytest.approx(max(2 * shards, 4 * 0.25 * shards))
    megatron = job_and_rows(MIXTRAL, EXPERTS_SPLIT, megatron_facts(), Techniques(offload_optimizer=0.75))
    split = rank_parameters(*megatron)
    rest = split.dense[0] / 8 + split.expert[0] / 4
    assert host_terms(*megatron, NODE)["checkpoint"][0] == pytest.approx((12 * 0.25 + 2) * rest)


@pytest.mark.parametrize(("zero_stage", "of_dense", "of_experts"), [(0, 1, 1), (1, 8, 4)])
@pytest.mark.parametrize("dense_layers", [0, 4])
def test_pinned_states_of_a_mixture_are_rounded_parameter_by_parameter(
    zero_stage: int, of_dense: int, of_experts: int, dense_layers: int
) -> None:
    shape = replace(MIXTRAL, moe=MoeShape(8, 2, 14336, 0, (0,) * dense_layers + (1,) * (32 - dense_layers)))
    layout = replace(EXPERTS_SPLIT, zero_stage=zero_stage)
    job, rows = job_and_rows(shape, layout, megatron_facts(), Techniques(offload_optimizer=1.0))
    counts = rank_parameters(job, rows)
    shards = counts.dense[0] / of_dense + counts.expert[0] / of_experts
    dense, experts = (float(rows.sum_of(each)[0]) for each in layer_parameters(job, rows))
    layers = dense / of_dense + experts / of_experts

    def rounded(elements: float) -> float:
        return float(2 ** np.ceil(np.log2(4 * elements)) / (4 * elements))

    first_of_experts, table = 2 * 2 * 4096 * 14336 / of_experts, 32000 * 4096 / 2 / of_dense
    pinned = layers * rounded(first_of_experts) + (shards - layers) * rounded(table)
    host = host_terms(job, rows, NODE)["offloaded_optimizer"][0]
    assert host == pytest.approx(8 * shards + 8 * pinned)


def test_swapped_activations_on_the_host_are_the_share_that_is_not_recomputed() -> None:
    facts, layout = megatron_facts(), Layout(tensor=2, data=4, sequence_parallel=1)
    resident = HostNode(processes=8, resident=True)
    job, rows = job_and_rows(LLAMA3_8B, layout, facts, Techniques(swapped_share=0.3))
    plain, swapped = (float(kept_activations(j, rows)[0]) for j in (replace(job, techniques=NO_TECHNIQUES), job))
    layer = plain / 32
    whole = 4096 * 2 * (4096 / 2 + 4096 / 2)
    share = (whole + 0.3 * (layer - whole)) / layer
    assert host_terms(job, rows, resident)["offloaded_activations"][0] == pytest.approx((plain - swapped) * share)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_the_guard_knows_what_a_rank_holds_at_least(zero_stage: int) -> None:
    """Exact counts, split by all that may split them: the layers of a rank and its tables; 2 + 4 + 12 bytes, less the
    state that Muon spares, less what is on the host, corrected by measured runs, and a KiB for rounding."""
    layout = Layout(tensor=2, pipeline=2, data=4, expert=2, zero_stage=zero_stage)
    job, rows = job_and_rows(
        MIXTRAL, layout, megatron_facts(MegatronOptions(muon=True)), Techniques(offload_optimizer=0.5)
    )
    count = count_parameters(MIXTRAL)
    layer = count.layers[0]
    dense, expert = (16 * (layer.total - layer.experts) + count.embedding) / 2, 16 * layer.experts / 2
    shards = dense / 4 + expert * 2 / 8 if zero_stage else dense + expert
    expected = 6 * (dense + expert) + 0.5 * 8 * shards - 1024
    assert least_torch_bytes(job, rows)[0] == pytest.approx(expected)
    more = replace(job, correction=Correction(torch_share=0.1))
    assert least_torch_bytes(more, rows)[0] == pytest.approx(1.1 * (expected + 1024) - 1024)


def test_the_floor_of_a_split_is_the_mean_of_its_stages() -> None:
    layout = Layout(tensor=2, pipeline=2, data=4, zero_stage=1)
    job, rows = job_and_rows(MIXTRAL, layout, megatron_facts(MegatronOptions(fp8_recipe="tensorwise")))
    state = states(job, rows)
    mean = float(np.mean(state.parameters + state.weight_copies + state.gradients + state.optimizer))
    floor = least_state_bytes(job, LayoutColumns.of([layout]))[0]
    assert floor == pytest.approx(mean - 8 + job.facts.allocator.context_bytes)
    outside = replace(job, correction=Correction(torch_share=0.1, outside_bytes=GIB))
    floor = least_state_bytes(outside, LayoutColumns.of([layout]))[0]
    assert floor == pytest.approx(1.1 * (mean - 8) + job.facts.allocator.context_bytes + GIB)


def test_the_first_layers_backward_pass_has_one_layer_the_table_and_what_waits_for_it() -> None:
    """Where gradients come and go: of a short sequence the table's own gradient is more than a layer's; a tied one
    besides waits while the layer runs."""
    facts, layout = deepspeed_facts(), Layout(data=8, zero_stage=1)
    table, h = 128256 * 4096, 4096
    job, rows = job_and_rows(replace(LLAMA3_8B, num_layers=2), layout, facts, length=64)
    layer = float(largest_layer(job, rows)[0])
    terms = transient_terms(job, rows)
    assert at(terms, "activations")[FIRST_LAYER] == layer
    assert at(terms, "layer_backward")[FIRST_LAYER] == pytest.approx(2 * table + 2 * 64 * h - layer, rel=1e-6)
    again = replace(layout, recompute=RECOMPUTE_FULL)
    job, rows = job_and_rows(replace(LLAMA3_8B, num_layers=2), again, facts, length=64)
    terms = transient_terms(job, rows)
    expected = 2 * table + 2 * 64 * h - 64 * 2 * h - float(recomputed_layer(job, rows)[0])
    assert at(terms, "layer_backward")[FIRST_LAYER] == pytest.approx(expected, rel=1e-6)
    tied = replace(LLAMA3_8B, tied_embeddings=True)
    job, rows = job_and_rows(tied, layout, facts)
    expected = float(layer_backward(job, rows)[0]) + 2 * table
    assert at(transient_terms(job, rows), "layer_backward")[FIRST_LAYER] == expected


def test_a_rank_that_trains_no_layer_runs_none_backward() -> None:
    layout = Layout(pipeline=2, data=4)
    job, rows = job_and_rows(LLAMA3_8B, layout, megatron_facts(), Techniques(trained_layers=4))
    first, last = transient_terms(job, rows).moments[LAYER]["layer_backward"]
    assert (first, last) == (0, float(layer_backward(job, rows)[1]))


def test_narrow_weights_of_a_sharded_mixture_and_its_gathered_experts() -> None:
    options = MegatronOptions(fp8_recipe="mxfp8", fp8_parameters=True, compute_capability=10.0)
    facts, layout = megatron_fsdp_facts(options), Layout(data=8, expert=4, zero_stage=3)
    job, rows = job_and_rows(MIXTRAL, layout, facts)
    linears, experts = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024), 32 * 2 * 3 * 4096 * 14336
    counts, state = rank_parameters(job, rows), states(job, rows)
    assert counts.expert[0] == experts
    assert state.weight_copies[0] == pytest.approx(2 * (linears / 8 + experts / 2) + (linears + experts) / 16)
    assert state.parameters[0] == pytest.approx(2 * (counts.dense[0] - linears) / 8)
    few = replace(MIXTRAL, num_layers=1, vocab_size=1024, moe=replace(MIXTRAL.moe, layer_pattern=(1,)))
    one_by_one = ZeroSettings(gathering=Gathering(sequential=True))
    job, rows = job_and_rows(few, layout, deepspeed_facts(DeepSpeedOptions(zero=one_by_one, split_from_start=True)))
    counts = rank_parameters(job, rows)
    resting, gathered = counts.dense[0] / 8 + counts.expert[0] / 2, counts.dense[0] + counts.expert[0]  # all of it
    assert states(job, rows).parameters[0] == pytest.approx(2 * (resting + gathered))


def test_narrow_gradients_of_backward_beside_accumulated_ones_to_the_end() -> None:
    facts = changed(deepspeed_facts(), backward_gradient_bytes=(0.0, 1.0, 0.0, 0.0))
    without, beside = (
        at(held(LLAMA3_8B, Layout(data=8, zero_stage=1), each)[1], "gradient_buffers")[:STEP]
        for each in (deepspeed_facts(), facts)
    )
    assert [b - a for a, b in zip(without, beside, strict=True)] == [PARAMETERS] * 4


def test_a_table_without_room_among_freed_logits_gets_a_segment_of_its_own() -> None:
    """Of short sequences: its gradient, beside the whole of a layer's backward pass."""
    layout = Layout(data=4)
    facts = changed(megatron_facts(), mixture_cache_share=0.0, whole_segments=True)
    for length, lone in ((512, True), (8192, False)):
        job, rows = job_and_rows(MIXTRAL, layout, facts, length=length)
        terms = transient_terms(job, rows)
        state = state_terms(job, rows, states(job, rows))
        lasting = sum(float(column[0]) for column in (*terms.lasting.values(), *state.lasting.values()))
        layer = sum(float(c[0]) for c in (*terms.moments[LAYER].values(), *state.moments[LAYER].values()))
        first = estimate(job, layout, 8).ranks[0]
        table = 2 * 32000 * 4096 * lone
        assert first.reserved_bytes == max(lasting + layer + table, first.allocated_bytes)


@pytest.mark.parametrize("shape", [LLAMA3_8B, MIXTRAL], ids=["dense", "mixture"])
@pytest.mark.parametrize(
    ("microbatches", "share"),
    [
        (2, 0.75),  # all four chunks are alive; the first is one of them, and nothing takes the place of another two
        (16, 0.2),  # five chunks are alive, and what is freed but for the first is filled again
    ],
)
def test_the_first_chunks_backward_pass_frees_a_share_of_what_is_in_flight(
    shape: ModelShape, microbatches: int, share: float
) -> None:
    """Two stages of two chunks, groups of two micro-batches; every chunk is a quarter of the model."""
    layout = Layout(pipeline=2, virtual_pipeline=2, data=8)
    job = job_of(shape, layout, megatron_facts(), NO_TECHNIQUES, 4096, microbatches)
    rows = all_ranks(job, LayoutColumns.of([layout]))
    nothing, kept = (embedding_backward(job, rows, np.full(2, size))[0] for size in (0.0, 1e9))
    assert nothing - kept == pytest.approx(share * 1e9)
    assert nothing == 2 * shape.vocab_size * shape.hidden_size + 2 * 4096 * shape.hidden_size  # of table and output


def test_a_flat_steps_blocks_lie_beside_the_backward_pass_and_not_beside_the_step() -> None:
    facts = changed(deepspeed_facts(), cache_share=0.0)
    layout = Layout(data=8, zero_stage=2)
    job, rows = job_and_rows(LLAMA3_8B, layout, facts, microbatches=1, length=8)
    state = states(job, rows)
    transient, of_states = transient_terms(job, rows), state_terms(job, rows, state)
    lasting = sum(float(column[0]) for terms in (transient, of_states) for column in terms.lasting.values())
    totals = [
        lasting + sum(float(column[0]) for moment in moments for column in moment.values())
        for moments in zip(transient.moments, of_states.moments, strict=True)
    ]
    assert max(totals) == totals[STEP] > max(totals[:STEP])
    beside = max(totals[:STEP]) + float(state.flat[0]) - totals[STEP]
    estimated = estimate(job, layout, 1).ranks[0]
    assert estimated.terms["allocator_cache"] == pytest.approx(beside, abs=8)
    assert beside > 0


def test_what_fsdp_allocated_on_its_own_streams_stays_beside_the_step() -> None:
    job, rows = job_and_rows(LLAMA3_8B, Layout(data=8, zero_stage=3), torchtitan_facts(True, True, False, 1))
    state = states(job, rows)
    beside = _other_streams(state, state_terms(job, rows, state))
    assert float(beside[-1][0]) == round(float(state.gradients[0])) + round(float(state.gathered[0])) > 0
