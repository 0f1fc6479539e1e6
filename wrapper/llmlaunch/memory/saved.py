"""The tensors one transformer layer saves for its backward pass, for one micro-batch, by the module that saves them.

The list of a fused block was read off traces of Megatron core 0.19.2 with Transformer Engine 2.20 under fake tensors
(dense, sequence parallel, flash attention) and from their sources; Korthikanti et al. (2022), section 4, gives the same
list for GPT with dropout and unfused scores. Names are those of Megatron's `--recompute-modules` and
`--offload-modules`, with `_input` and `_output` where a module keeps both. Techniques save of these tensors: chunked
MLPs, adapters, sampled inputs, and what waits on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, reduce

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.adapters import INPUTS_OF, Tensors, saved_beside_adapters
from llmlaunch.memory.compressed import attention_tensors, stream_tensors
from llmlaunch.memory.job import Job, RankColumns, mean_of_kinds, once_for_rows
from llmlaunch.memory.recurrent import saved_by_delta_net, saved_by_mamba
from llmlaunch.models.kinds import part_kinds
from llmlaunch.models.shape import CLAMPED, SQUARED, Indexer, MoeShape

__all__ = [
    "Gone",
    "SavedTensors",
    "balanced_tokens",
    "kept_operators",
    "key_value_heads",
    "leaves_device",
    "on_device",
    "padded_heads",
    "projected_bytes",
    "saved_by_dense_layer",
    "saved_by_mixture_layer",
    "sequence_split",
    "tokens",
]


STATISTIC_BYTES = 4.0  # softmax and norm statistics are fp32


Gone = Mapping[str, bool | BoolColumn]  # by tensor: of all layouts, or layout by layout


@frozen
class SavedTensors:
    """Bytes by tensor of one layer for one micro-batch."""

    tensors: Mapping[str, FloatColumn]

    @cached_property
    def total(self) -> FloatColumn:
        return self.without({})

    def without(self, gone: Gone) -> FloatColumn:
        """Return the bytes of all tensors except those that are `gone`."""
        left = [(column, gone.get(name, False)) for name, column in self.tensors.items()]
        columns = [
            column if away is False else np.where(away, 0.0, column) for column, away in left if away is not True
        ]
        return reduce(np.add, columns) if columns else np.zeros_like(left[0][0])

    def of(self, *names: str) -> FloatColumn:
        """Return the bytes of the named tensors that the layer has."""
        first = next(iter(self.tensors.values()))
        return reduce(np.add, (self.tensors.get(name, np.zeros_like(first)) for name in names))


@once_for_rows
def tokens(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the tokens of one micro-batch on one context-parallel rank."""
    return job.workload.sequence_length * rows.layouts.micro_batch_size / rows.layouts.context


