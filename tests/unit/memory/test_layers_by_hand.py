"""What layers, the loss and the ends of a model hold, one function after the other, against sums done by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layer_tensors import dense_layer, mixture_layer, rank_layers
from random_jobs import GEMMA, GPT, LATENT, SHARED, SINKS
from shapes import ALTERNATING, LLAMA3_8B, MIXTRAL, job_of

from llmlaunch.effects.adapters import adapter_parameters
from llmlaunch.effects.recompute import recomputed_layer
from llmlaunch.effects.swap import swapped_by_layer
from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.frameworks.deepspeed.family_facts import with_family
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.memory.activations import (
    cut_parameters,
    kept_activations,
    kept_embedding,
    largest_layer,
    returned_key_values,
)
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.loss import (
    cached_logits,
    final_norm,
    logit_piece,
    logits,
    projection,
    saved_by_heads,
    step_logits,
    tables_of_heads,
    waiting_logits,
)
from llmlaunch.memory.workspace import (
    head_backward,
    layer_backward,
    mixture_forward,
    weight_gradient_stubs,
)
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import SQUARED, Indexer, LinearAttention, MlaShape, ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from support.changed_facts import changed
from validation.fsdp import atorch_facts, torchtitan_facts
from validation.megatron_deepspeed import megatron_deepspeed_facts

N = 4096  # tokens of a sequence
BALANCED = changed(megatron_facts(), expert_imbalance=1.0)
SPLIT = Layout(tensor=2, data=4, sequence_parallel=1)
ENDS = Layout(tensor=2, pipeline=2, data=4, sequence_parallel=1)


def value(
    function: Callable[[Job, RankColumns], Any],
    shape: ModelShape,
    layout: Layout = SPLIT,
    facts: MemoryFacts = BALANCED,
    techniques: Techniques = NO_TECHNIQUES,
    rank: int = 0,
    microbatches: int = 1,
) -> float:
    job = job_of(shape, layout, facts, techniques, N, microbatches)
    return float(np.broadcast_to(function(job, all_ranks(job, LayoutColumns.of([layout]))), layout.pipeline)[rank])


def test_a_gpt_layer_keeps_what_korthikanti_and_others_count() -> None:
    """34 s b h + 5 a s^2 b bytes with dropout and without parallelism (Korthikanti et al. 2022, equation 1), and the
    statistics of two norms and of a softmax in fp32."""
    gpt = replace(GPT, attention_dropout=0.1, hidden_dropout=0.1)
    h, heads = 1024, 16
    expected = 34 * N * h + 5 * heads * N * N + 4 * N * (2 + heads)
    assert value(dense_layer, gpt, Layout(), megatron_deepspeed_facts("fp16")) == expected


def test_gates_keep_a_sigmoid_in_fp32_and_give_the_projection_a_tensor_of_its_own() -> None:
    plain, gated = (value(dense_layer, replace(LLAMA3_8B, attention_gate=gate)) for gate in (False, True))
    assert gated - plain == N * (4 + 2) * 4096 / 2


HYBRID = replace(LLAMA3_8B, num_layers=8, linear_attention=LinearAttention(4, 16, 32))
STAGES = Layout(tensor=2, pipeline=4, data=2, sequence_parallel=1)  # of two layers each


def test_a_stage_keeps_what_the_kinds_of_its_layers_keep() -> None:
    """The first stage has two gated delta nets, the second one beside ordinary attention. Per token: what the
    convolution reads; queries and keys normed, with an fp32 statistic of each head, and once for each value head;
    values; a decay, its softplus and that before it in fp32, the other rate's sigmoid; 64 entries of the inverse;
    output, its norm and a statistic, the gate and its activation in fp32; their product."""
    h, t, keys, values, ffn = 4096, 2, 16 * 128, 32 * 128, 14336
    norms, mlp = 2 * (2 * h + 4 + 2 * h) / t, 3 * 2 * ffn / t
    convolution, normed, heads = 2 * (2 * keys + values), 2 * 2 * keys + 4 * 2 * 16, 2 * (2 * values + values)
    rates, inverse = 32 * (3 * 4 + 2), 2 * 64 * 32
    output = (2 + 2) * values + 4 * 32 + (4 + 4) * values + 2 * values
    delta = norms + (convolution + normed + heads + rates + inverse + output) / t + mlp
    full = norms + 2 * (4096 + 2 * 1024) / t + (2 * 4096 + 4 * 32) / t + mlp
    assert value(rank_layers, HYBRID, STAGES) == pytest.approx(N * 2 * delta)
    assert value(rank_layers, HYBRID, STAGES, rank=1) == pytest.approx(N * (delta + full))
    again = replace(STAGES, recompute=RECOMPUTE_FULL)
    entered = 2 * h / t
    for rank in (0, 1):  # the larger kind, where a stage has it
        assert value(recomputed_layer, HYBRID, again, rank=rank) == pytest.approx(N * (max(delta, full) - entered))
        assert value(largest_layer, HYBRID, STAGES, rank=rank) == pytest.approx(N * max(delta, full))


def test_recomputed_attention_keeps_more_in_the_layers_that_have_it() -> None:
    again = replace(STAGES, recompute=RECOMPUTE_SELECTIVE)
    more = [
        value(kept_activations, HYBRID, again, rank=r) - value(kept_activations, HYBRID, STAGES, rank=r) for r in (0, 1)
    ]
    assert more == [0, pytest.approx(N * 2 * (4096 + 1024) / 2)]


def test_the_recurrence_runs_backward_beside_the_gradient_of_its_gate() -> None:
    """Of queries w, the gradients of queries, of keys twice and of w; of values u, those written into states, the
    gradients of output, values and gate, and one on its way; twice a state for 64 tokens. The MLP, the norm before it
    and what is behind the recurrence are gone."""
    narrow = replace(HYBRID, ffn_hidden_size=1024)
    h, t, width = 4096, 2, 32 * 128
    alive = 2 * (5 * width + 6 * width + 2 * 32 * 128 * 128 / 64)
    gone = 3 * 2 * 1024 + 2 * h + 4 + 2 * h + (2 + 2 + 4 + 4 + 2) * width + 4 * 32
    assert value(layer_backward, narrow, STAGES) == pytest.approx(N * (2 * 2 * h + alive - gone) / t)
    without = replace(STAGES, pipeline=8)  # whose last stage has ordinary attention alone
    ordinary = replace(narrow, linear_attention=None)
    assert value(layer_backward, narrow, without, rank=7) == value(layer_backward, ordinary, without, rank=7)


# stages of two layers each
STATE_SPACES = replace(
    LLAMA3_8B, num_layers=8, gated_mlp=False, activation=SQUARED, position_embedding="none", ffn_hidden_size=1024,
    mamba=Mamba("MM*-M-EM", 32, 64, 128, 4, mtp_pattern="*E"),
    moe=MoeShape(8, 2, 512, 768, (0, 0, 0, 0, 0, 0, 1, 0)),
)  # fmt: skip
INNER, WRITTEN = 32 * 64, 4 * 128  # columns of 32 heads; of what 4 groups of them write to their states
ONE_NORM = 2 * 4096 + 4 + 2 * 4096


def test_experts_in_latents_exchange_less_and_keep_what_comes_back() -> None:
    h, latent, t, topk = 4096, 1024, 2, 2
    narrow = replace(STATE_SPACES, moe=replace(STATE_SPACES.moe or MIXTRAL.moe, latent_size=latent))
    less = value(mixture_layer, STATE_SPACES) - value(mixture_layer, narrow)
    assert less == pytest.approx(N / t * (topk * 2 * (h - latent) - 2 * latent))
    exchanged = [value(mixture_forward, shape) - N / t * 2 * h for shape in (STATE_SPACES, narrow)]
    assert exchanged[1] == pytest.approx(exchanged[0] * latent / h)


def test_the_scan_runs_backward_beside_gradients_of_all_columns() -> None:
    """Twice the convolved columns, the gradients of all columns and twice of the output; of a head's step five entries
    in fp32 and in bf16; 128 products of each group for a token, and four of the states between chunks of 128 tokens. Of
    what the mixer keeps, the scan's output and what is behind it are gone, as is the gradient of its output."""
    t, h, convolved = 2, 4096, INNER + 2 * WRITTEN
    alive = 2 * (2 * convolved + (INNER + convolved + 32) + 2 * INNER) + 10 * 32
    alive += 12 * INNER * 128 / 128 + 4 * 4 * 128
    gone = 2 * INNER + 4 * 4 + 2 * INNER + 2 * h
    assert value(layer_backward, STATE_SPACES, STAGES) == pytest.approx(N * (2 * 2 * h + alive - gone) / t)
    behind = ONE_NORM + 2 * 2 * 1024  # an MLP has run backward before
    assert value(layer_backward, STATE_SPACES, STAGES, rank=2) == pytest.approx(
        N * (2 * 2 * h + alive - gone - behind) / t
    )


