"""Pages in which activations of experts wait for their backward pass (`--moe-paged-stash`,
megatron/core/transformer/moe/paged_stash.py, core 0.19).

With a fixed number of rows for the tokens of a device's experts, most layers leave some of them empty. What is saved
inside the experts' one kernel is copied without these into pages, when the layer has run forward, and back when its
backward pass is next. The buffers of pages are made once, after the first step, and stay. How many tokens arrive is not
known before a job runs; the buffers count with equally shared ones, times a factor, so their size is. A step whose
tokens they cannot take is run again without pages and fixed rows (PagedStashRunner); what that needs is not in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.block import Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.mixture import Mixture
from llmlaunch.layers.mlp import projected_bytes
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.effects import Effect, HostBytes
from llmlaunch.memory.job import Job, RankColumns, head_rank
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.priced_layers import Gone, PricedLayers
from llmlaunch.memory.schedule import in_flight
from llmlaunch.timing.effects import LayerParts, TimeEffect
from llmlaunch.timing.network import exposed
from llmlaunch.timing.products import DevicePace, SplitColumns, Work

# What Transformer Engine marks as rows of tokens when experts are one kernel (transformer_engine/pytorch/ops/fused/
# grouped_mlp.py fuser_forward, 2.20): the quantized inputs of both linears, and what the activation reads.
STASHED = ("expert_fc1_input", "expert_fc1_output", "expert_fc2_input")
TERM = "paged_stash"
WEIGHT_BYTES = 4.0  # of the router's weight of a row, which is marked, too
NUMBER_BYTES = 8.0  # of a page's number
# Tensors of a layer, each with a record of its pages: those three, the weights, and the scales of the inputs, of which
# every 32 rows have one.
RECORDED, ROWS_LISTED = 6.0, 4.0 + 2.0 / 32.0


class PagedStashEffect(Effect):
    """Pages on the device and on the host in place of what layers of experts save."""

    def on(self, job: Job) -> bool:
        return job.techniques.paged_stash is not None

    def gone(self, c: LayerColumns, tensors: Tensors) -> Gone:
        """What is copied to pages."""
        return {name: True for name in STASHED if name in tensors}

    def back_on_device(self, job: Job, rows: RankColumns) -> Size:
        """The tensors of the layer that runs."""
        return running_experts(job, rows)

    def lasting(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """The pages on the device."""
        return {TERM: stash_pages(job, rows)}

    def on_host(self, job: Job, rows: RankColumns) -> Mapping[str, HostBytes]:
        """The pages in host memory."""
        buffers = tuple((pages, pages) for pages in _host_pages(job, rows))
        return {TERM: HostBytes(np.zeros(len(rows)), buffers)}


def running_experts(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of the layer that runs: its tensors are there with all their rows, before they are copied to
    pages and after. Of two micro-batches that compute in turn both are."""
    layers = layers_of(job, rows)
    several = 1.0 + job.techniques.overlaps_experts
    alive = zip(in_flight(job, rows).alive, layers.by_group(_every_row(layers)), strict=True)
    return several * reduce(np.maximum, (np.where(count > 0, size, 0.0) for count, size in alive))


