"""Weight matrices and other parameters of a block, and which side of each tensor parallelism divides.

Parameter counts, what a device holds of them, number formats, optimizers of matrices, adapters, the order in which
ZeRO 3 gathers, and the operations of a token all come from these lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.techniques.requests import FUSED_MODULES, Adapters

INPUTS, OUTPUTS, NEITHER = "inputs", "outputs", "neither"  # the side of a matrix that tensor parallelism divides


@frozen
class Part:
    """One of the linear layers that a framework may keep apart where another fuses them: its name, by which adapters
    and what reads a saved tensor know it, and its columns. They come in `units`, heads of keys, of which every tensor
    rank has one at least (transformer_config.py, core 0.19); None: they are divided evenly."""

    name: str
    columns: float
    units: int | None = None

    def on_device(self, tensor: Size) -> Size:
        """Return the columns that one of `tensor` ranks has."""
        if self.units is None:
            return self.columns / tensor
        return self.columns / self.units * np.maximum(self.units / tensor, 1.0)


@frozen
class Matrix:
    """A matrix of `inputs` rows and all columns of its `parts`, one side of which tensor parallelism divides; where
    `divided` is "neither" it is whole on every device, and works on the sequence-parallel share of the tokens.

    `fused` is its name among Megatron core's linear layers, by which adapters know it there. There are `count` such
    matrices, one for each expert where `of_experts`, which expert and expert-tensor parallelism divide; `topk` copies
    of a token pass through some of them. A `linear` layer has a stub for its weight's gradient; a router is none.
    Narrower number formats are applied to a `narrow` one."""

    inputs: float
    parts: tuple[Part, ...]
    divided: str
    fused: str = ""
    bias: bool = False
    count: int = 1
    of_experts: bool = False
    topk: int = 1
    linear: bool = True
    narrow: bool = True

    @cached_property
    def outputs(self) -> float:
        """Columns of the whole matrix."""
        return sum(part.columns for part in self.parts)

    @cached_property
    def elements(self) -> float:
        """Elements of one whole matrix."""
        return self.inputs * self.outputs

    @cached_property
    def biases(self) -> float:
        """Elements of the bias of one whole matrix."""
        return self.outputs if self.bias else 0.0

    @property
    def total_parameters(self) -> float:
        """Elements of all such matrices and of their biases."""
        return self.count * (self.elements + self.biases)

    def ranks(self, c: LayerColumns) -> FloatColumn:
        """Return how many devices divide one matrix."""
        return c.expert_tensor if self.of_experts else c.tensor

    def inputs_on_device(self, c: LayerColumns) -> Size:
        """Return the rows of one matrix on a device."""
        return self.inputs / self.ranks(c) if self.divided == INPUTS else self.inputs

    def outputs_on_device(self, c: LayerColumns) -> Size:
        """Return the columns of one matrix on a device."""
        if self.divided != OUTPUTS:
            return self.outputs
        ranks = self.ranks(c)
        total: Size = self.parts[0].on_device(ranks)
        for part in self.parts[1:]:
            total = total + part.on_device(ranks)
        return total

    def count_on_device(self, c: LayerColumns) -> Size:
        """Return how many such matrices a device has."""
        return self.count / c.expert if self.of_experts else float(self.count)

    def elements_on_device(self, c: LayerColumns) -> Size:
        """Return the elements of one matrix on a device."""
        return self.inputs_on_device(c) * self.outputs_on_device(c)

    def biases_on_device(self, c: LayerColumns) -> Size:
        """Return the elements of one bias on a device: a divided column has its own, others all of them."""
        return self.outputs_on_device(c) if self.bias else 0.0


@frozen
class Vector:
    """Parameters that are no matrix: norms, sinks, convolutions. Where they are not `divided` they are whole on every
    device; `units` as those of a `Part`. `size` is the number of all of them."""

    size: float
    divided: bool = False
    units: int | None = None

    def on_device(self, c: LayerColumns) -> Size:
        """Return the parameters on a device."""
        return self.on_ranks(c.tensor)

    def on_ranks(self, tensor: Size) -> Size:
        """Return the parameters that one of `tensor` ranks has."""
        return Part("", self.size, self.units).on_device(tensor) if self.divided else self.size


def adapted(matrices: Sequence[Matrix], adapters: Adapters) -> list[tuple[Matrix, float]]:
    """Return the linear layers that have an adapter, as Hugging Face's models have them: the matrix of each, and
    the columns of that matrix that are its part."""
    targets = adapters.targets
    return [(matrix, part.columns) for matrix in matrices for part in matrix.parts if part.name in targets]


def fused_adapted(matrices: Sequence[Matrix], adapters: Adapters) -> list[Matrix]:
    """Return the linear layers of Megatron core that have an adapter (megatron/bridge/peft/lora.py LoRA,
    Megatron-Bridge 0.6)."""
    names = fused_names(adapters)
    return [matrix for matrix in matrices if matrix.fused in names]


def fused_names(adapters: Adapters) -> frozenset[str]:
    """Return the linear layers of Megatron core whose parts all have an adapter; not every MLP has a gate."""
    targets = adapters.targets
    return frozenset(name for name, parts in FUSED_MODULES.items() if {*parts} - {"gate_proj"} <= targets)