@once_for_rows
def sequence_split(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the divisor of norms, residuals and dropout: the tensor-parallel size with sequence parallelism, else
    1."""
    return np.where(rows.layouts.sequence_parallel > 0, rows.tensor, 1.0)


@once_for_rows
def saved_by_dense_layer(job: Job, rows: RankColumns) -> SavedTensors:
    """Attention and a dense MLP; of layers of one part each, the mean of those that are no mixtures."""
    n, tensors = tokens(job, rows), _mixers(job, rows)
    if job.shape.mamba is None:
        tensors |= _mlp(job, rows)
    elif rows.shares is None:  # no tensor is in each of its parts
        tensors = {"mamba_scan": np.zeros(len(rows))}
    return SavedTensors(apply_techniques_to_saved(job, n, n / sequence_split(job, rows), tensors))


def _mlp(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    n, width = tokens(job, rows), job.shape.ffn_hidden_size / rows.tensor
    return {
        **_norm(job, rows, "mlp_norm"),
        **stream_tensors(job, n, "mlp"),
        "mlp_fc1_output": n * projected_bytes(job) * width,
        "mlp_fc2_input": n * job.facts.linear_input_bytes * width,
    }


FUSED_ROWS = 256.0  # of a tile of experts that are one kernel (moe_utils.py get_align_size_for_quantization)


@once_for_rows
def saved_by_mixture_layer(job: Job, rows: RankColumns) -> SavedTensors:
    """Attention, where layers have more than one part, and a mixture of experts; a mixture routes topk copies of every
    token."""
    shape, facts = job.shape, job.facts
    moe = shape.moe
    assert moe is not None
    lay, n, split = rows.layouts, tokens(job, rows), sequence_split(job, rows)
    routed = routed_tokens(job, rows)
    width, outer = routed * moe.ffn_hidden_size, shape.expert_width
    shared = n * moe.shared_expert_ffn_hidden_size / rows.tensor
    weighed_before = moe.router.weighted_inputs  # whose gradient reads what was not weighed yet
    latents = moe.latent_size is not None
    mixture = {
        **_norm(job, rows, "mlp_norm"),
        **stream_tensors(job, n, "mlp"),
        "moe_router": n * (_routing(job, moe) + facts.router_input_bytes * shape.hidden_size) / split,
        # what comes back in latents is the input of the projection behind the experts, narrower where linears are
        **({"moe_latents": n * facts.linear_input_bytes * outer / split} if latents else {}),
        # expert-tensor parallelism gathers the tokens of its group and splits the width: only the inputs grow
        "expert_fc1_input": routed * facts.linear_input_bytes * outer * lay.expert_tensor,
        **({"expert_unweighted": routed * facts.activation_bytes * outer} if weighed_before else {}),
        "expert_fc1_output": width * (projected_bytes(job) + _scaled(job)),
        "expert_fc2_input": width * facts.linear_input_bytes,
        **({"expert_clamped": width * facts.clamped_activation_bytes} if shape.activation == CLAMPED else {}),
        "moe_permuted_output": routed * _combined(job) * outer * lay.expert_tensor,
        "shared_fc1_output": shared * projected_bytes(job),
        "shared_fc2_input": shared * facts.linear_input_bytes,
    }
    if moe.shared_expert_gate:
        mixture["shared_expert_output"] = n * facts.activation_bytes * shape.hidden_size / split
    mixers = _mixers(job, rows) if shape.mamba is None else {}
    return SavedTensors(apply_techniques_to_saved(job, n, n / split, {**mixers, **mixture}))


def _routing(job: Job, moe: MoeShape) -> float:
    """Bytes per token of scores, probabilities and of the order experts take tokens in."""
    all_scored = moe.router.score_function != "softmax" or not moe.router.normalize_topk
    return (job.facts.router_bytes + job.facts.router_scores_bytes * all_scored) * moe.num_experts


def routed_tokens(job: Job, rows: RankColumns) -> FloatColumn:
    """Tokens the experts of one device see: topk of each when routing is balanced; with a capacity factor, experts are
    padded up to it and drop what exceeds it (megatron/core/transformer/moe/moe_utils.py, core 0.19). A device's experts
    may have a fixed number of rows together, whole tiles of them (token_dispatcher.py _HybridEPManager.setup_metadata,
    core 0.19)."""
    moe = job.shape.moe
    if moe is None:
        return np.zeros(len(rows))
    routed = balanced_tokens(job, rows)
    room = job.techniques.expert_rank_capacity_factor
    if room is not None:  # rows, most of them with tokens
        return np.ceil(np.floor(room * routed) / FUSED_ROWS) * FUSED_ROWS
    if moe.capacity_factor is not None and moe.capacity_factor > 0:
        return routed * moe.capacity_factor
    return routed * job.facts.expert_imbalance


def balanced_tokens(job: Job, rows: RankColumns) -> FloatColumn:
    """Return topk times the tokens of a device: what its experts see of equally shared ones."""
    topk = 0 if job.shape.moe is None else job.shape.moe.topk
    return tokens(job, rows) * topk / sequence_split(job, rows)


def gathered_tokens(job: Job, rows: RankColumns) -> FloatColumn:
    """Tokens a device holds at once when the dispatcher gathers all tokens of the expert ranks instead of exchanging
    them (`--moe-token-dispatcher-type allgather`, megatron/core/transformer/moe/token_dispatcher.py, core 0.19)."""
    lay = rows.layouts
    if job.shape.moe is None or job.techniques.token_dispatcher != "allgather":
        return np.zeros(len(rows))
    ranks = lay.expert * lay.expert_tensor
    return np.where((ranks > 1) & (rows.moe_layers > 0), tokens(job, rows) / sequence_split(job, rows) * ranks, 0.0)


def projected_bytes(job: Job) -> float:
    """Bytes per (token x ffn column) the activation function keeps: gate and up, or up alone; an unfused gated
    activation keeps silu(gate) as well."""
    e = job.facts.activation_bytes
    if not job.shape.gated_mlp:
        return e + job.facts.ungated_activation_bytes
    return 2.0 * e if job.facts.gated_activation_fused else 3.0 * e


def _scaled(job: Job) -> float:
    """Experts multiply their activation by the router's probability: fused for a gated one, else the unscaled
    activation is kept as well (megatron/core/transformer/mlp.py and moe/experts.py, core 0.12 to 0.19). A squared ReLU
    has a kernel of its own (fusions/fused_weighted_squared_relu.py)."""
    fused = (job.shape.gated_mlp and job.facts.gated_activation_fused) or job.shape.activation == SQUARED
    return 0.0 if fused or job.facts.expert_output_weighted else job.facts.activation_bytes


def _combined(job: Job) -> float:
    """Bytes per (routed token x hidden element) of what experts put out, kept where it is weighed or combined."""
    facts = job.facts
    return facts.combine_bytes + (facts.activation_bytes if facts.expert_output_weighted else 0.0)


def _norm(job: Job, rows: RankColumns, name: str) -> dict[str, FloatColumn]:
    """A norm keeps its input and statistics, the linear after it the output; dropout before the norm keeps a mask."""
    shape, facts = job.shape, job.facts
    share = tokens(job, rows) / sequence_split(job, rows)
    mask = float(shape.hidden_size) if shape.hidden_dropout > 0 else 0.0
    per_token = (facts.residual_bytes + facts.norm_extra_bytes) * shape.hidden_size + STATISTIC_BYTES + mask
    output = tokens(job, rows) if facts.gathered_inputs_kept else share
    return {
        f"{name}_input": share * per_token,
        f"{name}_output": output * facts.linear_input_bytes * shape.hidden_size,
    }


def _mixers(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """What attention keeps, or what stands in its place, in the mean of a rank's layers. The tensors of the parts have
    different names, and of each there is none in some layer."""
    shape = job.shape
    if rows.shares is None:
        return {} if shape.linear_attention is not None or shape.mamba is not None else _mean_attention(job, rows)
    tensors: dict[str, dict[str, FloatColumn]] = {}
    for kind in part_kinds(shape):
        if kind == "linear" and shape.linear_attention is not None:
            delta_net = saved_by_delta_net(job, rows, shape.linear_attention, tokens(job, rows))
            tensors[kind] = {**_norm(job, rows, "delta_norm"), **delta_net}
        elif kind == "mamba" and shape.mamba is not None:
            mamba = saved_by_mamba(job, rows, shape.mamba, tokens(job, rows))
            tensors[kind] = {**_norm(job, rows, "mamba_norm"), **mamba}
        else:
            tensors[kind] = _mlp(job, rows) if kind == "mlp" else _mean_attention(job, rows)
    return {name: column * rows.shares[kind] for kind in tensors for name, column in tensors[kind].items()}


def _mean_attention(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """The tensors of each kind of softmax attention have the same names, and a kind may lack some."""
    of_kinds = [_attention(alike, rows) for alike in job.by_attention]
    if len(of_kinds) == 1:
        return of_kinds[0]
    names, none = dict.fromkeys(name for tensors in of_kinds for name in tensors), np.zeros(len(rows))
    return {name: mean_of_kinds(rows, [tensors.get(name, none) for tensors in of_kinds]) for name in names}


def _post_norms(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """Norms after attention and after the MLP (Gemma 2) keep their inputs; what they put out is only added."""
    if not job.shape.post_norms:
        return {}
    per_token = (job.facts.residual_bytes + job.facts.norm_extra_bytes) * job.shape.hidden_size + STATISTIC_BYTES
    share = tokens(job, rows) / sequence_split(job, rows) * per_token
    return {"attn_post_norm_input": share, "mlp_post_norm_input": share}


def _attention(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """One attention block: norm, Q, K, V, output and its statistics, scores where they are kept; and the norms after
    the blocks, where there are some."""
    shape, facts, n, t = job.shape, job.facts, tokens(job, rows), rows.tensor
    e = facts.activation_bytes
    tensors = _norm(job, rows, "attn_norm") | _post_norms(job, rows) | stream_tensors(job, n, "attn")
    if shape.compressed_attention is not None:
        return tensors | attention_tensors(job, n)
    statistics = STATISTIC_BYTES * shape.num_attention_heads
    # a narrower linear keeps its own copy of the attention's output, a gate puts out another tensor, and an all-to-all
    # over context ranks makes a copy
    other = facts.linear_input_bytes < e or shape.attention_gate
    copied: float | FloatColumn = facts.linear_input_bytes if other else 0.0
    if facts.attention_output_copied:
        copied = copied + e
    if facts.context_all_to_all:
        copied = copied + np.where(rows.layouts.context > 1, e, 0.0)
    if shape.mla is None:
        width = float(shape.query_width)
        heads = shape.num_attention_heads if facts.key_values_expanded else shape.num_query_groups
        groups, keys = np.maximum(heads, t) * shape.head_dim, key_value_heads(job, rows) * shape.head_dim
        mixed = 2.0 if facts.mixed_projection_kept else 1.0
        tensors["attn_qkv"] = n * e * (mixed * (width + keys) + keys) / t
        if shape.qk_l2_norm:
            tensors["attn_qk_norm"] = n * (e + STATISTIC_BYTES) * (width + groups) / t
        if shape.qk_layernorm:
            statistics_of = shape.num_attention_heads * shape.head_dim if shape.qk_norm_of_all_heads else shape.head_dim
            per_token = e + facts.norm_extra_bytes + STATISTIC_BYTES / statistics_of
            tensors["attn_qk_norm"] = n * per_token * (width + groups) / t
        if shape.value_norm:  # a copy in fp32, its mean square and the root of that
            per_head = STATISTIC_BYTES * (shape.head_dim + 2.0)
            tensors["attn_value_norm"] = n * per_head * np.maximum(shape.num_query_groups, t) / t
    else:
        width = float(shape.num_attention_heads * shape.mla.v_head_dim)
        tensors |= _latents(job, rows) if shape.indexer is None else _chosen_keys(job, rows, shape.indexer)
    tensors["attn_output"] = n * (e * width + (0.0 if shape.indexer else statistics)) / t
    if np.any(copied):
        tensors["attn_proj_input"] = n * copied * width / t
    if shape.vision is not None and facts.turns_by_layer:
        tensors["attn_turns"] = n * e * facts.turns_by_layer * shape.head_dim
    if shape.attention_gate:
        tensors["attn_gate"] = n * STATISTIC_BYTES * width / t  # its sigmoid in fp32
    if facts.attention_scores_saved:
        tensors["attn_scores"] = _scores(job, rows)
    return tensors


def key_value_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the heads of keys, and of values, that attention reads, over all tensor ranks: at least one a rank, and
    one for every query head where they are copied. An all-to-all over context ranks repeats the heads of a tensor rank
    until there is one for each of them (deepspeed/runtime/sequence_parallel/ulysses_sp.py _combine_local_sequences,
    0.19.8; Transformer Engine refuses fewer heads than ranks)."""
    if job.facts.key_values_expanded:
        heads = np.full(len(rows), float(job.shape.num_attention_heads))
    else:
        heads = np.asarray(np.maximum(job.shape.num_query_groups, rows.tensor), dtype=np.float64)
    return np.maximum(heads, rows.tensor * rows.layouts.context) if job.facts.context_all_to_all else heads


def _latents(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """Multi-latent attention keeps the latents and their norms' outputs, whole on every device, and the up-projected
    Q, K and V (megatron/core/transformer/multi_latent_attention.py, core 0.19). The norms are fused into the
    up-projections and belong to them."""
    shape, e, n = job.shape, job.facts.activation_bytes, tokens(job, rows)
    mla = shape.mla
    assert mla is not None
    heads, head = shape.num_attention_heads, mla.qk_head_dim + mla.qk_pos_emb_head_dim
    ranks = (mla.q_lora_rank or 0) + mla.kv_lora_rank
    per_token = e * ranks + (e + job.facts.linear_input_bytes) * mla.qk_pos_emb_head_dim
    normed = (job.facts.linear_input_bytes + job.facts.norm_extra_bytes) * ranks
    copied = mla.qk_head_dim + mla.v_head_dim if job.facts.key_values_expanded else 0
    if job.facts.query_input_normed and mla.q_lora_rank is None:
        normed += job.facts.linear_input_bytes * shape.hidden_size + STATISTIC_BYTES
    return {
        "attn_latents": n * per_token / sequence_split(job, rows),
        "attn_latents_normed": n * normed / sequence_split(job, rows),
        "attn_qkv": n * e * heads * (2.0 * head + mla.v_head_dim + copied) / rows.tensor,
    }


TOPK_BYTES = 4.0  # of the number of a key
KERNEL_HEADS = 64.0  # a kernel of sparse attention takes no fewer on a device, and is given empty ones


def padded_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the heads that the kernel of sparse attention works on (FlashMLA's sparse prefill;
    experimental_attention_variant/dsa_cudnn_kernels.py _flash_mla_head_padding, core 0.19)."""
    return np.maximum(job.shape.num_attention_heads / rows.tensor, KERNEL_HEADS)


def _chosen_keys(job: Job, rows: RankColumns, indexer: Indexer) -> dict[str, FloatColumn]:
    """Latent attention to the keys that an indexer chose (experimental_attention_variant/absorbed_mla.py, dsa.py and
    dsa_cudnn_kernels.py FusedIndexerSparseAttnFunc, core 0.19; traced).

    Keys and values stay latents, and their up-projections become part of queries and of the output, so that heads are
    as wide as the latent. Kept are the queries before and after that, what attention puts out in latents, and for each
    micro-batch a copy of the values' up-projection. The loss that teaches the indexer computes its gradients in the
    forward pass and keeps them; with sequence parallelism the indexer gathers its inputs first."""
    shape, facts, n, t = job.shape, job.facts, tokens(job, rows), rows.tensor
    mla, e = shape.mla, facts.activation_bytes
    assert mla is not None
    assert mla.q_lora_rank is not None
    heads, split = shape.num_attention_heads / t, sequence_split(job, rows)
    wide, query = mla.kv_lora_rank + mla.qk_pos_emb_head_dim, mla.qk_head_dim + mla.qk_pos_emb_head_dim
    latents = (e + facts.linear_input_bytes) * mla.q_lora_rank + e * mla.kv_lora_rank + 2.0 * STATISTIC_BYTES
    width = indexer.heads * indexer.head_dim
    taught = e * (width + 2 * indexer.head_dim + indexer.heads) + 2.0 * STATISTIC_BYTES
    chosen = TOPK_BYTES * (min(indexer.topk, job.workload.sequence_length) + 1.0)
    inputs = np.where(split > 1, facts.linear_input_bytes * (shape.hidden_size + mla.q_lora_rank), 0.0)
    output = padded_heads(job, rows) * (e * mla.kv_lora_rank + STATISTIC_BYTES)
    return {
        "attn_latents": n * latents / split,
        "attn_qkv": n * e * (heads * (query + wide) + wide),
        "attn_chosen": n * (chosen + taught + inputs),
        "attn_latent_output": n * output + e * heads * mla.v_head_dim * mla.kv_lora_rank,
    }


def _scores(job: Job, rows: RankColumns) -> FloatColumn:
    """The s x s probabilities where attention is unfused, with dropout their mask and the dropped copy too
    (Korthikanti et al., section 4.1). A softmax in a wider type keeps its result besides, in place of the probabilities
    where those are dropped, and a cap what tanh puts out (eager_attention_forward of
    transformers/models/gemma2/modeling_gemma2.py, 5.23). Recomputing anything recomputes these."""
    shape, e, wide = job.shape, job.facts.activation_bytes, job.facts.softmax_bytes
    dropped = shape.attention_dropout > 0
    copies = 2.0 * e + 1.0 if dropped else e
    if wide is not None:
        copies += wide - e if dropped or wide == e else wide
    if shape.attention_softcap is not None:
        copies += e
    return copies * shape.num_attention_heads * tokens(job, rows) * job.workload.sequence_length / rows.tensor


def kept_operators(job: Job, rows: RankColumns, mlp_width: int) -> FloatColumn:
    """Selective recompute by operator keeps the layer's input, attention's output, and what every second linear puts
    out: of Q, K, V, output, gate, up and down the first, third, fifth and seventh; over tensor ranks also what both
    blocks reduce-scatter (torchtitan, parallelisms/parallelize_llama.py, 9dec370, December 2024;
    distributed/activation_checkpoint.py, b5bcd76). The down projection's output is not read again: compiled code drops
    it, eager code keeps it. `mlp_width` is that of the dense MLP or of a mixture's shared expert; the others' grouped
    products are none of the operators whose output is kept."""
    shape, facts, t = job.shape, job.facts, rows.tensor
    e, h, split = facts.activation_bytes, shape.hidden_size, sequence_split(job, rows)
    values = np.maximum(shape.num_query_groups, t) * shape.head_dim
    linears = e * (shape.query_width + values + mlp_width) / t
    attention = (e * shape.query_width + STATISTIC_BYTES * shape.num_attention_heads) / t
    scattered = np.where(t > 1, 2.0 * e * h / split, 0.0)
    last = e * h / split * facts.unused_outputs_kept * (t == 1)
    return np.asarray(tokens(job, rows) * (facts.residual_bytes * h / split + linears + attention + scattered + last))


ROUNDING_BUFFERS = 2.0


def apply_techniques_to_saved(job: Job, n: FloatColumn, norm_tokens: FloatColumn, tensors: Tensors) -> Tensors:
    """Return the saved tensors of one layer under the techniques. `n` is the tokens of a micro-batch, `norm_tokens`
    those of them that a norm sees."""
    chunked = _chunked(job, tensors)
    return _sampled(job, n, saved_beside_adapters(job, n, norm_tokens, chunked))


def _chunked(job: Job, tensors: Tensors) -> Tensors:
    """A dense MLP computed in mini-sequences keeps its input alone where the backend computes a piece again in the
    backward pass (MsT, Luo et al. 2024, section 3.2; deepspeed/runtime/sequence_parallel/ulysses_sp.py TiledMLP,
    0.19.8)."""
    if job.techniques.mlp_chunks == 1 or not job.facts.mlp_chunks_recomputed:
        return tensors
    return {name: column for name, column in tensors.items() if name not in ("mlp_fc1_output", "mlp_fc2_input")}


def _sampled(job: Job, n: FloatColumn, tensors: Tensors) -> Tensors:
    """A linear layer keeps a share of its input's rows for an unbiased weight gradient (WTA-CRS, Liu et al. 2023,
    section 3). The attention keeps the whole of what the projection after it reads. What-if."""
    share = job.techniques.sampled_share
    if share >= 1.0:
        return tensors
    return {name: column * (share if name in INPUTS_OF else 1.0) for name, column in tensors.items()}


def leaves_device(job: Job, rows: RankColumns) -> bool:
    """Whether whole layers, or their inputs, of any row wait in host memory."""
    techniques = job.techniques
    return bool(techniques.offload_checkpoints or techniques.swapped_share or np.any(rows.layouts.offload_layers))


def on_device(job: Job, rows: RankColumns, saved_bytes: FloatColumn, layer_bytes: FloatColumn) -> FloatColumn:
    """Return the part of `saved_bytes`, the activations of all layers of a rank over the micro-batches in flight, that
    does not wait in host memory, where anything `leaves_device`. `layer_bytes` are those of its largest layer, for one
    micro-batch."""
    techniques = job.techniques
    layers = np.maximum(rows.dense_layers + rows.moe_layers, 1.0)
    left = _first_layers(rows, layers, _checkpoints(job, rows, saved_bytes, layer_bytes), layer_bytes)
    # The rounding buffers hold a layer each; what is not swapped is recomputed into them (MEMO, Zhao et al. 2025,
    # section 4): whatever the share, nothing else of a layer stays. What-if.
    return np.minimum(left, ROUNDING_BUFFERS * layer_bytes) if techniques.swapped_share else left


def _checkpoints(job: Job, rows: RankColumns, saved_bytes: FloatColumn, layer_bytes: FloatColumn) -> FloatColumn:
    """The layer inputs of full recompute on the host (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1)."""
    if not job.techniques.offload_checkpoints:
        return saved_bytes
    travelling = np.minimum(saved_bytes, job.facts.travelling_checkpoints * layer_bytes)
    return np.where(rows.layouts.recompute == RECOMPUTE_FULL, travelling, saved_bytes)


def _first_layers(
    rows: RankColumns, layers: FloatColumn, saved_bytes: FloatColumn, layer_bytes: FloatColumn
) -> FloatColumn:
    """The first layers of each rank on the host, whole (KARMA, Wahib et al. 2020; Megatron
    `--cpu-offloading-num-layers`). Of L layers, N offloaded, layer i has left before layer L - N + i runs forward and
    comes back when that layer has run backward, so that never more than L - N layers are on the device
    (transformer_engine/pytorch/cpu_offload.py DefaultOffloadSynchronizer, 2.20); the one that runs always is."""
    if not np.any(rows.layouts.offload_layers):
        return saved_bytes
    moved = np.minimum(rows.layouts.offload_layers, layers)
    return np.where(
        moved > 0, np.maximum(saved_bytes * (1.0 - moved / layers), np.minimum(saved_bytes, layer_bytes)), saved_bytes
    )
