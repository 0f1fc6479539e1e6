"""Softmax attention: queries, keys and values from the residual stream, scores, and the projection behind them."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import FP32_BYTES, Behind, Block, Saved, Tensors, stream_bytes
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix, Part, Vector
from llmlaunch.layers.work import Amounts, BlockWork, ContextTraffic, causal_mean

if TYPE_CHECKING:
    from llmlaunch.layers.modules import Module, ModuleStyle

ATTENTION_BACKWARD = 2.5  # five products for the two forward (Dao 2023, section 3)

CORE, PROJECTION, QKV = ("core_attn",), ("attn_proj",), ("qkv_linear",)


@frozen
class Window:
    """How many last tokens a query attends to, or the size of chunks that attend to themselves (`chunked`)."""

    tokens: int
    chunked: bool = False


class SoftmaxAttention(Block):
    """What ordinary and latent attention have alike behind their projections."""

    role = "attn"
    norm_output_moved_by = QKV
    norm_read_by = ("q_proj", "k_proj", "v_proj")
    hidden: int
    heads: int
    softcap: bool
    dropout: bool
    gate: bool
    window: Window | None = None

    @property
    def output_width(self) -> int:
        """Columns of what attention puts out."""
        raise NotImplementedError

    def head_widths(self) -> tuple[float, float]:
        """Return the columns of a query's head and of a value's head."""
        raise NotImplementedError

    def key_value_heads(self, c: LayerColumns) -> FloatColumn:
        """Return the heads of keys, and of values, that attention reads, over all tensor ranks."""
        raise NotImplementedError

    def projected_values(self, c: LayerColumns) -> FloatColumn:
        """Return the columns of values as they are projected, over all tensor ranks."""
        return np.full(len(c), float(self.output_width))

    @property
    def query_width(self) -> int:
        """Columns of the queries."""
        raise NotImplementedError

    @property
    def key_value_width(self) -> int:
        """Columns of the keys, and of the values."""
        raise NotImplementedError

    def attended_keys(self, sequence_length: int) -> float:
        """Return the keys that a token attends to, averaged over tokens: half of the sequence, of the window where
        there is one, or of the piece where the sequence is cut."""
        window = self.window
        if window is None:
            return sequence_length / 2.0
        if window.chunked:
            return min(window.tokens, sequence_length) / 2.0
        return causal_mean(window.tokens, sequence_length)

    def attended_elements(self, sequence_length: int) -> float:
        """Return the elements of keys and values that a token's heads are multiplied with."""
        return self.attended_keys(sequence_length) * self.heads * sum(self.head_widths())

    def sequence_work(self, c: LayerColumns) -> BlockWork:
        """softmax(QK)V over a device's queries and their keys, flash attention (Dao 2023, section 3): two products
        forward, five backward; half of the square, or less of it in layers with a window, whose other blocks the
        kernels leave out, unless the window is a mask. With a mask of packed rows it is the whole square. A block of
        queries that sees the whole sequence is started last and waited for, which is long where heads are few. Of a
        sequence in c pieces, one is causal; the others are rectangles, whose blocks are alike and end half a block
        apart."""
        if c.facts.attention.attention_scores_saved:
            return self._unfused_work(c)
        s, window = c.sequence_length, None if c.facts.attention.windows_masked else self.window
        keys, seen = (s / 2.0, s) if window is None else (self.attended_keys(s), min(window.tokens, s))
        if c.facts.attention.row_mask_bytes:
            keys = float(s)
        columns = sum(self.head_widths())
        multiplied, tail = 2.0 * keys * self.heads * columns, (seen * columns) * (1.0 + 1.0 / c.layouts.context)
        backward = Amounts(c.share, attention=ATTENTION_BACKWARD * multiplied, tail=ATTENTION_BACKWARD * tail)
        return Amounts(c.share, attention=multiplied, tail=tail), backward

    def _unfused_work(self, c: LayerColumns) -> BlockWork:
        """Scores in memory: the whole square, as plain products, and softmax and dropout pass by pass (Korthikanti et
        al. 2022, section 4: 5 bytes of every score are kept; written once and read twice or more)."""
        s = float(c.sequence_length)
        products = 2.0 * s * self.heads * sum(self.head_widths())
        passes = 6.0 + (2.5 if self.dropout else 0.0)  # elements of two bytes read or written, forward
        through = passes * 2.0 * self.heads * s
        return Amounts(c.share, wide=products, bytes=through), Amounts(c.share, wide=2.0 * products, bytes=through)

    def memory_work(self, c: LayerColumns) -> BlockWork | None:
        """Rotary positions of queries and keys, as the framework's kernels turn them."""
        turned = c.facts.layer.activation_bytes * (self.query_width + self.key_value_width)
        forward, backward = (Amounts(c.share, bytes=each * turned) for each in c.facts.layer.kernels.rotary_elements)
        return forward, backward

    def context_traffic(self, c: LayerColumns) -> ContextTraffic | None:
        """Return queries, keys, values and the output as heads for sequence, or keys and values around the ring, of
        which a device has a head at least."""
        columns = self.query_width + self.key_value_width
        head = self.query_width // self.heads
        ring = head * np.maximum(self.key_value_width // head * c.per_tensor, 1.0)
        return ContextTraffic(2.0 * columns, ring, float(self.query_width))

    def output_tensors(self, c: LayerColumns, statistics: bool = True) -> dict[str, Saved]:
        """Return what attention puts out with the softmax's `statistics`, what the projection behind it keeps, and
        scores where they are kept. A narrower linear keeps its own copy of the attention's output, a gate puts out
        another tensor, and an all-to-all over context ranks makes a copy. A mask of booleans is made numbers in every
        layer anew, whole on each tensor rank (convert_boolean_attn_mask,
        aten/src/ATen/native/transformers/attention.cpp, torch 2.13)."""
        facts, n, t, e, width = c.facts, c.tokens, c.tensor, c.facts.layer.activation_bytes, float(self.output_width)
        each = e * width + (FP32_BYTES * self.heads if statistics else 0.0)
        tensors = {"attn_output": Saved(n * each / t, moved_by=PROJECTION)}
        copied: Size = facts.layer.linear_input_bytes if facts.layer.linear_input_bytes < e or self.gate else 0.0
        if facts.attention.attention_output_copied:
            copied = copied + e
        if facts.attention.context_all_to_all:
            copied = copied + np.where(c.layouts.context > 1, e, 0.0)
        if np.any(copied):
            tensors["attn_proj_input"] = Saved(n * copied * width / t, moved_by=PROJECTION)
        if self.gate:
            tensors["attn_gate"] = Saved(n * FP32_BYTES * width / t)  # its sigmoid in fp32
        if facts.attention.attention_scores_saved:
            tensors["attn_scores"] = Saved(self._scores(c), freed_by=CORE, moved_by=CORE)
        elif facts.attention.row_mask_bytes:
            tensors["attn_mask"] = Saved(e * n * c.sequence_length, freed_by=CORE, moved_by=CORE)
        return tensors

    def _scores(self, c: LayerColumns) -> FloatColumn:
        """The s x s probabilities where attention is unfused, with dropout their mask and the dropped copy too
        (Korthikanti et al., section 4.1). A softmax in a wider type keeps its result besides, in place of the
        probabilities where those are dropped, and a cap what tanh puts out (eager_attention_forward of
        transformers/models/gemma2/modeling_gemma2.py, 5.23). Recomputing anything recomputes these."""
        e, wide = c.facts.layer.activation_bytes, c.facts.attention.softmax_bytes
        copies = 2.0 * e + 1.0 if self.dropout else e
        if wide is not None:
            copies += wide - e if self.dropout or wide == e else wide
        if self.softcap:
            copies += e
        return copies * self.heads * c.tokens * c.sequence_length / c.tensor

    def backward(self, c: LayerColumns, own: Tensors, behind: Behind) -> Size:
        """With scores in memory their gradients, else what a fused kernel makes; less what later branches saved."""
        if c.facts.attention.attention_scores_saved:
            scores = self.heads / c.tensor * c.tokens * c.sequence_length
            made = c.facts.attention.score_gradient_bytes * scores
        else:
            made = self._fused_backward(c, own)
        return made - behind.later() - behind.last_layer

    def _fused_backward(self, c: LayerColumns, own: Tensors) -> FloatColumn:
        """Return the bytes that fused attention makes while it runs backward, less what the projection behind it has
        let go of by then.

        The gradient of the output comes in; those of queries, keys and values go out. Queries' is summed in fp32, and
        where several query heads share a head of keys, keys and values first get a gradient for every query head
        (mha_bwd of flash-attn 2.8, csrc/flash_attn/flash_api.cpp, and of torch 2.13, cuda/flash_attn/flash_api.cpp; the
        workspace of cuDNN's sdpa_backward, `dQ_accum`, `dK_fullhead` and `dV_fullhead`, cudnn-frontend 1.14). With a
        mask as a tensor all three are summed in fp32 (cuda/mem_eff_attention/kernel_backward.h workspace_size, torch
        2.13). In fp32 nothing is summed apart."""
        facts, e, heads = c.facts, c.facts.layer.activation_bytes, float(self.heads)
        query, value = self.head_widths()
        keys = self.key_value_heads(c)
        summed = 0.0 if e >= FP32_BYTES else FP32_BYTES
        made = e * (heads * (value + query) + keys * (query + value)) + summed * heads * query
        if facts.attention.windows_masked:
            made = made + summed * keys * (query + value)
        else:
            made = made + np.where(keys < heads, e * heads * (query + value), 0.0)
        gone = own["attn_proj_input"].bytes if "attn_proj_input" in own else 0.0
        output = stream_bytes(c, self.hidden) if facts.layer.branch_gradients_apart else 0.0
        return np.asarray(c.tokens * made / c.tensor - gone - output)


@frozen
class Attention(SoftmaxAttention):
    """Grouped-query attention. `query_key_norm` is "head", "all" (one norm over all heads), "l2" (no weights) or None;
    `norm_vectors` are the vectors of one norm, 2 of a LayerNorm. `keys_are_values` projects keys alone, and
    `value_norm` norms values without weights. `turned_beside_images`: cosines and sines are made by layer."""

    hidden: int
    heads: int
    groups: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    query_key_norm: str | None = None
    value_norm: bool = False
    keys_are_values: bool = False
    sinks: bool = False
    gate: bool = False
    rope: bool = True
    dropout: bool = False
    softcap: bool = False
    window: Window | None = None
    turned_beside_images: bool = False
    norm_vectors: int = 1
    scaled: tuple[float, ...] = ()
    scaled_input: bool = False
    norm_moved_by = QKV

    @property
    def query_width(self) -> int:
        """Columns of the queries."""
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Columns of the keys, and of the values."""
        return self.groups * self.head_dim

    @property
    def output_width(self) -> int:
        """Columns of what attention puts out."""
        return self.query_width

    def head_widths(self) -> tuple[float, float]:
        """Return the columns of a query's head and of a value's head."""
        return float(self.head_dim), float(self.head_dim)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The mixed projection and the one behind attention (megatron/core/transformer/attention.py, core 0.19)."""
        queries = float(self.query_width * (2 if self.gate else 1))
        keys = ("k_proj",) if self.keys_are_values else ("k_proj", "v_proj")
        parts = (
            Part("q_proj", queries),
            *(Part(name, float(self.key_value_width), self.groups) for name in keys),
        )
        return (
            Matrix(float(self.hidden), parts, OUTPUTS, "linear_qkv", self.bias),
            Matrix(
                float(self.query_width), (Part("o_proj", float(self.hidden)),), INPUTS, "linear_proj", self.output_bias
            ),
        )

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """Norms of queries and keys, and a sink of each head."""
        norms: tuple[Vector, ...] = ()
        if self.query_key_norm == "all":
            several = self.norm_vectors
            norms = (
                Vector(float(several * self.query_width), divided=True),
                Vector(float(several * self.key_value_width), divided=True, units=self.groups),
            )
        elif self.query_key_norm == "head":
            norms = (Vector(float(self.norm_vectors * self.head_dim)),) * 2
        return (*norms, Vector(float(self.heads), divided=True)) if self.sinks else norms

    def modules(self, style: ModuleStyle) -> list[Module]:
        """Return the projections of queries, keys and values, norms and sinks, and the projection of the output."""
        from llmlaunch.layers.modules import container, linear_modules, vector_modules

        first, last = (chain.from_iterable(linear_modules(matrix, style)) for matrix in self.matrices)
        return container([*first, *vector_modules(self.vectors, style), *last])

    def memory_work(self, c: LayerColumns) -> BlockWork | None:
        """Return rotary positions, of layers that have them."""
        return super().memory_work(c) if self.rope else None

    def key_value_heads(self, c: LayerColumns) -> FloatColumn:
        """Return the heads of keys, and of values, that attention reads, over all tensor ranks: at least one a rank,
        and one for every query head where they are copied. An all-to-all over context ranks repeats the heads of a
        tensor rank until there is one for each of them (deepspeed/runtime/sequence_parallel/ulysses_sp.py
        _combine_local_sequences, 0.19.8; Transformer Engine refuses fewer heads than ranks)."""
        if c.facts.attention.key_values_expanded:
            heads = np.full(len(c), float(self.heads))
        else:
            heads = np.asarray(np.maximum(self.groups, c.tensor), dtype=np.float64)
        return np.maximum(heads, c.tensor * c.layouts.context) if c.facts.attention.context_all_to_all else heads

    def projected_values(self, c: LayerColumns) -> FloatColumn:
        """Return the columns of values as they are projected, over all tensor ranks: a head for each rank at least."""
        return np.asarray(np.maximum(self.groups, c.tensor) * float(self.head_dim))

    def saved(self, c: LayerColumns) -> dict[str, Saved]:
        """Q, K and V, what norms of them keep, the output and its statistics, scores where they are kept.

        Recomputed attention saves more. Flash attention keeps Q and K and V as they enter it. With rotary positions Q
        and K are new tensors and V is a view of the mixed projection, which stays alive whole; without recompute
        Transformer Engine copies V and the projection goes (traced, core 0.19.2 with Transformer Engine 2.20: 12.72
        against 12.11 GiB on Llama 3 8B)."""
        facts, layer = c.facts.attention, c.facts.layer
        n, t, e, width = c.tokens, c.tensor, layer.activation_bytes, float(self.query_width)
        heads = self.heads if facts.key_values_expanded else self.groups
        groups, keys = np.maximum(heads, t) * self.head_dim, self.key_value_heads(c) * self.head_dim
        mixed = 2.0 if facts.mixed_projection_kept else 1.0
        tensors = {"attn_qkv": Saved(n * e * (mixed * (width + keys) + keys) / t, moved_by=CORE)}
        if self.query_key_norm == "l2":
            tensors["attn_qk_norm"] = Saved(n * (e + FP32_BYTES) * (width + groups) / t, moved_by=CORE)
        elif self.query_key_norm is not None:
            over = self.heads * self.head_dim if self.query_key_norm == "all" else self.head_dim
            per_token = e + layer.norm_extra_bytes + FP32_BYTES / over
            tensors["attn_qk_norm"] = Saved(n * per_token * (width + groups) / t, moved_by=CORE)
        if self.value_norm:  # a copy in fp32, its mean square and the root of that
            per_head = FP32_BYTES * (self.head_dim + 2.0)
            tensors["attn_value_norm"] = Saved(n * per_head * np.maximum(self.groups, t) / t)
        tensors |= self.output_tensors(c)
        if self.turned_beside_images and facts.turns_by_layer:
            tensors["attn_turns"] = Saved(n * e * facts.turns_by_layer * self.head_dim)
        if self.rope and not facts.attention_scores_saved:
            columns = self.query_width + self.projected_values(c)
            tensors["attn_uncopied_values"] = Saved(n * e * columns / t, with_module="core_attn")
        return tensors
