"""What Megatron core keeps in memory: with its DDP and distributed optimizer, and with Megatron-FSDP (ZeRO 2 and 3)."""

from __future__ import annotations

from dataclasses import dataclass

from llmlaunch.facts import (
    DEFAULT_GROUPS,
    AllocatorFacts,
    AttentionFacts,
    ExchangeFacts,
    HostFacts,
    LayerFacts,
    LossFacts,
    MemoryFacts,
    MixtureFacts,
    Quantized,
    StateFacts,
    StepFacts,
)
from llmlaunch.memory.constants import constant
from llmlaunch.workload import ELEMENT_BYTES, OptimizerFormats

AMPERE, HOPPER = 8.0, 9.0
# Forward and backward multiplications of a layer that `--tp-comm-overlap` overlaps, each with a buffer of its own, and
# the workspaces of three streams together (transformer_engine/pytorch/module/base.py initialize_ub, 2.20).
USER_BUFFERS = 10
BLACKWELL = 10.0

# Bytes per logit at the loss's worst moment, beyond the logits themselves, by `--cross-entropy-fusion-impl`.
# none: an fp32 copy, the softmax in place of it (tensor_parallel/cross_entropy.py, core 0.8 to 0.19; up to 0.7 the
# caller kept the copy and the softmax was another). Logits that are fp32 already are not copied.
# native: the same, compiled (fusions/fused_cross_entropy.py, core 0.19). Its source works in place, and so it does run
# eagerly; compiled, Megatron's CI runs peak 355 to 405 MiB above those without it, 4 bytes a logit more
# (tests/data/measurements/fit.jsonl, A100, H100 and GB200).
# te: the gradient overwrites the logits, or a copy of them in their own format where Transformer Engine keeps its input
# (transformer_engine/pytorch/cross_entropy.py, `overwrite_input` of 2.20.2, which core 0.19 leaves at its default).
LOSS_BYTES = {"none": 4.0, "native": 8.0, "te": 0.0}
LOSSES = tuple(LOSS_BYTES)
FUSED_LOSSES = ("native", "te")
# Per token and expert: scores of the balancing loss, fp32, and the order of all choices as int64, of which experts read
# the first part (transformer/moe/moe_utils.py compute_routing_scores_for_aux_loss, permute, core 0.19; traced). Softmax
# before the choice and sigmoid keep fp32 scores of all experts besides (topk_routing_with_score_function). Of the last
# micro-batch the dispatcher has the probabilities scattered among all experts, and which ones are chosen
# (token_dispatcher.py MoEAlltoAllTokenDispatcher.dispatch_preprocess).
ROUTER_BYTES = 4.0 + 8.0
ROUTER_LAST_BYTES = 4.0 + 1.0
# From this number of experts on, Megatron warns that scores in less than fp32 are unstable (transformer_config.py, core
# 0.19), and `--moe-router-dtype fp32` is rendered.
FP32_ROUTER_EXPERTS = 32
WITHOUT_QUERY_NORM = ("0.16",)  # mla_qk_norm_config.py came later
STATE_BYTES = {**ELEMENT_BYTES, "fp8": 1.0}
# A checkpoint holds master and moments in fp32, whatever their format in memory (fused_adam.py state_dict).
WIDE_STATES = 12.0
EAGER_LOSS_BYTES = {**LOSS_BYTES, "native": 4.0}
WIDE_LOGIT_BYTES = 4.0

# The start of a job is reduced over all ranks, gradients of tied tables over the two that hold them, and those of
# experts over their replicas (megatron/training/training.py pretrain; core/distributed/finalize_model_grads.py;
# core/parallel_state.py, core 0.19).
GROUPS = ("world", *DEFAULT_GROUPS, "expert_data", "tied_embeddings")

MXFP8_SCALE_BYTES = 2.0 / 32.0  # a byte for every 32 elements, in both orientations


# Orthogonalizing a matrix yields fp32, and that result multiplied by one scale and by another
# (megatron/core/optimizer/emerging_optimizers.py TensorParallelMuon, core 0.19; traced).
MATRIX_STEP_BYTES = 12.0


