"""Gated short convolutions (LFM2, Liquid AI 2025): a token is weighed by a gate, mixed column by column with the few
tokens before it, and weighed again."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import chain

from llmlaunch.facts import ByPass, MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import Behind, Block, Saved, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix, Part, Vector
from llmlaunch.layers.modules import Module, ModuleStyle, container, linear_modules
from llmlaunch.layers.work import Amounts, BlockWork
from llmlaunch.models.shape import ModelShape


@frozen
class ShortConvolution(Block):
    """A convolution of each column over `kernel` tokens, between a projection to both gates and what is convolved, and
    one behind it. `bias`: all three have one."""

    hidden: int
    kernel: int
    bias: bool = False
    role = "convolution"
    norm_read_by = ("o_proj",)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """Both projections, in_proj and out_proj, which have an adapter both or neither, as attention's output has
        (transformers/models/lfm2/modeling_lfm2.py Lfm2ShortConv, 5.23)."""
        h = float(self.hidden)
        return (
            Matrix(h, (Part("o_proj", 3.0 * h),), OUTPUTS, bias=self.bias),
            Matrix(h, (Part("o_proj", h),), INPUTS, bias=self.bias),
        )

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """A weight for each column and token that the convolution spans, and perhaps a bias for each column."""
        return (Vector(float((self.kernel + self.bias) * self.hidden), divided=True),)

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return both projections, inside the module that reads the weights of the convolution as its own: the forward
        pass of nn.Conv1d never runs (Lfm2ShortConv.forward, transformers 5.23; external parameters of
        deepspeed/runtime/zero/parameter_offload.py ZeROOrderedDict, 0.19.8)."""
        linears = chain.from_iterable(linear_modules(matrix, style) for matrix in self.matrices)
        block, *inside = container(chain.from_iterable(linears))
        columns = self.hidden // style.split.tensor
        own = (self.kernel * columns, *((columns,) if self.bias else ()))
        return [replace(block, parameters=own), *inside]

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """Both gates and what is convolved, in one tensor of which they are views, the product that the convolution
        reads, what it puts out, and the input of the last projection. nn.Conv1d pads on both sides and cuts the end
        off, so that its output is as long as the sequence and what it is padded with (causal_conv1d_fn without the
        package causal-conv1d, transformers/models/lfm2/modeling_lfm2.py, 5.23)."""
        columns = c.tokens * self.hidden / c.tensor
        e, padded = c.facts.layer.activation_bytes, 1.0 + (self.kernel - 1.0) / c.sequence_length
        return {
            "convolution_projection": Saved(3.0 * e * columns),
            "convolution_input": Saved(e * columns),
            "convolution_output": Saved(e * padded * columns),
            "convolution_proj_input": Saved(c.facts.layer.linear_input_bytes * columns, read_by=("o_proj",)),
        }

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """The gradient of the gated output and those of its two factors, while the last projection has let its input
        go. All later steps add less than they free: the gradient of the whole first projection is put together when
        nothing of what it put out is left."""
        made = 3.0 * c.facts.layer.activation_bytes * c.tokens * self.hidden / c.tensor
        gone = own["convolution_proj_input"].bytes if "convolution_proj_input" in own else 0.0
        return made - gone - behind.later() - behind.last_layer

    @property
    def recurrent_flops(self) -> float:
        """A product and a sum of each column and token that the convolution spans."""
        return 2.0 * self.kernel * self.hidden

    def memory_work(self, c: LayerColumns) -> BlockWork:
        """What gates and convolution read and write, 8 tensors as wide as the stream forward and 29 backward: two
        gradients of each gate, that of the padded output and the convolution's own, and those of the first projection,
        put together and turned (counted by dispatch in Lfm2ShortConv of transformers 5.23 under torch 2.13). No
        measured run stands behind it yet."""
        moved = c.facts.layer.activation_bytes * self.hidden
        return Amounts(c.share, bytes=8.0 * moved), Amounts(c.share, bytes=29.0 * moved)

    def kernels(self, facts: MemoryFacts) -> ByPass:
        """Return those of eager code, counted likewise: of the norm 8 forward and 16 backward, and of the residual sum,
        the projections, both gates, the convolution and its padding."""
        return 14.0, 29.0


def short_convolution(shape: ModelShape) -> ShortConvolution:
    """Return the convolution of a model's layers."""
    convolution = shape.short_convolution
    assert convolution is not None
    return ShortConvolution(shape.hidden_size, convolution.kernel, convolution.bias)
