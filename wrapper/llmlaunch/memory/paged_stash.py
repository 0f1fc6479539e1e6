"""Pages in which activations of experts wait for their backward pass (`--moe-paged-stash`,
megatron/core/transformer/moe/paged_stash.py, core 0.19).

With a fixed number of rows for the tokens of a device's experts, most layers leave some of them empty. What is saved
inside the experts' one kernel is copied without these into pages, when the layer has run forward, and back when its
backward pass is next. The buffers of pages are made once, after the first step, and stay. How many tokens arrive is not
known before a job runs; the buffers count with equally shared ones, times a factor, so their size is. A step whose
tokens they cannot take is run again without pages and fixed rows (PagedStashRunner); what that needs is not in here.
"""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.heads import head_layers, head_rank
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.saved import balanced_tokens, routed_tokens, saved_by_mixture_layer
from llmlaunch.memory.schedule import in_flight

__all__ = ["STASHED", "equal_share", "host_pages", "running_experts", "stash_pages"]

# What Transformer Engine marks as rows of tokens when experts are one kernel (transformer_engine/pytorch/ops/fused/
# grouped_mlp.py fuser_forward, 2.20): the quantized inputs of both linears, and what the activation reads.
STASHED = ("expert_fc1_input", "expert_fc1_output", "expert_fc2_input")
WEIGHT_BYTES = 4.0  # of the router's weight of a row, which is marked, too
NUMBER_BYTES = 8.0  # of a page's number
# Tensors of a layer, each with a record of its pages: those three, the weights, and the scales of the inputs, of which
# every 32 rows have one.
RECORDED, ROWS_LISTED = 6.0, 4.0 + 2.0 / 32.0


def running_experts(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of the layer that runs: its tensors are there with all their rows, before they are copied to
    pages and after. Of two micro-batches that compute in turn both are."""
    if job.techniques.paged_stash is None:
        return np.zeros(len(rows))
    layers = 1.0 + job.techniques.overlaps_experts
    return np.where(_mixtures(job, rows) > 0, layers * _every_row(job, rows), 0.0)


def stash_pages(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of the pages on the device, the lists of those that are free (each kept twice, to begin a step
    anew), and the records of what lies where, for as many rows as there are."""
    stash = job.techniques.paged_stash
    assert stash is not None
    listed = 2.0 * ROWS_LISTED * (stash.device_factor + stash.host_factor) * balanced_tokens(job, rows)
    numbers = (RECORDED * routed_tokens(job, rows) + listed) / stash.page_size
    return _mixtures(job, rows) * (stash.device_factor * equal_share(job, rows) + NUMBER_BYTES * numbers)


def host_pages(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the bytes of each buffer of pages in host memory: tensors of one width have one."""
    stash = job.techniques.paged_stash
    assert stash is not None
    share = stash.host_factor * balanced_tokens(job, rows) / routed_tokens(job, rows)
    saved = saved_by_mixture_layer(job, rows)
    return [_mixtures(job, rows) * share * saved.of(name) for name in STASHED]


def equal_share(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what one layer has in pages of one micro-batch whose tokens are equally shared."""
    return _every_row(job, rows) * balanced_tokens(job, rows) / routed_tokens(job, rows)


def _every_row(job: Job, rows: RankColumns) -> FloatColumn:
    return saved_by_mixture_layer(job, rows).of(*STASHED) + WEIGHT_BYTES * routed_tokens(job, rows)


def _mixtures(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the mixture layers alive, counted once for each micro-batch in flight, those of prediction heads among
    them."""
    alive = in_flight(job, rows).mixture
    if not job.shape.mtp_num_layers:
        return alive
    heads = job.shape.mtp_num_layers * head_layers(job, rows).mixture * in_flight(job, rows).heads
    return alive + np.where(rows.rank == head_rank(job, rows.layouts), heads, 0.0)