def test_modules_for_prediction_keep_what_their_own_layers_keep() -> None:
    one, full = replace(STATE_SPACES, mtp_num_layers=1), 2 * (4096 + 2 * 1024) + 2 * 4096 + 4 * 32
    more = value(mixture_layer, STATE_SPACES, STAGES) + N * (ONE_NORM + full) / 2
    without = replace(one, mamba=Mamba("MM*-M-EM", 32, 64, 128, 4, mtp_pattern="*"))
    expected = more - N * (ONE_NORM + full) / 2
    assert value(saved_by_heads, one, STAGES, rank=3) - value(saved_by_heads, without, STAGES, rank=3) == pytest.approx(
        expected
    )


def test_modules_for_prediction_keep_all_where_blocks_of_layers_are_made_again() -> None:
    block, again = Techniques(recompute_method="block"), replace(STAGES, recompute=RECOMPUTE_FULL, recompute_layers=1)
    both, one = (
        replace(STATE_SPACES, mtp_num_layers=1, mamba=Mamba("MM*-M-EM", 32, 64, 128, 4, mtp_pattern=module))
        for module in ("*E", "E")
    )
    kept = [value(saved_by_heads, shape, again, techniques=block, rank=3) for shape in (both, one)]
    full = 2 * (4096 + 2 * 1024) + 2 * 4096 + 4 * 32
    assert kept[0] - kept[1] == pytest.approx(N * (ONE_NORM + full) / 2)


