"""What fully sharded data parallelism of PyTorch keeps in memory, in five trainers, to price their measurements.

FSDP2 (`fully_shard`) and FSDP1 (`FullyShardedDataParallel`), torch 2.13,
torch/distributed/fsdp: a block's parameters are gathered in the compute type before it runs, the next block's meanwhile
into a second buffer (`_fully_shard/_fsdp_param_group.py`, forward and backward prefetch; `limit_all_gathers` of FSDP1
allows two as well); its gradients are copied into one buffer of the reduced type while the buffer before it is being
reduced (`_fsdp_collectives.py` `foreach_reduce`). The optimizer frees gradients (`zero_grad`, set to none). Adam with
foreach makes one temporary as large as a moment; torch 2.0 made two (torch/optim/adamw.py `_multi_tensor_adamw`).

What eager code keeps more than a fused or compiled block: a norm in fp32 keeps its fp32 input and its normalized input;
silu(gate) is kept beside gate and up. torch.compile recomputes what is cheap and does not feed a matrix product
(torch/_functorch/partitioners.py, `ban_recompute_materialized_backward`): a compiled block keeps what a fused one does.
"""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.facts import (
    AllocatorFacts,
    AttentionFacts,
    ExchangeFacts,
    ForeignFacts,
    FullSharding,
    LayerFacts,
    LossFacts,
    MemoryFacts,
    StateFacts,
    StepFacts,
)
from llmlaunch.memory.constants import constant
from llmlaunch.workload import ELEMENT_BYTES

MOMENTS = 8.0  # two in fp32
UNFUSED_NORM = 4.0
# Softmax in fp32 by torch: its saved output, the gradient of the picked logits, and the gradient it makes of it, all
# fp32 and alive together (torch.nn.functional.cross_entropy); the logits themselves are gone.
FP32_LOSS = 12.0
# The same over tensor ranks: output, gradient, its exponential and their sum
# (torch/distributed/tensor/parallel/loss.py `_nll_loss_and_log_softmax_backward`).
PARALLEL_LOSS = 16.0
CHUNKS = 8  # torchtune's CEWithChunkedOutputLoss, num_output_chunks


def torchtitan_facts(compiled: bool, compiled_loss: bool, float8_gather: bool, tensor: int) -> MemoryFacts:
    """torchtitan 9dec370 (December 2024) to b5bcd76: FSDP2, fp32 parameters and gradients, bf16 compute, reduced in
    fp32 (parallelisms/parallelize_llama.py `apply_fsdp`); AdamW with foreach (optimizer.py); the last block is not
    released before backward. Pipelines keep the stage gathered, buffers for every micro-batch and the last stage's
    outputs (torch/distributed/pipelining/stage.py, 2.13). The loss casts bf16 logits to fp32 (train.py `loss_fn`) and
    frees them: the place of both holds one of the fp32 tensors that follow, and a third is left over. Compiled, only
    the bf16 logits and their gradient exist. torchao's float8 linears keep bf16 inputs and
    gather one byte per weight (`enable_fsdp_float8_all_gather`); the head stays bf16."""
    loss = 4.0 if compiled_loss else FP32_LOSS if tensor == 1 else PARALLEL_LOSS
    return _finished(
        MemoryFacts(
            backend="torchtitan",
            version="b5bcd76",
            source="torchtitan train.py, parallelisms/parallelize_llama.py, 9dec370; torch/distributed/fsdp, 2.13",
            states=StateFacts(
                parameter_bytes=4.0,
                gradient_bytes=4.0,
                optimizer_bytes=MOMENTS,
                full_sharding=FullSharding(
                    gathered_bytes=1.0 if float8_gather else 2.0,
                    root_bytes=2.0,
                    gradient_bytes=2.0,
                    reduced_bytes=4.0,
                    keeps_stage=True,
                ),
            ),
            step=StepFacts(step_bytes_sharded=(4.0, 4.0, 4.0, 4.0)),
            layer=_blocks(compiled),
            attention=AttentionFacts(key_values_expanded=True),
            loss=LossFacts(logit_bytes=loss, logit_gradient_bytes=2.0 if compiled_loss else 6.0),
            exchange=ExchangeFacts(pipeline_buffers=2),
            foreign=ForeignFacts(
                operators_kept=True,
                unused_outputs_kept=not compiled,
                gathered_inputs_kept=True,
                pipeline_buffers_by_microbatch=True,
                cached_logit_bytes=0.0 if compiled_loss else 2.0,
                step_logits_bytes=2.0,
            ),
        )
    )


def torchtune_facts(
    precision: str,
    compiled: bool,
    chunked_loss: bool,
    optimizer_in_backward: bool,
    state_bytes: float = 2.0,
    fused_optimizer: bool = True,
) -> MemoryFacts:
    """torchtune bd2a0fc7, full fine-tuning on one device: parameters, gradients and both moments in one type
    (recipes/full_finetune_single_device.py). `state_bytes` is of one moment, 1 for 8-bit states. Its configurations
    take torch's fused AdamW, which needs no temporary; with foreach one moment more lives in the step. An optimizer in
    the backward pass takes each gradient as it is made. The decoder casts its logits to fp32
    (torchtune/modules/transformer.py); with the chunked loss they stay narrow and one chunk of eight at a time is cast
    (modules/loss/ce_chunked_output_loss.py)."""
    width = ELEMENT_BYTES[precision]
    step = 0.0 if fused_optimizer or optimizer_in_backward else state_bytes
    return _finished(
        MemoryFacts(
            backend="torchtune",
            version="bd2a0fc7",
            source="torchtune recipes/full_finetune_single_device.py, torchtune/modules/transformer.py, bd2a0fc7",
            states=StateFacts(
                parameter_bytes=width,
                gradient_bytes=0.0 if optimizer_in_backward else width,
                optimizer_bytes=2.0 * state_bytes,
            ),
            step=StepFacts(step_bytes=(step, step, step, step)),
            layer=replace(_blocks(compiled), activation_bytes=width),
            attention=AttentionFacts(key_values_expanded=True),
            loss=LossFacts(
                logit_bytes=width + FP32_LOSS / CHUNKS if chunked_loss else FP32_LOSS,
                logit_gradient_bytes=width + (0.0 if chunked_loss else 4.0),
            ),
        )
    )


