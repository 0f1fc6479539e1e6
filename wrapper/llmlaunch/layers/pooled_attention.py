"""Attention to keys pooled by one ratio (DeepSeek-V4): all heads share one key, which is the value, too.

Read off the sources of Megatron-LM's development branch at d48bd6be (August 2026): core/transformer/
experimental_attention_variant/deepseek_v4_hybrid_attention.py, csa.py and csa_utils/fused_sparse_attention.py. No job
of ours has run them. Tensor parallelism divides none of it.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from llmlaunch.frozen import frozen
from llmlaunch.layers.attention import ATTENTION_BACKWARD
from llmlaunch.layers.block import FP32_BYTES, Behind, Block, Saved, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.latent_attention import UP_PROJECTION
from llmlaunch.layers.matrix import NEITHER, Matrix, Part, Vector
from llmlaunch.layers.work import Amounts, BlockWork, ContextTraffic, causal_mean
from llmlaunch.layout import RECOMPUTE_SELECTIVE
from llmlaunch.models.shape import ModelShape

INDEX_BYTES = 4.0  # of the number of a key
INDEX_TILE = 128.0  # numbers of keys come in whole tiles
POOLING_BYTES = FP32_BYTES + 2.0 + 2.0  # softmax in fp32, its weights and what they weigh in 16 bits
HEAD_PASSES = (4.0, 8.0)  # over all heads' queries, forward and backward: their norm, and the output turned back
POOLING_PASSES = (20.0, 40.0)  # over the columns that are pooled, of which weights in fp32 count twice
CHOSEN_FROM = 4  # the ratio of layers whose pooled keys are chosen from


@frozen
class PooledAttention(Block):
    """A query sees the last `window` tokens as they are, and those before them pooled, `ratio` into one key; 0: none
    of them. With the ratio CHOSEN_FROM an indexer chooses `index_topk` of the pooled keys. Groups of heads are
    projected by themselves before all are projected together."""

    hidden: int
    heads: int
    head_dim: int
    query_rank: int
    ratio: int
    window: int
    output_groups: int
    output_rank: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    norm_vectors: int = 1
    role = "attn"
    norm_moved_by = ("qkv_linear",)
    norm_output_moved_by = ("qkv_linear",)

    @property
    def query_width(self) -> int:
        """Columns of the queries."""
        return self.heads * self.head_dim

    @property
    def halves(self) -> int:
        """How many windows a token is pooled into, each with columns of its own: windows of four overlap."""
        return {0: 0, CHOSEN_FROM: 2}.get(self.ratio, 1)

    @property
    def chooses(self) -> bool:
        """Whether an indexer chooses among pooled keys."""
        return self.ratio == CHOSEN_FROM

    @property
    def index_width(self) -> int:
        """Columns of the indexer's queries."""
        return self.index_heads * self.index_head_dim

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """Queries from a latent, one key for all heads, the two projections of the output, and what pools and
        chooses. What pools, the projection of heads by groups and the indexer's weights stay in the compute format."""
        h, rank = float(self.hidden), float(self.query_rank)
        output = float(self.output_groups * self.output_rank)

        def whole(inputs: float, outputs: float, narrow: bool = True) -> Matrix:
            return Matrix(inputs, (Part("", outputs),), NEITHER, linear=narrow, narrow=narrow)

        queries = (whole(h, rank), whole(rank, float(self.query_width)))
        key, groups = whole(h, float(self.head_dim)), whole(float(self.query_width), float(self.output_rank), False)
        pooled = whole(h, float(self.halves * self.head_dim), narrow=False)
        last = whole(output, h)
        if not self.ratio:
            return *queries, key, groups, last
        if not self.chooses:
            return *queries, key, groups, pooled, pooled, last
        index = whole(h, float(self.halves * self.index_head_dim), narrow=False)
        indexer = index, index, whole(h, float(self.index_heads), narrow=False), whole(rank, float(self.index_width))
        return *queries, key, groups, pooled, pooled, *indexer, last

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """Norms of latents and keys, a sink of each head, and of each pooling a bias by place and a norm."""
        norm, widths = self.norm_vectors, [self.head_dim] if self.ratio else []
        if self.chooses:
            widths.append(self.index_head_dim)
        pooling = (self.ratio * self.halves * width + norm * width for width in widths)
        sizes = (norm * self.query_rank, norm * self.head_dim, self.heads, *pooling)
        return tuple(Vector(float(size)) for size in sizes)

    @cached_property
    def products(self) -> tuple[Matrix, ...]:
        """All matrices, those in the compute format, too."""
        return self.matrices

    def _pooled_keys(self, sequence_length: int) -> float:
        """Return the pooled keys that a token attends to, averaged over tokens."""
        pooled = sequence_length // self.ratio if self.ratio else 0
        return causal_mean(self.index_topk if self.chooses else pooled, pooled) if pooled else 0.0

    def attended_keys(self, sequence_length: int) -> float:
        """Return the keys that a token attends to, averaged over tokens: the last ones, and pooled ones."""
        return causal_mean(self.window, sequence_length) + self._pooled_keys(sequence_length)

    def attended_elements(self, sequence_length: int) -> float:
        """Return the elements of keys and values that a token's heads are multiplied with."""
        return self.attended_keys(sequence_length) * 2.0 * self.query_width

    def sequence_work(self, c: LayerColumns) -> BlockWork:
        """Attention, and the choice of pooled keys: every one before a token is scored; the loss that teaches the
        indexer multiplies queries and chosen keys once more, and makes the indexer's gradients at once."""
        s = c.sequence_length
        both = 2.0 * self.attended_elements(s)
        choice = indexed = 0.0
        if self.chooses:
            keys = self._pooled_keys(s)
            choice = 2.0 * keys * self.query_width
            indexed = 2.0 * s / (2.0 * CHOSEN_FROM) * self.index_width + 4.0 * keys * self.index_width
        forward = Amounts(c.tokens, attention=both + choice, wide=indexed)
        return forward, Amounts(c.tokens, attention=ATTENTION_BACKWARD * both)

    def memory_work(self, c: LayerColumns) -> BlockWork:
        """Rotary positions of queries and keys, norms of all heads, the output's positions turned back, and what pools
        keys."""
        columns = float(self.halves * (self.head_dim + (self.index_head_dim if self.chooses else 0)))
        layer, turned = c.facts.layer, (self.query_width + self.head_dim) * c.per_tensor
        e = layer.activation_bytes
        forward, backward = (
            Amounts(c.tokens, bytes=e * (rotary * turned + heads * self.query_width + pooling * columns))
            for rotary, heads, pooling in zip(layer.kernels.rotary_elements, HEAD_PASSES, POOLING_PASSES, strict=True)
        )
        return forward, backward

    def context_traffic(self, c: LayerColumns) -> ContextTraffic | None:
        """Return what ordinary attention with one head of keys sends."""
        columns = 2.0 * (self.query_width + self.head_dim)
        return ContextTraffic(columns, np.full(len(c), float(self.head_dim)), float(self.query_width))

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """Queries are kept before and after the norm of each head, and attention's output before and after its
        positions are turned back. What pools and the projection of heads by groups stay in 16 bits beside narrower
        formats, and so does what they read. The loss that teaches the indexer computes its gradients in the forward
        pass and keeps them."""
        n, e, narrow = c.tokens, c.facts.layer.activation_bytes, c.facts.layer.linear_input_bytes
        h, width, rank = self.hidden, float(self.query_width), self.query_rank
        copies = 2.0 * narrow if narrow < e else 0.0  # of two projections that read the same input
        heads = FP32_BYTES * self.heads
        queries = e * (2.0 * width + 2.0 * self.head_dim) + heads + FP32_BYTES
        return {
            "attn_norm_output": Saved(
                n * (e + copies) * h, moved_by=("qkv_linear",), read_by=("q_proj", "k_proj", "v_proj")
            ),
            "attn_latents": Saved(n * (2.0 * e * rank + FP32_BYTES), moved_by=("qkv_linear",)),
            "attn_latents_normed": Saved(n * (narrow * rank if narrow < e else 0.0), UP_PROJECTION, ("qkv_linear",)),
            "attn_qkv": Saved(n * queries, UP_PROJECTION, ("core_attn",)),
            "attn_pooled": Saved(n * self._pooled_bytes(c)),
            "attn_pooled_output": Saved(n * (2.0 * e * width + heads)),
            "attn_proj_input": Saved(n * e * self.output_groups * self.output_rank, moved_by=("attn_proj",)),
        }

    def _pooled_bytes(self, c: LayerColumns) -> float:
        """Bytes per token of the keys that attention reads, of which ones a query sees, of what pooled them, and of
        what the indexer keeps."""
        e, ratio, sequence = c.facts.layer.activation_bytes, self.ratio, c.sequence_length
        if not ratio:
            return INDEX_BYTES * INDEX_TILE * math.ceil(self.window / INDEX_TILE)
        chosen = self.index_topk if self.chooses else sequence / ratio
        seen = INDEX_BYTES * INDEX_TILE * math.ceil((self.window + chosen) / INDEX_TILE)
        columns = float(self.halves * self.head_dim)
        pooled = seen + e * self.head_dim * (1.0 + 3.0 / ratio) + POOLING_BYTES * columns
        if not self.chooses:
            return float(pooled)
        index = self.index_head_dim
        gradients = e * (self.index_heads * (index + 1.0) + index / ratio)
        narrow = c.facts.layer.linear_input_bytes * self.query_rank if c.facts.layer.linear_input_bytes < e else 0.0
        return float(pooled + POOLING_BYTES * self.halves * index + gradients + narrow)

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """The gradients of attention's output and of the queries, less the output that was turned back, which is freed
        by then; those of all keys in fp32; and the queries where they are computed again."""
        e = c.facts.layer.activation_bytes
        keys = FP32_BYTES * self.head_dim * (1.0 + (1.0 / self.ratio if self.ratio else 0.0))
        again = c.recomputes("mla_up_proj") & (c.layouts.recompute == RECOMPUTE_SELECTIVE)
        queries = np.where(again, own["attn_qkv"].bytes, 0.0)
        return c.tokens * (e * self.query_width + keys) + queries - behind.later() - behind.last_layer


def pooled_attention(shape: ModelShape, ratio: int) -> PooledAttention:
    """Return the attention of a layer that pools `ratio` keys into one."""
    compressed = shape.compressed_attention
    assert compressed is not None
    return PooledAttention(
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        query_rank=compressed.q_lora_rank,
        ratio=ratio,
        window=compressed.window,
        output_groups=compressed.output_groups,
        output_rank=compressed.output_rank,
        index_heads=compressed.index_heads,
        index_head_dim=compressed.index_head_dim,
        index_topk=compressed.index_topk,
        norm_vectors=shape.norm_vectors,
    )