def test_a_gemma_layer_under_transformers() -> None:
    """Four norms that keep two fp32 copies besides; heads' norms do, too; unfused scores, their fp32 softmax and tanh;
    silu(gate) beside gate and up."""
    facts = with_family(deepspeed_facts(DeepSpeedOptions()), GEMMA, N)
    h, heads, width, ffn = 2304, 8, 256, 9216
    extra = 4 + 2
    norms = 2 * (2 * h + extra * h + 4 + 2 * h) + 2 * (2 * h + extra * h + 4)
    qkv = 2 * (heads * width + 2 * heads * width) + (2 + extra + 4 / width) * (2 * heads * width)
    scores = (2 + 4 + 2) * heads * N
    expected = N * (norms + qkv + 2 * heads * width + 4 * heads + scores + 4 * 2 * ffn)
    assert value(dense_layer, GEMMA, Layout(), facts) == pytest.approx(expected)


def test_a_mixture_keeps_its_router_its_routed_tokens_and_the_shared_expert() -> None:
    """Softmax before the choice keeps fp32 scores of all experts, and a gate the shared expert's output."""
    h, query, t, topk, experts, ffn, shared = 2048, 2048, 2, 4, 60, 1408, 5632
    attention = (2 * h + 4 + 2 * h) / t + 2 * 3 * query / t + (2 * query + 4 * 16) / t
    router = (12 + 4) * experts / t
    routed = topk / t * (2 * h + 3 * 2 * ffn)
    expected = N * (attention + (4 * h + 4) / t + router + routed + 3 * 2 * shared / t + 2 * h / t)
    assert value(mixture_layer, SHARED) == pytest.approx(expected)


def test_experts_weighed_after_they_are_done_keep_their_outputs() -> None:
    """Under transformers: every routed token twice, as it is put out and as it is weighed; DeepSeek's router reads an
    fp32 copy of its input."""
    facts = with_family(changed(deepspeed_facts(), combine_bytes=2.0), LATENT, N)
    without = changed(facts, combine_bytes=0.0, expert_output_weighted=False, router_input_bytes=0.0)
    more = value(mixture_layer, LATENT, Layout(), facts) - value(mixture_layer, LATENT, Layout(), without)
    h, topk, ffn = 2048, 6, 1408
    # where the activation is not fused, what is weighed before the second linear is kept as well
    assert more == pytest.approx(N * (topk * 4 * h + 4 * h - topk * 2 * ffn))


def test_latent_attention_keeps_latents_their_norms_and_whole_heads() -> None:
    shape = replace(LLAMA3_8B, num_query_groups=32, mla=MlaShape(1536, 512, 128, 64, 128))
    facts = megatron_facts(MegatronOptions(fp8_recipe="tensorwise"))
    h, heads, ffn, t = 4096, 32, 14336, 2
    norms = 2 * (2 * h + 4 + h) / t
    latents = (2 * (1536 + 512) + (2 + 1) * 64 + (1536 + 512)) / t
    attention = 2 * heads * (2 * 192 + 128) / t + (2 * heads * 128 + 4 * heads) / t + heads * 128 / t
    assert value(dense_layer, shape, facts=facts) == pytest.approx(N * (norms + latents + attention + 5 * ffn / t))


def test_queries_and_keys_without_a_weight_to_norm_them_are_kept_twice() -> None:
    more = value(dense_layer, replace(LLAMA3_8B, qk_l2_norm=True)) - value(dense_layer, LLAMA3_8B)
    assert more == pytest.approx(N * (2 + 4) * (4096 + 1024) / 2)


def test_experts_whose_inputs_are_weighed_keep_them_before_that() -> None:
    moe = MIXTRAL.moe
    assert moe is not None
    weighing = replace(MIXTRAL, moe=replace(moe, router=replace(moe.router, weighted_inputs=True)))
    more = value(mixture_layer, weighing) - value(mixture_layer, MIXTRAL)
    assert more == pytest.approx(N * 2 * 2 * 4096 / 2)


SPARSE = replace(LATENT, mtp_num_layers=0, mla=MlaShape(1536, 512, 128, 64, 128), indexer=Indexer(32, 96, 2048))


def test_attention_to_chosen_keys_keeps_heads_as_wide_as_the_latent_and_the_indexers_gradients() -> None:
    h, heads, ffn, t = 2048, 16, 8192, 2
    norms = 2 * (2 * h + 4 + 2 * h) / t
    latents = (2 * (2 * 1536 + 512) + 8) / t
    queries = 2 * (heads / t * (192 + 576) + 576)
    choice = 4 * (2048 + 1) + 2 * (32 * 96 + 2 * 96 + 32) + 8 + 2 * (h + 1536)  # its inputs are gathered
    output = 64 * (2 * 512 + 4) + 2 * heads * 128 / t  # 8 heads on a device are filled up to 64
    weights = 2 * heads / t * 128 * 512
    kept = N * (norms + latents + queries + choice + output + 6 * ffn / t) + weights
    assert value(dense_layer, SPARSE) == pytest.approx(kept)
    short = replace(SPARSE, indexer=replace(SPARSE.indexer, topk=2 * N))  # no more keys than there are
    assert value(dense_layer, short) - kept == pytest.approx(N * 4 * (N - 2048))
    assert value(mixture_layer, SPARSE) - kept == pytest.approx(
        value(mixture_layer, replace(SPARSE, indexer=None)) - value(dense_layer, replace(SPARSE, indexer=None))
    )


