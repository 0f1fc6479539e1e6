"""What a technique does to the time of a step, as one object: its `TimeEffect`.

A module of `effects/` has it, beside what the technique does to memory. The engine knows none of them by name: where
work is repeated, hidden or added, it asks the effects in use, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import Size
from llmlaunch.layers.layer import Layer
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.effects import Column, effects_in
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.timing.network import TensorPasses
from llmlaunch.timing.products import DevicePace, Rates, SplitColumns, Work

if TYPE_CHECKING:
    from llmlaunch.layers.mixture import Mixture


@frozen
class Mlps:
    """The parts of a layer's MLPs or mixture: the products of the MLPs, or of a shared expert and of latents, for every
    token; kernels (forward, backward) of all of the layer; and of a mixture its experts' products."""

    every_token: Rates
    kernels: tuple[float | FloatColumn, float | FloatColumn]
    mixture: Mixture | None = None
    experts: Work | None = None


@frozen
class LayerParts:
    """The parts of a layer before anything is recomputed: products, softmax attention, that with recurrences
    (`scores`), element-wise operations, and of these, forward, activation functions and norms; then exchanges, None
    where no layout has any. Nothing hides that of the experts' tokens."""

    layer: Layer
    linears: Work
    softmax: Work
    scores: Work
    element_wise: Work
    activation: FloatColumn
    norms: FloatColumn
    mlp: Mlps
    tensor: TensorPasses
    context: Work | None
    expert: Work | None

    @property
    def computed(self) -> Work:
        """All that the device computes."""
        return self.linears + self.scores + self.element_wise

    def products_of_every_token(self, at: SplitColumns) -> Work:
        """Return the products of MLPs, or of a shared expert and of latents."""
        return self.mlp.every_token.work(at.tokens, at.share, at.per_tensor)


@frozen
class Repeated:
    """Seconds of forward work that is done again before the backward pass, and the kernels launched for it."""

    seconds: FloatColumn
    kernels: float | FloatColumn


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Kernels = tuple[float, float]  # forward and backward


class TimeEffect:
    """What one technique does to the time of a step. A method that a technique does not write changes nothing.

    Effects are asked in the order of their `order`, and of the names of their modules where that is equal.
    """

    order = 1
    pairs_microbatches = False  # whether the passes of another micro-batch hide what a layer exchanges
    asks_for_counts = True  # whether the host waits for the number of tokens that each expert gets
    fills_and_drains = True  # whether the slowest stage of a pipeline waits once a step for all others

    def on(self, job: Job) -> bool:
        """Whether the job uses the technique, or any of its layouts may."""
        return True

    # of one layer and one micro-batch

    def pace(self, pace: DevicePace, layer: Layer) -> DevicePace:
        """Return what the device reaches in a layer, which is `pace` without the technique."""
        return pace

    def element_wise(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Work | None:
        """Return the seconds of element-wise operations that come on top of the `parts`; None for none."""
        return None

    def repeated(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated | None:
        """Return the forward work that is done again before the backward pass; None for none."""
        return None

    def waited(
        self, at: SplitColumns, parts: LayerParts, exchange: Work, passes: tuple[FloatColumn, FloatColumn]
    ) -> Work | None:
        """Return what is waited for of the `exchange` of the experts' tokens beside both `passes` of a layer; None
        where the technique hides nothing. The first one that hides some decides."""
        return None

    def module_host_seconds(self, seconds: float) -> float:
        """Return the seconds in which the host launches a kernel of a mixture's modules, which are so many without the
        technique."""
        return seconds

    def captured(self, job: Job, mixture: bool) -> Kernels | None:
        """Return the kernels of a layer, with or without a `mixture`, that no host launches; None for all of them."""
        return 0.0, 0.0

    # of activations that wait in host memory

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        """Whether activations of any layout travel there."""
        return False

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """Return the bytes of one layer of each group and micro-batch that travel there from a stage with so many
        `layers`, which are `moved` without the technique."""
        return moved

    # of the head and the loss

    def logit_bytes(self, moved: float) -> float:
        """Return the bytes that the loss reads and writes for each logit, which are `moved` without the technique."""
        return moved

    def repeated_head(self, head: Work) -> FloatColumn:
        """Return the seconds in which work of the `head` is done again before its backward pass."""
        return 0.0 * head.forward

    # of the layers of a stage

    def run_backward(self, job: Job, ranks: RankColumns) -> Sequence[FloatColumn]:
        """Return how many layers of each group on each rank run backward."""
        return ranks.counts

    # of a pipeline

    def bubble(self, at: SplitColumns, bubble: FloatColumn, weight_gradients: Column) -> FloatColumn:
        """Return the seconds in which the slowest stage waits for the others to fill and drain, which are `bubble`
        without the technique; the others make `weight_gradients` in so many seconds."""
        return bubble

    def hiding_times(self, at: SplitColumns, microbatches: FloatColumn, times: FloatColumn) -> FloatColumn:
        """Return the number of micro-batches whose passes run beside transfers that happen once a step, which are
        `times` without the technique."""
        return times

    # of the update

    def update(self, job: Job, cluster: Cluster, parameters: FloatColumn) -> Size:
        """Return the seconds that the update of a device's `parameters` takes beside that on the device."""
        return 0.0

    def overlaps_update(self, layouts: LayoutColumns) -> bool | BoolColumn:
        """Whether gradients and parameters travel beside the passes of the next batch."""
        return False


@cache
def _effects_in(names: tuple[str, ...]) -> tuple[TimeEffect, ...]:
    return effects_in(names, TimeEffect)


def time_effects_in_use(job: Job) -> tuple[TimeEffect, ...]:
    """Return the effects that the job uses, in order."""
    if job.answers.time_effects is None:
        of_techniques = _effects_in(job.techniques.effect_modules)
        job.answers.time_effects = tuple(effect for effect in of_techniques if effect.on(job))
    return job.answers.time_effects


def time_effects(
    job: Job, method: Callable[Concatenate[TimeEffect, Arguments], Result]
) -> tuple[Callable[Arguments, Result], ...]:
    """Return one method of the effects that the job uses, of those that write it, in order."""
    return _written(time_effects_in_use(job), method)


@cache
def _written(effects: tuple[TimeEffect, ...], method: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    name = method.__name__
    return tuple(getattr(effect, name) for effect in effects if getattr(type(effect), name) is not method)
