"""Seconds and arithmetic of a vision encoder on the first stage, forward and backward of one micro-batch.

Products, attention of the patches of an image to each other, and element-wise kernels run at the pace of the decoder's;
a tensor-parallel rank waits for two sums forward and two backward of each block, which is not split by sequence. No
measured run stands behind it yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.layers.attention import ATTENTION_BACKWARD
from llmlaunch.layers.matrix import INPUTS, NEITHER, OUTPUTS, Matrix, Part
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.job import Job
from llmlaunch.models.sections import Vision
from llmlaunch.models.shape import ModelShape
from llmlaunch.timing.network import TensorPasses, tensor_pass
from llmlaunch.timing.products import DevicePace, SplitColumns, Work, constant, rates

SCORE_PASSES = 6.0  # elements of two bytes read or written for each score that is kept, forward
SUMS = 4.0  # passes that two sums over tensor parallelism are, of each block and direction


def encoder_flops(shape: ModelShape) -> float:
    """Return the FLOPs of one sample's images, forward and backward, nothing recomputed; forward alone of what is
    frozen."""
    vision = shape.vision
    if vision is None:
        return 0.0
    patches, tokens = vision.patches_per_sample, vision.tokens_per_sample
    elements = vision.depth * _elements(_block(vision)) + vision.patch_width * vision.hidden_size
    scores = vision.depth * 2.0 * vision.patches_per_image * vision.hidden_size
    projected = vision.projectors * _elements(_projector(vision, shape.hidden_size))
    return (1.0 if vision.frozen else 3.0) * 2.0 * patches * (elements + scores) + 6.0 * tokens * projected


def encoder_seconds(job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace) -> Mapping[str, FloatColumn]:
    """Return the seconds by kind; nothing without an encoder."""
    vision = job.shape.vision
    if vision is None:
        return {}
    patches = np.asarray(at.layouts.micro_batch_size * float(vision.patches_per_sample))
    share, matrices = patches * at.per_tensor, at.per_tensor
    linears = rates(job, pace, _block(vision), wide=True).work(patches, share, matrices)
    embedding = rates(job, pace, [_matrix(vision.patch_width, vision.hidden_size, NEITHER)], wide=True)
    scores, element = _scores(job, vision, pace, share), _element_wise(job, vision, pace, patches, share)
    forward = vision.depth * (linears.forward + scores.forward + element.forward)
    again = forward * (at.layouts.recompute == RECOMPUTE_FULL) * (not vision.frozen)
    tokens = patches / vision.merge_size**2
    projected = rates(job, pace, _projector(vision, job.shape.hidden_size), wide=True)
    projectors = projected.work(tokens, tokens * at.per_tensor, matrices).both * vision.projectors
    blocks = [_trained(vision, each) for each in (linears, scores, element)]
    products = vision.depth * blocks[0] + _trained(vision, embedding.work(patches, patches, np.ones(len(at))))
    running = products + vision.depth * (blocks[1] + blocks[2])
    kinds = {
        "matrix_products": products + projectors,
        "attention": vision.depth * blocks[1],
        "element_wise": vision.depth * blocks[2],
        "kernel_launches": _launches(job, vision, pace, running + again),
        "tensor_parallel": vision.depth * _sums(job, vision, cluster, at, patches, linears.backward),
    }
    return {**kinds, "recompute": again} if np.any(again) else kinds


def _block(vision: Vision) -> tuple[Matrix, ...]:
    h, ffn = vision.hidden_size, vision.ffn_hidden_size
    return _matrix(h, 3 * h, OUTPUTS), _matrix(h, h, INPUTS), _matrix(h, ffn, OUTPUTS), _matrix(ffn, h, INPUTS)


def _projector(vision: Vision, hidden_size: int) -> tuple[Matrix, ...]:
    merged = vision.merged_width
    return _matrix(merged, merged, OUTPUTS), _matrix(merged, hidden_size, INPUTS)


def _matrix(inputs: int, outputs: int, divided: str) -> Matrix:
    return Matrix(float(inputs), (Part("", float(outputs)),), divided)


def _elements(matrices: tuple[Matrix, ...]) -> float:
    return sum(matrix.elements for matrix in matrices)


def _trained(vision: Vision, work: Work) -> FloatColumn:
    return work.forward if vision.frozen else work.both


def _scores(job: Job, vision: Vision, pace: DevicePace, share: FloatColumn) -> Work:
    """Return the seconds of softmax(QK)V of one block: a patch attends to all patches of its image. Attention that is
    not fused reads and writes its scores as that of a decoder does (`SoftmaxAttention.sequence_work`)."""
    operations = 4.0 * vision.patches_per_image * vision.hidden_size * share
    if job.facts.attention.attention_scores_saved:
        scores = float(vision.num_attention_heads * vision.patches_per_image) * share
        through = SCORE_PASSES * 2.0 / pace.element_wise * scores
        return Work(operations / pace.wide + through, 2.0 * operations / pace.wide + through)
    return Work(operations / pace.attention_forward, ATTENTION_BACKWARD * operations / pace.attention_backward)


def _element_wise(job: Job, vision: Vision, pace: DevicePace, patches: FloatColumn, share: FloatColumn) -> Work:
    """Return the seconds of one block's norms, additions, rotary positions and activation, as the backend's kernels of
    a decoder move them; GELU reads one and writes one forward, reads two and writes one backward."""
    moved, each = job.facts.layer.kernels, job.facts.layer.activation_bytes / pace.element_wise
    h, passes = float(vision.hidden_size), []
    for direction, activated in enumerate((2.0, 3.0)):
        whole = (2.0 * moved.norm_elements[direction] + moved.stream_elements[direction]) * h
        split = moved.rotary_elements[direction] * 2.0 * h + activated * vision.ffn_hidden_size
        passes.append(each * (whole * patches + split * share))
    return Work(passes[0], passes[1])


def _launches(job: Job, vision: Vision, pace: DevicePace, running: FloatColumn) -> FloatColumn:
    """Return the seconds of gaps between kernels, or what the host takes longer to launch them than they run; no CUDA
    graph holds them."""
    forward, backward = job.facts.layer.kernels.launched
    kernels = vision.depth * (forward if vision.frozen else forward + backward)
    host = pace.host_seconds_factor * constant("kernel_host_seconds") * kernels
    return np.maximum(host - running, constant("kernel_seconds") * kernels)


def _sums(
    job: Job, vision: Vision, cluster: Cluster, at: SplitColumns, patches: FloatColumn, backward: FloatColumn
) -> FloatColumn:
    """Return the seconds that one block waits for sums over tensor parallelism; those backward run beside the weights'
    gradients."""
    narrow = replace(job, shape=replace(job.shape, hidden_size=vision.hidden_size))
    seconds = tensor_pass(narrow, cluster, replace(at, tokens=patches))
    return TensorPasses(seconds, SUMS, 0.0 if vision.frozen else SUMS).exposed(backward)
