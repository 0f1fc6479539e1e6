"""What Megatron-DeepSpeed keeps in memory: the fork and the DeepSpeed (0.6) BLOOM was trained with in 2022."""

from __future__ import annotations

from dataclasses import dataclass

from llmlaunch.facts import (
    AllocatorFacts,
    AttentionFacts,
    ExchangeFacts,
    ForeignFacts,
    LayerFacts,
    LossFacts,
    MemoryFacts,
    StateFacts,
    StepFacts,
    ZeroFacts,
)
from llmlaunch.memory.constants import constant
from llmlaunch.workload import ELEMENT_BYTES

# The fork's default of both dropouts, which the BLOOM runs inherited (bigscience-workshop/Megatron-DeepSpeed,
# megatron/arguments.py, 2022-02; bigscience-workshop/bigscience, train/tr11-176B-ml/README.md).
DROPOUT = 0.1

REDUCE_BUCKET_ELEMENTS = 5e8  # deepspeed/runtime/engine.py MEMORY_OPT_ALLREDUCE_SIZE and zero/constants.py, 0.6

# Groups with a collective of their own. Megatron's: tensor, and data and pipeline (megatron/data/gpt_dataset.py sums
# over both). DeepSpeed's grid builds its own of the same ranks: data (gradients), pipeline (the loss), the whole model
# (overflow), the shares of a stage's output; besides the tied embeddings, each neighbour in the pipeline, and all ranks
# (deepspeed/runtime/pipe/topology.py, engine.py, module.py, 0.6). Ranks that share a sequence are a group too, and so
# are these and the data parallel ones, over which gradients are then reduced.
GROUPS = (
    "world",
    "tensor",
    "data",
    "pipeline",
    "data",
    "pipeline",
    "context",
    "data_and_context",
    "model",
    "stage_output",
    "neighbours",
    "tied_embeddings",
)


def accumulates_in_fp32(precision: str, gradient_dtype: str | None) -> bool:
    """Whether DeepSpeed's BF16_Optimizer runs: bf16 weights whose gradients are accumulated in fp32. It shards the
    optimizer whatever the ZeRO stage says (deepspeed/runtime/bf16_optimizer.py, 0.6)."""
    return precision == "bf16" and gradient_dtype != "bf16"


AMPERE = 8.0


@dataclass(frozen=True)
class ForkOptions:
    """What of a job decides bytes beside its precision. `fused_optimizer` is DeepSpeed's own or Apex's Adam, for which
    DeepSpeed since 0.5 takes FP16_Optimizer; 0.4 took FP16_UnfusedOptimizer for Apex's. `embedding_norm` is
    `--embed-layernorm`."""

    fused_optimizer: bool = True
    embedding_norm: bool = True
    compute_capability: float | None = None


def megatron_deepspeed_facts(
    precision: str, gradient_dtype: str | None = None, options: ForkOptions = ForkOptions()
) -> MemoryFacts:
    """Megatron's model of early 2022 under DeepSpeed's pipeline engine.

    Model (megatron/model/transformer.py, mpu/layers.py): unfused attention; no gradient is accumulated in place; the
    embedding's norm and dropout lie outside the checkpointed layers. Pipeline (deepspeed/runtime/pipe/engine.py): a
    stage keeps the share of the output it sent, and restores output and gradient whole to run backward. Loss: the
    16-bit logits, their fp32 copy, and a clone that becomes the softmax and then its own gradient
    (mpu/cross_entropy.py). Kernels are loaded at once, fewer and smaller before Ampere.
    """
    width = ELEMENT_BYTES[precision]
    engine = _engine(precision, gradient_dtype, options.fused_optimizer)
    before = options.compute_capability is not None and options.compute_capability < AMPERE
    return MemoryFacts(
        backend="megatron-deepspeed",
        version="0.6",
        source=engine.source,
        states=StateFacts(parameter_bytes=width, gradient_bytes=engine.gradient_bytes, optimizer_bytes=12.0),
        step=StepFacts(
            step_bytes=(engine.step_bytes, 0.0, 0.0, 0.0),
            step_bytes_sharded=(0.0, engine.step_bytes_sharded, engine.step_bytes_sharded, 0.0),
            gradient_norm_bytes=(0.0, engine.norm_bytes, engine.norm_bytes, 0.0),
            flat_bucket_bytes=REDUCE_BUCKET_ELEMENTS * max(width, engine.gradient_bytes),
            flat_step=True,
        ),
        zero=ZeroFacts(gathered_in_step=True),
        layer=LayerFacts(activation_bytes=width),
        attention=AttentionFacts(attention_scores_saved=True, context_all_to_all=True),
        loss=LossFacts(logit_bytes=width + 8.0, logit_gradient_bytes=width + 4.0),
        exchange=ExchangeFacts(
            pipeline_buffers=2,
            groups=GROUPS,
            communicator_bytes=constant("communicator_bytes_before_ampere" if before else "communicator_bytes"),
        ),
        allocator=AllocatorFacts(
            workspace_bytes=constant("workspace_bytes"),
            # where the step has flat tensors of its own, what they take beside the backward pass is the cache
            cache_share=0.0 if engine.step_bytes_sharded else constant("cache_share"),
            context_bytes=constant("context_v100_2021_bytes" if before else "context_a100_2022_bytes"),
        ),
        foreign=ForeignFacts(
            backward_gradient_bytes=(engine.narrow_bytes,) * 4,
            reduced_at_end=True,  # PipelineEngine _exec_reduce_grads (deepspeed/runtime/pipe/engine.py, 0.6)
            embedding_norm=options.embedding_norm,
            stage_output_bytes=width,
        ),
    )


@dataclass(frozen=True)
class _Engine:
    """Bytes per parameter of one of DeepSpeed's 16-bit optimizers: what stays until the step, what only backward
    holds, and the step's temporaries, whole (no ZeRO) and sharded."""

    source: str
    gradient_bytes: float
    narrow_bytes: float
    step_bytes: float
    step_bytes_sharded: float
    norm_bytes: float


def _engine(precision: str, gradient_dtype: str | None, fused_optimizer: bool) -> _Engine:
    """BF16_Optimizer adds every micro-batch's bf16 gradients to whole fp32 ones and steps on a slice of those.

    Otherwise the 16-bit gradients accumulate whole. ZeRO 1 takes each gradient's norm in double precision, flattens the
    partition's gradients and copies them to fp32: 2 + 4 bytes. Without ZeRO the step copies each gradient to fp32 and
    flattens the copies: 4 + 4 (deepspeed/runtime/fp16/fused_optimizer.py); with an optimizer that is not fused it steps
    on the copies, too large for blocks of activations (unfused_optimizer.py; experiments/gpt2-meg-ds-3d of bigscience).
    """
    if accumulates_in_fp32(precision, gradient_dtype):
        return _Engine("deepspeed/runtime/bf16_optimizer.py, 0.6", 4.0, 2.0, 0.0, 0.0, 0.0)
    whole = "fused_optimizer.py" if fused_optimizer else "unfused_optimizer.py"
    step_bytes = 8.0 if fused_optimizer else 4.0
    return _Engine(f"deepspeed/runtime/zero/stage_1_and_2.py, fp16/{whole}, 0.6", 2.0, 0.0, step_bytes, 6.0, 8.0)
