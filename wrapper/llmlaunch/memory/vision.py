"""Bytes and parameters of a vision encoder, on the first pipeline rank.

Bridge builds it on the first rank alone, splits its linears over tensor parallelism, and neither its sequence nor its
images over sequence or context parallelism: each context-parallel rank encodes all images of its micro-batch
(megatron/bridge/models/qwen_vl/modelling_qwen3_vl/model.py Qwen3VLModel and transformer_config.py
get_vision_model_config, Megatron-Bridge 0.6). It computes in the compute format whatever the decoder's is, and is
recomputed where the decoder is in full. The tensors were counted in traces of Bridge's encoder under fake tensors, and
in Transformers' (models/qwen3_vl/modeling_qwen3_vl.py, 5.23).
"""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.schedule import in_flight
from llmlaunch.models.vision import Vision, encoder_parameters

__all__ = ["encoder_activations", "encoder_backward", "encoder_matrices", "rank_encoder", "saved_by_block"]


STATISTIC_BYTES = 4.0  # statistics of norms and of the softmax, and turns, are fp32
PIXEL_BYTES = 4.0  # as an image processor makes them
# of the four learned positions around a patch: their numbers as int64, and a weight of each
POSITION_BYTES = 4.0 * (8.0 + 4.0)


def rank_encoder(job: Job, rows: RankColumns, trained: bool = False) -> FloatColumn:
    """Return the parameters of the encoder and its projectors on one device of each rank, all of them or those that are
    trained; 0 behind the first rank."""
    vision = job.shape.vision
    if vision is None:
        return np.zeros(len(rows))
    count = encoder_parameters(vision, job.shape.hidden_size)
    projectors = count.projectors_split / rows.tensor + count.projectors_whole
    blocks = count.blocks_split / rows.tensor + count.blocks_whole
    return np.where(rows.first, projectors if trained and vision.frozen else projectors + blocks, 0.0)


def encoder_matrices(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of trained matrices on one device whose shapes differ, each once."""
    vision = job.shape.vision
    if vision is None:
        return np.zeros(len(rows))
    h, merged = vision.hidden_size, vision.merged_width
    block = 0 if vision.frozen else 4 * h**2 + 2 * h * vision.ffn_hidden_size
    return np.where(rows.first, (block + merged * (merged + job.shape.hidden_size)) / rows.tensor, 0.0)


def saved_by_block(job: Job, vision: Vision, tensor: FloatColumn) -> FloatColumn:
    """Return the bytes that one block saves for each patch: inputs, statistics and outputs of two norms, queries, keys,
    values and what attention puts out, the softmax's statistics, what goes into the activation and comes out of it.
    Beside images rotary positions are no fused kernel, and a backend may make cosines and sines in every block.
    Attention that is not fused keeps probabilities of all patches of an image, in the softmax's own type besides where
    that is wider."""
    e, h, facts = job.facts.activation_bytes, vision.hidden_size, job.facts
    norms = 2.0 * (2.0 * e * h + 2.0 * STATISTIC_BYTES)
    attention = facts.encoder_attention_widths * e * h + STATISTIC_BYTES * vision.num_attention_heads
    turns = STATISTIC_BYTES * facts.turns_by_layer * (h / vision.num_attention_heads)
    if facts.attention_scores_saved:
        wider = 0.0 if facts.softmax_bytes in (None, e) else facts.softmax_bytes
        attention += (e + (wider or 0.0)) * _scores(vision)
    return np.asarray(norms + turns + (attention + 2.0 * e * vision.ffn_hidden_size) / tensor)


def encoder_activations(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what the encoder keeps for its backward pass over all micro-batches in flight, and the images of the one
    that runs. A frozen encoder keeps what its projectors read alone."""
    vision = job.shape.vision
    if vision is None:
        return np.zeros(len(rows))
    e, h = job.facts.activation_bytes, vision.hidden_size
    # of each projector the output of its norm, and what goes into its activation and comes out of it
    projected = vision.projectors * (e * h + 2.0 * e * h / rows.tensor)
    last = e * h + 2.0 * STATISTIC_BYTES  # what the last projector's norm reads; others read inputs of blocks
    others = (vision.projectors - 1) * e * h
    blocks = _saved_by_blocks(job, rows, vision) + e * vision.patch_width + POSITION_BYTES
    bytes_per_patch = in_flight(job, rows).depth * ((others if vision.frozen else blocks) + projected + last)
    images = PIXEL_BYTES * vision.patch_width
    return np.where(rows.first, _patches(rows, vision) * (bytes_per_patch + images), 0.0)


def _saved_by_blocks(job: Job, rows: RankColumns, vision: Vision) -> FloatColumn:
    """Return what all blocks save for each patch. Full recompute keeps the input of a group of blocks, or takes the
    first blocks alone, as many as of the decoder's layers (modelling_qwen3_vl/transformer_block.py
    _checkpointed_forward, Megatron-Bridge 0.6)."""
    whole, inputs = saved_by_block(job, vision, rows.tensor), job.facts.activation_bytes * vision.hidden_size
    again: FloatColumn | float = vision.depth
    if job.techniques.recompute_method == "block":
        count = rows.layouts.recompute_layers
        again = np.where(count > 0, np.minimum(count, vision.depth), vision.depth)
    full = again * inputs / _group(job, rows, vision) + (vision.depth - again) * whole
    return np.where(rows.layouts.recompute == RECOMPUTE_FULL, full, vision.depth * whole)


def encoder_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the most that is alive while the encoder runs backward beside what it saved: gradients of its residual
    stream, of a block's MLP, of scores that are kept, and of all projectors' outputs, and the blocks that are computed
    again."""
    vision = job.shape.vision
    if vision is None:
        return np.zeros(len(rows))
    e, h = job.facts.activation_bytes, vision.hidden_size
    width = h if vision.frozen else vision.ffn_hidden_size  # a projector is as wide inside, for each patch
    kept = job.facts.attention_scores_saved and not vision.frozen
    scores = job.facts.score_gradient_bytes * _scores(vision) if kept else 0.0
    gradients = e * 2.0 * h + (e * 2.0 * width + scores) / rows.tensor
    gradients = gradients + e * vision.projectors * job.shape.hidden_size / vision.merge_size**2
    again = 0.0 if vision.frozen else saved_by_block(job, vision, rows.tensor) * _group(job, rows, vision)
    again = np.where(rows.layouts.recompute == RECOMPUTE_FULL, again, 0.0)
    return np.where(rows.first, _patches(rows, vision) * (gradients + again), 0.0)


def _scores(vision: Vision) -> float:
    """Return the scores of one patch in one block."""
    return float(vision.num_attention_heads * vision.patches_per_image)


def _patches(rows: RankColumns, vision: Vision) -> FloatColumn:
    """Return the patches of one micro-batch."""
    return np.asarray(rows.layouts.micro_batch_size * float(vision.patches_per_sample))


def _group(job: Job, rows: RankColumns, vision: Vision) -> FloatColumn | float:
    """Return how many blocks are one checkpoint under full recompute, as many as of the decoder's layers."""
    if job.techniques.recompute_method != "uniform":
        return 1.0
    return np.clip(rows.layouts.recompute_layers, 1, vision.depth).astype(np.float64)