def test_attention_to_chosen_keys_copies_all_that_its_backward_pass_reads() -> None:
    h, t = 2048, 2
    copies = 2 * (64 * (3 * 576 + 4 * 512) + 16 / t * (512 - 128))
    mlp = 2 * (2 * h + 2) / t + 3 * 2 * 8192 / t  # freed by then
    stream = 2 * 2 * h / t
    assert value(layer_backward, replace(SPARSE, moe=None)) == pytest.approx(N * (stream + copies - mlp))


def test_the_embedding_keeps_ids_masks_of_dropout_and_the_input_of_its_norm() -> None:
    gpt = replace(GPT, hidden_dropout=0.1)
    per_token = 32 + 1024 + 2 * 1024
    assert value(kept_embedding, gpt, Layout(), megatron_deepspeed_facts("fp16")) == N * per_token
    assert value(kept_embedding, gpt, ENDS, rank=1) == 0


def test_a_stage_of_megatron_deepspeed_keeps_its_share_of_the_output_it_sent() -> None:
    layout = Layout(tensor=2, pipeline=2, data=4)
    facts = megatron_deepspeed_facts("fp16")
    kept, without = (
        value(kept_activations, GPT, layout, changed(facts, stage_output_bytes=width), microbatches=8)
        for width in (2.0, 0.0)
    )
    assert kept - without == 2 * N * 2 * 1024 / 2  # two micro-batches in flight


def test_block_recompute_of_a_mixture_keeps_the_other_layers_whole() -> None:
    layout = replace(SPLIT, recompute=RECOMPUTE_FULL, recompute_layers=8)
    block = Techniques(recompute_method="block")
    facts = changed(BALANCED, router_last_bytes=0.0)
    whole, stream = value(mixture_layer, SHARED, facts=facts), N * 2 * 2048 / 2
    assert value(kept_activations, SHARED, layout, facts, block) == pytest.approx(8 * stream + 4 * whole)
    assert value(recomputed_layer, SHARED, layout, facts, block) == pytest.approx(0.0)
    eleven = replace(layout, recompute_layers=12)
    assert value(recomputed_layer, SHARED, eleven, facts, block) == pytest.approx(whole - stream)


def test_what_is_recomputed_of_a_layer_is_all_but_its_input_or_its_modules() -> None:
    full, selective = (replace(SPLIT, recompute=r) for r in (RECOMPUTE_FULL, RECOMPUTE_SELECTIVE))
    assert value(recomputed_layer, SHARED, full) == value(mixture_layer, SHARED) - N * 4096 / 2
    dense, ffn, h = LLAMA3_8B, 14336, 4096
    assert value(recomputed_layer, dense, selective, techniques=Techniques(("mlp",))) == N * (2 * h + 6 * ffn) / 2
    moe = value(recomputed_layer, MIXTRAL, selective, techniques=Techniques(("moe",)))
    assert moe == pytest.approx(N / 2 * (12 * 8 + 2 * (2 * h + 6 * ffn)))
    fp32 = megatron_facts(MegatronOptions("fp32"))
    scores = 4 * 32 * N * N / 2
    assert value(recomputed_layer, dense, selective, fp32, Techniques(("core_attn",))) == scores
    both = value(recomputed_layer, dense, selective, fp32, Techniques(("core_attn", "mlp")))
    assert both == scores + N * (4 * h + 12 * ffn) / 2


def test_selective_recompute_by_operator_recomputes_the_others() -> None:
    """On one tensor rank of a compiled model are kept: the input, the outputs of Q, V, gate, attention, eager ones that
    of down."""
    layout = replace(Layout(), recompute=RECOMPUTE_SELECTIVE)
    for compiled in (True, False):
        facts = torchtitan_facts(compiled, True, False, 1)
        whole = value(dense_layer, LLAMA3_8B, layout, facts)
        h, query, value_width, ffn = 4096, 4096, 1024, 14336
        kept = N * (2 * h + 2 * (query + value_width + ffn) + 2 * query + 4 * 32 + (0 if compiled else 2 * h))
        assert value(recomputed_layer, LLAMA3_8B, layout, facts) == whole - kept
        assert value(largest_layer, LLAMA3_8B, layout, facts) == kept
    latent = replace(LLAMA3_8B, num_query_groups=32, mla=MlaShape(None, 512, 128, 64, 128))
    kept = N * (2 * h + 2 * (32 * 192 + 32 * 128 + ffn) + 2 * 32 * 128 + 4 * 32 + 2 * h)
    assert value(largest_layer, latent, layout, facts) == kept
    shared = value(mixture_layer, SHARED, layout, facts) - value(recomputed_layer, SHARED, layout, facts)
    assert shared == N * (2 * 2048 + 2 * (3 * 2048 - 2048 + 5632) + 2 * 2048 + 4 * 16 + 2 * 2048)


