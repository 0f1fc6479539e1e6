"""What no layout can be faster than, whatever the number of devices."""

from __future__ import annotations

from llmlaunch.cluster.profile import Cluster
from llmlaunch.memory.job import Job
from llmlaunch.timing.flops import attention_width, layer_matrix_parameters
from llmlaunch.timing.products import pace

__all__ = ["least_device_seconds"]

ATTENTION_BACKWARD = 2.5  # five products for the two forward (Dao 2023, section 3)


def least_device_seconds(job: Job, cluster: Cluster) -> float:
    """Seconds of one step times devices: the arithmetic of matrix products and attention at the pace of large products,
    evenly over all devices, and nothing else. The pace and the arithmetic are those of `step_time`."""
    shape, speed = job.shape, pace(job, cluster)
    weights = shape.num_layers * layer_matrix_parameters(shape) + shape.hidden_size * shape.vocab_size
    products = _passes(job) * 2.0 * weights * _kept_tokens(job) / speed.linear
    backward = ATTENTION_BACKWARD / speed.attention_backward if _passes(job) > 1.0 else 0.0
    scores = job.workload.sequence_length * attention_width(shape) * (1.0 / speed.attention_forward + backward)
    return job.workload.tokens_per_step * (products + shape.num_layers * scores)


def _passes(job: Job) -> float:
    """Forward, gradients of inputs, gradients of weights, as far as all layers need them."""
    if job.techniques.trained_layers is not None:
        return 1.0
    return 2.0 if job.techniques.adapters is not None or job.techniques.sampled_share < 1.0 else 3.0


def _kept_tokens(job: Job) -> float:
    """The share that experts with a capacity are sure to take; it stands for all products."""
    moe = job.shape.moe
    return 1.0 if moe is None or moe.capacity_factor is None else min(moe.capacity_factor, 1.0)
