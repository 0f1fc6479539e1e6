"""Latent attention to keys that an indexer chose (DeepSeek-V3.2, GLM-5)."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.attention import ATTENTION_BACKWARD, CORE, QKV
from llmlaunch.layers.block import FP32_BYTES, Behind, Saved, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.latent_attention import UP_PROJECTION, LatentAttention, latent_attention
from llmlaunch.layers.matrix import NEITHER, Matrix, Part, Vector
from llmlaunch.layers.work import Amounts, BlockWork, causal_mean
from llmlaunch.models.shape import ModelShape

INDEX_BYTES = 4.0  # of the number of a key
KERNEL_HEADS = 64.0  # a kernel of sparse attention takes no fewer on a device, and is given empty ones


@frozen
class SparseAttention(LatentAttention):
    """Small `index_heads` score all keys, and each query attends to `topk` of them."""

    index_heads: int = 0
    index_head_dim: int = 0
    topk: int = 0

    @property
    def latent(self) -> int:
        """Columns of the queries' latent, of which the indexer makes its own queries."""
        assert self.query_rank is not None
        return self.query_rank

    @property
    def index_width(self) -> int:
        """Columns of the indexer's queries."""
        return self.index_heads * self.index_head_dim

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """Those of latent attention, and the indexer's: queries from their latent, one key and a weight of each head
        from the stream, whole on every device (experimental_attention_variant/dsa.py DSAIndexer, core 0.19)."""
        h = float(self.hidden)

        def whole(inputs: float, outputs: float) -> Matrix:
            return Matrix(inputs, (Part("", outputs),), NEITHER)

        *others, last = self.projections
        indexer = (
            whole(float(self.latent), float(self.index_width)),
            whole(h, float(self.index_head_dim)),
            whole(h, float(self.index_heads)),
        )
        return (*others, *indexer, last)

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """Norms of the latents, and the LayerNorm of the indexer's key, which has a bias."""
        return (*self.latent_norms, Vector(2.0 * self.index_head_dim))

    @cached_property
    def products(self) -> tuple[Matrix, ...]:
        """Those of latent attention; the indexer's are part of the work on the sequence."""
        return super().matrices

    def attended_keys(self, sequence_length: int) -> float:
        """Return the keys that a token attends to, averaged over tokens: of those behind the first `topk`, `topk`."""
        return causal_mean(self.topk, sequence_length)

    def sequence_work(self, c: LayerColumns) -> BlockWork:
        """Attention to chosen keys, heads as wide as the latent, and the choice of them (megatron/core/transformer/
        experimental_attention_variant/dsa_cudnn_kernels.py, core 0.19): the indexer, whole on every tensor rank,
        projects and scores every key before a token; the loss that teaches it multiplies queries and chosen keys once
        more, and makes the indexer's gradients at once. Kernels that gather keys are as fast as others (FlashMLA,
        README: 640 against 660 teraflops on H800)."""
        if c.facts.attention.attention_scores_saved:
            return super().sequence_work(c)
        s, keys = float(c.sequence_length), self.attended_keys(c.sequence_length)
        wide, heads = self.key_value_rank + self.positions, self.kernel_heads(c)
        both, target = 2.0 * keys * (wide + self.key_value_rank) * heads, 2.0 * keys * wide * heads
        width = self.index_width
        projected = 2.0 * (self.latent * width + self.hidden * (self.index_head_dim + self.index_heads))
        indexed = s * width + 4.0 * keys * width
        forward = Amounts(c.tokens, attention=both + target, linear=projected, wide=indexed)
        return forward, Amounts(c.tokens, attention=ATTENTION_BACKWARD * both, linear=projected)

    def kernel_heads(self, c: LayerColumns) -> FloatColumn:
        """Return the heads that the kernel of sparse attention works on (FlashMLA's sparse prefill;
        experimental_attention_variant/dsa_cudnn_kernels.py _flash_mla_head_padding, core 0.19)."""
        return np.maximum(self.heads / c.tensor, KERNEL_HEADS)

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """Keys and values stay latents, and their up-projections become part of queries and of the output, so that
        heads are as wide as the latent. Kept are the queries before and after that, what attention puts out in latents,
        and for each micro-batch a copy of the values' up-projection. The loss that teaches the indexer computes its
        gradients in the forward pass and keeps them; with sequence parallelism the indexer gathers its inputs first
        (experimental_attention_variant/absorbed_mla.py, dsa.py and dsa_cudnn_kernels.py FusedIndexerSparseAttnFunc,
        core 0.19; traced)."""
        facts, n, e, split = c.facts, c.tokens, c.facts.layer.activation_bytes, c.sequence_split
        heads = self.heads / c.tensor
        wide = self.key_value_rank + self.positions
        latents = (e + facts.layer.linear_input_bytes) * self.latent + e * self.key_value_rank + 2.0 * FP32_BYTES
        taught = e * (self.index_width + 2 * self.index_head_dim + self.index_heads) + 2.0 * FP32_BYTES
        chosen = INDEX_BYTES * (min(self.topk, c.sequence_length) + 1.0)
        inputs = np.where(split > 1, facts.layer.linear_input_bytes * (self.hidden + self.latent), 0.0)
        output = self.kernel_heads(c) * (e * self.key_value_rank + FP32_BYTES)
        return {
            "attn_latents": Saved(n * latents / split, moved_by=QKV),
            "attn_qkv": Saved(n * e * (heads * (self.query_head + wide) + wide), UP_PROJECTION, CORE),
            "attn_chosen": Saved(n * (chosen + taught + inputs), CORE),
            "attn_latent_output": Saved(n * output + e * heads * self.value_head_dim * self.key_value_rank, CORE),
            **self.output_tensors(c, statistics=False),
        }

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """Rows without keys are left out, so queries, outputs and gradients are copied twice: one row is added, and
        rows are selected; then there is the queries' gradient, and that of what attention put out
        (experimental_attention_variant/dsa_cudnn_kernels.py _run_sparse_attention_backward, core 0.19; traced). The
        input of the projection behind it is freed."""
        latent = self.key_value_rank
        copied = self.kernel_heads(c) * (3.0 * (latent + self.positions) + 4.0 * latent)
        copied = copied + self.heads / c.tensor * (latent - self.value_head_dim)
        made = c.tokens * c.facts.layer.activation_bytes * copied
        return made - behind.later() - behind.last_layer


def sparse_attention(shape: ModelShape) -> SparseAttention:
    """Return the latent attention with an indexer of a model's layers."""
    indexer, ordinary = shape.indexer, latent_attention(shape)
    assert indexer is not None
    values: dict[str, Any] = {field.name: getattr(ordinary, field.name) for field in fields(ordinary)}
    return SparseAttention(**values, index_heads=indexer.heads, index_head_dim=indexer.head_dim, topk=indexer.topk)