def test_swapped_bytes_are_the_input_attentions_output_and_a_share_of_the_rest() -> None:
    kept, whole = value(dense_layer, LLAMA3_8B), N * 2 * (4096 / 2 + 4096 / 2)
    swap = Techniques(swapped_share=0.3)
    swapped = value(lambda job, rows: swapped_by_layer(job, rows)[0], LLAMA3_8B, techniques=swap)
    assert swapped == pytest.approx(whole + 0.3 * (kept - whole))


def test_models_that_return_keys_and_values_hold_those_of_every_layer() -> None:
    layout = Layout(tensor=2)
    assert value(returned_key_values, MIXTRAL, layout, atorch_facts()) == 32 * N * 2 * 2 * 1024 / 2


@pytest.mark.parametrize(("microbatches", "waiting"), [(1, 1), (8, 2)])
def test_deferred_gradients_of_the_head_wait_with_their_logits(microbatches: int, waiting: int) -> None:
    facts = megatron_facts(MegatronOptions(deferred_head_gradients=2))
    expected = N * (6 + 2 * waiting) * LLAMA3_8B.padded_vocab_size(2) / 2
    assert value(logits, LLAMA3_8B, facts=facts, microbatches=microbatches) == expected


def test_logits_of_prediction_heads_wait_for_the_decoders() -> None:
    shape = replace(LATENT, mtp_num_layers=2, vocab_size=102400)
    assert value(waiting_logits, shape, ENDS, rank=1) == 2 * 4 * N * 102400 / 2
    assert value(logits, shape, ENDS, rank=1) == (6 + 2 * 4) * N * 102400 / 2


def test_a_trainers_logits_in_pieces_and_through_the_step() -> None:
    facts = torchtitan_facts(False, False, False, 1)
    layout = Layout(pipeline=2, data=4, zero_stage=3)
    assert value(cached_logits, LLAMA3_8B, layout, facts, rank=1) == 2 * N * 128256
    assert value(step_logits, LLAMA3_8B, layout, facts, rank=1, microbatches=8) == 8 * 2 * N * 128256
    assert value(step_logits, LLAMA3_8B, layout, facts, rank=0, microbatches=8) == 0


def test_the_last_norm_keeps_what_the_head_reads_and_unfused_copies() -> None:
    facts = deepspeed_facts(DeepSpeedOptions())
    assert value(final_norm, LLAMA3_8B, Layout(), facts) == N * ((2 * 2 + 4) * 4096 + 4)
    adapted = value(final_norm, LLAMA3_8B, Layout(), facts, Techniques(adapters=Adapters(8)))
    assert adapted == N * ((2 + 4) * 4096 + 4)
    gathered = changed(torchtitan_facts(True, True, False, 2), gathered_inputs_kept=True)
    assert value(final_norm, LLAMA3_8B, SPLIT, gathered) == N * (4 * 4096 + 4 + 2 * 4096) / 2


def test_a_prediction_head_under_block_recompute_keeps_its_layer_and_is_not_run_again() -> None:
    layout = replace(ENDS, recompute=RECOMPUTE_FULL, recompute_layers=1)
    shape = replace(LATENT, mtp_num_layers=1)
    hidden = N * 2 * 2048 / 2
    around = 3 * hidden + hidden * 2 - hidden
    kept = value(saved_by_heads, shape, layout, techniques=Techniques(recompute_method="block"), rank=1)
    layer = value(mixture_layer, shape, layout, rank=1)
    assert kept == pytest.approx(layer + around + 2 * hidden)
    full = replace(layout, recompute_layers=0)
    assert value(recomputed_layer, shape, full, rank=1) - value(recomputed_layer, shape, full, rank=0) == around
    assert value(projection, shape, full, rank=1) == 2 * 2048**2 / 2
    assert value(tables_of_heads, shape, full, rank=1) == 102400 / 2 * 2048 * 2
    stubs = [value(weight_gradient_stubs, s, full, rank=1) for s in (replace(shape, mtp_num_layers=0), shape)]
    assert stubs[1] - stubs[0] == 2 * 2 * 2048**2 / 2


def test_the_head_runs_backward_with_its_logits_its_weight_and_its_gathered_input() -> None:
    fused = value(head_backward, LLAMA3_8B, facts=BALANCED)
    gathered, padded = N * 4096 * 2 * (1 + 1 / 2), LLAMA3_8B.padded_vocab_size(2) / 2
    assert fused == 2 * N * padded + gathered
    unfused = value(head_backward, LLAMA3_8B, facts=megatron_facts(MegatronOptions(gradient_accumulation_fusion=False)))
    assert unfused - fused == 2 * padded * 4096


def test_a_mixture_runs_backward_through_its_exchange_or_its_experts() -> None:
    """Narrow experts leave the exchange, three copies of the routed tokens; wide ones their activations."""
    h, t, topk = 4096, 2, 2
    stream, routed = 2 * 2 * N * h / t, N * topk / t
    assert value(layer_backward, MIXTRAL) == stream + 2 * 2 * routed * 14336
    narrow = replace(MIXTRAL, moe=replace(MIXTRAL.moe, ffn_hidden_size=64))
    assert value(layer_backward, narrow) == stream + 3 * 2 * routed * h
    gathering = Techniques(token_dispatcher="allgather")
    layout = Layout(tensor=2, data=4, expert=4, sequence_parallel=1)
    assert value(layer_backward, narrow, layout, techniques=gathering) == stream + 2 * (routed + N / t * 4) * h


