"""Gated delta nets (Yang, Kautz and Hatamizadeh 2024): a state of fixed size in place of scores, behind a convolution
over neighbouring tokens. Kernels make most of the forward pass again in the backward pass."""

from __future__ import annotations

from functools import cached_property

from llmlaunch.frozen import frozen
from llmlaunch.layers.block import FP32_BYTES, Behind, Block, Saved, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix, Part, Vector
from llmlaunch.layers.work import BlockWork, ContextTraffic, recurrence
from llmlaunch.models.shape import ModelShape

DELTA_CHUNK = 64.0  # tokens over which flash-linear-attention solves a triangular system at a time


@frozen
class DeltaNet(Block):
    """Heads of queries and keys (`key_heads`), and of values and the gate (`value_heads`)."""

    hidden: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    role = "delta"
    norm_read_by = ("q_proj", "k_proj", "v_proj")

    @property
    def key_width(self) -> int:
        """Columns of the queries, and of the keys."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Columns of the values, and of the gate."""
        return self.value_heads * self.value_head_dim

    @property
    def convolved_width(self) -> int:
        """Columns of queries, keys and values together, which the convolution runs over."""
        return 2 * self.key_width + self.value_width

    @property
    def projected_width(self) -> int:
        """Columns of the first projection: queries, keys, values, the gate, and a decay and a rate of each head."""
        return self.convolved_width + self.value_width + 2 * self.value_heads

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The projections (megatron/core/ssm/gated_delta_net, core 0.19). Both have an adapter, or none."""
        h, values = float(self.hidden), float(self.value_width)
        return (
            Matrix(h, (Part("o_proj", float(self.projected_width)),), OUTPUTS, "linear_qkv"),
            Matrix(values, (Part("o_proj", h),), INPUTS, "linear_proj"),
        )

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """A convolution of each column, a decay and its bias for each value head, and a norm over a head, which is
        whole and no LayerNorm (core/ssm/gated_delta_net/common.py, core 0.19)."""
        convolution = self.conv_kernel * self.convolved_width + 2 * self.value_heads
        return Vector(float(convolution), divided=True), Vector(float(self.value_head_dim))

    @property
    def recurrent_flops(self) -> float:
        """Four products of a head's state, and the convolution (megatron/training/training.py
        num_floating_point_operations, core 0.19)."""
        return 2.0 * (4.0 * self.value_heads * self.value_head_dim**2 + self.conv_kernel * self.convolved_width)

    def sequence_work(self, c: LayerColumns) -> BlockWork:
        """Convolution, recurrence in chunks and gated norm, counted from the kernels of flash-linear-attention 0.4
        (fla/ops/gated_delta_rule, ops/common/chunk_delta_h.py and chunk_o.py) and from megatron/core/ssm, core 0.19. No
        measured run stands behind it yet.

        Operations: within its chunk the keys' products with each other and with queries, and what they weigh; of the
        state the products with keys and queries, and the update. Elements: by the convolution, by norms and copies of
        queries and keys, by kernels of the recurrence with the states between chunks, and by norm and gate behind it.
        """
        keys, values, heads = float(self.key_head_dim), float(self.value_head_dim), self.value_heads
        operations = heads * (DELTA_CHUNK * (6.0 * keys + 4.0 * values) + 6.0 * keys * values)
        states = keys * self.value_width / DELTA_CHUNK
        elements = 2.0 * self.convolved_width + 5.0 * 2.0 * self.key_width + 4.0 * 2.0 * heads * keys
        return recurrence(c, operations, elements + 14.0 * self.value_width + 3.0 * states)

    def context_traffic(self, c: LayerColumns) -> ContextTraffic | None:
        """Return what is projected, and what the last projection reads."""
        return ContextTraffic(float(self.projected_width + self.value_width))

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """What the convolution reads, normed queries and keys, these once for every value head, values, the inverse of
        each chunk's triangular system, and what the norm of the output and its gate keep: both factors, and the gate
        and its activation in fp32. A decay and a rate of each head come in fp32, the rate's sigmoid not
        (megatron/core/ssm/gated_delta_net, core 0.19; fla/ops/gated_delta_rule/chunk.py, modules/convolution.py and
        l2norm.py, flash-linear-attention 0.4)."""
        e, n = c.facts.layer.activation_bytes, c.tokens / c.tensor
        heads, values = self.value_heads, self.value_width
        expanded = heads // self.key_heads > 1
        queries = 2.0 * self.key_head_dim * heads + 2.0 * self.key_width * expanded
        return {
            "delta_convolution": Saved(n * e * self.convolved_width),
            "delta_heads": Saved(n * (e * (queries + values) + 2.0 * FP32_BYTES * self.key_heads)),
            "delta_rates": Saved(n * heads * (3.0 * FP32_BYTES + e)),
            "delta_chunks": Saved(n * e * DELTA_CHUNK * heads),
            "delta_output": Saved(n * (2.0 * (e + FP32_BYTES) * values + FP32_BYTES * heads)),
            "delta_proj_input": Saved(n * c.facts.layer.linear_input_bytes * values, read_by=("o_proj",)),
        }

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """Per element of all heads' queries five tensors, per element of their values five and the gate's gradient, and
        twice the states between chunks (fla/ops/gated_delta_rule/chunk.py chunk_gated_delta_rule_bwd,
        flash-linear-attention 0.4); less what the norm behind the recurrence saved."""
        queries = float(self.value_heads * self.key_head_dim)
        states = queries * self.value_head_dim / DELTA_CHUNK
        elements = 5.0 * queries + 6.0 * self.value_width + 2.0 * states
        alive = c.tokens * c.facts.layer.activation_bytes * elements / c.tensor
        output = own["delta_output"].bytes + (own["delta_proj_input"].bytes if "delta_proj_input" in own else 0.0)
        return alive - output - behind.later() - behind.last_layer


def delta_net(shape: ModelShape) -> DeltaNet:
    """Return the linear attention of a model's layers."""
    linear = shape.linear_attention
    assert linear is not None
    return DeltaNet(
        shape.hidden_size,
        linear.num_key_heads,
        linear.num_value_heads,
        linear.key_head_dim,
        linear.value_head_dim,
        linear.conv_kernel,
    )
