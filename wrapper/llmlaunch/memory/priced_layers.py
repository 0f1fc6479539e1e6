"""Bytes of one layer of each kind for one micro-batch, each computed once for all splits that agree in what a layer
sees, and kept across the settings of recompute and offload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import TypeVar

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import Behind, Block, Parameters, Saved, Tensors, stream_bytes
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Branch, Layer
from llmlaunch.layers.model import Model
from llmlaunch.memory.job import least

Gone = Mapping[str, bool | BoolColumn]  # by tensor: of all layouts, or layout by layout
BlockKind = TypeVar("BlockKind", bound=Block)
OfLayer = Callable[[Layer, Tensors], Size]


@frozen
class PricedLayers:
    """Each kind of layer of a `model` over a few splits, `row_of` all ranks that were asked about (None: they are these
    ranks). What a method returns is a column of all ranks: a list with one for each of the `groups` of `RankColumns`,
    or what the layers of one prediction module take together. `saved` says what a branch saves. `whole` are the same
    layers whatever is recomputed and offloaded, which share all that does not depend on it."""

    model: Model
    groups: tuple[tuple[int, ...], ...]
    columns: LayerColumns
    row_of: IntColumn | None
    saved: Callable[[Branch, LayerColumns], dict[str, Saved]]
    whole: PricedLayers | None = None

    # over the few splits, one entry for each kind of layer

    @cached_property
    def branch_tensors(self) -> Mapping[Branch, dict[str, Saved]]:
        """What each branch saves. Several kinds of layers may have the same."""
        if self.whole is not None:
            return self.whole.branch_tensors
        branches = dict.fromkeys(branch for layer in self.model.kinds for branch in layer.branches)
        return {branch: self.saved(branch, self.columns) for branch in branches}

    @cached_property
    def tensors(self) -> list[dict[str, Saved]]:
        """What a layer of each kind saves."""
        if self.whole is not None:
            return self.whole.tensors
        return [
            {name: tensor for branch in layer.branches for name, tensor in self.branch_tensors[branch].items()}
            for layer in self.model.kinds
        ]

    @cached_property
    def parameters(self) -> list[Parameters]:
        """The parameters of a layer of each kind."""
        if self.whole is not None:
            return self.whole.parameters
        return [layer.parameters(self.columns) for layer in self.model.kinds]

    @cached_property
    def totals(self) -> list[FloatColumn]:
        """All bytes that a layer of each kind saves."""
        if self.whole is not None:
            return self.whole.totals
        return [sum_without(self.columns, tensors, {}) for tensors in self.tensors]

    @cached_property
    def stream(self) -> FloatColumn:
        """The bytes of a layer's input."""
        if self.whole is not None:
            return self.whole.stream
        return stream_bytes(self.columns, self.model.kinds[0].branches[0].stream_width)

    def each(self, size: OfLayer) -> list[Size]:
        """Return what a function gives of every kind of layer and its tensors."""
        return [size(layer, tensors) for layer, tensors in zip(self.model.kinds, self.tensors, strict=True)]

    def of_blocks(self, kind: type[BlockKind], size: Callable[[BlockKind, LayerColumns], Size]) -> list[Size]:
        """Return what a function gives of the blocks of one kind, summed in every kind of layer."""
        return [sum((size(block, self.columns) for block in layer.blocks_of(kind)), 0.0) for layer in self.model.kinds]

    # of all ranks

    def of_ranks(self, size: Size) -> FloatColumn:
        """Return a column of all ranks from one of the few splits."""
        column = np.asarray(size, dtype=np.float64)
        if len(column.shape) != 1 or len(column) != len(self.columns):
            column = np.broadcast_to(column, len(self.columns))
        return column if self.row_of is None else np.take(column, self.row_of)

    def by_group(self, of_kinds: Sequence[Size]) -> list[FloatColumn]:
        """Return what a layer of each group takes: the least of its kinds."""
        return [self.of_ranks(least(of_kinds, kinds)) for kinds in self.groups]

    def predicted(self, of_kinds: Sequence[Size]) -> FloatColumn:
        """Return what the layers of one prediction module take together."""
        return self.of_ranks(sum((of_kinds[kind] for kind in self.model.predicts), 0.0))

    # what is alive while a layer runs

    def backward(self, last_kind: Callable[[], IntColumn], kept: Sequence[FloatColumn]) -> list[FloatColumn]:
        """Return what is alive while a layer of each kind runs backward, at its worst block, beside the gradient of the
        residual stream. Where layers have one branch each, the rank's last layer (`last_kind`) has run backward before
        any of another kind, and what it `kept` is free."""
        kinds = range(len(self.model.kinds))
        if not self.model.layers_are_branches:
            return self.by_group([self._backward(kind, 0.0) for kind in kinds])
        last = last_kind()
        by_last = [
            self.by_group([self._backward(kind, 0.0 if kind == end else kept[end]) for kind in kinds])
            for end in self.model.decoder_kinds
        ]
        place = np.searchsorted(self.model.decoder_kinds, last)
        return [np.choose(place, columns) for columns in zip(*by_last, strict=True)]

    def _backward(self, kind: int, last_layer: Size) -> FloatColumn:
        c, branches, own = self.columns, self.model.kinds[kind].branches, self.tensors[kind]
        sizes: list[Size] = []
        for place, branch in enumerate(branches):
            sizes.append(branch.mixing_backward(c))
            beside: tuple[Block, ...] = ()  # blocks that have run backward
            for block in reversed(branch.blocks):
                behind = Behind(partial(self._freed_behind, branches, place, beside), last_layer)
                sizes += [block.backward(c, own, behind), block.norm_backward(c)]
                beside = (*beside, block)
        return reduce(np.maximum, sizes, c.zeros())

    def _freed_behind(self, branches: Sequence[Branch], place: int, beside: tuple[Block, ...]) -> FloatColumn:
        """Return what later branches saved, and the norm behind this one: all that some module frees, and what norms
        keep; and what the blocks `beside` saved."""
        later = [
            tensor.bytes
            for branch in branches[place + 1 :]
            for name, tensor in self.branch_tensors[branch].items()
            if tensor.freed_by or "_norm_" in name
        ]
        own = self.branch_tensors[branches[place]]
        later += [tensor.bytes for name, tensor in own.items() if name.endswith("_post_norm_input")]
        later += [self._freed_beside(branches[place], beside)] if beside else []
        return reduce(np.add, later, self.columns.zeros())

    def _freed_beside(self, branch: Branch, beside: tuple[Block, ...]) -> FloatColumn:
        """Return what some blocks of a branch kept on the device, and what each of them that multiplies its input kept
        of that, less the gradient of the norm's output, which waits for that of the blocks before them."""
        c = self.columns
        names = {name for block in beside for name in block.saved(c)}
        saved = {name: tensor for name, tensor in self.branch_tensors[branch].items() if name in names}
        inputs = sum(block.scaled_input for block in beside) * branch.norm_output(c)
        waiting = c.facts.layer.activation_bytes * c.stream_tokens * branch.hidden
        away = by_module(saved, lambda tensor: tensor.moved_by, c.offloads)
        return sum_without(c, saved, away) + inputs - waiting

    def forward(self) -> list[FloatColumn]:
        """Return what is alive in the forward pass of a layer of each kind beside all that is saved."""
        c = self.columns
        return self.by_group(
            [reduce(np.maximum, (block.forward(c) for block in layer.blocks), c.zeros()) for layer in self.model.kinds]
        )


