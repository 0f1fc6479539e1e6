"""What one transformer layer saves for its backward pass where it is frozen and low-rank adapters stand beside some of
its linear layers, and how many parameters those of Megatron-Bridge have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.heads import head_layers, head_rank
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.models.linears import Linear, attention_linears, mlp_linears
from llmlaunch.models.shape import ModelShape

__all__ = ["INPUTS_OF", "Tensors", "fused_pairs", "fused_parameters", "saved_beside_adapters"]

Tensors = Mapping[str, FloatColumn]

INPUTS_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("attn_norm_output", "delta_norm_output", "mamba_norm_output"), ("q_proj", "k_proj", "v_proj")),
    **dict.fromkeys(("delta_proj_input", "mamba_proj_input"), ("o_proj",)),
    **dict.fromkeys(("mlp_norm_output", "expert_fc1_input"), ("gate_proj", "up_proj")),
    **dict.fromkeys(("mlp_fc2_input", "expert_fc2_input", "shared_fc2_input"), ("down_proj",)),
}
"""The inputs that only linear layers save, with the names of these layers. The attention's output is kept by the
attention too."""


def saved_beside_adapters(job: Job, n: FloatColumn, norm_tokens: FloatColumn, tensors: Tensors) -> Tensors:
    """Return the saved tensors of one layer, by name, in bytes. `n` is the tokens of a micro-batch, `norm_tokens` those
    of them that a norm sees."""
    if job.techniques.adapters is None:
        return tensors
    return (_fused_adapters if job.facts.adapters_fused else _adapted)(job, n, norm_tokens, tensors)


def _adapted(job: Job, n: FloatColumn, norm_tokens: FloatColumn, tensors: Tensors) -> Tensors:
    """Adapters keep their own rank-wide tensor beside the input of their linear layer, which a frozen layer alone does
    not need; with frozen first matrices nothing needs that input (LoRA-FA, Zhang et al. 2023, section 3). A wider or
    dropped input is a copy for each linear layer, with dropout's mask (peft/tuners/lora/layer.py Linear.forward, 0.19).
    A frozen unfused norm lets go of the copy its weight's gradient would need
    (transformers/models/llama/modeling_llama.py LlamaRMSNorm, 5.23)."""
    adapters, shape, facts = job.techniques.adapters, job.shape, job.facts
    assert adapters is not None
    e, wide = facts.activation_bytes, facts.adapter_bytes or facts.activation_bytes
    mlps = _mlps(shape, "expert_fc1_input" in tensors)
    beside = [linear for linear in (*_attention(shape), *mlps) if linear[0] in adapters.targets]
    copied = wide > e or facts.adapter_dropout

    saved_bytes = _without_unread(tensors, frozenset() if adapters.frozen_down or copied else adapters.targets)
    ranks = sum(times for _, _, times in beside)
    saved_bytes["adapters"] = ranks * wide * adapters.rank * n
    if facts.norm_extra_bytes >= e:
        for name in ("attn_norm_input", "mlp_norm_input"):
            saved_bytes[name] = saved_bytes[name] - norm_tokens * e * shape.hidden_size
    if copied:
        per_input = (0.0 if adapters.frozen_down else wide) + (1.0 if facts.adapter_dropout else 0.0)
        saved_bytes["adapter_inputs"] = per_input * sum(width * times for _, width, times in beside) * n
    return saved_bytes


Adapted = tuple[str, float, int]  # a linear layer's name, the width of its input, and how often a token passes it


def _attention(shape: ModelShape) -> list[Adapted]:
    """Return the linear layers of one attention block. All of latent attention's have an adapter, or none."""
    h, mla = float(shape.hidden_size), shape.mla
    if mla is None:
        return [*((name, h, 1) for name in ("q_proj", "k_proj", "v_proj")), ("o_proj", float(shape.query_width), 1)]
    queries = [h] if mla.q_lora_rank is None else [h, float(mla.q_lora_rank)]
    widths = (*queries, h, float(mla.kv_lora_rank), float(shape.num_attention_heads * mla.v_head_dim))
    return [("o_proj", width, 1) for width in widths]


def _mlps(shape: ModelShape, mixture: bool) -> list[Adapted]:
    """Return the linear layers of one MLP, or of a mixture's experts and its shared expert."""

    def linears(ffn: int, times: int) -> list[Adapted]:
        first = ("gate_proj", "up_proj") if shape.gated_mlp else ("up_proj",)
        return [*((name, float(shape.hidden_size), times) for name in first), ("down_proj", float(ffn), times)]

    moe = shape.moe
    if moe is None or not mixture:
        return linears(shape.ffn_hidden_size, 1)
    shared = moe.shared_expert_ffn_hidden_size
    return [*linears(moe.ffn_hidden_size, moe.topk), *(linears(shared, 1) if shared else [])]


