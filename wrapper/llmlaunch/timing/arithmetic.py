"""The arithmetic that a model needs whatever the hardware: the numerator of the model FLOPs utilisation, and a lower
bound of a step's device-seconds."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.cluster.profile import Cluster
from llmlaunch.memory.job import Job
from llmlaunch.models.kinds import head_kinds, kind_shares, layer_parts
from llmlaunch.models.linears import (
    Linear,
    attention_linears,
    delta_linears,
    latent_linears,
    mamba_linears,
    mlp_linears,
)
from llmlaunch.models.parameters import CONV_KERNEL
from llmlaunch.models.shape import ModelShape
from llmlaunch.timing.products import ATTENTION_BACKWARD, attended_keys, pace, part_share
from llmlaunch.timing.vision import encoder_flops

__all__ = ["least_device_seconds", "model_flops_per_token"]


def layer_matrix_parameters(shape: ModelShape) -> float:
    """Return the number of weights a token passes through in one layer, averaged over layers of all kinds."""
    linears = {"attention": attention_linears, "linear": delta_linears, "mamba": mamba_linears}
    parts = {part: kind_shares(shape) if part == "attention" else ((shape, 1.0),) for part in linears}
    mixers = sum(
        part_share(shape, part) * share * _elements(linears[part](kind))
        for part, kinds in parts.items()
        for kind, share in kinds
    )
    dense = _elements(mlp_linears(shape, float(shape.ffn_hidden_size)))
    moe = shape.moe
    mixtures = 0.0 if moe is None else sum(moe.layer_pattern) / len(moe.layer_pattern)
    mixture = 0.0
    if moe is not None:
        experts = mlp_linears(shape, float(moe.topk * moe.ffn_hidden_size), shape.expert_width)
        shared = mlp_linears(shape, float(moe.shared_expert_ffn_hidden_size))
        mixture = _elements((*experts, *shared, *latent_linears(shape)))
    if shape.mamba is None:
        return mixers + mixtures * mixture + (1.0 - mixtures) * dense
    return mixtures * mixture + (1.0 - mixtures) * (mixers + part_share(shape, "mlp") * dense)


def _elements(linears: Sequence[Linear]) -> float:
    return sum(linear.inputs * linear.outputs for linear in linears)


def attended_elements(shape: ModelShape, sequence_length: int) -> float:
    """Return the elements of keys and values that a token's heads are multiplied with, averaged over all layers."""
    kinds = kind_shares(shape)
    return sum(share * attended_keys(kind, sequence_length) * attention_width(kind) for kind, share in kinds)


def attention_width(shape: ModelShape) -> float:
    """Return the elements of a key and a value over all query heads, averaged over layers with attention of one kind
    and those with none."""
    if shape.mla is None:
        return layer_parts(shape).count("attention") / shape.num_layers * 2.0 * shape.query_width
    mla = shape.mla
    return float(shape.num_attention_heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim))


def model_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """Return the FLOPs of one token: forward and backward, attention to the keys that it sees (half of the square, less
    with windows), nothing recomputed (Narayanan et al. 2021, appendix, with the causal half and grouped queries), and
    of its part of the images."""
    layer = 2.0 * layer_matrix_parameters(shape) + 2.0 * attended_elements(shape, sequence_length)
    layer += _recurrent_flops(shape)
    head = 2.0 * shape.hidden_size * shape.vocab_size
    projection = 4.0 * shape.hidden_size**2
    more = shape.mtp_num_layers * (sum(head_kinds(shape)) * layer + head + projection)
    return 3.0 * (shape.num_layers * layer + head + more) + encoder_flops(shape) / sequence_length


def _recurrent_flops(shape: ModelShape) -> float:
    """Return a token's operations forward in the convolutions and recurrences, averaged over all layers: four products
    of a head's state in a gated delta net; in a Mamba-2 mixer seven of a column's state and the convolution
    (megatron/training/training.py num_floating_point_operations, core 0.19)."""
    linear, mamba, parts = shape.linear_attention, shape.mamba, layer_parts(shape)
    if linear is not None:
        state = 4.0 * linear.num_value_heads * linear.value_head_dim**2
        each = 2.0 * (state + linear.conv_kernel * linear.convolved_width)
        return parts.count("linear") / shape.num_layers * each
    if mamba is None:
        return 0.0
    each = 7.0 * mamba.inner_width * mamba.state_size + 2.0 * CONV_KERNEL * mamba.convolved_width
    return parts.count("mamba") / shape.num_layers * each


def least_device_seconds(job: Job, cluster: Cluster) -> float:
    """Return a lower bound of the device-seconds of one step, for any number of devices: the arithmetic of matrix
    products and attention at the pace of large products, evenly over all devices, and nothing else. The pace and the
    arithmetic are those of `step_time`."""
    shape, speed = job.shape, pace(job, cluster)
    weights = shape.num_layers * layer_matrix_parameters(shape) + shape.hidden_size * shape.vocab_size
    products = _passes(job) * 2.0 * weights * _processed_share(job) / speed.linear
    backward = ATTENTION_BACKWARD / speed.attention_backward if _passes(job) > 1.0 else 0.0
    scores = 2.0 * attended_elements(shape, job.workload.sequence_length) * (1.0 / speed.attention_forward + backward)
    return job.workload.tokens_per_step * (products + shape.num_layers * scores)


def _passes(job: Job) -> float:
    """Return how many of the three passes all layers need: forward, gradients of inputs, gradients of weights."""
    if job.techniques.trained_layers is not None:
        return 1.0
    return 2.0 if job.techniques.adapters is not None or job.techniques.sampled_share < 1.0 else 3.0


def _processed_share(job: Job) -> float:
    """Return the share of tokens that experts with a capacity are sure to process; it is applied to all products."""
    moe = job.shape.moe
    return 1.0 if moe is None or moe.capacity_factor is None else min(moe.capacity_factor, 1.0)
