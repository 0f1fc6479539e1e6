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
from llmlaunch.layers.block import FP32_BYTES
from llmlaunch.layers.encoder import Encoder, encoder_of
from llmlaunch.memory.effects import Effect, effects_of
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.layer_bytes import job_columns
from llmlaunch.memory.schedule import in_flight
from llmlaunch.models.sections import Vision

PIXEL_BYTES = 4.0  # as an image processor makes them
# of the four learned positions around a patch: their numbers as int64, and a weight of each
POSITION_BYTES = 4.0 * (8.0 + 4.0)


def rank_encoder(job: Job, rows: RankColumns, trained: bool = False) -> FloatColumn:
    """Return the parameters of the encoder and its projectors on one device of each rank, all of them or those that are
    trained; 0 behind the first rank."""
    encoder = encoder_of(job.shape)
    if encoder is None:
        return np.zeros(len(rows))
    return np.where(rows.first, encoder.parameters(job_columns(job, rows.layouts), trained), 0.0)


def encoder_matrices(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of trained matrices on one device whose shapes differ, each once."""
    encoder = encoder_of(job.shape)
    if encoder is None:
        return np.zeros(len(rows))
    return np.where(rows.first, encoder.distinct_elements(job_columns(job, rows.layouts)), 0.0)


def encoder_activations(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what the encoder keeps for its backward pass over all micro-batches in flight, and the images of the one
    that runs. A frozen encoder keeps what its projectors read alone."""
    encoder = encoder_of(job.shape)
    if encoder is None:
        return np.zeros(len(rows))
    vision = encoder.vision
    e, h = job.facts.layer.activation_bytes, vision.hidden_size
    # of each projector the output of its norm, and what goes into its activation and comes out of it
    projected = vision.projectors * (e * h + 2.0 * e * h / rows.tensor)
    last = e * h + 2.0 * FP32_BYTES  # what the last projector's norm reads; others read inputs of blocks
    others = (vision.projectors - 1) * e * h
    blocks = _saved_by_layers(job, rows, encoder) + e * vision.patch_width + POSITION_BYTES
    bytes_per_patch = in_flight(job, rows).depth * ((others if vision.frozen else blocks) + projected + last)
    images = PIXEL_BYTES * vision.patch_width
    return np.where(rows.first, _patches(rows, vision) * (bytes_per_patch + images), 0.0)


def _saved_by_layers(job: Job, rows: RankColumns, encoder: Encoder) -> FloatColumn:
    """Return what all layers save for each patch."""
    of_block = encoder.saved_by_layer(job_columns(job, rows.layouts))
    kept = np.asarray(encoder.vision.depth * of_block)
    for effect in effects_of(job, Effect.kept_by_encoder):
        kept = effect(job, rows, encoder.vision, of_block, kept)
    return kept


def encoder_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the most that is alive while the encoder runs backward beside what it saved: gradients of its residual
    stream, of a block's MLP, of scores that are kept, and of all projectors' outputs, and the blocks that are computed
    again."""
    encoder = encoder_of(job.shape)
    if encoder is None:
        return np.zeros(len(rows))
    vision = encoder.vision
    e, h = job.facts.layer.activation_bytes, vision.hidden_size
    width = h if vision.frozen else vision.ffn_hidden_size  # a projector is as wide inside, for each patch
    kept = job.facts.attention.attention_scores_saved and not vision.frozen
    scores = job.facts.attention.score_gradient_bytes * encoder.scores if kept else 0.0
    gradients = e * 2.0 * h + (e * 2.0 * width + scores) / rows.tensor
    gradients = gradients + e * vision.projectors * job.shape.hidden_size / vision.merge_size**2
    if not vision.frozen:
        of_block = encoder.saved_by_layer(job_columns(job, rows.layouts))
        for effect in effects_of(job, Effect.encoded_again):
            gradients = gradients + effect(job, rows, vision, of_block)
    return np.where(rows.first, _patches(rows, vision) * gradients, 0.0)


def _patches(rows: RankColumns, vision: Vision) -> FloatColumn:
    """Return the patches of one micro-batch."""
    return np.asarray(rows.layouts.micro_batch_size * float(vision.patches_per_sample))
