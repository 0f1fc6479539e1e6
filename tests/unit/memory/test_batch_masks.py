"""Attention masks that the loader makes, on the device and on the host, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shapes import LLAMA3_8B, MIXTRAL, job_of

from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.memory.activations import arriving_mask, kept_activations, kept_masks
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import all_ranks
from llmlaunch.memory.loss import final_norm, logits
from llmlaunch.memory.moments import transient_terms
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques

LENGTH = 131072
SQUARE = LENGTH**2
MASKS = megatron_facts(MegatronOptions(attention_masks=True))


def arriving(layout: Layout, freed: float = 0.0, facts: MemoryFacts = MASKS) -> list[float]:
    job = job_of(LLAMA3_8B, layout, facts, length=LENGTH)
    rows = all_ranks(job, LayoutColumns.of([layout]))
    terms = arriving_mask(job, rows, np.full(len(rows), freed))
    return [float(each) for each in terms["attention_masks"]] if terms else []


def kept(
    layout: Layout, techniques: Techniques = NO_TECHNIQUES, shape: ModelShape = LLAMA3_8B, microbatches: int = 8
) -> list[float]:
    job = job_of(shape, layout, MASKS, techniques, LENGTH, microbatches)
    terms = kept_masks(job, all_ranks(job, LayoutColumns.of([layout])))
    return [float(each) for each in terms["attention_masks"]]


def test_a_mask_is_a_byte_for_each_pair_of_tokens() -> None:
    assert arriving(Layout(micro_batch_size=2)) == [2 * SQUARE]
    assert arriving(Layout(tensor=8, sequence_parallel=1)) == [SQUARE]  # every tensor rank has it


def test_a_context_rank_gets_the_whole_mask_and_copies_its_share() -> None:
    assert arriving(Layout(context=4)) == [SQUARE + SQUARE / 4]
    assert arriving(Layout(context=4), freed=SQUARE / 2) == [SQUARE * 3 / 4]
    assert arriving(Layout(context=4), freed=2.0 * SQUARE) == [SQUARE / 4]  # which is there while the loss is computed


def test_a_mask_arrives_before_there_are_activations_and_logits() -> None:
    """Of one small layer: less than the mask, which is larger when it arrives than while the loss is computed."""
    layout, shape = Layout(context=4), replace(LLAMA3_8B, num_layers=1, vocab_size=1024)
    job = job_of(shape, layout, MASKS, length=LENGTH)
    rows = all_ranks(job, LayoutColumns.of([layout]))
    parts = [float(part(job, rows)[0]) for part in (kept_activations, final_norm, logits)]
    assert min(parts) > 0
    masks = float(transient_terms(job, rows).moments[0]["attention_masks"][0])
    assert masks == pytest.approx(SQUARE + SQUARE / 4 - sum(parts), abs=1)
    assert masks > SQUARE / 4


def test_checkpoints_keep_the_mask_of_every_micro_batch_in_flight() -> None:
    layout = Layout(pipeline=4)
    assert kept(layout) == [0, 0, 0, 0]
    assert kept(replace(layout, recompute=RECOMPUTE_FULL)) == [4 * SQUARE, 0, 0, SQUARE]
    selective = replace(layout, recompute=RECOMPUTE_SELECTIVE)
    assert kept(selective, Techniques(recompute_modules=("core_attn",))) == [4 * SQUARE, 0, 0, SQUARE]
    assert kept(selective, Techniques(recompute_modules=("mlp",))) == [0, 0, 0, 0]
    assert arriving(replace(layout, recompute=RECOMPUTE_FULL)) == [4 * SQUARE, 0, 0, SQUARE]


def test_passes_that_share_a_schedule_keep_theirs() -> None:
    overlapped = Techniques(overlap_expert_communication=True)
    assert kept(Layout(data=8, expert=8), overlapped, MIXTRAL) == [SQUARE]


def host_bytes(layout: Layout, **options: object) -> int:
    facts = megatron_facts(MegatronOptions(**options))  # type: ignore[arg-type]
    job = job_of(LLAMA3_8B, layout, facts, length=LENGTH)
    return estimate(job, layout, node=HostNode(processes=4)).host_terms["data_loader"]


BATCHES = 4 * 40 * LENGTH


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 4])
def test_each_worker_makes_its_mask_of_two_fp32_squares_before_there_are_batches(workers: int, samples: int) -> None:
    """Of four processes; a kept mask is there beside batches, of which each has its own copy."""
    layout = Layout(context=4, micro_batch_size=samples)
    loaded = (2 * workers + 1) * samples
    made, beside = 4 * 8 * SQUARE * workers, 4 * SQUARE * (loaded + workers) + loaded * BATCHES
    assert (made > beside) == (samples == 1)
    assert host_bytes(layout, attention_masks=True, loader_workers=workers) == max(made, beside)