@dataclass(frozen=True)
class MegatronOptions:
    """The arguments of a run that decide its bytes, in addition to model and layout. Defaults are those of core 0.19
    with Transformer Engine. If `compute_capability` is None, Hopper or newer is assumed."""

    precision: str = "bf16"
    gradient_dtype: str | None = None  # None: fp32 with bf16 (--accumulate-allreduce-grads-in-fp32), else the precision
    optimizer_bytes: float | None = None  # per parameter; None: as `optimizer` says
    optimizer: OptimizerFormats | None = None  # of the precision-aware one; None: fp32 master and two fp32 moments
    muon: bool = False
    matrices_whole: bool = False  # on a rank, as core 0.19 has them with Muon and the distributed optimizer
    optimizer_instances: int = 1
    loss: str = "none"
    eager_layers: bool = False  # Megatron-LM's own Llama layers of 2023 (megatron/model/)
    te_loss_keeps_logits: bool = False  # as the releases do that Megatron-Bridge 0.6 and core 0.19 run with
    two_loss_copies: bool = False  # of the logits in fp32, as core 0.4 to 0.7 made them
    compiled: bool = True  # Megatron's fused functions go through torch.compile
    fp8_recipe: str | None = None
    fp8_parameters: bool = False
    transformer_engine: bool = True
    gradient_accumulation_fusion: bool = True
    gated_activation_fused: bool = True
    experts_fused: bool = False  # Transformer Engine's operation fuser: one kernel for the experts of a device
    unfused_attention: bool = False
    deferred_head_gradients: int = 0  # micro-batches whose head gradients wait (--defer-embedding-wgrad-compute)
    context_all_to_all: bool = False
    tp_comm_overlap: bool = False
    compute_capability: float | None = None
    expandable_segments: bool = True  # as llmlaunch renders it
    async_save: bool = False  # a second process for each trainer, with a context on the device
    attention_masks: bool = False  # made by the loader (without --no-create-attention-mask-in-dataloader)
    masks_by_sample: bool = False  # each for its own sample (--reset-attention-mask and the like), not once
    loader_workers: int = 2
    streams_recorded: bool = False  # as torch did before 2.7
    nvlink_domain_devices: int = 8
    optimizer_bytes_over_data: float = 0.0
    version: str = "0.19"


def megatron_facts(options: MegatronOptions = MegatronOptions()) -> MemoryFacts:
    """Return the facts of Megatron core with its DDP, or with its distributed optimizer if the layout has ZeRO stage 1.

    With --bf16, the gradient buffer accumulates in fp32 unless --grad-reduce-in-bf16 is set
    (megatron/training/arguments.py, core 0.19). Adam keeps an fp32 master and two fp32 moments
    (megatron/core/optimizer/optimizer.py). Gradients narrower than fp32 are copied to fp32 in the step: shards
    (distrib_optimizer.py, `_copy_model_grads_to_main_grads`), or all of them if the optimizer is not distributed (the
    same function in optimizer.py; traced).

    If a share of the optimizer is on the host, its class is first created over the whole parameters and clones what
    stays in fp32, before the distributed optimizer creates it again over the shards
    (cpu_offloading/hybrid_optimizer.py, core 0.19; traced). The first one is part of a reference cycle, which Python
    collects before a step reaches its peak: NVIDIA's peaks fall linearly with the share, 47.2, 43.4, 39.6, 35.6 and
    32.0 GB at 0, 25, 50, 75 and 100 % (Qwen3 30B on H100, optimizer offload card of Megatron-Bridge's skills, 2026-08).
    """
    states = _states(options)
    checkpointed = states.optimizer_bytes if options.optimizer is None else WIDE_STATES
    return MemoryFacts(
        backend="megatron-lm",
        version=options.version,
        source="megatron/core/optimizer and megatron/core/distributed, core 0.19",
        states=states,
        step=_step(options, states.gradient_bytes),
        layer=_layer(options),
        attention=_attention(options),
        mixture=MixtureFacts(
            router_bytes=ROUTER_BYTES,
            router_last_bytes=ROUTER_LAST_BYTES,
            router_scores_bytes=4.0,
            fp32_router_experts=FP32_ROUTER_EXPERTS,
            exchanges_held=True,
            expert_imbalance=constant("expert_imbalance"),
            experts_fused=options.experts_fused,
        ),
        loss=_loss(options),
        exchange=_exchange(options),
        allocator=_allocator(options),
        host=_host(ELEMENT_BYTES[options.precision], checkpointed, options),
    )


