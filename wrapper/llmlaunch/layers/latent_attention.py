"""Multi-head latent attention (DeepSeek-V2 and V3): queries, keys and values are projected up from narrow latents."""

from __future__ import annotations

from functools import cached_property
from itertools import chain

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.attention import CORE, QKV, SoftmaxAttention
from llmlaunch.layers.block import FP32_BYTES, Saved
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import INPUTS, NEITHER, OUTPUTS, Matrix, Part, Vector
from llmlaunch.layers.modules import Module, ModuleStyle, container, linear_modules, vector_modules
from llmlaunch.models.shape import ModelShape

UP_PROJECTION = ("mla_up_proj",)


@frozen
class LatentAttention(SoftmaxAttention):
    """`query_rank` and `key_value_rank` are the widths of the latents; None: queries have none. A head of queries and
    keys has `head_dim` columns without positions and `positions` with them. `norm_parameters` are those of a norm as
    wide as the residual stream, which some frameworks have before queries without a latent."""

    hidden: int
    heads: int
    query_rank: int | None
    key_value_rank: int
    head_dim: int
    positions: int
    value_head_dim: int
    norm_parameters: float = 0.0
    norm_vectors: int = 1
    dropout: bool = False
    softcap: bool = False
    gate: bool = False
    norm_freed_by = ("layernorm",)
    norm_moved_by = ("attn_norm",)

    @property
    def query_head(self) -> int:
        """Columns of a query's head."""
        return self.head_dim + self.positions

    @property
    def query_width(self) -> int:
        """Columns of the queries."""
        return self.heads * self.query_head

    @property
    def key_value_width(self) -> int:
        """Columns of the keys, of which every query head has its own."""
        return self.query_width

    @property
    def up_projections(self) -> tuple[Matrix, ...]:
        """The matrices behind the latents, and that of queries without one."""
        return tuple(matrix for matrix in self.products if matrix.divided == OUTPUTS)

    @property
    def output_width(self) -> int:
        """Columns of what attention puts out."""
        return self.heads * self.value_head_dim

    def head_widths(self) -> tuple[float, float]:
        """Return the columns of a query's head and of a value's head."""
        return float(self.query_head), float(self.value_head_dim)

    def key_value_heads(self, c: LayerColumns) -> FloatColumn:
        """Return the heads of keys, and of values: one for every query head."""
        return np.full(len(c), float(self.heads))

    @cached_property
    def projections(self) -> tuple[Matrix, ...]:
        """Down projections are whole on every device, up projections divided (megatron/core/transformer/
        multi_latent_attention.py, core 0.19). All of them have an adapter, or none."""
        h, queries = float(self.hidden), float(self.heads * self.query_head)
        up = float(self.heads * (self.head_dim + self.value_head_dim))

        def linear(inputs: float, outputs: float, divided: str, fused: str = "linear_qkv") -> Matrix:
            return Matrix(inputs, (Part("o_proj", outputs),), divided, fused)

        query: tuple[Matrix, ...] = (linear(h, queries, OUTPUTS),)
        if self.query_rank is not None:
            rank = float(self.query_rank)
            query = linear(h, rank, NEITHER), linear(rank, queries, OUTPUTS)
        return (
            *query,
            linear(h, float(self.key_value_rank + self.positions), NEITHER),
            linear(float(self.key_value_rank), up, OUTPUTS),
            linear(float(self.output_width), h, INPUTS, "linear_proj"),
        )

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The projections alone."""
        return self.projections

    @cached_property
    def latent_norms(self) -> tuple[Vector, ...]:
        """Norms of the latents."""
        ranks = (self.query_rank, self.key_value_rank)
        return tuple(Vector(float(self.norm_vectors * rank)) for rank in ranks if rank is not None)

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """Norms of the latents."""
        return self.latent_norms

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return the projections, the norms of latents behind them, and all else as one tensor."""
        projections = (linear for matrix in self.projections for linear in linear_modules(matrix, style))
        counted = sum(each.elements for each in self.projections) + sum(each.size for each in self.latent_norms)
        others = int(self.total_parameters - counted)
        rest = [Module((others,))] if others else []
        return container([*chain.from_iterable(projections), *vector_modules(self.latent_norms, style), *rest])

    def more_vectors(self, c: LayerColumns) -> Size:
        """Return the norm before queries without a latent, where a framework has one."""
        return self.norm_parameters if c.facts.attention.query_input_normed and self.query_rank is None else 0.0

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """The latents and their norms' outputs, whole on every device, and the up-projected Q, K and V (megatron/core/
        transformer/multi_latent_attention.py, core 0.19). The norms are fused into the up-projections and belong to
        them."""
        facts, n, e, split = c.facts, c.tokens, c.facts.layer.activation_bytes, c.sequence_split
        ranks = (self.query_rank or 0) + self.key_value_rank
        per_token = e * ranks + (e + facts.layer.linear_input_bytes) * self.positions
        normed = (facts.layer.linear_input_bytes + facts.layer.norm_extra_bytes) * ranks
        copied = self.head_dim + self.value_head_dim if facts.attention.key_values_expanded else 0
        if facts.attention.query_input_normed and self.query_rank is None:
            normed += facts.layer.linear_input_bytes * self.hidden + FP32_BYTES
        wide = self.heads * (2.0 * self.query_head + self.value_head_dim + copied)
        return {
            "attn_latents": Saved(n * per_token / split, moved_by=QKV),
            "attn_latents_normed": Saved(n * normed / split, UP_PROJECTION, QKV),
            "attn_qkv": Saved(n * e * wide / c.tensor, UP_PROJECTION, CORE),
            **self.output_tensors(c),
        }


def latent_attention(shape: ModelShape) -> LatentAttention:
    """Return the latent attention of a model's layers."""
    mla = shape.mla
    assert mla is not None
    return LatentAttention(
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        query_rank=mla.q_lora_rank,
        key_value_rank=mla.kv_lora_rank,
        head_dim=mla.qk_head_dim,
        positions=mla.qk_pos_emb_head_dim,
        value_head_dim=mla.v_head_dim,
        norm_parameters=shape.norm_parameters,
        norm_vectors=shape.norm_vectors,
        dropout=shape.attention_dropout > 0,
        softcap=shape.attention_softcap is not None,
        gate=shape.attention_gate,
    )
