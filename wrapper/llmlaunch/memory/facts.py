"""What a backend tells the estimator: bytes per element, what is sharded over whom, which tensors are saved."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryFacts"]


@dataclass(frozen=True)
class MemoryFacts:
    """One backend, one version, as data. Every figure is bytes per element unless said otherwise.

    State: `parameter_bytes` (the compute copy), `gradient_bytes` (what accumulates through the step),
    `optimizer_bytes` (master weights and moments). ZeRO stage 1 shards the optimizer, 2 also the gradients,
    3 also the parameters, over data parallelism, and over context parallelism too where
    `shard_over_context` (Megatron core since 0.7: megatron/core/distributed/param_and_grad_buffer.py).
    """

    backend: str
    version: str
    source: str
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    shard_over_context: bool = True
    # extra copy of the gradients alive during backward, per parameter, by ZeRO stage 0..3 (unsharded, sharded)
    backward_gradient_bytes: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    backward_gradient_bytes_sharded: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    # temporaries of the optimizer step, per sharded parameter, by ZeRO stage
    step_bytes_sharded: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    activation_bytes: float = 2.0
    gated_activation_fused: bool = True  # the activation is recomputed inside the fused kernel, not saved
    mlp_activation_copies: float = 2.0  # ungated: how many (tokens x ffn) copies are kept
    attention_scores_saved: bool = False  # unfused attention keeps s x s scores
    logit_bytes: float = 6.0  # per (token, vocabulary/tensor) element kept for backward
    logit_transient_bytes: float = 0.0  # more of the same while the loss is computed
    bucket_bytes: float = 0.0  # communication buckets, bytes per rank
    live_parameter_bytes: float = 0.0  # ZeRO-3: upper bound of gathered parameters beside the largest module
    workspace_bytes: float = 0.0  # constant allocated by kernels libraries through torch
    cache_share: float = 0.0  # reserved = allocated x (1 + cache_share)
    context_bytes: float = 0.0  # accelerator context, outside torch
    communicator_bytes: float = 0.0  # per process group of more than one rank this rank is in
    pad_vocabulary: bool = True  # pads to 128 x tensor
