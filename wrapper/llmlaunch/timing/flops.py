"""Arithmetic a model needs, whatever the hardware: the numerator of the model FLOPs utilisation."""

from __future__ import annotations

from llmlaunch.cluster.profile import Cluster
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.timing.products import attention_linears, mlp_linears, pace

__all__ = ["attention_width", "layer_matrix_parameters", "least_device_seconds", "model_flops_per_token"]


def layer_matrix_parameters(shape: ModelShape) -> float:
    """Return the number of weights a token passes through in one layer, averaged over dense and mixture layers."""
    attention = sum(linear.inputs * linear.outputs for linear in attention_linears(shape))
    dense = sum(linear.inputs * linear.outputs for linear in mlp_linears(shape, float(shape.ffn_hidden_size)))
    if shape.moe is None:
        return attention + dense
    moe = shape.moe
    share = sum(moe.layer_pattern) / len(moe.layer_pattern)
    width = float(moe.topk * moe.ffn_hidden_size + moe.shared_expert_ffn_hidden_size)
    mixture = sum(linear.inputs * linear.outputs for linear in mlp_linears(shape, width))
    return attention + share * mixture + (1.0 - share) * dense


def attention_width(shape: ModelShape) -> float:
    """Return the elements of a key and a value over all query heads: times the sequence, a token's causal attention
    forward."""
    if shape.mla is None:
        return 2.0 * shape.query_width
    mla = shape.mla
    return float(shape.num_attention_heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim))


def model_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """Return the FLOPs of one token: forward and backward, causal attention (half of the square), nothing recomputed
    (Narayanan et al. 2021, appendix, with the causal half and grouped queries)."""
    layer = 2.0 * layer_matrix_parameters(shape) + sequence_length * attention_width(shape)
    head = 2.0 * shape.hidden_size * shape.vocab_size
    projection = 4.0 * shape.hidden_size**2
    more = shape.mtp_num_layers * (layer + head + projection)
    return 3.0 * (shape.num_layers * layer + head + more)


ATTENTION_BACKWARD = 2.5  # five products for the two forward (Dao 2023, section 3)


def least_device_seconds(job: Job, cluster: Cluster) -> float:
    """Return a lower bound of the device-seconds of one step, for any number of devices: the arithmetic of matrix
    products and attention at the pace of large products, evenly over all devices, and nothing else. The pace and the
    arithmetic are those of `step_time`."""
    shape, speed = job.shape, pace(job, cluster)
    weights = shape.num_layers * layer_matrix_parameters(shape) + shape.hidden_size * shape.vocab_size
    products = _passes(job) * 2.0 * weights * _processed_share(job) / speed.linear
    backward = ATTENTION_BACKWARD / speed.attention_backward if _passes(job) > 1.0 else 0.0
    scores = job.workload.sequence_length * attention_width(shape) * (1.0 / speed.attention_forward + backward)
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
