"""Two published formulas, for comparison only: Fujii et al.'s first stage and Megatron's own theoretical report.

The tables of docs/accuracy.md and the tests apply them to the same records as our estimator; the planner never does.
Neither knows a kind of peak: each gives the bytes of weights, optimizer and activations of the most loaded (first)
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmlaunch.accuracy.scoring import OUTCOMES, ScoredRecord
from llmlaunch.accuracy.summary import errors, judged
from llmlaunch.calibration.evidence import FUJII_SHARE
from llmlaunch.calibration.stated.completion import with_defaults
from llmlaunch.layout import RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.models.shape import ModelShape
from validation.trainers import PUBLIC_TRAINERS

MEGATRON = ("megatron", "megatron-deepspeed")  # the fact tables of what both formulas describe
MASTER_AND_MOMENTS = 12  # bytes per parameter: fp32 master, first and second moment


@dataclass(frozen=True)
class ReferenceJob:
    """The inputs of both formulas. `shape.vocab_size` is the padded one; ZeRO stage 1 is the distributed optimizer."""

    shape: ModelShape
    layout: Layout
    sequence_length: int
    num_microbatches: int | None  # None: enough to fill the pipeline
    fp32_gradients: bool = True
    attention_scores_saved: bool = False  # neither flash nor recomputed attention


@dataclass(frozen=True)
class ReferenceBytes:
    """Bytes of the most loaded stage."""

    weights_and_optimizer_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.weights_and_optimizer_bytes + self.activation_bytes


@dataclass(frozen=True)
class Anchor:
    """A published formula: what it is, what it leaves out, and its function (None if it does not apply)."""

    title: str
    ignores: str
    formula: Callable[[ReferenceJob], ReferenceBytes | None]


def fujii_first_stage(job: ReferenceJob) -> ReferenceBytes | None:
    """Return the bytes by Fujii et al., "Accelerating Large Language Model Training with 4D Parallelism and Memory
    Consumption Estimator" (arXiv 2411.06465), first pipeline stage of a dense decoder, as their published code computes
    it. None for mixtures of experts and latent attention, which it does not describe.

    Embedding input: the code counts 8 bytes for every element of (tokens x hidden), not for every token; kept, because
    it is what their 80 % rule was measured with.
    """
    shape, layout = job.shape, job.layout
    if shape.moe is not None or shape.mla is not None:
        return None
    states = MASTER_AND_MOMENTS / (layout.data * layout.context if layout.zero_stage else 1)
    per_parameter = 2 + (4 if job.fp32_gradients else 2) + states
    return ReferenceBytes(_fujii_parameters(shape, layout) * per_parameter, _fujii_activations(job))


def _fujii_parameters(shape: ModelShape, layout: Layout) -> float:
    h, vocabulary = shape.hidden_size, shape.hidden_size * shape.vocab_size
    groups = shape.num_query_groups / shape.num_attention_heads
    attention = 2 * h * h * (1 + groups) * (shape.query_width / h)
    mlp = (3 if shape.gated_mlp else 2) * h * shape.ffn_hidden_size
    body = shape.num_layers * (attention + mlp + 2 * h)
    first = (body / layout.pipeline + vocabulary) / layout.tensor
    if layout.pipeline == 1 and not shape.tied_embeddings:
        first += vocabulary / layout.tensor + h
    return first


def _fujii_activations(job: ReferenceJob) -> float:
    shape, layout = job.shape, job.layout
    h, t, p = shape.hidden_size, layout.tensor, layout.pipeline
    tokens = job.sequence_length / layout.context * layout.micro_batch_size
    groups = shape.num_query_groups / shape.num_attention_heads
    mlp = (8 if shape.gated_mlp else 4) * shape.ffn_hidden_size / h
    layer = tokens * h * (12 + 4 * groups + mlp)
    if shape.hidden_dropout:
        layer += 2 * tokens * h
    if job.attention_scores_saved and layout.recompute == RECOMPUTE_NONE:
        mask = 1 if shape.attention_dropout else 0
        layer += (4 + mask) * tokens * job.sequence_length / layout.context * shape.num_attention_heads
    dropped = tokens * h * p if shape.hidden_dropout else 0
    total = (layer * shape.num_layers + 8 * tokens * h * p + dropped) / t * _in_flight(job)
    if p == 1:
        total += 4 * tokens * h * (1 + shape.vocab_size / h) / t
    return total


def _in_flight(job: ReferenceJob) -> float:
    """Return the micro-batches in flight on the first stage as a share of a full pipeline: Megatron's own factor, which
    Fujii et al. took over."""
    layout, microbatches = job.layout, job.num_microbatches
    if layout.virtual_pipeline > 1:
        return 1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual_pipeline)
    if layout.pipeline > 1 and microbatches is not None:
        return min(1.0, microbatches / layout.pipeline)
    return 1.0


def megatron_theory(job: ReferenceJob) -> ReferenceBytes | None:
    """Return what Megatron-LM prints as "Theoretical memory footprints" (megatron/training/theoretical_memory_usage.py,
    core 0.19): the most loaded shard's states, and activations by one of two formulas. The first is used with sequence
    parallelism and selective recompute; every other job, recomputing or not, gets the second."""
    selective = job.layout.recompute == RECOMPUTE_SELECTIVE
    with_sequence_parallelism = bool(job.layout.sequence_parallel) and selective
    activations = _theory_with_sp(job) if with_sequence_parallelism else _theory_without_sp(job)
    return ReferenceBytes(_theory_states(job.shape, job.layout), activations)


def _theory_states(shape: ModelShape, layout: Layout) -> float:
    split, whole, expert = _theory_parameters(shape, layout)
    experts_over = layout.expert_tensor * layout.expert * layout.pipeline
    expert_data = max(layout.world_size // experts_over, 1)
    dense_bytes = _theory_bytes(layout, layout.data)
    return (split / layout.tensor + whole) * dense_bytes + expert / (
        layout.expert_tensor * layout.expert
    ) * _theory_bytes(layout, expert_data)


def _theory_bytes(layout: Layout, replicas: int) -> float:
    """Return bytes per parameter. The report divides states by data parallelism alone, not by context parallelism."""
    return 6 + MASTER_AND_MOMENTS / replicas if layout.zero_stage else 18


def _theory_parameters(shape: ModelShape, layout: Layout) -> tuple[float, float, float]:
    """Return the parameters of the most loaded shard, before tensor and expert splits: what tensor parallelism splits,
    what it replicates, and routed experts. One pipeline share of the layers, every multi-token-prediction layer, one
    embedding (two if there is one stage and they are not tied)."""
    h, norm = shape.hidden_size, (1 if shape.normalization == "RMSNorm" else 2)
    wide = 2 * h * (3 / 2 if shape.gated_mlp else 1)
    attention, moe = _theory_attention(shape, norm), shape.moe
    mixtures = sum(moe.layer_pattern) if moe else 0
    dense = shape.num_layers - mixtures
    last_is_mixture = moe.layer_pattern[-1] if moe else 0
    extra_mixtures = last_is_mixture * shape.mtp_num_layers
    extra_dense = shape.mtp_num_layers - extra_mixtures
    split_dense = attention + wide * shape.ffn_hidden_size
    split_mixture = attention + (wide * moe.shared_expert_ffn_hidden_size if moe else 0)
    router = h * moe.num_experts + (moe.num_experts if shape.linear_bias else 0) if moe else 0
    routed = wide * moe.ffn_hidden_size * moe.num_experts if moe else 0
    split = (split_dense * dense + split_mixture * mixtures) / layout.pipeline
    split += split_dense * extra_dense + split_mixture * extra_mixtures
    two_embeddings = layout.pipeline == 1 and not shape.tied_embeddings
    split += h * shape.vocab_size * (2 if two_embeddings else 1)
    norms = 2 * h * norm
    whole = (norms * shape.num_layers + router * mixtures + norm * h) / layout.pipeline
    whole += norms * shape.mtp_num_layers + router * extra_mixtures
    return split, whole, routed * (mixtures / layout.pipeline + extra_mixtures)


def _theory_attention(shape: ModelShape, norm: int) -> float:
    h, heads, mla = shape.hidden_size, shape.num_attention_heads, shape.mla
    if mla is None:
        return 2 * h * h * (1 + shape.num_query_groups / heads) * (shape.query_width / h)
    query_head = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    rank = mla.q_lora_rank
    query = h * heads * query_head if rank is None else rank * (h + heads * query_head + norm)
    latent = mla.kv_lora_rank * (h + heads * (mla.qk_head_dim + mla.v_head_dim) + norm) + h * mla.qk_pos_emb_head_dim
    return query + latent + heads * mla.v_head_dim * h


def _theory_with_sp(job: ReferenceJob) -> float:
    shape, layout = job.shape, job.layout
    tokens, h = job.sequence_length * layout.micro_batch_size, shape.hidden_size
    layers = tokens * h * (18 + 4 * shape.ffn_hidden_size / h) * shape.num_layers
    total = (layers + tokens * (8 + h) * layout.pipeline) * _in_flight(job)
    if layout.pipeline == 1:
        total += tokens * h * 4 * (1 + shape.vocab_size / h)
    return total / layout.tensor


def _theory_without_sp(job: ReferenceJob) -> float:
    shape, layout = job.shape, job.layout
    tokens, h = job.sequence_length * layout.micro_batch_size, shape.hidden_size
    layers = tokens * h * (10 + 24 / layout.tensor) * shape.num_layers
    total = (layers + tokens * (8 + h) * layout.pipeline) * _in_flight(job)
    if layout.pipeline == 1:
        total += 2 * tokens * (shape.vocab_size / layout.tensor + h)
    return 1.05 * total


ANCHORS: Mapping[str, Anchor] = {
    "fujii": Anchor(
        "Fujii et al., first stage",
        "the last stage, recompute, mixtures of experts, latent attention, the optimizer step, buffers, workspaces, "
        "allocator cache, context and communicators",
        fujii_first_stage,
    ),
    "megatron_theory": Anchor(
        "Megatron-LM's theoretical report",
        "context parallelism, full recompute, grouped queries and the MLP's gate in activations, activations of "
        "experts, bf16 gradients, the last stage, workspaces, allocator cache, context and communicators",
        megatron_theory,
    ),
}


def anchor_bytes(scored: ScoredRecord) -> dict[str, int | None]:
    """Return bytes by the name of each anchor, None if it does not apply: another framework, or a model it does not
    describe."""
    job = _reference_job(scored)
    results = {name: anchor.formula(job) if job else None for name, anchor in ANCHORS.items()}
    return {name: None if result is None else round(result.total_bytes) for name, result in results.items()}


def _reference_job(scored: ScoredRecord) -> ReferenceJob | None:
    case = scored.case
    if case is None or scored.job is None or scored.job.backend not in MEGATRON:
        return None
    record, _ = with_defaults(scored.record, PUBLIC_TRAINERS[scored.record["backend"]].defaults)
    return ReferenceJob(
        shape=case.job.shape,
        layout=case.layout,
        sequence_length=case.job.workload.sequence_length,
        num_microbatches=case.num_microbatches,
        fp32_gradients=record["optimizer"]["gradient_dtype"] == "fp32",
        attention_scores_saved=record["implementation"]["attention"] == "unfused",
    )


def anchor_summary(group: Sequence[ScoredRecord], name: str) -> dict[str, Any]:
    """Return the entry of `families` for one anchor, over the records of one family and kind it applies to, with our
    own MAPE on just those (`our_mape`). Its bytes stand for every kind of peak and pipeline rank: neither formula tells
    them apart."""
    priced = [(scored, value) for scored in group if (value := anchor_bytes(scored)[name]) is not None]
    if not priced:
        return {"records": 0}
    if group[0].record["peak_kind"] in OUTCOMES:
        return {"records": len(priced), **_verdicts(priced)}
    theirs = errors(replace(scored, predicted_bytes=value) for scored, value in priced)
    ours = errors(scored for scored, _ in priced)
    return {"records": len(priced), **theirs, **({"our_mape": ours["mape"]} if ours else {})}


def _verdicts(priced: Sequence[tuple[ScoredRecord, int]]) -> dict[str, int]:
    cards = [
        (value, scored.record["gpu_memory_bytes"])
        for scored, value in priced
        if judged(scored) and scored.record.get("gpu_memory_bytes")
    ]
    safe = sum(value <= int(FUJII_SHARE * card) for value, card in cards)
    above = sum(value > card for value, card in cards)
    return {"called_safe": safe, "called_unsafe": len(cards) - safe, "above_card": above}
