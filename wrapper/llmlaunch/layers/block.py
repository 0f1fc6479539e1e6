"""What every kind of block says of itself.

A block sees no rank, no pipeline and no data parallelism: its results are columns over splits, for one device and one
micro-batch. To add a kind of block is to write one of these, and to name it where a model's shape has it (`model`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from llmlaunch.columns import FloatColumn
from llmlaunch.facts import ByPass, MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix, Vector
from llmlaunch.layers.work import BlockWork, ContextTraffic

if TYPE_CHECKING:
    from llmlaunch.layers.modules import Module, ModuleStyle

FP32_BYTES = 4.0  # statistics of norms and of the softmax
MLP_SHARE = 0.4  # of the kernels of a layer of attention and an MLP


@frozen
class Saved:
    """One tensor that a layer saves for its backward pass: its bytes, the modules of selective recompute that free it,
    and the modules whose offload moves it to the host, by Megatron's names (`--recompute-modules`,
    `--offload-modules`). One `with_module` exists only where that module is recomputed. `read_by` are the parts of
    matrices that alone read it; empty where something else reads it, too."""

    bytes: FloatColumn
    freed_by: tuple[str, ...] = ()
    moved_by: tuple[str, ...] = ()
    with_module: str | None = None
    read_by: tuple[str, ...] = ()


Tensors = Mapping[str, Saved]


@frozen
class Parameters:
    """Parameter counts on one device. Those of experts are apart, because other ranks share them."""

    dense: Size = 0.0
    expert: Size = 0.0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.expert + other.expert)


@frozen
class Behind:
    """What has run backward before a block does, and is free by then: the tensors of later branches of its layer, and
    what the rank's last layer kept where that is of another kind, in models whose layers have one branch each."""

    later: Callable[[], FloatColumn]
    last_layer: Size = 0.0


@frozen
class AdapterGroup:
    """Linear layers whose adapters' tensors are freed together: the name of what they save, the tokens that pass
    through them, and whether these are those of the residual stream, which a norm keeps split."""

    name: str
    matrices: tuple[Matrix, ...]
    tokens: FloatColumn
    freed_by: tuple[str, ...] = ()
    of_stream: bool = True


