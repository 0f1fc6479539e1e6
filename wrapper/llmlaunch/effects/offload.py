"""Activations that wait in host memory until their backward pass: those of named modules, of whole layers, or the layer
inputs that full recompute keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.block import Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.model import model_of
from llmlaunch.layout import RECOMPUTE_FULL, LayoutColumns, Modules
from llmlaunch.memory.activations import kept_by_layer, of_all_layers, on_device, saved_share
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.priced_layers import Gone, by_module
from llmlaunch.memory.tokens import layer_input
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.treatments import CheckpointOffload, ModuleOffload, ModuleOffloadShare
from llmlaunch.timing.effects import TimeEffect


class OffloadEffect(Effect):
    """Layouts say how many layers leave, and may name the modules; the job names them otherwise."""

    decides_moments = (ModuleOffload, ModuleOffloadShare, CheckpointOffload)

    def gone(self, c: LayerColumns, tensors: Tensors) -> Gone:
        """The tensors of offloaded modules."""
        if not offloads_modules(c.techniques, c.layouts):
            return {}
        return by_module(tensors, lambda tensor: tensor.moved_by, c.offloads)

    def gone_share(self, job: Job, layouts: LayoutColumns) -> float:
        """The first layers of each chunk may be a share of them."""
        return job.techniques.offload_fraction if offloads_modules(job.techniques, layouts) else 1.0

    def on_device(
        self, job: Job, rows: RankColumns, saved_bytes: FloatColumn, of_groups: Sequence[FloatColumn]
    ) -> FloatColumn:
        """What checkpoints and whole layers leave there."""
        if not (job.techniques.offload_checkpoints or np.any(rows.layouts.offload_layers)):
            return saved_bytes
        largest = rows.most_of(of_groups) * saved_share(job, rows)
        return _first_layers(job, rows, _checkpoints(job, rows, saved_bytes, largest), largest, of_groups)

    def back_on_device(self, job: Job, rows: RankColumns) -> Size:
        """What stays of offloaded modules: their last group, so that its backward pass need not wait
        (fine_grained_activation_offload.py post_warmup_callback, core 0.19): one layer's, one micro-batch's, where a
        rank keeps any."""
        if not offloads_modules(job.techniques, rows.layouts):
            return 0.0
        sizes = _moved_by_layer(job, rows)
        return np.minimum(rows.most_of(sizes), on_device(job, rows, of_all_layers(job, rows, sizes), sizes))

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        return bool(
            job.techniques.offload_checkpoints
            or offloads_modules(job.techniques, layouts)
            or np.any(layouts.offload_layers)
        )

    def without_moves(self, job: Job, layouts: LayoutColumns) -> tuple[Job, LayoutColumns]:
        """All of them stay."""
        here, layouts = without_offloaded_modules(job, layouts)
        here = replace(here, techniques=replace(here.techniques, offload_checkpoints=False))
        if not np.any(layouts.offload_layers):
            return here, layouts
        return here, replace(layouts, offload_layers=np.zeros_like(layouts.offload_layers))


def offloads_modules(techniques: Techniques, layouts: LayoutColumns) -> bool:
    """Whether the activations of any module of any layout wait in host memory."""
    if layouts.modules is None:
        return bool(techniques.offload_modules)
    return any(modules.offload for modules in layouts.module_sets)


def without_offloaded_modules(job: Job, layouts: LayoutColumns) -> tuple[Job, LayoutColumns]:
    """Return job and layouts with the activations of all modules on the device."""
    here = replace(job, techniques=replace(job.techniques, offload_modules=()))
    module_sets = tuple(Modules(modules.recompute) for modules in layouts.module_sets)
    return here, replace(layouts, module_sets=module_sets)


def _moved_by_layer(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return what one layer's offloaded modules save for one micro-batch, of the layers whose modules leave."""
    here, layouts = without_offloaded_modules(job, rows.layouts)
    on_device = zip(kept_by_layer(here, rows.with_layouts(layouts)), kept_by_layer(job, rows), strict=True)
    fraction = job.techniques.offload_fraction  # which decides how many of the groups move, and not how large they are
    return [(every - left) / fraction for every, left in on_device]


