"""The MLP of a layer, gated or not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.facts import ByPass, MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import MLP_SHARE, AdapterGroup, Behind, Block, Saved, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix, Part, fused_adapted

if TYPE_CHECKING:
    from llmlaunch.layers.modules import Module, ModuleStyle


@frozen
class Mlp(Block):
    """`width` columns inside; gated: SwiGLU and kin, with a gate beside up. `scaled_output`: what it adds to the
    residual stream is multiplied by a constant."""

    hidden: int
    width: int
    gated: bool = True
    bias: bool = False
    scaled: tuple[float, ...] = ()
    scaled_output: bool = False
    role = "mlp"
    norm_freed_by = ("mlp",)
    norm_read_by = ("gate_proj", "up_proj")
    repeated_modules = ("mlp",)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The first matrix, gate and up together, and the second."""
        return mlp_matrices(self.hidden, self.width, self.gated, self.bias)

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return both linear layers, or three, and the activation function."""
        from llmlaunch.layers.modules import mlp_modules

        return mlp_modules(self.matrices, style)

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """Return the input and the output of the activation function."""
        if c.pieces_again:
            return {}
        n, width = c.tokens, self.width / c.tensor
        return {
            "mlp_fc1_output": Saved(n * projected_bytes(c, self.gated) * width, ("mlp",)),
            "mlp_fc2_input": Saved(n * c.facts.layer.linear_input_bytes * width, ("mlp",), read_by=("down_proj",)),
        }

    @property
    def activation_gates(self) -> float:
        """Gate and up, or up alone."""
        return 2.0 if self.gated else 1.0

    def matrix_reads(self, c: LayerColumns) -> float:
        """Return the pieces of the sequence, each of which reads the matrices and adds to their gradients by itself."""
        return c.mlp_pieces

    def activation_columns(self, c: LayerColumns) -> Size:
        """Return the elements between both matrices."""
        return self.width * c.share

    def kernels(self, facts: MemoryFacts) -> ByPass:
        """Return the MLP's share of a layer's kernels."""
        return MLP_SHARE * facts.layer.kernels.launched[0], MLP_SHARE * facts.layer.kernels.launched[1]

    def adapter_groups(self, c: LayerColumns) -> tuple[AdapterGroup, ...]:
        """Return both linear layers."""
        return (AdapterGroup("mlp_adapters", self.matrices, c.tokens, ("mlp",)),)

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """An MLP in pieces does one after the other, each computed again where its input alone is kept (MsT, Luo et al.
        2024, section 3.2; megatron/core/transformer/transformer_layer.py _forward_mlp, core 0.19)."""
        width = c.tokens * self.width / c.tensor * (1.0 / c.mlp_pieces)
        first, second = (matrix.elements_on_device(c) for matrix in self.matrices)
        hidden, output = c.tokens * self.hidden, self.scaled_output
        steps = mlp_backward(c, self.gated, width, hidden, (first, second), scaled_output=output)
        if not c.pieces_again:
            return steps
        return steps + (projected_bytes(c, self.gated) + c.facts.layer.linear_input_bytes) * width

    def norm_backward(self, c: LayerColumns) -> Size:
        """The fp32 temporaries of an unfused norm, beyond what the MLP has surely saved and let go of by then: one
        computed in pieces has saved its input alone (deepspeed/runtime/sequence_parallel/ulysses_sp.py
        SequenceTiledCompute.forward, 0.19.8; traced)."""
        facts, n = c.facts, c.tokens
        gone = 2.0 * facts.layer.activation_bytes * n * self.width / c.tensor
        if c.pieces_again:
            gone = facts.layer.activation_bytes * n * self.hidden / c.sequence_split
        return facts.layer.norm_backward_bytes * n * self.hidden / c.sequence_split - gone

    def forward(self, c: LayerColumns) -> Size:
        """What adapters add in the last layer's forward pass: what the frozen matrix puts out, what the adapter does,
        before and after it is scaled, and their sum, which is saved of the first linear, while there is no input of the
        second yet (megatron/bridge/peft/lora_layers.py LoRALinear.forward, Megatron-Bridge 0.6). Over tensor ranks the
        second adapter gathers its columns, which then are put together (megatron/core/tensor_parallel/mappings.py
        _gather_along_last_dim, core 0.19; traced)."""
        adapters, e, n, t = c.techniques.adapters, c.facts.layer.activation_bytes, c.tokens, c.tensor
        if adapters is None or not c.facts.adapters.adapters_fused:
            return 0.0
        names = {matrix.fused for matrix in fused_adapted(self.matrices, adapters)}
        first, second = float("linear_fc1" in names), float("linear_fc2" in names)
        each = first * (2.0 * (2.0 if self.gated else 1.0) - second)
        columns = np.where(t > 1, 1.0 / c.sequence_split + 1.0 / t + 2.0, 3.0)
        return e * n * np.maximum(each * self.width / t, second * self.hidden * columns)


def mlp_matrices(
    outer: int,
    width: int,
    gated: bool,
    bias: bool = False,
    count: int = 1,
    of_experts: bool = False,
    topk: int = 1,
) -> tuple[Matrix, Matrix]:
    """Return both matrices of an MLP that is `width` columns wide inside and `outer` outside."""
    first = tuple(Part(name, float(width)) for name in (("gate_proj", "up_proj") if gated else ("up_proj",)))
    experts = count, of_experts, topk
    return (
        Matrix(float(outer), first, OUTPUTS, "linear_fc1", bias, *experts),
        Matrix(float(width), (Part("down_proj", float(outer)),), INPUTS, "linear_fc2", bias, *experts),
    )


def projected_bytes(c: LayerColumns, gated: bool) -> float:
    """Return the bytes per (token x MLP column) that the activation function keeps: gate and up, or up alone; an
    unfused gated activation keeps silu(gate) as well."""
    e = c.facts.layer.activation_bytes
    if not gated:
        return e + c.facts.layer.ungated_activation_bytes
    return 2.0 * e if c.facts.layer.gated_activation_fused else 3.0 * e


def inputs_kept(c: LayerColumns) -> float:
    """Return the share of the input of an MLP's second linear that is saved, and freed once its weight gradient is
    computed."""
    adapters = c.techniques.adapters
    if adapters is not None and (adapters.frozen_down or "down_proj" not in adapters.targets):
        return 0.0
    return c.kept_rows


def mlp_backward(
    c: LayerColumns,
    gated: bool,
    width: FloatColumn,
    hidden: FloatColumn,
    matrices: Sequence[Size],
    outliving: Size = 0.0,
    scaled_output: bool = False,
) -> FloatColumn:
    """Return the bytes alive at the worst step of an MLP's backward pass: the second linear (gradient of its output,
    where that is not the residual stream's, and of its input), the activation function (gradients of both sides; the
    saved input of the second linear is gone), the first linear (gradient of its input, and of its weight where that is
    not accumulated in place).

    `width` and `hidden` are elements of one MLP-wide and one hidden-wide tensor, `matrices` those of both weights;
    `outliving` is the share of the second linear's input that outlives its backward."""
    facts, e = c.facts, c.facts.layer.activation_bytes
    w = facts.layer.linear_input_bytes * inputs_kept(c)
    projected = 2.0 if gated else 1.0
    no_temporary = facts.layer.weight_gradient_fused or c.techniques.adapters is not None
    first, second = (0.0 if no_temporary else facts.states.parameter_bytes * matrix for matrix in matrices)
    output = hidden if facts.layer.branch_gradients_apart or scaled_output else 0.0
    second_linear = e * (output + width) + second
    created = 0.0 if facts.layer.gated_gradient_in_place and gated else projected
    saved_input = w * width
    activation = e * (1.0 + created) * width - saved_input * (1.0 - outliving)
    first_linear = e * (projected * width + hidden) + first - saved_input - e * projected * width
    return np.maximum(second_linear, np.maximum(activation, first_linear))