FUSED, LORA = changed(BALANCED, adapters_fused=True), Techniques(adapters=Adapters(16))
NOT_HELD = changed(FUSED, exchanges_held=False)  # where nothing but adapters adds to a layer's forward pass
FUSED_SHAPES = [(LLAMA3_8B, 2, 4096 + 2 * 1024), (GPT, 1, 3 * GPT.query_width)]


@pytest.mark.parametrize(("shape", "gates", "queries"), FUSED_SHAPES, ids=["gated", "plain"])
def test_fused_adapters_have_four_pairs_of_which_tensor_ranks_split_both(
    shape: ModelShape, gates: int, queries: int
) -> None:
    h, ffn = shape.hidden_size, shape.ffn_hidden_size
    pairs = (h + queries) + (shape.query_width + h) + (h + gates * ffn) + (ffn + h)
    assert value(lambda job, rows: adapter_parameters(job, rows)[0], shape, SPLIT, FUSED, LORA) == (
        shape.num_layers * 16 * pairs / 2
    )
    assert value(weight_gradient_stubs, shape, SPLIT, FUSED, LORA) == 2 * 16 * pairs / 2
    second = h * (1 / 2 + 1 / 2 + 1 + 1)  # of the frozen linear, of the rank, of all ranks, and put together
    assert value(mixture_forward, shape, SPLIT, NOT_HELD, LORA) == 2 * N * max((2 * gates - 1) * ffn / 2, second)
    third = value(mixture_forward, shape, Layout(), NOT_HELD, LORA)
    assert third == 2 * N * max((2 * gates - 1) * ffn, 3 * h)
    assert value(mixture_forward, shape, SPLIT, NOT_HELD) == value(mixture_forward, shape, SPLIT, BALANCED, LORA) == 0
    predicting = replace(shape, mtp_num_layers=2)
    assert value(lambda job, rows: adapter_parameters(job, rows)[0], predicting, SPLIT, FUSED, LORA) == (
        (shape.num_layers + 2) * 16 * pairs / 2
    )


def test_fused_adapters_of_experts_are_one_pair_for_all_on_a_device() -> None:
    layout, h, ffn, pairs = replace(SPLIT, data=4, expert=4), 4096, 14336, (4096 + 4096 + 2 * 1024) + (4096 + 4096)
    for expert_tensor in (1, 2):
        split = replace(layout, expert_tensor=expert_tensor)
        dense, expert = (
            value(lambda job, rows, i=i: adapter_parameters(job, rows)[i], MIXTRAL, split, FUSED, LORA) for i in (0, 1)
        )
        assert dense == 32 * 16 * pairs / 2
        assert expert == 32 * 16 * (h + 2 * ffn + ffn + h) / expert_tensor
        stubs = value(weight_gradient_stubs, MIXTRAL, split, FUSED, LORA)
        assert stubs == 2 * 16 * (pairs / 2 + (2 * h + 3 * ffn) / expert_tensor)
        routed = N * 2 / 2
        saved = value(mixture_layer, MIXTRAL, split, FUSED, LORA) - value(mixture_layer, MIXTRAL, split, FUSED)
        assert saved == 2 * (2 * 16 * N + N * h + 2 * 16 * routed * expert_tensor)
        forward = value(mixture_forward, MIXTRAL, split, NOT_HELD, LORA)
        assert forward == 6 * routed * ffn + 2 * routed * h * 2  # permuted and exchanged beside them


IN_LATENTS = replace(
    LLAMA3_8B, mla=MlaShape(1536, 512, 128, 64, 128), moe=MoeShape(8, 2, 2048, 1024, (0,) + (1,) * 31), mtp_num_layers=1
)


def test_frozen_experts_hold_their_inputs_while_they_run() -> None:
    layout, routed = Layout(pipeline=2, data=4, expert=4), N * 2
    attention = Techniques(adapters=Adapters(16, target_modules=("linear_qkv", "linear_proj")))
    first = Techniques(adapters=Adapters(16, target_modules=("linear_fc1",)))
    again = Techniques(("moe_act",), adapters=LORA.adapters)

    def held(facts: MemoryFacts, techniques: Techniques, recompute: int = 0) -> float:
        return value(mixture_forward, IN_LATENTS, replace(layout, recompute=recompute), facts, techniques, rank=1)

    assert held(FUSED, attention) - held(FUSED, first) == 2 * routed * 4096
    assert held(FUSED, first) == held(FUSED, NO_TECHNIQUES)
    second = 2 * routed * 4096 * (1 + 1 + 3)  # permuted, exchanged, and three times what the second linear puts out
    assert held(NOT_HELD, LORA) == second
    assert held(NOT_HELD, attention) == 0
    assert held(NOT_HELD, again, RECOMPUTE_SELECTIVE) == second + 2 * routed * 2048


