"""What DeepSpeed with a Hugging Face model keeps in memory: its optimizer classes and kernels.

Every row is bytes per parameter in a run on D data-parallel ranks, written (whole, sharded): whole + sharded / D. D
counts the ranks of Ulysses sequence parallelism too; with AutoTP, parameters are those of one tensor rank. Rows marked
"counted" are held against live tensor bytes of a real engine (tests/frameworks/test_deepspeed_bytes.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmlaunch.facts import (
    NONE,
    AdapterFacts,
    AllocatorFacts,
    AttentionFacts,
    ExchangeFacts,
    FusedLoss,
    Gathering,
    GradientLife,
    HostFacts,
    LayerFacts,
    LayerKernels,
    LossFacts,
    MemoryFacts,
    StateFacts,
    StepFacts,
    ZeroFacts,
)
from llmlaunch.memory.constants import constant
from llmlaunch.workload import ELEMENT_BYTES

FP32_STATES, BF16_STATES = "fp32", "bf16"
DEFAULT_GATHERING = Gathering()


@dataclass(frozen=True)
class ZeroSettings:
    """What ZeRO does by ds_config.json. `overlap_comm` makes a second bucket below stage 3; without
    `contiguous_gradients` stage 3 has no bucket of its own; `secondary_ranks` is zero_hpz_partition_size;
    `optimizer_states` is "bf16" with bf16_master_weights_and_grads and bf16_optimizer_states. `sub_group_elements` of
    None is DeepSpeed's default."""

    gathering: Gathering = DEFAULT_GATHERING
    sub_group_elements: int | None = None
    secondary_ranks: int = 1
    overlap_comm: bool = True
    contiguous_gradients: bool = True
    memory_efficient_linear: bool = True
    optimizer_states: str = FP32_STATES


DEFAULT_SETTINGS = ZeroSettings(overlap_comm=False)  # below stage 3


MEGATRON_FORK_KIND = "megatron-deepspeed"  # a kind of script that recipes of earlier versions could name
VERSION = "0.19"
# Defaults of deepspeed/runtime/zero/config.py, 0.19
BUCKET_ELEMENTS = 500_000_000  # reduce_bucket_size, allgather_bucket_size
SUB_GROUP_ELEMENTS = 1_000_000_000  # sub_group_size
# Offload by share sends whole sub-groups to the host, so that a share needs many of them.
OFFLOAD_GROUPS = 20
FP64_BYTES = 8.0

HUGGING_FACE_KINDS = ("own", "hugging-face")  # scripts of one's own whose model is one of Transformers'

# ZeRO communicates in a clone of the group of all ranks (utils/groups.py `_clone_world_group`); barriers, and scripts'
# mean losses, go through that group itself (zero/stage3.py, 0.19.8).
GROUPS = ("world", "tensor", "pipeline", "context", "data", "data_and_context")

# Counted by dispatch in a Llama layer of transformers 5.23 under torch 2.13, forward and backward; torch's own dropout
# is one kernel, flash attention one forward and three backward. Norms compute in fp32, pass by pass. Liger's norms,
# rotary positions and activation are a kernel each, a norm's weight gradient one more (liger_kernel/ops, 0.8).
EAGER_KERNELS = LayerKernels(
    launched=(38.0, 74.0),
    norm_elements=(18.0, 48.0),
    stream_elements=(6.0, 13.0),
    rotary_elements=(10.0, 18.0),
    activation_elements=(2.0, 4.0),
    gathered_modules=9.0,
    gathered_adapter_modules=2.0,
)
LIGER_KERNELS = replace(
    EAGER_KERNELS,
    launched=(16.0, 33.0),
    norm_elements=(2.0, 3.0),
    rotary_elements=(2.0, 2.0),
    activation_elements=(0.0, 0.0),
)
# Adapters that peft 0.21 makes in fp32, under autocast: their input is widened, drops out and is narrowed again.
WIDE_ADAPTER, WIDE_ADAPTER_INPUTS = (9.0, 12.0), (10.5, 11.0)  # kernels, elements of a linear layer's input

Share = tuple[float, float]  # bytes per parameter: whole, and divided by the ranks that shard


