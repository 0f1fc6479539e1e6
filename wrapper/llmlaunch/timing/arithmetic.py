"""The arithmetic of a training step whatever the hardware: the numerator of the model FLOPs utilisation, and a lower
bound of a step's device-seconds."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.cluster.profile import Accelerator, Cluster
from llmlaunch.frozen import frozen
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
from llmlaunch.models.mamba import CONV_KERNEL
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Adapters, Techniques
from llmlaunch.timing.products import (
    ATTENTION_BACKWARD,
    adapted_linears,
    adapted_of_mixture,
    attended_keys,
    pace,
    part_share,
    peaks,
)
from llmlaunch.timing.vision import encoder_flops

__all__ = [
    "TokenFlops",
    "attended_elements",
    "least_device_seconds",
    "matrix_parameters",
    "token_flops",
    "utilisation",
]


@frozen
class TokenFlops:
    """Floating-point operations that training does for one token, nothing recomputed: `linears` in the linear layers of
    the blocks, which 8-bit and 4-bit formats make narrower, and `others` in attention, recurrences, head, adapters and
    the token's part of the images."""

    linears: float
    others: float

    @property
    def total(self) -> float:
        """All operations of one token."""
        return self.linears + self.others


def token_flops(shape: ModelShape, sequence_length: int, techniques: Techniques = NO_TECHNIQUES) -> TokenFlops:
    """Return the operations of one token: forward and backward, attention to the keys that it sees (half of the square,
    less with windows), nothing recomputed (Narayanan et al. 2021, appendix, with the causal half and grouped queries).

    Only work that is done counts. Layers below the first one that is trained go forward alone. A frozen matrix beside
    adapters has no weight gradient, and one whose rows are sampled (WTA-CRS) has a gradient of so many rows. Of experts
    with a capacity below one only the tokens they take count.
    """
    layers, frozen = _layers_of_each_kind(shape), _frozen_layers(shape, techniques)
    weights = matrix_parameters(shape)
    mixing = 2.0 * attended_elements(shape, sequence_length) + _recurrent_flops(shape)
    weight_gradient = 0.0 if techniques.adapters is not None else techniques.sampled_share
    products = 2.0 + weight_gradient  # forward, the gradient of the input, that of the weights
    heads = shape.mtp_num_layers
    trained = [all_ - below + heads * more for all_, below, more in zip(layers, frozen, head_kinds(shape), strict=True)]
    linears = sum(
        2.0 * each * (products * back + below) for each, back, below in zip(weights, trained, frozen, strict=True)
    )
    others = mixing * (3.0 * sum(trained) + sum(frozen))
    head = 2.0 * shape.hidden_size * shape.vocab_size
    others += products * ((1.0 + heads) * head + heads * 4.0 * shape.hidden_size**2)
    others += encoder_flops(shape) / sequence_length
    if techniques.adapters is not None:
        others += _adapter_flops(shape, techniques.adapters, trained)
    return TokenFlops(linears, others)


def utilisation(job: Job, accelerator: Accelerator, step_seconds: float, devices: int) -> float | None:
    """Return the model FLOPs utilisation (MFU): the time that the operations of a step take at the accelerator's dense
    peaks, those of quantized linear layers at the peak of their format, over the time the step takes. None where the
    peak of the precision is not known."""
    known = peaks(job, accelerator) if job.workload.precision in accelerator.flops_per_second else None
    if known is None:
        return None
    flops = token_flops(job.shape, job.workload.sequence_length, job.techniques)
    seconds = flops.linears / known.linear + flops.others / known.wide
    return job.workload.tokens_per_step * seconds / (step_seconds * devices)


def _layers_of_each_kind(shape: ModelShape) -> tuple[int, int]:
    """Return the numbers of layers that are no mixtures and of those that are."""
    mixtures = sum(shape.moe.layer_pattern) if shape.moe else 0
    return shape.num_layers - mixtures, mixtures


def _frozen_layers(shape: ModelShape, techniques: Techniques) -> tuple[int, int]:
    """Return the numbers of layers of each kind below the first one that is trained."""
    if techniques.trained_layers is None:
        return 0, 0
    below = max(shape.num_layers - techniques.trained_layers, 0)
    mixtures = sum(shape.moe.layer_pattern[:below]) if shape.moe else 0
    return below - mixtures, mixtures


def _adapter_flops(shape: ModelShape, adapters: Adapters, layers: Sequence[int]) -> float:
    """Return the operations of one token in all adapters. Each has two matrices; the first has no weight gradient where
    it is frozen."""
    first_passes = 2.0 if adapters.frozen_down else 3.0

    def flops(linears: Sequence[Linear]) -> float:
        return sum(2.0 * adapters.rank * (first_passes * each.inputs + 3.0 * each.outputs) for each in linears)

    of_layers = layers[0] * flops(adapted_linears(shape, adapters.targets))
    if shape.moe is not None:
        every_token, experts = adapted_of_mixture(shape, shape.moe, adapters.targets)
        of_layers += layers[1] * (flops(every_token) + shape.moe.topk * flops(experts))
    return of_layers


def matrix_parameters(shape: ModelShape) -> tuple[float, float]:
    """Return the numbers of weights that a token passes through in a layer that is no mixture and in a mixture,
    averaged over layers of all kinds of attention."""
    linears = {"attention": attention_linears, "linear": delta_linears, "mamba": mamba_linears}
    parts = {part: kind_shares(shape) if part == "attention" else ((shape, 1.0),) for part in linears}
    mixers = sum(
        part_share(shape, part) * share * _elements(linears[part](kind))
        for part, kinds in parts.items()
        for kind, share in kinds
    )
    dense = _elements(mlp_linears(shape, float(shape.ffn_hidden_size)))
    moe, mixture = shape.moe, 0.0
    if moe is not None:
        taken = 1.0 if moe.capacity_factor is None else min(moe.capacity_factor, 1.0)
        experts = mlp_linears(shape, float(moe.topk * moe.ffn_hidden_size), shape.expert_width)
        shared = mlp_linears(shape, float(moe.shared_expert_ffn_hidden_size))
        mixture = taken * _elements(experts) + _elements((*shared, *latent_linears(shape)))
    if shape.mamba is None:
        return mixers + dense, mixers + mixture
    return mixers + part_share(shape, "mlp") * dense, mixture


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
    of_layers = zip(_layers_of_each_kind(shape), matrix_parameters(shape), strict=True)
    weights = sum(layers * each for layers, each in of_layers) + shape.hidden_size * shape.vocab_size
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
