"""What ZeRO 3 holds of gathered parameters at most, tensor by tensor in the order of a forward and a backward pass.

Follows deepspeed/runtime/zero/partitioned_param_coordinator.py and partition_parameters.py, 0.19.8: a module's
parameters are gathered before it runs, those of the modules behind it up to a bucket, and each is released unless it
is needed again soon. Counted on a real engine (tests/frameworks/test_deepspeed_bytes.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from operator import eq

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.facts import Gathering
from llmlaunch.families.registry import family_named
from llmlaunch.frozen import frozen
from llmlaunch.layers.encoder import encoder_of
from llmlaunch.layers.model import model_of
from llmlaunch.layers.modules import NO_PARAMETERS, Module, ModuleSplit, ModuleStyle, container
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques.requests import Adapters


@lru_cache(maxsize=64)
def modules_of(shape: ModelShape, split: ModuleSplit, adapters: Adapters | None) -> tuple[Module, ...]:
    """Return the modules of a whole model on one device, those of low-rank adapters among them, each before what is
    inside it."""
    counts, model, encoder = count_parameters(shape), model_of(shape), encoder_of(shape)
    divided, tied = counts.embedding // split.tensor, shape.tied_embeddings
    family = family_named(shape.family)
    style = ModuleStyle(split, adapters, family.fuses_linears, family.gathered_mixture)
    kinds = [layer.modules(style) for layer in model.kinds]
    table = Module(
        (counts.embedding if split.table_whole else divided,), frozen_table=adapters is not None and not tied
    )
    positions = [Module((counts.positions,))] if counts.positions else []
    images = encoder.modules(split) if encoder is not None else []
    layers = (module for kind in model.order for module in kinds[kind])
    body = container([table, *positions, *images, NO_PARAMETERS, *layers, Module((counts.final_norm,))])
    head = Module(() if tied else (divided,), shares_table=tied)
    further = [Module((counts.mtp,))] if counts.mtp else []
    return tuple(container([*body, head, *further]))


@frozen
class Gathered:
    """Elements on one device: `most` at any time of a forward and backward pass, of which `persistent` are there in
    the optimizer step too."""

    most: int
    persistent: int


def gathered_elements(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what ZeRO 3 gathers at most on each row's device, 0 at lower stages. The order with and without full
    recompute differs by little, and the larger of the two counts."""
    limits, lay = job.facts.zero.gathering, rows.layouts
    elements = np.zeros(len(rows))
    sharded = np.flatnonzero(lay.zero_stage >= 3)
    if limits is None or not len(sharded):
        return elements
    splits = np.stack([lay.tensor, lay.expert, lay.expert_tensor])[:, sharded]
    different, of_row = np.unique(splits, axis=1, return_inverse=True)
    most = [
        max(
            gathered(
                job.shape,
                ModuleSplit(tensor, expert, expert_tensor, job.facts.states.embedding_whole),
                job.techniques.adapters,
                limits,
                recompute,
            ).most
            for recompute in (False, True)
        )
        for tensor, expert, expert_tensor in different.T.tolist()
    ]
    elements[sharded] = np.array(most, dtype=np.float64)[of_row.reshape(-1)]
    return elements


@lru_cache(maxsize=1024)
def gathered(
    shape: ModelShape, split: ModuleSplit, adapters: Adapters | None, limits: Gathering, recompute: bool
) -> Gathered:
    """Return what is gathered of a whole model on one device, from the second step on, when the order is known.
    `recompute` says whether every layer runs forward again before it runs backward."""
    every = modules_of(shape, split, adapters)
    modules = _without_repetition(every, shape.num_layers, limits)
    run = _Pass(modules, _order(modules, recompute), limits)
    left_out = 0 if modules is every else _persistent_elements(every, limits) - run.persistent
    return Gathered(run.most() + left_out, run.persistent + left_out)


FEW_LAYERS = 4  # the first may be of another kind than those that repeat


def _persistent_elements(modules: Sequence[Module], limits: Gathering) -> int:
    few = limits.persistent_elements
    return sum(size for module in modules for size in module.parameters if size <= few)