class Block:
    """A kind of block. What a kind does not say is nothing."""

    hidden: int  # columns of the residual stream
    role: str = ""  # its norms' tensors are named after it
    norm_freed_by: tuple[str, ...] = ()  # modules of selective recompute that free the output of the norm before it
    norm_moved_by: tuple[str, ...] = ()  # modules whose offload moves the input of that norm
    norm_output_moved_by: tuple[str, ...] = ()
    norm_read_by: tuple[str, ...] = ()  # parts of matrices that read the output of that norm
    norm_always_read: bool = False  # though all linear layers that read the output of that norm are frozen
    repeated_modules: tuple[str, ...] = ()  # modules of selective recompute whose tensors are all back at once
    scaled: tuple[float, ...] = ()  # columns of each tensor that it multiplies by a constant
    scaled_input: bool = False  # one of these is its input: it reads a tensor of its own, and not the norm's output

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The block's matrices, in the order in which a forward pass reads them."""
        return ()

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """The block's parameters that are no matrices, biases of these aside."""
        return ()

    @cached_property
    def total_parameters(self) -> float:
        """Parameters of the whole block."""
        return sum(each.size for each in self.vectors) + sum(each.total_parameters for each in self.matrices)

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return the modules of the block's class in Transformers, in the order in which they run forward, each before
        what is inside it; one tensor of a kind whose class is not known."""
        from llmlaunch.layers.modules import Module

        return [Module((int(self.total_parameters),))]

    def more_vectors(self, c: LayerColumns) -> Size:
        """Return parameters that the block has in some frameworks alone."""
        return 0.0

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """Return the tensors that the block saves, those of its norm aside."""
        return {}

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """Return the bytes alive while the block runs backward, beside the gradient of the residual stream, less what
        is free by then. `own` are the tensors of its layer."""
        return 0.0

    def forward(self, c: LayerColumns) -> Size:
        """Return the bytes alive in the block's forward pass beside all that is saved."""
        return 0.0

    def norm_backward(self, c: LayerColumns) -> Size:
        """Return the bytes alive while an unfused norm before the block runs backward, less what the block has let go
        of."""
        return 0.0

    def adapter_groups(self, c: LayerColumns) -> tuple[AdapterGroup, ...]:
        """Return the linear layers of Megatron core beside which adapters may stand."""
        return (AdapterGroup(f"{self.role}_adapters", self.matrices, c.tokens),)

    @cached_property
    def products(self) -> tuple[Matrix, ...]:
        """The matrices that tokens are multiplied with as linear layers."""
        return tuple(matrix for matrix in self.matrices if matrix.linear)

    @property
    def up_projections(self) -> tuple[Matrix, ...]:
        """The matrices that recompute of "mla_up_proj" repeats."""
        return ()

    @property
    def token_elements(self) -> float:
        """The weights of linear layers that a token passes through."""
        return sum(matrix.elements * matrix.topk for matrix in self.products)

    @property
    def recurrent_flops(self) -> float:
        """A token's operations forward in convolutions and recurrences, as FLOPs are reported."""
        return 0.0

    @property
    def activation_gates(self) -> float:
        """How many inputs as wide as its output the activation function has."""
        return 1.0

    @property
    def collective_pairs(self) -> float:
        """How often the block's input is gathered over tensor parallelism, each time with a scatter behind it."""
        return 1.0

    def matrix_reads(self, c: LayerColumns) -> float:
        """Return how often a pass reads the matrices."""
        return 1.0

    def expert_rows(self, c: LayerColumns) -> FloatColumn:
        """Return the rows that matrices of experts multiply on a device, all expert-tensor ranks' together."""
        return c.zeros()

    def attended_elements(self, sequence_length: int) -> float:
        """Return the elements of keys and values that a token's heads are multiplied with."""
        return 0.0

    def sequence_work(self, c: LayerColumns) -> BlockWork | None:
        """Return the work of attention or a recurrence; None without any."""
        return None

    def memory_work(self, c: LayerColumns) -> BlockWork | None:
        """Return the element-wise work, that of norms, residual sums and the activation aside; None without any."""
        return None

    def activation_columns(self, c: LayerColumns) -> Size:
        """Return the elements that the activation function puts out."""
        return 0.0

    def cast_elements(self, c: LayerColumns) -> tuple[Size, Size]:
        """Return the elements that are cast to a narrower format: what the linear layers of every token take in, and,
        backward, the gradients of what they put out."""
        inputs: Size = 0.0
        outputs: Size = 0.0
        for matrix in self.products:
            if matrix.of_experts or not matrix.narrow:
                continue
            inputs = inputs + matrix.inputs * (c.tokens if matrix.divided == OUTPUTS else c.share)
            outputs = outputs + matrix.outputs * (c.tokens if matrix.divided == INPUTS else c.share)
        return inputs, outputs

    def context_traffic(self, c: LayerColumns) -> ContextTraffic | None:
        """Return what context parallelism sends."""
        return None

    def kernels(self, facts: MemoryFacts) -> ByPass:
        """Return the kernels that the host launches in a layer without a mixture, adapters aside."""
        forward, backward = facts.layer.kernels.launched
        return (1.0 - MLP_SHARE) * forward, (1.0 - MLP_SHARE) * backward

    def parameters(self, c: LayerColumns) -> Parameters:
        """Return the block's parameters on a device."""
        dense: Size = self.more_vectors(c)
        expert: Size = 0.0
        for vector in self.vectors:
            dense = dense + vector.on_device(c)
        for matrix in self.matrices:
            count = matrix.count_on_device(c) * (matrix.elements_on_device(c) + matrix.biases_on_device(c))
            if matrix.of_experts:
                expert = expert + count
            else:
                dense = dense + count
        return Parameters(dense, expert)


def stream_bytes(c: LayerColumns, width: float) -> FloatColumn:
    """Return the bytes of a layer's input for one micro-batch: a residual stream that is `width` columns wide."""
    return c.tokens * c.facts.residual_bytes * width / c.sequence_split


def scaled_columns(*products: tuple[float | None, int]) -> tuple[float, ...]:
    """Return the columns of tensors that are multiplied by a constant, of those that may be."""
    return tuple(float(columns) for constant, columns in products if constant is not None)