@dataclass(frozen=True)
class Engine:
    """One optimizer class under one precision. `lasting` is there from start to end, parameters included; the rest is
    what comes on top: `accumulated` between micro-batches, `final` at the end of the last backward (with one
    micro-batch; what is accumulated in shards comes on top), `step` in the optimizer step. Buckets and gathered
    parameters are not in it."""

    name: str
    stage: int
    precision: str  # "half" (bf16, fp16) or "fp32"
    accumulation: str  # "same" as the precision, or "fp32" (data_types.grad_accum_dtype), of bf16
    offload: bool  # of the optimizer states, to CPU or NVMe
    lasting: Share
    parameters: float  # of `lasting`, the compute copy
    gradients: Share  # of `lasting`, gradients
    accumulated: Share
    final: Share
    step: Share
    where: str
    evidence: str  # "counted" or "read"
    flattened: bool = False  # `final` is flattened besides, a bucket at a time, to be all-reduced
    foreach_step: Share | None = None  # `step` with an AdamW that is not fused; None: no other
    states: str = FP32_STATES  # or "bf16": master weights and moments, with bf16_optimizer_states


_FUSED = "FP16_Optimizer, FP16_UnfusedOptimizer"
_ZERO = "DeepSpeedZeroOptimizer"
_BF16 = "BF16_Optimizer"
_ZERO3 = "DeepSpeedZeroOptimizer_Stage3"
_S0 = "deepspeed/runtime/fp16/fused_optimizer.py, unfused_optimizer.py, 0.19.8"
_SP = "deepspeed/runtime/engine.py allreduce_bucket, 0.19.8; torch AdamW"
_S12 = "deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8"
_S3 = "deepspeed/runtime/zero/stage3.py, 0.19.8"
_BF = "deepspeed/runtime/bf16_optimizer.py, 0.19.8"
_NO = (0.0, 0.0)

ENGINES: tuple[Engine, ...] = (
    Engine(_FUSED, 0, "half", "same", False, (14, 0), 2, _NO, (2, 0), (2, 0), (6, 0), _S0, "counted", True, (10, 0)),
    Engine("AdamW", 0, "fp32", "same", False, (12, 0), 4, _NO, (4, 0), (4, 0), (4, 0), _SP, "counted", True, (8, 0)),
    Engine(_ZERO, 1, "half", "same", False, (2, 12), 2, _NO, (2, 0), (2, 2), (0, 8), _S12, "counted"),
    Engine(_ZERO, 1, "fp32", "same", False, (4, 12), 4, _NO, (4, 0), (4, 4), (0, 8), _S12, "counted"),
    Engine(_BF16, 1, "half", "fp32", False, (6, 12), 2, (4, 0), (2, 0), (2, 0), (2, 0), _BF, "counted", True, (2, 4)),
    Engine(_ZERO, 2, "half", "same", False, (2, 12), 2, _NO, (0, 2), (0, 2), (0, 8), _S12, "counted"),
    Engine(_ZERO, 2, "fp32", "same", False, (4, 12), 4, _NO, (0, 4), (0, 4), (0, 8), _S12, "counted"),
    Engine(_ZERO, 2, "half", "fp32", False, (2, 12), 2, _NO, (0, 4), (0, 4), (0, 4), _S12, "counted", False, (0, 8)),
    Engine(_ZERO3, 3, "half", "same", False, (0, 16), 2, (0, 2), _NO, _NO, (0, 6), _S3, "counted", False, (0, 8)),
    Engine(_ZERO3, 3, "fp32", "same", False, (0, 20), 4, (0, 4), _NO, _NO, (0, 4), _S3, "counted", False, (0, 8)),
    Engine(_ZERO3, 3, "half", "fp32", False, (0, 18), 2, (0, 4), _NO, _NO, (0, 4), _S3, "counted", False, (0, 8)),
    # master weights and moments in bf16. The master weights of 3 are copies too: it compares a device with its name
    Engine(_ZERO, 1, "half", "same", False, (2, 6), 2, _NO, (2, 0), (2, 2), (0, 4), _S12, "counted", states="bf16"),
    Engine(_ZERO, 2, "half", "same", False, (2, 6), 2, _NO, (0, 2), (0, 2), (0, 4), _S12, "counted", states="bf16"),
    Engine(
        *(_ZERO3, 3, "half", "same", False, (0, 10), 2, (0, 2), _NO, _NO, (0, 2), _S3, "counted", False, (0, 4)),
        states="bf16",
    ),
    Engine(_ZERO, 2, "half", "fp32", False, (2, 6), 2, _NO, (0, 4), (0, 4), (0, 6), _S12, "counted", states="bf16"),
    Engine(_ZERO3, 3, "half", "fp32", False, (0, 12), 2, (0, 4), _NO, _NO, (0, 6), _S3, "counted", states="bf16"),
    # the device's part where optimizer states are on the host: the step copies new parameters back in fp32 (1, 2)
    Engine(_ZERO, 1, "half", "same", True, (2, 0), 2, _NO, (2, 0), (2, 0), (0, 4), _S12, "read"),
    Engine(_ZERO, 1, "fp32", "same", True, (4, 0), 4, _NO, (4, 0), (4, 0), (0, 4), _S12, "read"),
    Engine(_ZERO, 2, "half", "same", True, (2, 0), 2, _NO, _NO, _NO, (0, 4), _S12, "read"),
    Engine(_ZERO, 2, "fp32", "same", True, (4, 0), 4, _NO, _NO, _NO, (0, 4), _S12, "read"),
    Engine(_ZERO3, 3, "half", "same", True, (0, 2), 2, _NO, _NO, _NO, _NO, _S3, "read"),
    Engine(_ZERO3, 3, "fp32", "same", True, (0, 4), 4, _NO, _NO, _NO, _NO, _S3, "read"),
)