def _states(options: MegatronOptions) -> StateFacts:
    """Return the facts of parameters, gradients and optimizer states. Muon keeps only an fp32 momentum for matrices
    other than embedding and head, and Adam's two moments for all other parameters (megatron/core/optimizer/muon.py,
    layer_wise_optimizer.py, core 0.19)."""
    gradients = options.gradient_dtype or ("fp32" if options.precision == "bf16" else options.precision)
    return StateFacts(
        parameter_bytes=ELEMENT_BYTES[options.precision],
        gradient_bytes=ELEMENT_BYTES[gradients],
        optimizer_bytes=optimizer_bytes(options),
        optimizer_bytes_over_data=options.optimizer_bytes_over_data,
        optimizer_instances=options.optimizer_instances,
        matrix_states_spared_bytes=4.0 if options.muon else 0.0,
        matrices_whole=options.muon and options.matrices_whole,
        partly_offloaded_bytes=4.0,
        moved_to_buffers=True,
    )


def _step(options: MegatronOptions, gradients: float) -> StepFacts:
    step = _gradient_copy(options, gradients) + _widened(options.optimizer)
    return StepFacts(
        step_bytes=(step, 0.0, 0.0, 0.0),
        step_bytes_sharded=(0.0, step, step, step),
        matrix_step_bytes=MATRIX_STEP_BYTES if options.muon and options.matrices_whole else 0.0,
    )


def _layer(options: MegatronOptions) -> LayerFacts:
    """Return what norms, MLP and linear layers keep.

    RMSNorm of the eager layers keeps its input in fp32 as well as the normalized values, and silu(gate) is kept
    (megatron/model/rms_norm.py, transformer.py ParallelMLP, core_v0.4.0). Gate and up of a clamped SwiGLU are clamped
    outside the fused kernel and concatenated again (megatron/core/fusions/fused_bias_geglu.py
    weighted_bias_quick_geglu_impl, core 0.19; traced).
    """
    width = ELEMENT_BYTES[options.precision]
    return LayerFacts(
        activation_bytes=width,
        quantized=_quantized(options),
        gated_activation_fused=options.gated_activation_fused and not options.eager_layers,
        clamped_activation_bytes=2.0 * width,
        norm_extra_bytes=4.0 if options.eager_layers else 0.0,
        stream_copy_bytes=_stream_copy(options),
        weight_gradient_fused=options.gradient_accumulation_fusion,
        weight_gradient_stubs=options.transformer_engine,
    )


def _attention(options: MegatronOptions) -> AttentionFacts:
    """Return what attention keeps.

    Neither flash nor fused attention supports fp32 or GPUs before Ampere
    (transformer_engine/pytorch/attention/dot_product_attention/utils.py get_attention_backend, 2.20). The softmax of
    the scores is then saved, and its backward pass holds four more tensors of that size at once. The eager layers
    repeat keys and values for every query head (megatron/model/transformer.py ParallelAttention, core_v0.4.0).
    """
    before_ampere = options.compute_capability is not None and options.compute_capability < AMPERE
    unfused = options.precision == "fp32" or before_ampere or options.unfused_attention
    return AttentionFacts(
        attention_scores_saved=unfused,
        score_gradient_bytes=3.0 * ELEMENT_BYTES[options.precision] if unfused else 0.0,
        turns_by_layer=4.0,
        encoder_attention_widths=4.0,
        key_values_expanded=options.eager_layers,
        query_input_normed=options.version not in WITHOUT_QUERY_NORM,
        context_all_to_all=options.context_all_to_all,
    )


