"""What a technique does to memory, as one object: its `Effect`.

A module of `effects/` has it. The engine knows none of them by name: where something is saved, kept, moved or made, it
asks the effects in use, in order. So a technique that changes memory is one module there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import Saved, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Branch
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.priced_layers import Gone, PricedLayers
from llmlaunch.models.sections import Vision

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Ordered(Protocol):
    order: int


Kind = TypeVar("Kind", bound=_Ordered)
Column = Callable[[], FloatColumn]
Pinned = tuple[FloatColumn, FloatColumn]  # bytes that are pinned, in tensors of so many bytes


@frozen
class HostBytes:
    """Bytes in host memory of one process: those that are `pageable`, and tensors that are `pinned`. What is made
    `after_loading` takes the memory that the checkpoint took from which a training starts."""

    pageable: FloatColumn
    pinned: tuple[Pinned, ...] = ()
    after_loading: bool = False


class Effect:
    """What one technique does to memory. A method that a technique does not write changes nothing.

    Effects are asked in the order of their `order`, and of the names of their modules where that is equal: what one
    returns is what the next one is given.
    """

    order = 1
    # sections of `Techniques` that decide bytes of moments, or of states, and nothing that the split decides alone
    decides_moments: tuple[type[Any], ...] = ()

    def on(self, job: Job) -> bool:
        """Whether the job uses the technique, or any of its layouts may."""
        return True

    # of pipeline ranks

    def stages_alike(self, job: Job) -> bool:
        """Whether equal layers take equally much on all pipeline ranks."""
        return True

    def inner_ranks_hold_most(self, job: Job) -> bool:
        """Whether a pipeline rank between the first and the last may hold most."""
        return False

    # of one layer and one micro-batch

    def columns(self, c: LayerColumns) -> LayerColumns:
        """Return what blocks look at, which is `c` without the technique."""
        return c

    def saved(self, c: LayerColumns, branch: Branch, tensors: dict[str, Saved]) -> dict[str, Saved]:
        """Return what a branch of a layer saves, which is `tensors` without the technique."""
        return tensors

    def gone(self, c: LayerColumns, tensors: Tensors) -> Gone:
        """Return which of a layer's saved tensors are not on the device until the layer runs backward."""
        return {}

    def gone_share(self, job: Job, layouts: LayoutColumns) -> float:
        """Return the share of the layers whose tensors are `gone`."""
        return 1.0

    def kept(self, layers: PricedLayers, kind: int, gone: Gone, kept: Column) -> FloatColumn:
        """Return what a layer of one kind keeps beside the tensors that are `gone`; `kept` is that without the
        technique."""
        return kept()

    def kept_by_head(self, job: Job, rows: RankColumns, kept: Column, whole: Column) -> FloatColumn:
        """Return what a prediction head saves, where it keeps of its layer what the decoder's layers `kept`, and the
        `whole` of it."""
        return kept()

    # of the layers of a rank

    def saved_by_groups(self, job: Job, rows: RankColumns, of_groups: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """Return what all layers of each group save over all micro-batches in flight, which is `of_groups` without the
        technique."""
        return of_groups

    def saved_share(self, job: Job, rows: RankColumns) -> Size:
        """Return the share of what layers keep that is saved."""
        return 1.0

    def saved_besides(self, job: Job, rows: RankColumns) -> Size:
        """Return what layers save beside that, over all micro-batches in flight."""
        return 0.0

    def on_device(
        self, job: Job, rows: RankColumns, saved_bytes: FloatColumn, of_groups: Sequence[FloatColumn]
    ) -> FloatColumn:
        """Return the part of `saved_bytes`, the activations of all layers of a rank over the micro-batches in flight,
        that does not wait in host memory. A layer of each group saves `of_groups` bytes for one micro-batch."""
        return saved_bytes

    def back_on_device(self, job: Job, rows: RankColumns) -> Size:
        """Return what is on the device all the same of activations that the technique takes from there."""
        return 0.0

    def keeps_inputs(self, job: Job, rows: RankColumns) -> bool | BoolColumn:
        """Whether the inputs of a micro-batch's layers outlive their forward pass, its mask among them."""
        return False

    # of a vision encoder

    def kept_by_encoder(
        self, job: Job, rows: RankColumns, vision: Vision, of_block: Size, kept: FloatColumn
    ) -> FloatColumn:
        """Return what all blocks of an encoder save for each patch, each of which makes `of_block` bytes; `kept` is
        that without the technique."""
        return kept

    def encoded_again(self, job: Job, rows: RankColumns, vision: Vision, of_block: Size) -> Size:
        """Return what is computed again at once for each patch, of blocks of an encoder that make `of_block` bytes."""
        return 0.0

    # of moments

    def lasting(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """Return terms of what is made once and stays."""
        return {}

    def in_passes(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """Return terms of what is alive through all passes forward and backward."""
        return {}

    def at_the_loss(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """Return terms of what is alive while the loss and the head run."""
        return {}

    def logits_share(self, job: Job, rows: RankColumns) -> Size:
        """Return the share of the tokens whose logits exist at a time."""
        return 1.0

    def beside_logits(self, job: Job, rows: RankColumns) -> Size:
        """Return what is alive beside the logits."""
        return 0.0

    def after_the_loss(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """Return terms of what the loss leaves there while the layers run backward."""
        return {}

    def layer_backward(self, job: Job, rows: RankColumns, backward: FloatColumn) -> FloatColumn:
        """Return the temporaries of a layer's backward pass, which are `backward` without the technique."""
        return backward

    def beside_layer(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """Return terms of what is alive beside the layer that runs backward."""
        return {}

    def after_forward(self, beside: Mapping[str, FloatColumn], rows: RankColumns) -> Size:
        """Return what is not there yet, of the terms `beside` the layer that runs backward, when the last layer runs
        forward for the last time."""
        return 0.0

    def pooled(self, job: Job, rows: RankColumns) -> Size:
        """Return the bytes of saved activations that nothing else may use once they are free."""
        return 0.0

    def at_moments(
        self,
        job: Job,
        rows: RankColumns,
        moments: Sequence[Mapping[str, FloatColumn]],
        layer: FloatColumn,
        tables: FloatColumn,
    ) -> Sequence[Mapping[str, FloatColumn]]:
        """Return the transient terms of all moments, of which those of the passes come first and those of the
        optimizer's step last. The last of the passes is the backward pass of a layer, with temporaries of `layer`
        bytes, or of `tables` where those of the embedding are more."""
        return moments

    def connections(self, job: Job, rows: RankColumns) -> FloatColumn:
        """Return what connections of communicators hold outside torch."""
        return np.zeros(len(rows))

    def outside_torch(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """Return terms of what else is outside torch."""
        return {}

    def wasted(self, job: Job, rows: RankColumns) -> Size:
        """Return what the allocator wastes where it cuts blocks of one size for tensors of another, as `facts` say it
        does."""
        return 0.0

    # of model states

    def trains_all(self, job: Job) -> bool:
        """Whether all parameters of the decoder have gradients."""
        return True

    def trains_head(self, job: Job) -> bool:
        """Whether the head's weight has a gradient."""
        return True

    def trained_parameters(
        self, job: Job, rows: RankColumns, dense: FloatColumn, expert: FloatColumn
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return the (dense, expert) parameters of a rank that have gradients, which are so many without the
        technique."""
        return dense, expert

    def trained_matrices(
        self,
        job: Job,
        rows: RankColumns,
        trained: tuple[FloatColumn, FloatColumn],
        matrices: tuple[FloatColumn, FloatColumn],
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return how many of the `trained` (dense, expert) parameters are in matrices of the blocks: all of these
        `matrices` without the technique."""
        return matrices

    def added_parameters(self, job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
        """Return the (dense, expert) parameters on a device beside those of the model."""
        return np.zeros(len(rows)), np.zeros(len(rows))

    def frees_gathered(self, job: Job, rows: RankColumns) -> bool | BoolColumn:
        """Whether nothing that a forward pass saves holds a gathered parameter."""
        return False

    def spared_at_rest(self, job: Job, rows: RankColumns) -> Size:
        """Return the bytes by which the parameters of a rank take less than in the compute format."""
        return 0.0

    def least_parameter_bytes(self, job: Job, least: float) -> float:
        """Return a lower bound of the bytes of a parameter, which is `least` without the technique."""
        return least

    def unread_parameters(self, job: Job, rows: RankColumns) -> Size:
        """Return the dense parameters of a rank that no backward pass reads."""
        return 0.0

    def stubs(self, job: Job, rows: RankColumns, elements: FloatColumn) -> FloatColumn:
        """Return the elements of the stubs of weight gradients, which are so many without the technique."""
        return elements

    def optimizer_on_device(self, job: Job) -> float:
        """Return the share of the optimizer's states that is on the device."""
        return 1.0

    def optimizer_step(self, job: Job, step: FloatColumn, largest: FloatColumn) -> FloatColumn:
        """Return the temporaries of the optimizer's step, which are `step` without the technique; `largest` is what a
        rank steps of its largest parameter, in elements."""
        return step

    def before_the_first_step(self, job: Job, parameters: FloatColumn) -> Size:
        """Return what lies beside the buffers before there are activations, where the framework moves parameters into
        buffers; `parameters` are those that are trained, whole and in shards."""
        return 0.0

    def shards_on_device(self, job: Job) -> bool:
        """Whether parameters that rest in shards rest on the device."""
        return True

    def lasting_states(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """Return terms of what lasts beside parameters, gradients and optimizer states."""
        return {}

    # of what waits in host memory

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        """Whether activations of any layout wait in host memory."""
        return False

    def without_moves(self, job: Job, layouts: LayoutColumns) -> tuple[Job, LayoutColumns]:
        """Return job and layouts with these activations on the device."""
        return job, layouts

    def on_host(self, job: Job, rows: RankColumns) -> Mapping[str, HostBytes]:
        """Return terms of host memory that follow from the micro-batch, beside activations that are moved there."""
        return {}

    def states_on_host(self, job: Job, rows: RankColumns) -> Mapping[str, HostBytes]:
        """Return terms of model states in host memory."""
        return {}

    def waiting(self, job: Job, rows: RankColumns, moved: FloatColumn) -> FloatColumn:
        """Return what waits in host memory of the activations that are `moved` off the device."""
        return moved


def effects_in(names: Sequence[str], base: type[Kind]) -> tuple[Kind, ...]:
    """Return the object of each class that is a kind of `base` in modules of `effects/`, by their `order`. The modules
    of these names are imported, and no others."""
    modules = [import_module(f"llmlaunch.effects.{name}") for name in sorted(names)]
    kinds = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.__name__
    ]
    return tuple(sorted(map(_object_of, kinds), key=lambda effect: effect.order))


@cache
def _object_of(kind: type[Any]) -> Any:
    return kind()


@cache
def _effects_in(names: tuple[str, ...]) -> tuple[Effect, ...]:
    return effects_in(names, Effect)


def effects_in_use(job: Job) -> tuple[Effect, ...]:
    """Return the effects that the job uses, in order."""
    if job.answers.effects is None:
        of_techniques = _effects_in(job.techniques.effect_modules)
        job.answers.effects = tuple(effect for effect in of_techniques if effect.on(job))
    return job.answers.effects


def effects_of(
    job: Job, method: Callable[Concatenate[Effect, Arguments], Result]
) -> tuple[Callable[Arguments, Result], ...]:
    """Return one method of the effects that the job uses, of those that write it, in order."""
    known = job.answers.effects_by_method
    if known is None:
        known = job.answers.effects_by_method = _methods(effects_in_use(job))
    if method not in known:
        name = method.__name__
        writers = (effect for effect in effects_in_use(job) if getattr(type(effect), name) is not method)
        known[method] = tuple(getattr(effect, name) for effect in writers)
    return known[method]


@cache
def _methods(effects: tuple[Effect, ...]) -> dict[object, tuple[Callable[..., Any], ...]]:
    """Return where jobs with the same effects keep which of them write a method."""
    return {}


def optimizer_on_device(job: Job) -> float:
    """Return the share of the optimizer's states that is on the device."""
    return math.prod(effect(job) for effect in effects_of(job, Effect.optimizer_on_device))


def shards_on_device(job: Job) -> bool:
    """Whether parameters that rest in shards rest on the device."""
    return all(effect(job) for effect in effects_of(job, Effect.shards_on_device))


def trains_all(job: Job) -> bool:
    """Whether all parameters of the decoder have gradients."""
    return all(effect(job) for effect in effects_of(job, Effect.trains_all))


def trains_head(job: Job) -> bool:
    """Whether the head's weight has a gradient."""
    return all(effect(job) for effect in effects_of(job, Effect.trains_head))