@dataclass(frozen=True)
class DeepSpeedOptions:
    """What of a ds_config.json and of the training script decides bytes, beside model and layout. Defaults are
    DeepSpeed's, for a script that hands `deepspeed.initialize` a Hugging Face model."""

    precision: str = "bf16"
    accumulation: str | None = None  # data_types.grad_accum_dtype; None: the precision
    offload_optimizer: bool = False
    fused_optimizer: bool = True  # DeepSpeed's FusedAdam, which a config's "AdamW" is, or torch's with fused=True
    offloaded_share: float = 0.0  # of ZeRO 3's sub-groups, where the states of some are on the host and some are not
    reduce_bucket_elements: float = BUCKET_ELEMENTS
    eager_attention: bool = False  # Hugging Face's attn_implementation "eager", which writes scores out
    liger: bool = False  # Liger's norm, rotary, SwiGLU and fused linear cross-entropy in place of Hugging Face's
    zero: ZeroSettings = DEFAULT_SETTINGS
    split_from_start: bool = False  # the model is made under zero.Init (HF's from_pretrained with an HfDeepSpeedConfig)
    expandable_segments: bool = False
    sequence_ranks: int = 1  # Ulysses sequence parallelism, the layout's context size


def engine_of(stage: int, options: DeepSpeedOptions) -> Engine:
    """The class `deepspeed.initialize` takes (engine.py `_do_optimizer_sanity_check`, 0.19.8). Where a combination has
    no row of its own, that of the precision's own accumulation without offload holds."""
    precision = "fp32" if options.precision == "fp32" else "half"
    wider = options.precision == "bf16" and options.accumulation == "fp32"
    for offload in (True, False) if options.offload_optimizer else (False,):
        for accumulation in ("fp32", "same") if wider else ("same",):
            wanted = (stage, precision, accumulation, offload)
            rows = [r for r in ENGINES if (r.stage, r.precision, r.accumulation, r.offload) == wanted]
            if rows:
                return next((row for row in rows if row.states == options.zero.optimizer_states), rows[0])
    raise LookupError(f"no engine row for ZeRO {stage} and {options}")


def _partly_offloaded(row: Engine, share: float) -> Engine:
    """ZeRO 3 whose gradients arrive on the host because some sub-groups are stepped there; the others keep an fp32
    gradient on the device from start to end, and torch's AdamW steps them, with one more fp32 temporary of a
    sub-group (zero/stage3.py `initialize_optimizer_states`, `_release_sub_group`, `backup_optimizer`, 0.19.8)."""
    return replace(row, gradients=(0.0, 4.0 * (1.0 - share)), accumulated=_NO, step=(0.0, 4.0 / OFFLOAD_GROUPS))