def _loss(options: MegatronOptions) -> LossFacts:
    width = ELEMENT_BYTES[options.precision]
    return LossFacts(
        logit_bytes=width + _loss_bytes(options),
        kept_logit_bytes=width if options.loss == "te" else 4.0,
        logit_gradient_bytes=width,
        deferred_head_gradients=options.deferred_head_gradients,
    )


def _exchange(options: MegatronOptions) -> ExchangeFacts:
    return ExchangeFacts(
        sequence_gather="last" if options.transformer_engine else "all",
        user_buffers=USER_BUFFERS if options.tp_comm_overlap else 0,
        streams_recorded=options.streams_recorded,
        pipeline_buffers=1,
        groups=GROUPS,
        communicator_bytes=constant("communicator_bytes"),
        exchange_peer_bytes=constant("exchange_peer_bytes"),
        exchange_domain_devices=options.nvlink_domain_devices,
    )


def _allocator(options: MegatronOptions) -> AllocatorFacts:
    """Return workspaces, allocator cache and context: the memory that no tensor of the model accounts for."""
    engine = _engine_workspace(options)
    segments = "expandable" if options.expandable_segments else "whole"
    return AllocatorFacts(
        workspace_bytes=constant("workspace_bytes") + engine * (1.0 + 3.0 * options.tp_comm_overlap),
        grouped_workspace_bytes=4.0 * engine,
        cache_share=constant(f"cache_share_of_{segments}_segments"),
        mixture_cache_share=constant("mixture_cache_share"),
        context_bytes=constant("context_bytes") * (2.0 if options.async_save else 1.0),
        whole_segments=not options.expandable_segments,
    )


def _loss_bytes(options: MegatronOptions) -> float:
    """Return the bytes per logit that the loss needs in addition to the logits."""
    if options.loss == "te" and options.te_loss_keeps_logits:
        return ELEMENT_BYTES[options.precision]
    beside = (LOSS_BYTES if options.compiled else EAGER_LOSS_BYTES)[options.loss]
    if options.loss == "none" and options.two_loss_copies:
        beside += WIDE_LOGIT_BYTES
    copied = options.precision != "fp32" and options.loss != "te"
    return beside if copied else max(beside - WIDE_LOGIT_BYTES, 0.0)


def _stream_copy(options: MegatronOptions) -> float:
    """Return the bytes per element of several residual streams that are copied to fp32 for mixing. Kernels for
    Blackwell read them without a copy (core/fusions/fused_mhc_kernels.py, Megatron-LM d48bd6be)."""
    fused = options.compute_capability is not None and options.compute_capability >= BLACKWELL
    return 0.0 if fused else 4.0


def optimizer_bytes(options: MegatronOptions) -> float:
    """Return the bytes of master parameter and moments per parameter.

    The precision-aware optimizer stores the fp32 master of a bf16 parameter as its 16 low bits, as long as Transformer
    Engine's Adam holds the master itself. It does not if fp8 recipes other than delayed leave the master to Megatron
    (optimizer_config.py `use_precision_aware_optimizer_no_fp8_or_ds_fp8`, core 0.19;
    transformer_engine/pytorch/optimizers/fused_adam.py store_param_remainders, 2.20).
    """
    if options.optimizer_bytes is not None:
        return options.optimizer_bytes
    master = 0.0 if options.precision == "fp32" else 4.0
    formats = options.optimizer
    if formats is None:
        return master + 8.0
    if formats.main_parameters == "fp16" or (options.precision == "bf16" and _held_by_adam(options)):
        master = 2.0
    return master + STATE_BYTES[formats.first_moment] + STATE_BYTES[formats.second_moment]


def _held_by_adam(options: MegatronOptions) -> bool:
    """Return whether Transformer Engine's Adam holds the master parameters. It then reads gradients in any format."""
    formats = options.optimizer
    return formats is not None and (formats.main_parameters != "fp32" or options.fp8_recipe in (None, "delayed"))


def _gradient_copy(options: MegatronOptions, gradients: float) -> float:
    return 4.0 if gradients < 4.0 and not _held_by_adam(options) else 0.0


