"""What techniques save of the tensors a layer keeps: chunked MLPs, adapters, sampled inputs, and the host's share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.job import Job, RankColumns

__all__ = ["apply_techniques_to_saved", "on_device"]

Tensors = Mapping[str, FloatColumn]

# Inputs that only linear layers save. The attention's output is kept by the attention too.
LINEAR_INPUTS = (
    "attn_norm_output",
    "mlp_norm_output",
    "mlp_fc2_input",
    "expert_fc1_input",
    "expert_fc2_input",
    "shared_fc2_input",
)
ROUNDING_BUFFERS = 2.0


def apply_techniques_to_saved(job: Job, n: FloatColumn, norm_tokens: FloatColumn, tensors: Tensors) -> Tensors:
    """Return the saved tensors of one layer under the techniques. `n` is the tokens of a micro-batch, `norm_tokens`
    those of them that a norm sees."""
    return _sampled(job, n, _adapted(job, n, norm_tokens, _chunked(job, tensors)))


def _chunked(job: Job, tensors: Tensors) -> Tensors:
    """A dense MLP computed in mini-sequences keeps its input alone where the backend computes a piece again in the
    backward pass (MsT, Luo et al. 2024, section 3.2; deepspeed/runtime/sequence_parallel/ulysses_sp.py TiledMLP,
    0.19.8)."""
    if job.techniques.mlp_chunks == 1 or not job.facts.mlp_chunks_recomputed:
        return tensors
    return {name: column for name, column in tensors.items() if name not in ("mlp_fc1_output", "mlp_fc2_input")}


def _adapted(job: Job, n: FloatColumn, norm_tokens: FloatColumn, tensors: Tensors) -> Tensors:
    """Adapters keep their own rank-wide tensor beside the input of every linear layer; with frozen first matrices
    nothing needs that input (LoRA-FA, Zhang et al. 2023, section 3). A frozen unfused norm lets go of the normalized
    copy its weight's gradient would need (transformers/models/llama/modeling_llama.py LlamaRMSNorm, 5.23)."""
    adapters = job.techniques.adapters
    if adapters is None:
        return tensors
    shape, e = job.shape, job.facts.activation_bytes
    saved_bytes = dict(tensors)
    mixture = shape.moe is not None and "expert_fc1_input" in tensors
    pairs = 4.0 + (0.0 if mixture else (3.0 if shape.gated_mlp else 2.0))
    saved_bytes["adapters"] = pairs * e * adapters.rank * n
    if mixture and shape.moe is not None:
        saved_bytes["adapters"] += (3.0 if shape.gated_mlp else 2.0) * shape.moe.topk * e * adapters.rank * n
    if job.facts.norm_extra_bytes >= e:
        for name in ("attn_norm_input", "mlp_norm_input"):
            saved_bytes[name] = saved_bytes[name] - norm_tokens * e * shape.hidden_size
    if adapters.frozen_down:
        saved_bytes = {name: column for name, column in saved_bytes.items() if name not in LINEAR_INPUTS}
    return saved_bytes


def _sampled(job: Job, n: FloatColumn, tensors: Tensors) -> Tensors:
    """A linear layer keeps a share of its input's rows for an unbiased weight gradient (WTA-CRS, Liu et al. 2023,
    section 3). The attention keeps the whole of what the projection after it reads. What-if."""
    share = job.techniques.sampled_share
    if share >= 1.0:
        return tensors
    return {name: column * (share if name in LINEAR_INPUTS else 1.0) for name, column in tensors.items()}


def on_device(job: Job, rows: RankColumns, saved_bytes: FloatColumn, depth: FloatColumn) -> FloatColumn:
    """Return the part of `saved_bytes`, the activations of all layers of a rank over `depth` micro-batches, that does
    not wait in host memory."""
    techniques = job.techniques
    if not (techniques.offload_checkpoints or techniques.swapped_share or np.any(rows.layouts.offload_layers)):
        return saved_bytes
    layers = np.maximum(rows.dense_layers + rows.moe_layers, 1.0)
    layer_bytes = saved_bytes / np.maximum(layers * depth, 1.0)  # one layer, one micro-batch
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