def _without_repetition(modules: Sequence[Module], layers_count: int, limits: Gathering) -> Sequence[Module]:
    """Return the modules without layers in the middle, where there are so many that what is gathered repeats itself:
    all limits together span fewer layers than are left at either end. Layers may differ by a pattern."""
    starts = [index for index, module in enumerate(modules) if module.layer][-layers_count:]
    if limits.persistent_total < math.inf or len(starts) < 2 * FEW_LAYERS:
        return modules
    layers = [tuple(modules[start : start + 1 + modules[start].inside]) for start in starts]
    sizes = [sum(size for module in layer for size in module.parameters) for layer in layers]
    later = layers[FEW_LAYERS:]
    period = next((p for p in range(1, FEW_LAYERS) if all(map(eq, later, layers[FEW_LAYERS - p :]))), None)
    if period is None:
        return modules
    spanned = limits.live_elements + limits.reuse_elements + 2 * limits.prefetch_elements
    kept = FEW_LAYERS + 2 * period + -(-spanned // min(sizes[FEW_LAYERS:]))
    dropped = (len(layers) - 2 * kept) // period * period
    if dropped <= 0:
        return modules
    first, last = starts[kept], starts[kept + dropped]
    before = [
        replace(module, inside=module.inside - (last - first)) if index + module.inside >= last else module
        for index, module in enumerate(modules[:first])
    ]
    return [*before, *modules[last:]]


def _order(modules: Sequence[Module], recompute: bool) -> list[int]:
    """Return the modules in the order in which a forward and a backward pass run them."""
    forward = list(range(len(modules)))
    backward = _backward(modules, 0, len(modules), recompute)
    return forward + [index for index in backward if not modules[index].frozen_table]


def _backward(modules: Sequence[Module], first: int, last: int, recompute: bool) -> list[int]:
    """Return the modules from `first` to `last` in the order of a backward pass, each before what is inside it."""
    outermost = []
    index = first
    while index < last:
        outermost.append(index)
        index += 1 + modules[index].inside
    order = []
    for index in reversed(outermost):
        end = index + 1 + modules[index].inside
        order.append(index)
        if recompute and modules[index].layer:
            order.extend(range(index, end))
        order.extend(_backward(modules, index + 1, end, recompute))
    return order


class _Flat:
    """One collective. Of several parameters the buffer they arrive in is there until each has been waited for."""

    def __init__(self, parameters: Sequence[int], copied: int) -> None:
        self.parameters = parameters
        self.copied = copied  # elements
        self.waiting = set(parameters)
        self.arrived = False


class _Pass:
    """The coordinator's book-keeping of one forward and backward pass, in elements."""

    def __init__(self, modules: Sequence[Module], order: Sequence[int], limits: Gathering) -> None:
        self.limits, self.order = limits, order
        self.sizes: list[int] = []
        self.owned: list[list[int]] = []
        for module in modules:
            first = len(self.sizes)
            self.sizes.extend(module.parameters)
            self.owned.append([0] if module.shares_table else list(range(first, len(self.sizes))))
        self.stays = self._persistent()
        self.persistent = sum(size for size, stays in zip(self.sizes, self.stays, strict=True) if stays)
        sums = [sum(self.sizes[p] for p in owned) for owned in self.owned]
        self.leaf = [module.leaf for module in modules]
        self.before = [0, *accumulate(0 if self.leaf[index] else sums[index] for index in order)]
        self.leaves = _Leaves(modules, order, sums) if any(self.leaf) else None
        self.uses: list[deque[int]] = [deque() for _ in self.sizes]
        for step, index in enumerate(order):
            for parameter in self.owned[index]:
                self.uses[parameter].append(step)
        self.queue = deque((p, step) for step, index in enumerate(order) for p in self.owned[index])
        self.available = list(self.stays)
        self.fetched_for = [-1] * len(self.sizes)
        self.flats: dict[int, _Flat] = {}
        self.alive, self.counted = self.persistent, 0
        self.highest = self.persistent

    def _persistent(self) -> list[bool]:
        """Return for each parameter whether it stays (zero/parameter_offload.py mark_persistent_parameters)."""
        total, stays = 0, []
        for size in self.sizes:
            kept = size <= self.limits.persistent_elements and size + total <= self.limits.persistent_total
            stays.append(kept)
            total += size * kept
        return stays

    def most(self) -> int:
        """Run all modules, and return the most elements that were alive at once."""
        for step, index in enumerate(self.order):
            owned = self.owned[index]
            if owned:
                self._gather([p for p in owned if not self.available[p] and p not in self.flats])
                self._wait(owned)
            self._prefetch(step, owned)
            self.highest = max(self.highest, self.alive)
            apart = self.leaves.between(step) if self.leaves is not None and self.leaf[index] else None
            for parameter in owned:
                self._release(step, parameter, apart)
        return self.highest

    def _gather(self, parameters: Sequence[int]) -> None:
        if not parameters:
            return
        elements = sum(self.sizes[p] for p in parameters)
        in_common = len(parameters) > 1 and not self.limits.sequential
        flat = _Flat(parameters, elements if in_common else 0)
        self.flats.update(dict.fromkeys(parameters, flat))
        self.alive, self.counted = self.alive + elements, self.counted + elements

    def _wait(self, owned: Sequence[int]) -> None:
        """Copy parameters out of the buffers of their collectives, which go when each of theirs has been waited for, in
        no certain order. One alone arrives where it stays (AllGatherCoalescedHandle.wait, _all_gather_sequential)."""
        flats = [self.flats.pop(parameter, None) for parameter in owned]
        for flat in flats:
            if flat is not None and not flat.arrived:
                flat.arrived = True
                self.alive += flat.copied
                for each in flat.parameters:
                    self.available[each] = True
        self.highest = max(self.highest, self.alive)
        for parameter, flat in zip(owned, flats, strict=True):
            if flat is not None:
                flat.waiting.discard(parameter)
                self.alive -= 0 if flat.waiting else flat.copied

    def _prefetch(self, step: int, owned: Sequence[int]) -> None:
        """Take the module's parameters from the queue, and gather what is next in it up to the limits."""
        due = sum(self.fetched_for[p] < step for p in owned)
        while self.queue and due:
            parameter, use = self.queue.popleft()
            self.fetched_for[parameter] = use
            due -= 1
        room = min(self.limits.live_elements - self.counted, self.limits.prefetch_elements)
        if room <= 0:
            return
        ahead: list[int] = []
        elements = 0
        while self.queue and elements < room:
            parameter, use = self.queue.popleft()
            self.fetched_for[parameter] = max(self.fetched_for[parameter], use)
            if not self.available[parameter] and parameter not in self.flats and parameter not in ahead:
                ahead.append(parameter)
                elements += self.sizes[parameter]
        self._gather(ahead)

    def _release(self, step: int, parameter: int, apart: float | None) -> None:
        """Release a parameter unless it is used again soon (__params_to_release). `apart` is the distance to the next
        use of one inside a leaf module; of others, what is inside leaf modules counts for nothing."""
        uses = self.uses[parameter]
        while uses and uses[0] <= step:
            uses.popleft()
        if apart is None:
            apart = self.before[uses[0]] - self.before[step + 1] if uses else math.inf
        soon = apart < self.limits.reuse_elements
        if self.stays[parameter] or soon or self.fetched_for[parameter] > step or not self.available[parameter]:
            return
        self.available[parameter] = False
        self.alive, self.counted = self.alive - self.sizes[parameter], self.counted - self.sizes[parameter]


class _Leaves:
    """Distances as leaf modules count them: with all that is inside any module that runs, up to the first that holds
    their parameters again."""

    def __init__(self, modules: Sequence[Module], order: Sequence[int], sums: Sequence[int]) -> None:
        until = [0, *accumulate(sums)]
        within = [until[index + 1 + module.inside] - until[index] for index, module in enumerate(modules)]
        self.before = [0, *accumulate(within[index] for index in order)]
        self.order = order
        self.ends = [index + 1 + module.inside for index, module in enumerate(modules)]

    def between(self, step: int) -> float:
        """Return the elements between the leaf that runs at a step and the next module that holds it."""
        leaf = self.order[step]
        later = range(step + 1, len(self.order))
        holder = next((at for at in later if self.order[at] <= leaf < self.ends[self.order[at]]), None)
        return math.inf if holder is None else self.before[holder] - self.before[step + 1]