def _checkpoints(job: Job, rows: RankColumns, saved_bytes: FloatColumn, layer_bytes: FloatColumn) -> FloatColumn:
    """The layer inputs of full recompute on the host (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1)."""
    if not job.techniques.offload_checkpoints:
        return saved_bytes
    travelling = np.minimum(saved_bytes, job.facts.layer.travelling_checkpoints * layer_bytes)
    return np.where(rows.layouts.recompute == RECOMPUTE_FULL, travelling, saved_bytes)


def _first_layers(
    job: Job, rows: RankColumns, saved_bytes: FloatColumn, layer_bytes: FloatColumn, of_groups: Sequence[FloatColumn]
) -> FloatColumn:
    """The first layers of each rank on the host, whole (KARMA, Wahib et al. 2020; Megatron
    `--cpu-offloading-num-layers`). Of L layers, N offloaded, layer i has left before layer L - N + i runs forward and
    comes back when that layer has run backward, so that never more than L - N layers, one behind the other, are on the
    device (transformer_engine/pytorch/cpu_offload.py DefaultOffloadSynchronizer, 2.20); the one that runs always is."""
    if not np.any(rows.layouts.offload_layers):
        return saved_bytes
    layers = np.maximum(rows.layers, 1.0)
    offloaded = np.minimum(rows.layouts.offload_layers, layers)
    share = 1.0 - offloaded / layers
    if rows.groups == model_of(job.shape).single_groups:
        share = _heaviest_share(job, rows, offloaded, share, of_groups)
    left = np.maximum(saved_bytes * share, np.minimum(saved_bytes, layer_bytes))
    return np.where(offloaded > 0, left, saved_bytes)


def _heaviest_share(
    job: Job, rows: RankColumns, offloaded: FloatColumn, share: FloatColumn, of_groups: Sequence[FloatColumn]
) -> FloatColumn:
    """Return the share of what all layers save that those save which are on the device at once, if they are the
    heaviest of so many that follow each other; `share` where layers are alike. The layers of a stage are those of the
    whole model, since there is no pipeline beside it (transformer_config.py, core 0.19)."""
    model = model_of(job.shape)
    if len(model.decoder_kinds) == 1:
        return share
    heaviest: FloatColumn = share.copy()
    every = np.maximum(rows.sum_of(of_groups), 1.0)
    count = len(model.order)
    for moved_layers in np.unique(offloaded[rows.layouts.pipeline == 1]).astype(np.int64).tolist():
        some = np.flatnonzero((offloaded == moved_layers) & (rows.layouts.pipeline == 1))
        windows = np.stack([before[count - moved_layers :] - before[: moved_layers + 1] for before in model.before])
        saved = np.tensordot(windows.T, np.stack([np.broadcast_to(size, len(rows))[some] for size in of_groups]), 1)
        heaviest[some] = saved.max(axis=0) / every[some]
    return heaviest


class ModuleOffloadTime(TimeEffect):
    """Layouts may name the modules; the job names them otherwise."""

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        return offloads_modules(job.techniques, layouts)

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """What the modules save."""
        if not offloads_modules(job.techniques, rows.layouts):
            return moved
        here, on_device = without_offloaded_modules(job, rows.layouts)
        whole, left = kept_by_layer(here, rows.with_layouts(on_device)), kept_by_layer(job, rows)
        return [a - b + c for a, b, c in zip(whole, left, moved, strict=True)]


class CheckpointOffloadTime(TimeEffect):
    """The layer inputs of full recompute."""

    order = 3  # in place of what leaves otherwise

    def on(self, job: Job) -> bool:
        return job.techniques.offload_checkpoints

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        return True

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """The inputs alone."""
        inputs = layer_input(job, rows)
        return [np.where(rows.layouts.recompute == RECOMPUTE_FULL, inputs, each) for each in moved]


class LayerOffloadTime(TimeEffect):
    """The first layers of each rank, whole. Layouts say how many."""

    order = 5  # of what leaves of other layers

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        return bool(np.any(layouts.offload_layers))

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """All that these layers keep."""
        if not np.any(rows.layouts.offload_layers):
            return moved
        share = np.minimum(rows.layouts.offload_layers / np.maximum(layers, 1.0), 1.0)
        return [(1.0 - share) * some + share * one for some, one in zip(moved, kept_by_layer(job, rows), strict=True)]