def composer_facts() -> MemoryFacts:
    """llm-foundry 8c8dd48 on composer: FSDP1 around every MPT block, fp32 parameters, bf16 compute, reduced in fp32
    (composer/distributed/mosaic_parallelism.py `get_mixed_precision`, DEFAULT; PURE reduces in bf16). The decoupled
    AdamW steps parameter by parameter. LayerNorm runs in bf16 (`low_precision_layernorm`,
    scripts/train/benchmarking/submit_benchmarks.py); the fused loss keeps bf16 logits and their gradient
    (llmfoundry/models/mpt/modeling_mpt.py `fused_crossentropy`)."""
    sharding = FullSharding(gathered_bytes=2.0, root_bytes=2.0, gradient_bytes=2.0, reduced_bytes=4.0)
    return _finished(
        MemoryFacts(
            backend="composer",
            version="8c8dd48",
            source="llm-foundry scripts/train/benchmarking, 8c8dd48; composer/distributed/mosaic_parallelism.py",
            states=StateFacts(parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=MOMENTS, full_sharding=sharding),
            loss=LossFacts(logit_bytes=4.0),
        )
    )


def atorch_facts() -> MemoryFacts:
    """ATorch (dlrover 11bf2fb, atorch/examples/llama2/fsdp_llama2.py): FSDP1 around every decoder layer without mixed
    precision, bf16 by autocast alone. So parameters are gathered, gradients reduced and the residual stream kept in
    fp32. Hugging Face's loss (transformers 4.31) keeps its fp32 logits besides; because layers are checkpointed from
    outside, the model's default `use_cache` stays on and the outputs hold every layer's keys and values through the
    backward pass (atorch/modules/transformer/layers.py `past_key_value`)."""
    sharding = FullSharding(gathered_bytes=4.0, root_bytes=4.0, gradient_bytes=4.0, reduced_bytes=4.0)
    return _finished(
        MemoryFacts(
            backend="atorch",
            version="11bf2fb",
            source="dlrover atorch/examples/llama2/fsdp_llama2.py, 11bf2fb; transformers modeling_llama.py, 4.31",
            states=StateFacts(parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=MOMENTS, full_sharding=sharding),
            step=StepFacts(step_bytes_sharded=(4.0, 4.0, 4.0, 4.0)),
            layer=_blocks(compiled=False),
            loss=LossFacts(logit_bytes=4.0 + FP32_LOSS, logit_gradient_bytes=8.0),
            foreign=ForeignFacts(stream_bytes=4.0, key_values_returned=True),
        )
    )


def internevo_facts() -> MemoryFacts:
    """InternEvo 7776693 (November 2023) with FSDP: bf16 parameters and gradients; the step makes an fp32 copy of the
    gradients beside the fp32 parameters and moments (internlm/solver/optimizer/fsdp_optimizer.py), and AdamW of torch
    2.0, which FSDP there asked for, two temporaries as large as a moment. Attention and MLP are blocks of their own;
    the model's output is cast to fp32 and the loss writes its gradient over it. FSDP shards in the group ZERO1, metrics
    and the first parameters go through DATA, norms through MODEL and tests of the machine through GLOBAL
    (internlm/train/training_internlm.py, model/metrics.py, utils/parallel.py, core/context/parallel_context.py)."""
    sharding = FullSharding(
        gathered_bytes=2.0, root_bytes=2.0, gradient_bytes=2.0, reduced_bytes=2.0, gathered_blocks=1.5
    )
    return _finished(
        MemoryFacts(
            backend="internevo",
            version="7776693",
            source="InternEvo internlm/solver/optimizer/fsdp_optimizer.py, 7776693; torch/optim/adamw.py, 2.0.1",
            states=StateFacts(
                parameter_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=4.0 + MOMENTS, full_sharding=sharding
            ),
            step=StepFacts(step_bytes_sharded=(12.0, 12.0, 12.0, 12.0)),
            loss=LossFacts(logit_bytes=10.0),
            exchange=ExchangeFacts(groups=("world", "tensor", "model", "data", "data")),
        )
    )


def _blocks(compiled: bool) -> LayerFacts:
    """Return what blocks keep: eager ones more of norm and activation."""
    return LayerFacts(gated_activation_fused=compiled, norm_extra_bytes=0.0 if compiled else UNFUSED_NORM)


def _finished(facts: MemoryFacts) -> MemoryFacts:
    """What all five share. The gradients of a sharded block are counted with the block, its matrices included."""
    return replace(
        facts,
        states=replace(facts.states, pad_vocabulary=False),
        layer=replace(facts.layer, weight_gradient_fused=facts.states.full_sharding is not None),
        exchange=replace(facts.exchange, communicator_bytes=constant("communicator_bytes")),
        allocator=AllocatorFacts(
            workspace_bytes=constant("workspace_bytes"),
            cache_share=constant("cache_share"),
            context_bytes=constant("context_bytes"),
        ),
        foreign=replace(facts.foreign, gradients_freed=True),
    )
