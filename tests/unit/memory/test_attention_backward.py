"""What attention holds while it runs backward, against sums done by hand: where an MLP runs in pieces, or attention
keeps its scores, this is a layer's peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layer_tensors import layer_tensors
from shapes import LLAMA3_8B, job_of

from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.frameworks.deepspeed.family_facts import shipped_facts, with_family
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.activations import arriving_mask
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.workspace import layer_backward
from llmlaunch.models.shape import Mamba, MlaShape, ModelShape, SlidingWindow
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from support.changed_facts import changed

N, H = 4096, 4096  # tokens, hidden size
HEADS, GROUPS, D = 32, 8, 128
Q, KV = HEADS * D, GROUPS * D
LIGER = deepspeed_facts(DeepSpeedOptions(liger=True))
PIECES = Techniques(mlp_chunks=64)
ALONE = Layout(data=8, zero_stage=3)
# of the MLP a fused norm keeps input, statistics and output; its pieces are computed again
BEHIND = 2 * 2 * H + 4
# gradients of the output, queries, keys and values; queries' once more in fp32
FUSED = 2 * Q + 2 * Q + 2 * 2 * KV + 4 * Q
EVERY_HEAD = 2 * 2 * Q  # keys' and values' gradients for each query head


def backward(
    layout: Layout = ALONE,
    shape: ModelShape = LLAMA3_8B,
    facts: MemoryFacts = LIGER,
    techniques: Techniques = PIECES,
) -> float:
    """Return what a layer whose worst block is attention holds beside the gradient of the residual stream, which is
    there twice where branches have their own. No gradient of a weight is a tensor of its own, which may be larger."""
    job = job_of(shape, layout, changed(facts, weight_gradient_fused=True), techniques, N, 1)
    stream = facts.layer.activation_bytes * N / layout.context * H * (2 if facts.layer.branch_gradients_apart else 1)
    return float(layer_backward(job, all_ranks(job, LayoutColumns.of([layout])))[0]) - stream


def saved(layout: Layout, name: str, shape: ModelShape = LLAMA3_8B) -> float:
    job = job_of(shape, layout, LIGER, NO_TECHNIQUES, N, 1)
    return float(layer_tensors(job, all_ranks(job, LayoutColumns.of([layout])))[name][0])


def test_fused_attention_makes_gradients_of_all_it_read_and_sums_queries_in_fp32() -> None:
    assert backward() == N * (FUSED + EVERY_HEAD - BEHIND)


def test_with_a_mask_all_three_gradients_are_summed_in_fp32() -> None:
    """Keys and values were copied to every query head."""
    masked = changed(LIGER, key_values_expanded=True, windows_masked=True)
    assert backward(facts=masked) == N * (2 * Q + 3 * 2 * Q + 3 * 4 * Q - BEHIND)


def test_each_layer_keeps_its_own_numbers_of_the_mask_of_packed_rows() -> None:
    """Counted in transformers 5.23 on a CPU: 6.2 bytes per pair of tokens in three layers in bf16, 12.4 in fp32."""
    layout = Layout(tensor=2, data=4, zero_stage=1, micro_batch_size=2)
    columns = all_ranks(job_of(LLAMA3_8B, layout, LIGER), LayoutColumns.of([layout]))

    def job(packed: bool, shape: ModelShape = LLAMA3_8B) -> Job:
        facts = shipped_facts(deepspeed_facts(DeepSpeedOptions()), shape, N, packed)
        return job_of(shape, layout, facts, NO_TECHNIQUES, N, 1)

    assert float(layer_tensors(job(packed=True), columns)["attn_mask"][0]) == 2 * 2 * N * N
    assert float(arriving_mask(job(packed=True), columns, np.zeros(1))["attention_masks"][0]) == 2 * N * N
    capped = replace(LLAMA3_8B, attention_softcap=50.0)  # it adds the mask to scores, which are kept
    for plain in (job(packed=False), job(packed=True, shape=capped)):
        assert "attn_mask" not in layer_tensors(plain, columns)
    windows = replace(LLAMA3_8B, sliding_window=SlidingWindow(1024, full_every=4))
    assert job(packed=True, shape=windows).facts.attention.row_mask_bytes == 2  # one for each kind of layer


def test_tensor_ranks_share_the_heads() -> None:
    assert backward(Layout(tensor=2, data=4, zero_stage=1)) == N * ((FUSED + EVERY_HEAD) / 2 - BEHIND)


def test_pieces_of_an_mlp_make_attention_the_peak_of_a_layer() -> None:
    """One in one piece lets go of more than attention makes."""
    fewer = replace(LLAMA3_8B, num_attention_heads=16, num_query_groups=1)
    assert backward(shape=fewer) < backward()
    assert backward(shape=fewer, techniques=NO_TECHNIQUES) == backward(techniques=NO_TECHNIQUES)


@pytest.mark.parametrize(("ranks", "heads"), [(2, GROUPS), (8, GROUPS), (16, 16), (32, 32)])
def test_ulysses_repeats_heads_of_keys_and_values_up_to_its_degree(ranks: int, heads: int) -> None:
    layout = Layout(context=ranks, zero_stage=3)
    assert saved(layout, "attn_qkv") == N / ranks * 2 * (Q + 2 * heads * D)
    repeated = 2 * 2 * (heads - GROUPS) * D
    shared = EVERY_HEAD if heads < HEADS else 0
    copy = 2 * Q  # of the output, which the projection behind it has let go of
    assert backward(layout) == N / ranks * (FUSED + repeated + shared - copy - BEHIND)


SCORES = HEADS * N * N


@pytest.mark.parametrize(("precision", "of_scores"), [("bf16", 6), ("fp16", 4), ("fp32", 8)])
def test_capped_scores_leave_their_gradients_beside_the_softmax(precision: str, of_scores: int) -> None:
    """Of bf16 the probabilities are gone, and two gradients are fp32; fp16 enters the softmax as it is."""
    capped = replace(LLAMA3_8B, attention_softcap=50.0)
    facts = with_family(deepspeed_facts(DeepSpeedOptions(precision=precision, liger=True)), capped, N)
    behind = BEHIND if precision != "fp32" else 2 * 4 * H + 4
    assert backward(shape=capped, facts=facts) == of_scores * SCORES - N * behind


def test_scores_beside_sinks_leave_three_gradients_of_which_one_takes_the_probabilities_place() -> None:
    sinks = replace(LLAMA3_8B, attention_sinks=True)
    assert backward(shape=sinks, facts=with_family(LIGER, sinks, N)) == 4 * SCORES - N * BEHIND


def test_latent_attention_has_wider_queries_and_keys_than_values() -> None:
    latent = replace(LLAMA3_8B, num_query_groups=HEADS, mla=MlaShape(None, 512, 96, 32, 64))
    wide, narrow = HEADS * (96 + 32), HEADS * 64
    made = 2 * narrow + 2 * wide + 2 * (wide + narrow) + 4 * wide
    assert backward(shape=latent) == N * (made - BEHIND)
    masked = changed(LIGER, windows_masked=True)
    assert backward(shape=latent, facts=masked) == N * (made + 4 * (wide + narrow) - BEHIND)


@pytest.mark.parametrize(("pattern", "behind"), [("M*" * 4, 0), ("M*" * 3 + "M-", BEHIND)])
def test_softmax_attention_counts_beside_a_smaller_state_space(pattern: str, behind: int) -> None:
    """A layer of one part: only an MLP that is the last layer has let go of anything."""
    small = replace(LLAMA3_8B, num_layers=8, mamba=Mamba(pattern, 1, 8, 8, 1))
    assert backward(shape=small) == pytest.approx(N * (FUSED + EVERY_HEAD - behind))
