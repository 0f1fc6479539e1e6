"""Mamba-2 mixers (Dao and Gu 2024): a scan over states, in chunks of tokens, behind a convolution. Kernels make most of
the forward pass again in the backward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.facts import ByPass, MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import FP32_BYTES, Behind, Block, Saved, Tensors, scaled_columns, stream_bytes
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix, Part, Vector
from llmlaunch.layers.modules import Module, ModuleStyle, container, linear_modules
from llmlaunch.layers.work import BlockWork, ContextTraffic, recurrence
from llmlaunch.models.sections import CONV_KERNEL, SCAN_CHUNK
from llmlaunch.models.shape import ModelShape, Multipliers


@frozen
class Mamba2(Block):
    """`heads` of `head_dim` columns, each with `state_size` states; `groups` of heads read and write them alike. The
    convolution spans `kernel` tokens, the scan runs in chunks of `chunk`, and a `gated_norm` may stand behind the gate.
    `scaled_output`: what it adds to the residual stream is multiplied."""

    hidden: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int = CONV_KERNEL
    kernel_bias: bool = True
    chunk: int = SCAN_CHUNK
    gated_norm: bool = True
    scaled: tuple[float, ...] = ()
    scaled_input: bool = False
    scaled_output: bool = False
    role = "mamba"
    norm_read_by = ("q_proj", "k_proj", "v_proj")

    @property
    def inner_width(self) -> int:
        """Columns of all heads, and of the gate."""
        return self.heads * self.head_dim

    @property
    def convolved_width(self) -> int:
        """Columns that the convolution runs over: all heads, and how each group writes and reads states."""
        return self.inner_width + 2 * self.groups * self.state_size

    @property
    def projected_width(self) -> int:
        """Columns of the first projection: the gate, what is convolved, and a step of each head."""
        return self.inner_width + self.convolved_width + self.heads

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The projections, whose heads and groups are divided (core/ssm/mamba_mixer.py, core 0.19)."""
        h = float(self.hidden)
        return (
            Matrix(h, (Part("", float(self.projected_width)),), OUTPUTS, "linear_qkv"),
            Matrix(float(self.inner_width), (Part("", h),), INPUTS, "linear_proj"),
        )

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """A convolution of each column, a decay, a skip and the bias of a step for each head, and perhaps the weight of
        the norm (NemotronHMamba2Mixer, FalconH1Mixer; core/ssm/mamba_mixer.py, core 0.19)."""
        return (Vector(float(sum(self._tensors)), divided=True),)

    @property
    def _tensors(self) -> tuple[int, ...]:
        """The elements of each of these."""
        biases = (self.convolved_width,) if self.kernel_bias else ()
        norm = (self.inner_width,) if self.gated_norm else ()
        return (self.kernel * self.convolved_width, *biases, *(self.heads,) * 3, *norm)

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return the first projection, inside the module that hands all other weights to the fused kernel, those of the
        last projection, too: the forward passes of nn.Conv1d, of the norm and of out_proj never run
        (FalconH1Mixer.forward and NemotronHMamba2Mixer.forward, transformers 5.23; external parameters of
        deepspeed/runtime/zero/parameter_offload.py ZeROOrderedDict, 0.19.8)."""
        first, last = (chain.from_iterable(linear_modules(matrix, style)) for matrix in self.matrices)
        block, *inside = container(first)
        others = (size // style.split.tensor for size in self._tensors)
        return [replace(block, parameters=(*others, *(size for module in last for size in module.parameters))), *inside]

    def _groups(self, c: LayerColumns) -> FloatColumn:
        """Return the groups of heads on a device, in a sequence that context parallelism divides as it divides them:
        over more context ranks than a tensor rank has groups, each is there several times
        (core/ssm/mamba_context_parallel.py, core 0.19)."""
        return np.maximum(self.groups / c.tensor, c.layouts.context)

    @property
    def recurrent_flops(self) -> float:
        """Seven operations of a column's state, and the convolution (megatron/training/training.py
        num_floating_point_operations, core 0.19)."""
        return 7.0 * self.inner_width * self.state_size + 2.0 * self.kernel * self.convolved_width

    def sequence_work(self, c: LayerColumns) -> BlockWork:
        """Convolution, scan in chunks and gated norm, counted from the kernels of mamba-ssm 2.3
        (mamba_ssm/ops/triton/ssd_*.py) and from megatron/core/ssm, core 0.19. No measured run stands behind it yet.

        Operations: within its chunk the products of each group, and half of what they weigh of each column; of the
        state the update and what is read (Dao and Gu 2024, section 6). Elements: by the convolution, by the kernels of
        states and scan with the states between chunks, in fp32 before they are passed on, by the gate, and by a norm
        behind it."""
        inner, chunk, states = self.inner_width, float(self.chunk), self.inner_width * self.state_size / self.chunk
        operations = 2.0 * chunk * self.groups * self.state_size + chunk * inner
        operations += 4.0 * inner * self.state_size + 2.0 * self.kernel * self.convolved_width
        products, gated = 2.0 * 2.0 * self.groups * chunk, 8.0 if self.gated_norm else 6.0
        return recurrence(c, operations, 4.0 * self.convolved_width + gated * inner + 6.0 * states + products)

    def context_traffic(self, c: LayerColumns) -> ContextTraffic | None:
        """Return what is projected, and what the last projection reads."""
        return ContextTraffic(float(self.projected_width + self.inner_width))

    def kernels(self, facts: MemoryFacts) -> ByPass:
        """Return those of one mixer in every framework: norm and projections, convolution, decays of a chunk, its
        states, their passing, products, scan, norm behind it and residual; backward the first five again, and a
        gradient of each."""
        return 18.0, 45.0

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """All columns of the first projection, what the scan puts out before the gate, the statistics of a norm behind
        it, and what is read there: by that norm, which a kernel of its own makes, and by the last projection. Over
        context ranks, heads are exchanged for sequence (mamba_ssm/ops/triton/ssd_combined.py
        MambaSplitConv1dScanCombinedFn and layernorm_gated.py LayerNormFn, mamba-ssm 2.3; core/ssm/mamba_mixer.py, core
        0.19). Where one kernel computes the norm and the last projection, too, their inputs are made again."""
        e, inner, heads = c.facts.layer.activation_bytes, self.inner_width / c.tensor, self.heads / c.tensor
        columns, whole = 2.0 * (inner + self._groups(c) * self.state_size) + heads, c.facts.layer.mixer_fused
        gated = 1.0 if self.gated_norm and not whole else 0.0
        tensors = {
            "mamba_columns": Saved(c.tokens * e * columns),
            "mamba_scan": Saved(c.tokens * (1.0 + gated) * e * inner),
        }
        if self.gated_norm:
            tensors["mamba_statistics"] = Saved(c.tokens * FP32_BYTES * self.groups / c.tensor)
        if not whole:
            read = c.tokens * c.facts.layer.linear_input_bytes * inner
            tensors["mamba_proj_input"] = Saved(read, read_by=("o_proj",))
        return tensors

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """The convolved columns and their gradients, the gradients of all columns, of its output before and after the
        gate, steps and decays of each head in fp32, products of each group within a chunk; of the states between
        chunks, these and their gradients in fp32 and once more as they are multiplied (ssd_combined.py
        _mamba_chunk_scan_combined_bwd and ssd_state_passing.py _state_passing_bwd, mamba-ssm 2.3). What a norm behind
        the scan and the last projection saved is freed by then. The gradient of its output is gone, too, and the
        residual stream's is the only one as wide."""
        e, inner, heads = c.facts.layer.activation_bytes, self.inner_width / c.tensor, self.heads / c.tensor
        groups = self._groups(c)
        convolved = inner + 2.0 * groups * self.state_size
        states = inner * self.state_size / self.chunk
        columns = e * (2.0 * convolved + (inner + convolved + heads) + 2.0 * inner)
        chunks = (2.0 * FP32_BYTES + 2.0 * e) * states + FP32_BYTES * groups * self.chunk
        scan = chunks + (2.0 * FP32_BYTES + e) * heads
        if c.facts.layer.mixer_fused:
            return self._fused_backward(c, columns + e * inner, scan) - behind.later() - behind.last_layer
        alive = c.tokens * (columns + scan)
        gone = own["mamba_proj_input"].bytes if "mamba_proj_input" in own else 0.0
        if self.gated_norm:
            gone = own["mamba_scan"].bytes / 2.0 + (own["mamba_statistics"].bytes + gone)
        output = stream_bytes(c, self.hidden) if c.facts.layer.branch_gradients_apart else 0.0
        return alive - gone - output - behind.later() - behind.last_layer

    def _fused_backward(self, c: LayerColumns, columns: Size, scan: Size) -> FloatColumn:
        """Return what is alive in the kernel that multiplies with the last matrix, too: nothing saved is freed, the
        gradient of its output stays, which is a tensor of its own where that is multiplied, and the input of the last
        matrix is among the `columns`, made again. The gradient of that matrix is made when the `scan` has run backward
        (MambaSplitConv1dScanCombinedFn.backward, mamba-ssm 2.3)."""
        _, last = (matrix.elements_on_device(c) for matrix in self.matrices)
        no_temporary = c.facts.layer.weight_gradient_fused or c.techniques.adapters is not None
        gradient = 0.0 if no_temporary else c.facts.states.parameter_bytes * last
        output = stream_bytes(c, self.hidden) if self.scaled_output else 0.0
        return c.tokens * columns + np.maximum(c.tokens * scan, gradient) + output


def mamba_mixer(shape: ModelShape) -> Mamba2:
    """Return the Mamba-2 mixer of a model's layers."""
    mamba, constants = shape.mamba, shape.multipliers or Multipliers()
    assert mamba is not None
    mixer = Mamba2(
        hidden=shape.hidden_size,
        heads=mamba.num_heads,
        head_dim=mamba.head_dim,
        state_size=mamba.state_size,
        groups=mamba.groups,
        kernel=mamba.convolution_kernel,
        kernel_bias=mamba.convolution_bias,
        chunk=mamba.chunk,
        gated_norm=mamba.gated_norm,
        scaled_input=constants.mamba_input is not None,
        scaled_output=constants.mamba_output is not None,
    )
    scaled = scaled_columns(
        (constants.mamba_input, shape.hidden_size),
        (None if constants.mamba_parts is None else 1.0, mixer.projected_width),
        (constants.mamba_output, shape.hidden_size),
    )
    return replace(mixer, scaled=scaled)
