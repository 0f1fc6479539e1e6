"""The arithmetic of a training step whatever the hardware: the numerator of the model FLOPs utilisation, and a lower
bound of a step's device-seconds."""

from __future__ import annotations

from llmlaunch.cluster.profile import Accelerator, Cluster
from llmlaunch.frozen import frozen
from llmlaunch.layers.attention import ATTENTION_BACKWARD
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.matrix import adapted
from llmlaunch.layers.model import Model, model_of
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.timing.products import pace, peaks


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
    model, weight_gradient = model_of(shape), 0.0 if techniques.adapters is not None else techniques.sampled_share
    products = 2.0 + weight_gradient  # forward, the gradient of the input, that of the weights
    heads, linears, others = shape.mtp_num_layers, 0.0, 0.0
    for kind, (layer, below) in enumerate(zip(model.kinds, _frozen_layers(model, techniques), strict=True)):
        trained = model.counts[kind] - below + heads * model.predicts.count(kind)
        linears += 2.0 * layer.token_elements * (products * trained + below)
        others += (2.0 * layer.attended_elements(sequence_length) + layer.recurrent_flops) * (3.0 * trained + below)
        if techniques.adapters is not None:
            others += trained * _adapter_flops(layer, techniques.adapters)
    head = 2.0 * shape.hidden_size * shape.vocab_size
    others += products * ((1.0 + heads) * head + heads * 4.0 * shape.hidden_size**2)
    if shape.vision is not None:
        from llmlaunch.timing.vision import encoder_flops

        others += encoder_flops(shape) / sequence_length
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


def _frozen_layers(model: Model, techniques: Techniques) -> tuple[int, ...]:
    """Return the numbers of layers of each kind below the first one that is trained."""
    layers = len(model.order)
    below = 0 if techniques.trained_layers is None else max(layers - techniques.trained_layers, 0)
    return tuple(int(before[below]) for before in model.before)


def _adapter_flops(layer: Layer, adapters: Adapters) -> float:
    """Return the operations of one token in the adapters of a layer. Each has two matrices; the first has no weight
    gradient where it is frozen."""
    first_passes = 2.0 if adapters.frozen_down else 3.0
    beside = adapted(layer.matrices, adapters)
    return sum(
        2.0 * adapters.rank * matrix.topk * (first_passes * matrix.inputs + 3.0 * columns) for matrix, columns in beside
    )


def least_device_seconds(job: Job, cluster: Cluster) -> float:
    """Return a lower bound of the device-seconds of one step, for any number of devices: the arithmetic of matrix
    products and attention at the pace of large products, evenly over all devices, and nothing else. The pace and the
    arithmetic are those of `step_time`."""
    shape, speed, model = job.shape, pace(job, cluster), model_of(job.shape)
    layers = tuple(zip(model.counts, model.kinds, strict=True))
    weights = sum(count * layer.token_elements for count, layer in layers) + shape.hidden_size * shape.vocab_size
    products = _passes(job) * 2.0 * weights * _processed_share(job) / speed.linear
    backward = ATTENTION_BACKWARD / speed.attention_backward if _passes(job) > 1.0 else 0.0
    elements = sum(count * layer.attended_elements(job.workload.sequence_length) for count, layer in layers)
    scores = 2.0 * elements * (1.0 / speed.attention_forward + backward)
    return job.workload.tokens_per_step * (products + scores)


def _passes(job: Job) -> float:
    """Return how many of the three passes all layers need: forward, gradients of inputs, gradients of weights."""
    if job.techniques.trained_layers is not None:
        return 1.0
    return 2.0 if job.techniques.adapters is not None or job.techniques.sampled_share < 1.0 else 3.0


def _processed_share(job: Job) -> float:
    """Return the share of tokens that experts with a capacity are sure to process; it is applied to all products."""
    moe = job.shape.moe
    return 1.0 if moe is None or moe.capacity_factor is None else min(moe.capacity_factor, 1.0)
