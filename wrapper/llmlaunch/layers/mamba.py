"""Mamba-2 mixers (Dao and Gu 2024): a scan over states, in chunks of tokens, behind a convolution. Kernels make most of
the forward pass again in the backward pass."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.facts import ByPass, MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import FP32_BYTES, Behind, Block, Saved, Tensors, stream_bytes
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix, Part, Vector
from llmlaunch.layers.work import BlockWork, ContextTraffic, recurrence
from llmlaunch.models.mamba import CONV_KERNEL

__all__ = ["MAMBA_CHUNK", "Mamba2"]

MAMBA_CHUNK = 128.0  # tokens of a chunk of the scan (core/ssm/mamba_mixer.py, core 0.19)


@frozen
class Mamba2(Block):
    """`heads` of `head_dim` columns, each with `state_size` states; `groups` of heads read and write them alike."""

    hidden: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
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
        """A convolution of each column with its bias, a decay, a skip and the bias of a step for each head, and the
        weight of the norm (NemotronHMamba2Mixer; core/ssm/mamba_mixer.py, core 0.19)."""
        columns = (CONV_KERNEL + 1) * self.convolved_width + 3 * self.heads + self.inner_width
        return (Vector(float(columns), divided=True),)

    def _groups(self, c: LayerColumns) -> FloatColumn:
        """Return the groups of heads on a device, in a sequence that context parallelism divides as it divides them:
        over more context ranks than a tensor rank has groups, each is there several times
        (core/ssm/mamba_context_parallel.py, core 0.19)."""
        return np.maximum(self.groups / c.tensor, c.layouts.context)

    @property
    def recurrent_flops(self) -> float:
        """Seven operations of a column's state, and the convolution (megatron/training/training.py
        num_floating_point_operations, core 0.19)."""
        return 7.0 * self.inner_width * self.state_size + 2.0 * CONV_KERNEL * self.convolved_width

    def sequence_work(self, c: LayerColumns) -> BlockWork:
        """Convolution, scan in chunks and gated norm, counted from the kernels of mamba-ssm 2.3
        (mamba_ssm/ops/triton/ssd_*.py) and from megatron/core/ssm, core 0.19. No measured run stands behind it yet.

        Operations: within its chunk the products of each group, and half of what they weigh of each column; of the
        state the update and what is read (Dao and Gu 2024, section 6). Elements: by the convolution, by the kernels of
        states and scan with the states between chunks, in fp32 before they are passed on, by the gate, and by the norm
        behind it."""
        inner, states = self.inner_width, self.inner_width * self.state_size / MAMBA_CHUNK
        operations = 2.0 * MAMBA_CHUNK * self.groups * self.state_size + MAMBA_CHUNK * inner
        operations += 4.0 * inner * self.state_size + 2.0 * CONV_KERNEL * self.convolved_width
        products = 2.0 * 2.0 * self.groups * MAMBA_CHUNK
        return recurrence(c, operations, 4.0 * self.convolved_width + 8.0 * inner + 6.0 * states + products)

    def context_traffic(self, c: LayerColumns) -> ContextTraffic | None:
        """Return what is projected, and what the last projection reads."""
        return ContextTraffic(float(self.projected_width + self.inner_width))

    def kernels(self, facts: MemoryFacts) -> ByPass:
        """Return those of one mixer in every framework: norm and projections, convolution, decays of a chunk, its
        states, their passing, products, scan, norm behind it and residual; backward the first five again, and a
        gradient of each."""
        return 18.0, 45.0

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """All columns of the first projection, what the scan puts out before and after the gate, the statistics of the
        norm behind it, and the last projection's input (mamba_ssm/ops/triton/ssd_combined.py
        MambaSplitConv1dScanCombinedFn and layernorm_gated.py LayerNormFn, mamba-ssm 2.3; core/ssm/mamba_mixer.py, core
        0.19). Over context ranks, heads are exchanged for sequence."""
        e, inner, heads = c.facts.layer.activation_bytes, self.inner_width / c.tensor, self.heads / c.tensor
        columns = 2.0 * (inner + self._groups(c) * self.state_size) + heads
        return {
            "mamba_columns": Saved(c.tokens * e * columns),
            "mamba_scan": Saved(c.tokens * 2.0 * e * inner),
            "mamba_statistics": Saved(c.tokens * FP32_BYTES * self.groups / c.tensor),
            "mamba_proj_input": Saved(c.tokens * c.facts.layer.linear_input_bytes * inner, read_by=("o_proj",)),
        }

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """The convolved columns and their gradients, the gradients of all columns, of its output before and after the
        gate, steps and decays of each head in fp32, products of each group within a chunk; of the states between
        chunks, these and their gradients in fp32 and once more as they are multiplied (ssd_combined.py
        _mamba_chunk_scan_combined_bwd and ssd_state_passing.py _state_passing_bwd, mamba-ssm 2.3). What the norm behind
        the scan and the last projection saved is freed by then. The gradient of its output is gone, too, and the
        residual stream's is the only one as wide."""
        e, inner, heads = c.facts.layer.activation_bytes, self.inner_width / c.tensor, self.heads / c.tensor
        groups = self._groups(c)
        convolved = inner + 2.0 * groups * self.state_size
        states = inner * self.state_size / MAMBA_CHUNK
        columns = e * (2.0 * convolved + (inner + convolved + heads) + 2.0 * inner)
        chunks = (2.0 * FP32_BYTES + 2.0 * e) * states + FP32_BYTES * groups * MAMBA_CHUNK
        alive = c.tokens * (columns + chunks + (2.0 * FP32_BYTES + e) * heads)
        proj = own["mamba_proj_input"].bytes if "mamba_proj_input" in own else 0.0
        scan = own["mamba_scan"].bytes / 2.0 + (own["mamba_statistics"].bytes + proj)
        output = stream_bytes(c, self.hidden) if c.facts.layer.branch_gradients_apart else 0.0
        return alive - scan - output - behind.later() - behind.last_layer