def _without_unread(tensors: Tensors, readers: frozenset[str]) -> dict[str, FloatColumn]:
    """Return the tensors without inputs of linear layers that none of the `readers` reads. The first layer of a model
    has nothing before its first adapter that needs a gradient, and keeps less: that is not counted."""
    return {
        name: column
        for name, column in tensors.items()
        if name not in INPUTS_OF or not readers.isdisjoint(INPUTS_OF[name])
    }


def _fused_adapters(job: Job, n: FloatColumn, norm_tokens: FloatColumn, tensors: Tensors) -> Tensors:
    """Each adapter keeps what is between its matrices, as wide as the rank on every tensor-parallel rank. Those beside
    queries and a dense MLP's first linear keep their input gathered where sequence parallelism splits it: all of it,
    beside the share that the norm keeps. Without an adapter, a frozen linear keeps no input, but a router does
    (megatron/bridge/peft/utils.py ParallelLinearAdapter, Megatron-Bridge 0.6; traced)."""
    adapters, e, moe = job.techniques.adapters, job.facts.activation_bytes, job.shape.moe
    assert adapters is not None
    targets = adapters.fused_targets(job.shape.gated_mlp) or ()
    first, second = "linear_fc1" in targets, "linear_fc2" in targets
    gathered = np.where(norm_tokens < n, e * job.shape.hidden_size * n, 0.0)
    between = e * adapters.rank
    saved_bytes = _without_unread(tensors, adapters.targets)
    queries, output = "linear_qkv" in targets, "linear_proj" in targets
    if not queries:  # norms of latents are fused into their projections
        saved_bytes.pop("attn_latents_normed", None)
    beside = (len(attention_linears(job.shape)) - 1) * queries + output
    saved_bytes["attn_adapters"] = between * float(beside) * n + float(queries) * gathered
    every_token = between * float(first + second) * n + float(first) * gathered
    if moe is None or "expert_fc1_input" not in tensors:
        saved_bytes["mlp_adapters"] = every_token
        return saved_bytes
    if moe.shared_expert_ffn_hidden_size:
        saved_bytes["shared_adapters"] = every_token
    gathered_rows = tensors["expert_fc1_input"] / (job.facts.linear_input_bytes * job.shape.expert_width)
    return saved_bytes | {
        "mlp_norm_output": tensors["mlp_norm_output"],
        "expert_adapters": between * float(first + second) * gathered_rows,
    }


def fused_parameters(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return the (dense, expert) parameters of adapters on a device. Layers of multi-token-prediction modules have
    adapters as the others have; the projections before them have none."""
    (dense_layer, mixture_layer), experts = fused_pairs(job, rows)
    dense, mixture = rows.dense_layers, rows.moe_layers
    if job.shape.mtp_num_layers:
        heads, here = head_layers(job, rows), rows.rank == head_rank(job, rows.layouts)
        modules = np.where(here, job.shape.mtp_modules, 0)
        dense, mixture = dense + modules * heads.dense, mixture + modules * heads.mixture
    return dense * dense_layer + mixture * mixture_layer, mixture * experts


def fused_pairs(job: Job, rows: RankColumns) -> tuple[tuple[FloatColumn, FloatColumn], FloatColumn]:
    """Return the parameters of adapters on a device as ((dense layer, mixture layer), experts of a mixture layer),
    beside the linears that Megatron core 0.19 has; all that come before the last one of attention are its first. All
    experts of a device share one pair for each of their two linears, and a shared expert has its own
    (megatron/bridge/peft/lora.py LoRA, `share_expert_adapters`, Megatron-Bridge 0.6)."""
    shape, adapters = job.shape, job.techniques.adapters
    assert adapters is not None
    targets = adapters.fused_targets(shape.gated_mlp) or ()

    def of(linears: Mapping[str, Sequence[Linear]], split: FloatColumn) -> FloatColumn:
        adapted = [linear for name in linears.keys() & targets for linear in linears[name]]
        return adapters.rank * sum(linear.inputs + linear.outputs for linear in adapted) / split

    def mlp(width: int, outer: int | None = None) -> dict[str, Sequence[Linear]]:
        linears = mlp_linears(shape, float(width), outer)
        return {"linear_fc1": linears[:1], "linear_fc2": linears[1:]}

    projections = attention_linears(shape)
    attention = of({"linear_qkv": projections[:-1], "linear_proj": projections[-1:]}, rows.tensor)
    dense = attention + of(mlp(shape.ffn_hidden_size), rows.tensor)
    if shape.moe is None:
        return (dense, attention), np.zeros(len(rows))
    experts = mlp(shape.moe.ffn_hidden_size, shape.expert_width)
    shared = of(mlp(shape.moe.shared_expert_ffn_hidden_size), rows.tensor)
    return (dense, attention + shared), of(experts, rows.layouts.expert_tensor.astype(np.float64))
