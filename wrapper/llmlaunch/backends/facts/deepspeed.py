"""What DeepSpeed with a Hugging Face model keeps in memory."""

from __future__ import annotations

from llmlaunch.backends.facts.elements import ELEMENT_BYTES
from llmlaunch.memory.constants import constant
from llmlaunch.memory.facts import HostFacts, MemoryFacts

__all__ = ["deepspeed_facts"]

REDUCE_BUCKET_ELEMENTS = 5e8  # DeepSpeed's default reduce_bucket_size (deepspeed/runtime/zero/config.py, 0.19)


def deepspeed_facts(precision: str, offload_optimizer: bool = False, fused_loss: bool = False) -> MemoryFacts:
    """DeepSpeed 0.19 with ZeRO and a Hugging Face model.

    Counted in CPU runs, live tensor bytes and the allocator's peak of each phase, D = 2, two micro-batches, P
    parameters, w = 4 (fp32) or 2 (bf16; fp16 takes the same classes): lasting w + 12/D (stage 1, 2), (w + 12)/D
    (stage 3), w + 12 (stage 0; in fp32 there is no master copy, w + 8). In the last backward + w + w/D (stage 1: whole
    gradients, then the partition), + 2w/D (stage 2: what is accumulated and the new partition), + w/D (stage 3), + 2w
    (stage 0: the all-reduce copies them). In the step + 8/D (gradient partition, its flat copy, that in fp32), stage 0
    in 16 bits + 6.
    A norm keeps its fp32 input, the normalized input and its output: 4 bytes more than a fused one
    (transformers/models/llama/modeling_llama.py LlamaRMSNorm, 5.23). Its loss is computed on fp32 logits: 16-bit
    logits, the fp32 log-softmax, its gradient and the 16-bit gradient are alive together
    (transformers/loss/loss_utils.py).
    """
    width = ELEMENT_BYTES[precision]
    half = width < 4.0
    kept = 0.0 if offload_optimizer else width
    step = (4.0, 4.0, 4.0, 0.0) if offload_optimizer else (0.0, 8.0, 8.0, 8.0)
    return MemoryFacts(
        backend="deepspeed",
        version="0.19",
        source="deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, 0.19.8",
        parameter_bytes=width,
        gradient_bytes=0.0,
        optimizer_bytes=0.0 if offload_optimizer else 12.0,
        backward_gradient_bytes=(2.0 * width if half else width, width, 0.0, 0.0),
        backward_gradient_bytes_sharded=(0.0, kept, 2.0 * kept, kept),
        step_bytes=(6.0 if half else 0.0, 0.0, 0.0, 0.0),
        step_bytes_sharded=step,
        activation_bytes=width,
        gated_activation_fused=False,
        norm_extra_bytes=0.0 if fused_loss else 4.0,
        logit_bytes=0.0 if fused_loss else 2.0 * width + 8.0,
        bucket_bytes=REDUCE_BUCKET_ELEMENTS * width,
        live_parameters=1e9,
        workspace_bytes=constant("workspace_bytes"),
        cache_share=constant("cache_share"),
        context_bytes=constant("context_bytes"),
        communicator_bytes=constant("communicator_bytes"),
        pad_vocabulary=False,
        host=_host(width),
    )


def _host(width: float) -> HostFacts:
    """Offloaded states of ZeRO 1 and 2: fp32 masters and gradients and a narrow copy of both, pinned, and unpinned
    moments; of ZeRO 3 only the gradients, fp32 and narrow, are pinned (zero/stage_1_and_2.py, stage3.py, 0.19). A
    checkpoint is written tensor by tensor, each copied to the host on its way (torch/serialization.py)."""
    return HostFacts(
        process_bytes=constant("process_host_bytes"),
        optimizer_bytes=(0.0, 16.0 + 2.0 * width, 16.0 + 2.0 * width, 16.0 + width),
        optimizer_pinned_bytes=(0.0, 8.0 + 2.0 * width, 8.0 + 2.0 * width, 4.0 + width),
        parameter_bytes=width,
        checkpoint_parameter_bytes=width,
        checkpoint_state_bytes=4.0,
    )