def test_biased_experts_put_their_outputs_together_before_they_are_sorted() -> None:
    """Permuted and exchanged tokens, the experts' output, that with its bias expert by expert, and put together."""
    layout = Layout(data=4, expert=4)
    routed = N * 4 * 2880
    assert value(mixture_forward, SINKS, layout, BALANCED) == 2 * routed * 5


def test_a_clamped_activation_keeps_gate_and_up_twice_until_it_is_recomputed() -> None:
    without = replace(SINKS, activation="silu")
    clamped = value(mixture_layer, SINKS, Layout()) - value(mixture_layer, without, Layout())
    assert clamped == N * 4 * 2 * 2 * 2880
    again, selective = Techniques(("moe_act",)), Layout(recompute=RECOMPUTE_SELECTIVE)
    recomputed = [value(largest_layer, shape, selective, BALANCED, again) for shape in (SINKS, without)]
    assert recomputed[0] == recomputed[1]


def test_layers_of_both_kinds_and_those_that_are_trained_add_up() -> None:
    facts = changed(BALANCED, router_last_bytes=0.0)
    dense, mixture = (value(layer, ALTERNATING, facts=facts) for layer in (dense_layer, mixture_layer))
    assert value(kept_activations, ALTERNATING, facts=facts) == 8 * dense + 24 * mixture
    last = value(kept_activations, ALTERNATING, facts=facts, techniques=Techniques(trained_layers=4))
    assert last == 4 * mixture
    away = replace(SPLIT, offload_layers=24)
    assert value(kept_activations, ALTERNATING, away, facts) == pytest.approx(8 * mixture)  # which are the last
    block = replace(SPLIT, recompute=RECOMPUTE_FULL, recompute_layers=8)
    kept = value(kept_activations, LLAMA3_8B, block, techniques=Techniques(recompute_method="block"))
    assert kept == 8 * N * 2 * 4096 / 2 + 24 * value(dense_layer, LLAMA3_8B)
    kept = value(kept_activations, ALTERNATING, block, facts, Techniques(recompute_method="block"))
    assert kept == pytest.approx(8 * N * 2 * 2048 / 2 + 4 * dense + 20 * mixture)  # the first eight are made again
    stages = replace(block, pipeline=2)
    kept = value(kept_activations, ALTERNATING, stages, facts, Techniques(recompute_method="block"), rank=1)
    assert kept == pytest.approx(8 * N * 2 * 2048 / 2 + 8 * mixture)


@pytest.mark.parametrize(("frozen", "per_input"), [(False, 4 + 1), (True, 1)])
def test_pefts_adapters_cast_and_drop_out_of_every_linears_input(frozen: bool, per_input: int) -> None:
    """Seven linears of rank 16 in fp32; q, k and v, o, gate and up, and down read copies of their own; frozen norms
    keep one copy less, and no linear its own input."""
    facts = changed(deepspeed_facts(), adapter_bytes=4.0, adapter_dropout=True)
    h, query, ffn = 4096, 4096, 14336
    norms = 2 * (2 * h + 4 * h + 4 - 2 * h)
    attention = 2 * (query + 2 * 1024) + 2 * query + 4 * 32
    adapters = 7 * 4 * 16 + per_input * (3 * h + query + 2 * h + ffn)
    adapted = value(dense_layer, LLAMA3_8B, Layout(), facts, Techniques(adapters=Adapters(16, frozen)))
    assert adapted == N * (norms + attention + 3 * 2 * ffn + adapters)
    experts = value(mixture_layer, MIXTRAL, Layout(), facts, Techniques(adapters=Adapters(16, frozen)))
    routed = 2 * (3 * 2 * ffn + 2 * ffn + facts.mixture.combine_bytes * h)
    router = facts.mixture.router_bytes * 8
    adapters = (4 + 3 * 2) * 4 * 16 + per_input * (3 * h + query + 2 * (2 * h + ffn))
    assert experts == N * (norms + attention + routed + router + adapters)


def test_attentions_output_is_copied_for_narrow_linears_and_for_all_to_alls() -> None:
    layout = replace(SPLIT, context=2)
    narrow, both = (
        megatron_facts(MegatronOptions(fp8_recipe="tensorwise", context_all_to_all=a2a)) for a2a in (False, True)
    )
    wide = megatron_facts(MegatronOptions(context_all_to_all=True))
    tokens, width = N / 2, 4096 / 2
    apart = changed(narrow, attention_output_copied=True)
    more = [value(dense_layer, LLAMA3_8B, layout, facts) for facts in (narrow, both, wide, BALANCED, apart)]
    assert more[1] - more[0] == more[2] - more[3] == more[4] - more[0] == tokens * 2 * width
    ring = value(dense_layer, LLAMA3_8B, layout, narrow) - value(
        dense_layer, LLAMA3_8B, layout, changed(narrow, quantized=None)
    )
    linears = -(2 * 4096 / 2 + 14336 / 2)  # inputs of one byte instead of two, of Q, K and V, gate and up, and down
    assert ring == tokens * (linears + width)