def _widened(formats: OptimizerFormats | None) -> float:
    """Return the bytes per parameter of the fp32 copies for the step. Adam computes in fp32, so anything kept in fewer
    bits is copied, all of it at once. Two moments in bf16 are widened inside its kernel (fused_adam.py step,
    fuse_unscale, 2.20)."""
    if formats is None:
        return 0.0
    moments = (formats.first_moment, formats.second_moment)
    narrow = 0 if moments == ("bf16", "bf16") else sum(name != "fp32" for name in moments)
    return 4.0 * (narrow + (formats.main_parameters != "fp32"))


def _host(width: float, optimizer: float, options: MegatronOptions) -> HostFacts:
    """Return what a rank keeps in host memory.

    Offloaded states are pinned fp32 parameters and gradients and unpinned moments, one tensor per parameter
    (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core 0.19). Offloaded activations go to a pinned pool
    (pipeline_parallel/fine_grained_activation_offload.py).

    Before a torch_dist checkpoint is written, asynchronously or not, everything that a rank writes is copied to the
    host: its share of parameters and states over data parallelism (dist_checkpointing/strategies/filesystem_async.py
    preload_tensors).

    Each worker of the loader has 2 batches ready and one in progress. Samples have no attention mask if
    --no-create-attention-mask-in-dataloader is rendered. Otherwise each worker makes one and keeps it, unless masks
    depend on the sample (core/datasets/gpt_dataset.py GPTDataset.__getitem__, core 0.19).
    """
    return HostFacts(
        process_bytes=constant("process_host_bytes") * (2.0 if options.async_save else 1.0),  # that which writes, too
        optimizer_bytes=(16.0,) * 4,
        optimizer_pinned_bytes=(8.0,) * 4,
        optimizer_flat=False,
        activations_pinned=True,
        checkpoint_bytes=width + optimizer,
        loader_batches=2 * options.loader_workers + 1,
        loader_workers=options.loader_workers,
        loader_mask=options.attention_masks,
        loader_mask_kept=options.attention_masks and not options.masks_by_sample,
    )


def _engine_workspace(options: MegatronOptions) -> float:
    if not options.transformer_engine:
        return 0.0
    before = options.compute_capability is not None and options.compute_capability < HOPPER
    return constant("transformer_engine_workspace_bytes" + ("_before_hopper" if before else ""))


def _quantized(options: MegatronOptions) -> Quantized | None:
    """Return the facts of narrow formats in Transformer Engine, or None without one.

    A linear layer's input is saved in the narrow format, in the one orientation that the weight gradient needs, and
    narrow weights are kept for all micro-batches of a step. Before Blackwell, 8-bit matrix products need the second
    operand transposed, so weights are kept twice. Block-scaled formats are always kept twice, because scales run along
    one dimension (transformer_engine/pytorch/tensor/*_tensor.py and module/linear.py, 2.20).

    A cast reads 16 bits and writes each orientation that is kept. A current scale of the whole tensor (tensorwise)
    takes one more read. Four bits take two more: one for that scale, and one for the transposed copy, which goes
    through a Hadamard transform.
    """
    if options.fp8_recipe is None:
        return None
    both = options.compute_capability is not None and options.compute_capability < BLACKWELL
    copies = {
        "delayed": (1.0, 2.0 if both else 1.0),
        "tensorwise": (1.0, 2.0 if both else 1.0),
        "blockwise": (1.0 + 4.0 / 128.0, 2.0 + 8.0 / 128.0**2),
        "mxfp8": (1.0 + 1.0 / 32.0, 2.0 + 2.0 / 32.0),
        "nvfp4": (0.5 + 1.0 / 16.0, 1.0 + 2.0 / 16.0),
    }[options.fp8_recipe]
    reads = {"tensorwise": 2.0, "nvfp4": 3.0}.get(options.fp8_recipe, 1.0)
    return Quantized(
        *copies,
        replaces_parameters=options.fp8_parameters,
        cast_bytes=reads * ELEMENT_BYTES[options.precision] + copies[1],
        block_scaled=options.fp8_recipe in ("blockwise", "mxfp8", "nvfp4"),
    )