def stash_pages(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of the pages on the device, the lists of those that are free (each kept twice, to begin a step
    anew), and the records of what lies where, for as many rows as there are."""
    stash = job.techniques.paged_stash
    assert stash is not None
    layers = layers_of(job, rows)
    listed = 2.0 * ROWS_LISTED * (stash.device_factor + stash.host_factor)

    def numbers(mixture: Mixture) -> FloatColumn:
        c = layers.columns
        return (RECORDED * mixture.routed_tokens(c) + listed * mixture.balanced_tokens(c)) / stash.page_size

    pages = [
        stash.device_factor * share + NUMBER_BYTES * sum(map(numbers, layer.blocks_of(Mixture)), 0.0)
        for share, layer in zip(_equal_share(layers), layers.model.kinds, strict=True)
    ]
    return _of_all(job, rows, layers, pages)


def _host_pages(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the bytes of each buffer of pages in host memory: tensors of one width have one."""
    stash = job.techniques.paged_stash
    assert stash is not None
    layers = layers_of(job, rows)

    def pages(name: str) -> FloatColumn:
        saved = layers.each(lambda layer, tensors: tensors[name].bytes if name in tensors else 0.0)
        shares = _balanced_share(layers)
        return _of_all(
            job, rows, layers, [stash.host_factor * share * size for share, size in zip(shares, saved, strict=True)]
        )

    return [pages(name) for name in STASHED]


def equal_share(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return what one layer of each group has in pages of one micro-batch whose tokens are equally shared."""
    layers = layers_of(job, rows)
    return layers.by_group(_equal_share(layers))


def _equal_share(layers: PricedLayers) -> list[Size]:
    return [each * share for each, share in zip(_every_row(layers), _balanced_share(layers), strict=True)]


def _balanced_share(layers: PricedLayers) -> list[Size]:
    """Return by kind of layer the equally shared rows of its experts over all rows there are."""
    return layers.of_blocks(Mixture, lambda mixture, c: mixture.balanced_tokens(c) / mixture.routed_tokens(c))


def _every_row(layers: PricedLayers) -> list[Size]:
    """Return by kind of layer what its experts save that goes to pages, of all rows."""

    def size(layer: Layer, tensors: Tensors) -> Size:
        weights = (WEIGHT_BYTES * mixture.routed_tokens(layers.columns) for mixture in layer.blocks_of(Mixture))
        stashed = (tensors[name].bytes for name in STASHED if name in tensors)
        return sum((*stashed, *weights), 0.0)

    return layers.each(size)


def _of_all(job: Job, rows: RankColumns, layers: PricedLayers, of_kinds: list[Size]) -> FloatColumn:
    """Return what all layers alive take together, once for each micro-batch in flight, those of prediction heads among
    them."""
    products = zip(in_flight(job, rows).alive, layers.by_group(of_kinds), strict=True)
    total = reduce(np.add, (count * size for count, size in products))
    if not job.shape.mtp_num_layers:
        return total
    heads = job.shape.mtp_num_layers * layers.predicted(of_kinds) * in_flight(job, rows).heads
    return total + np.where(np.equal(rows.rank, head_rank(job, rows.layouts)), heads, 0.0)


class PagedStashTime(TimeEffect):
    """The copies run on a stream of their own (megatron/core/transformer/moe/paged_stash.py, core 0.19)."""

    order = 4  # beside what else leaves

    def on(self, job: Job) -> bool:
        return job.techniques.paged_stash is not None

    def element_wise(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Work | None:
        """What is waited for of copies that are read and written each time, beside all of the layer but its experts.
        What pages in host memory take is not counted here."""
        mixture, experts = parts.mlp.mixture, parts.mlp.experts
        if mixture is None or experts is None:
            return None
        width = job.facts.layer.linear_input_bytes * (mixture.outer + mixture.width)
        width += projected_bytes(at.layer, mixture.gated) * mixture.width
        once = (2.0 * width / pace.element_wise) * mixture.busiest_copies(at.layer)
        beside = parts.computed.forward - experts.forward, parts.computed.backward - experts.backward
        return Work(exposed(once, beside[0]), exposed(once, beside[1]))

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        return _spilled_share(job) > 0

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """What experts save beyond the device's pages."""
        spilled = _spilled_share(job)
        return [some + spilled * share for some, share in zip(moved, equal_share(job, rows), strict=True)]


def _spilled_share(job: Job) -> float:
    """Return what the device's pages cannot take of the activations of experts, where the busiest device's are as many
    as usual, as a multiple of equally shared ones. It goes to pages in host memory, as far as there are any."""
    stash = job.techniques.paged_stash
    assert stash is not None
    return min(max(job.facts.mixture.expert_imbalance - stash.device_factor, 0.0), stash.host_factor)