def deepspeed_facts(options: DeepSpeedOptions = DeepSpeedOptions()) -> MemoryFacts:
    """DeepSpeed 0.19 with ZeRO and a Hugging Face model of transformers 5.

    An unfused norm keeps its input in fp32, that normalized in the precision, and its output: 4 bytes more than a fused
    one (models/llama/modeling_llama.py LlamaRMSNorm). Its loss holds, for every logit, the 16-bit logit (the output
    object keeps it), the fp32 log-softmax, its gradient and the gradient of its input (loss/loss_utils.py). Liger's
    fused loss makes the head's weight gradient in the forward pass: the sum, one chunk's product and that in fp32
    (liger_kernel/ops/fused_linear_cross_entropy.py, 0.8); all these were seen in profiles of real steps on a CPU.
    An AdamW that is not fused holds one more fp32 temporary of what it steps, the root of the second moments
    (torch/optim/adam.py `_multi_tensor_adam`, 2.13; counted).
    """
    rows = _engines(options)
    return MemoryFacts(
        backend="deepspeed",
        version=VERSION,
        source="; ".join(dict.fromkeys(row.where for row in rows)),
        states=_states(options, rows),
        step=_step(options, rows),
        zero=_zero(options, rows),
        layer=_layer(options),
        attention=_attention(options),
        loss=_loss(options),
        # AutoTP (module_inject/layers.py LinearLayer, 0.19.8)
        exchange=ExchangeFacts(
            inputs_reduced_apart=True, groups=GROUPS, communicator_bytes=constant("communicator_bytes")
        ),
        allocator=AllocatorFacts(
            workspace_bytes=constant("workspace_bytes"),
            cache_share=constant("cache_share"),
            context_bytes=constant("context_bytes"),
            cut_checkpoints=not options.expandable_segments,
        ),
        host=_host(ELEMENT_BYTES[options.precision], options.zero.optimizer_states),
    )


def _engines(options: DeepSpeedOptions) -> list[Engine]:
    """Return the optimizer class of each ZeRO stage."""
    rows = [engine_of(stage, options) for stage in range(4)]
    if not options.fused_optimizer:
        rows = [row if row.foreach_step is None else replace(row, step=row.foreach_step) for row in rows]
    if options.offloaded_share:
        rows[3] = _partly_offloaded(rows[3], options.offloaded_share)
    return rows


def _states(options: DeepSpeedOptions, rows: list[Engine]) -> StateFacts:
    """Return parameters and optimizer states; gradients come and go, as `_zero` says. The states are those of stage 2:
    1 and 3 have the same, but where gradients add up in fp32 beside bf16 master weights, and no stage 1 is legal."""
    return StateFacts(
        parameter_bytes=ELEMENT_BYTES[options.precision],
        gradient_bytes=0.0,
        optimizer_bytes=0.0 if rows[2].offload else float(rows[2].lasting[1]),
        optimizer_bytes_unsharded=float(rows[0].lasting[0] - rows[0].parameters),
        placed_whole=not options.split_from_start,
        pad_vocabulary=False,
        projections_apart=True,
        embedding_whole=True,  # AutoTP (module_inject/auto_tp.py _replace_module, 0.19.8)
    )


def _step(options: DeepSpeedOptions, rows: list[Engine]) -> StepFacts:
    """Return the temporaries of the optimizer step. Gradients of 1 and 2 that wait for the step are whole parameters',
    and their norm is taken in fp64 (zero/stage_1_and_2.py `get_flat_partition`, `get_grad_norm_direct`, 0.19.8;
    traced)."""
    width = ELEMENT_BYTES[options.precision]
    whole_parameters = not options.offload_optimizer and options.accumulation != "fp32"
    return StepFacts(
        step_bytes=_column([row.step[0] for row in rows]),
        step_bytes_sharded=_column([row.step[1] for row in rows]),
        touched_gradient_bytes=(0.0, width, width, 0.0) if whole_parameters else NONE,
        gradient_norm_bytes=(0.0, FP64_BYTES, FP64_BYTES, 0.0) if whole_parameters else NONE,
        flat_bucket_bytes=BUCKET_ELEMENTS * width,  # engine.py buffered_allreduce_fallback, 0.19.8: not configurable
        flat_step=not options.expandable_segments,
        state_element_bytes=ELEMENT_BYTES[options.zero.optimizer_states],
    )


def _zero(options: DeepSpeedOptions, rows: list[Engine]) -> ZeroFacts:
    """Return when gradients live, and what ZeRO reduces and gathers them and parameters with."""
    width = ELEMENT_BYTES[options.precision]
    return ZeroFacts(
        gradient_life=_gradient_life(rows),
        # 1 and 2 make one for every backward pass, or two, to fill one while the other is reduced (overlap_comm), and
        # copy one to be reduced; 3 makes one for good, and a flat copy of it
        bucket_bytes=bucket_bytes(options.reduce_bucket_elements, options.precision, options.zero.overlap_comm),
        bucket_kept=options.zero.contiguous_gradients,
        lasting_bucket_bytes=options.reduce_bucket_elements * width,
        # seq_parallel_communication_data_type is fp32 unless set (runtime/constants.py, 0.19.8; traced)
        widened_bucket_bytes=ELEMENT_BYTES["fp32"] if options.sequence_ranks > 1 and width < 4.0 else 0.0,
        # temp_grad_buffer_for_gpu_offload (zero/stage_1_and_2.py, 0.19.8; traced)
        host_transfer_bytes=(0.0, width, width, 0.0) if options.offload_optimizer else NONE,
        sub_group_elements=options.zero.sub_group_elements or SUB_GROUP_ELEMENTS,
        gathering=options.zero.gathering,
        gathered_weights_kept=not options.zero.memory_efficient_linear,
        secondary_ranks=options.zero.secondary_ranks,
        gathered_in_step=True,  # zero/stage_1_and_2.py step, all_gather_dp_groups, 0.19.8
    )