def test_latent_attention_under_transformers_copies_heads_and_normalizes_in_fp32() -> None:
    shape = replace(LATENT, mla=MlaShape(1536, 512, 128, 64, 128))
    facts = with_family(deepspeed_facts(), shape, N)
    plain = changed(facts, key_values_expanded=False, norm_extra_bytes=0.0)
    heads, norms, h = 16, 2, 2048
    more = value(dense_layer, shape, Layout(), facts) - value(dense_layer, shape, Layout(), plain)
    assert more == N * (2 * heads * (128 + 128) + 4 * (1536 + 512) + norms * 4 * h)


@pytest.mark.parametrize(
    ("dropout", "cap", "per_score"),
    [
        (0.0, None, 2 + 4),  # the probabilities and the fp32 softmax
        (0.1, None, 2 + 1 + 4),  # dropped probabilities, their mask, the softmax
        (0.0, 50.0, 2 + 4 + 2),  # what tanh puts out
    ],
)
def test_eager_attention_keeps_its_softmax_in_fp32(dropout: float, cap: float | None, per_score: int) -> None:
    shape = replace(LLAMA3_8B, attention_dropout=dropout, attention_softcap=cap)
    eager, fused = (deepspeed_facts(DeepSpeedOptions(eager_attention=is_eager)) for is_eager in (True, False))
    more = value(dense_layer, shape, Layout(), eager) - value(dense_layer, shape, Layout(), fused)
    assert more == per_score * 32 * N * N


def test_selective_recompute_by_operator_keeps_what_tensor_ranks_scatter() -> None:
    layout = replace(Layout(tensor=2, sequence_parallel=1), recompute=RECOMPUTE_SELECTIVE)
    kept = value(largest_layer, LLAMA3_8B, layout, torchtitan_facts(True, True, False, 2))
    h, ffn = 4096, 14336
    assert kept == N / 2 * (2 * h + 2 * (h + 1024 + ffn) + 2 * h + 4 * 32 + 2 * 2 * h)


def test_gpt_2s_activation_under_transformers_keeps_three_more_results() -> None:
    shape = replace(GPT, family="gpt2")
    facts = with_family(deepspeed_facts(), shape, N)
    h, ffn = 1024, 4096
    attention = 2 * 3 * h + 2 * h + 4 * 16
    assert value(dense_layer, shape, Layout(), facts) == N * (2 * (4 * h + 4) + attention + (2 + 3 * 2) * ffn + 2 * ffn)


def test_a_first_linear_of_a_wide_table_of_experts_is_the_worst_step_of_its_backward_pass() -> None:
    """Few tokens beside a large weight whose gradient is a tensor of its own: the gradient of the input and of the
    weight, less the activation's input that is gone."""
    unfused = changed(megatron_facts(MegatronOptions(gradient_accumulation_fusion=False)), expert_imbalance=1.0)
    h, ffn, tokens = 4096, 14336, 64
    job = job_of(LLAMA3_8B, Layout(), unfused, NO_TECHNIQUES, tokens, 1)
    backward = layer_backward(job, all_ranks(job, LayoutColumns.of([Layout()])))[0]
    assert backward == 2 * 2 * tokens * h + 2 * tokens * h + 2 * 2 * h * ffn - 2 * tokens * ffn


def test_a_piece_of_an_mlp_that_is_computed_again_has_all_it_saves() -> None:
    facts, chunked = changed(BALANCED, mlp_chunks_recomputed=True), Techniques(mlp_chunks=8)
    again, stored = (value(layer_backward, LLAMA3_8B, facts=each, techniques=chunked) for each in (facts, BALANCED))
    assert again - stored == 3 * 2 * N * 14336 / 2 / 8
    uniform = replace(SPLIT, recompute=RECOMPUTE_FULL, recompute_layers=32)
    block = Techniques(recompute_method="block")
    whole = value(dense_layer, LLAMA3_8B) - N * 2 * 4096 / 2
    assert value(recomputed_layer, LLAMA3_8B, uniform, techniques=block) == whole
    first = replace(uniform, recompute_layers=8)  # the others, whole, have run backward by then
    assert value(recomputed_layer, LLAMA3_8B, first, techniques=block) == 0


def test_layer_inputs_that_do_not_fill_the_matrices_once_made_there_waste_the_rest() -> None:
    """2,500 tokens: what is left of gate and up, of down, of Q, K and V, and of the output, in every layer."""
    h, ffn, query, key, t = 4096, 14336, 4096, 1024, 2
    stream = 2 * 2500 * h // t
    matrices = (2 * h * ffn // t, h * ffn // t, h * (query + 2 * key) // t, h * query // t)
    for zero_stage, layers in ((0, 0), (1, 32)):
        layout = replace(SPLIT, zero_stage=zero_stage)
        job = job_of(LLAMA3_8B, layout, BALANCED, length=2500)
        wasted = cut_parameters(job, all_ranks(job, LayoutColumns.of([layout])))
        assert wasted[0] == layers * sum(2 * matrix % stream for matrix in matrices) >= 0
    assert value(logit_piece, LLAMA3_8B, ENDS, rank=1) == 4 * N * LLAMA3_8B.padded_vocab_size(2) / 2
    assert value(logit_piece, LLAMA3_8B, ENDS, rank=0) == 0