def by_module(
    tensors: Tensors, modules: Callable[[Saved], tuple[str, ...]], taken: Callable[[str], bool | BoolColumn]
) -> Gone:
    """Return the tensors of which any of the `modules` that a tensor names is `taken`."""
    answers: dict[str, bool | BoolColumn] = {}
    gone: dict[str, bool | BoolColumn] = {}
    for name, tensor in tensors.items():
        for module in modules(tensor):
            if module not in answers:
                answers[module] = taken(module)
            if answers[module] is not False:
                gone[name] = gone[name] | answers[module] if name in gone else answers[module]
    return gone


def either(some: Gone, others: Gone) -> Gone:
    """Return what is gone by either."""
    return {**some, **{name: some[name] | gone if name in some else gone for name, gone in others.items()}}


def sum_without(c: LayerColumns, tensors: Tensors, gone: Gone, recomputed: bool = False) -> FloatColumn:
    """Return the bytes of the tensors that are not `gone`. Those that only recomputed modules make count where layers
    are `recomputed`."""
    total: FloatColumn | None = None
    for name, tensor in tensors.items():
        away, column = gone.get(name, False), tensor.bytes
        if away is True:
            continue
        if tensor.with_module is not None:
            there = recomputed and c.recomputes(tensor.with_module)
            if there is False:
                continue
            column = column if there is True else np.where(there, column, 0.0)
        elif away is not False:
            column = np.where(away, 0.0, column)
        total = column if total is None else total + column
    return c.zeros() if total is None else total