def _layer(options: DeepSpeedOptions) -> LayerFacts:
    """Return what norms, MLP and linears keep, with and without Liger's kernels."""
    return LayerFacts(
        kernels=LIGER_KERNELS if options.liger else EAGER_KERNELS,
        activation_bytes=ELEMENT_BYTES[options.precision],
        gated_activation_fused=options.liger,
        gated_gradient_in_place=options.liger,
        norm_extra_bytes=0.0 if options.liger else 4.0,
        # LlamaRMSNorm (modeling_llama.py, transformers 5.23): five fp32 tensors of pow, mean and rsqrt (traced)
        norm_backward_bytes=0.0 if options.liger else 5.0 * ELEMENT_BYTES["fp32"],
        branch_gradients_apart=False,
        # mamba_split_conv1d_scan_combined (models/falcon_h1/modeling_falcon_h1.py FalconH1Mixer.forward, 5.23)
        mixer_fused=True,
        mlp_chunks_recomputed=True,  # TiledMLP (deepspeed/runtime/sequence_parallel/ulysses_sp.py, 0.19.8)
        # the one kept for the first backward and the two newest (activation_checkpointing/offload_activations.py,
        # keep_last_count and max_fwd_stash_count, 0.19.8)
        travelling_checkpoints=3.0,
    )


def _attention(options: DeepSpeedOptions) -> AttentionFacts:
    """Return what attention keeps, under Ulysses where the sequence is split."""
    return AttentionFacts(
        attention_scores_saved=options.eager_attention,
        softmax_bytes=ELEMENT_BYTES["fp32"],
        score_gradient_bytes=_eager_gradient_bytes(options.precision),
        # models/llama/modeling_llama.py LlamaRotaryEmbedding.forward, transformers 5.23 (traced)
        rotary_bytes=2.0 * ELEMENT_BYTES[options.precision],
        context_all_to_all=True,
    )


def _loss(options: DeepSpeedOptions) -> LossFacts:
    width = ELEMENT_BYTES[options.precision]
    return LossFacts(
        logit_bytes=0.0 if options.liger else width + 12.0,
        logit_gradient_bytes=0.0 if options.liger else width + 4.0,
        fused_loss=FusedLoss(2.0 * width + 4.0, width, 2.0 * width) if options.liger else None,
        logits_gathered=True,  # AutoTP (module_inject/layers.py LinearLayer, 0.19.8)
    )


def _eager_gradient_bytes(precision: str) -> float:
    """Return the bytes per score alive while eager attention runs backward, beyond what it saved.

    Its softmax is fp32 whatever the precision. The narrow probabilities are gone by the time that their gradient, in
    fp32, and that of the scores are both there: the latter is fp32 too, but for fp16, which the softmax reads as it is
    (transformers/models/llama/modeling_llama.py eager_attention_forward, 5.23; aten/src/ATen/native/SoftMax.cpp
    softmax, `half_to_float`, torch 2.13; traced)."""
    wide, width = ELEMENT_BYTES["fp32"], ELEMENT_BYTES[precision]
    if width == wide:
        return 2.0 * wide
    return wide + (width if precision == "fp16" else wide) - width


def _host(width: float, states: str) -> HostFacts:
    """Offloaded states of ZeRO 1 and 2: fp32 masters and gradients and a narrow copy of both, pinned, and unpinned
    moments; of ZeRO 3 only the gradients, fp32 and narrow, are pinned (zero/stage_1_and_2.py, stage3.py, 0.19). A
    checkpoint is written tensor by tensor, each copied to the host on its way (torch/serialization.py)."""
    return HostFacts(
        process_bytes=constant("process_host_bytes"),
        optimizer_bytes=(0.0, 16.0 + 2.0 * width, 16.0 + 2.0 * width, 16.0 + width),
        optimizer_pinned_bytes=(0.0, 8.0 + 2.0 * width, 8.0 + 2.0 * width, 4.0 + width),
        parameter_bytes=width,
        checkpoint_parameter_bytes=width,
        checkpoint_state_bytes=ELEMENT_BYTES[states],
    )


def _gradient_life(rows: list[Engine]) -> GradientLife:
    """ZeRO 2's accumulation is another tensor than the last micro-batch's partition, unless it is wider than that."""
    return GradientLife(
        lasting=_column([row.gradients[0] for row in rows]),
        lasting_sharded=_column([row.gradients[1] for row in rows]),
        accumulated=_column([row.accumulated[0] for row in rows]),
        accumulated_sharded=_column([row.accumulated[1] for row in rows]),
        final=_column([row.final[0] for row in rows]),
        final_sharded=_column([row.final[1] for row in rows]),
        earlier_sharded=_column([row.accumulated[1] if row.accumulation == "same" else 0.0 for row in rows]),
        flattened=_column([float(row.flattened) for row in rows]),
    )


def _column(values: list[float]) -> tuple[float, float, float, float]:
    stage_0, stage_1, stage_2, stage_3 = (float(value) for value in values)
    return stage_0, stage_1, stage_2, stage_3


def bucket_bytes(elements: float, precision: str, overlap: bool) -> float:
    """Return the buckets of ZeRO 1 and 2: gradients being collected, with `overlap` those of the bucket before, and a
    flat copy of what is reduced (zero/stage_1_and_2.py `setup_buckets`, `allreduce_bucket`, 0.19.8; traced). Without
    contiguous_gradients as many gradients wait by themselves."""
    return float((3 if overlap else 2) * elements * ELEMENT_BYTES[precision])


def script_facts(facts: MemoryFacts, kind: str) -> MemoryFacts:
    """Return what a kind of script of one's own changes. A stage of a pipeline holds, beside what its layers keep, the
    tensor it received and the one it sends (deepspeed/runtime/pipe/engine.py _exec_recv_activations and
    _exec_send_activations, 0.19.8). Adapters of another script are taken to be as `peft.get_peft_model` makes them, in
    fp32 whatever the model's type, and to drop out of their input."""
    if kind not in HUGGING_FACE_KINDS:
        return replace(facts, exchange=replace(facts.exchange, pipeline_buffers=2))
    kernels = replace(facts.layer.kernels, adapter=WIDE_ADAPTER, adapter_input_elements=WIDE_ADAPTER_INPUTS)
    adapters = AdapterFacts(adapter_bytes=ELEMENT_BYTES["fp32"], adapter_dropout=True)
    return replace(facts, layer=replace(facts.layer, kernels=kernels), adapters=adapters)


LOADING_NOTE = (
    "host memory while weights are loaded is that of Transformers 5: under ZeRO 3 the first rank "
    "alone holds the whole checkpoint, otherwise each rank does; 4.46 to 4.57 let every rank hold one file of it at a "
    "time under ZeRO 3"
)


def loading_facts(facts: MemoryFacts) -> MemoryFacts:
    """Return the facts of a model that `from_pretrained` loads.

    Under ZeRO 3 rank 0 reads all files into one dictionary, while other ranks read shapes alone. Without `zero.Init`
    each rank makes the whole model on the host and moves it (modeling_utils.py `_load_pretrained_model`, 5.23)."""
    width = facts.states.parameter_bytes
    host = replace(
        facts.host,
        loading_bytes=(width, width, width, 0.0),
        loading_first_bytes=(0.0, 0.0, 0.0, width),
        loading_assumed=LOADING_NOTE,
    )
    return replace(facts, host=host)


def resident_facts(facts: MemoryFacts, baseline_bytes: float | None = None) -> MemoryFacts:
    """Return the facts of a CPU-only machine, where the peak is resident memory: the idle trainer stands where a GPU
    has its context, nothing is held by drivers or communicators, and no caching allocator keeps pieces.
    `baseline_bytes` are those of the idle trainer on this machine; without them one measured elsewhere counts."""
    allocator = replace(
        facts.allocator,
        workspace_bytes=0.0,
        cache_share=constant("resident_cache_share"),
        context_bytes=constant("resident_baseline_bytes") if baseline_bytes is None else baseline_bytes,
        cut_checkpoints=False,
    )
    step, exchange = replace(facts.step, flat_step=False), replace(facts.exchange, communicator_bytes=0.0)
    return replace(facts, step=step, exchange=exchange, allocator=allocator)
