"""What Megatron core keeps in memory."""

from __future__ import annotations

from llmlaunch.backends.facts.elements import ELEMENT_BYTES
from llmlaunch.memory.constants import constant
from llmlaunch.memory.facts import MemoryFacts

__all__ = ["megatron_facts"]


# Bytes per logit at the loss's worst moment, by `--cross-entropy-fusion-impl`, for logits of `width` bytes.
# None: fp32 logits beside the narrow ones, softmax in place (tensor_parallel/cross_entropy.py, core 0.19).
# native: the same compiled, where each stage writes a new fp32 tensor (fusions/fused_cross_entropy.py).
# te: the gradient overwrites the logits (transformer_engine/pytorch/cross_entropy.py, 2.20).
LOGIT_BYTES = {None: lambda width: width + 4.0, "native": lambda width: width + 8.0, "te": lambda width: width}


def megatron_facts(
    precision: str,
    gradient_dtype: str | None = None,
    version: str = "0.19",
    optimizer_bytes: float | None = None,
    loss: str | None = None,
) -> MemoryFacts:
    """Megatron core: DDP's gradient buffer accumulates in `gradient_dtype` (fp32 with --bf16 unless
    --grad-reduce-in-bf16; megatron/training/arguments.py, core 0.19); Adam keeps an fp32 master and two fp32
    moments (megatron/core/optimizer/optimizer.py). Gradients narrower than fp32 are copied to fp32 shards in the step
    (distrib_optimizer.py, `_copy_model_grads_to_main_grads`)."""
    width = ELEMENT_BYTES[precision]
    gradients = ELEMENT_BYTES[gradient_dtype or ("fp32" if precision == "bf16" else precision)]
    master = 0.0 if precision == "fp32" else 4.0
    copied = 4.0 if gradients < 4.0 else 0.0
    return MemoryFacts(
        backend="megatron-lm",
        version=version,
        source="megatron/core/optimizer and megatron/core/distributed, core 0.19",
        parameter_bytes=width,
        gradient_bytes=gradients,
        optimizer_bytes=master + 8.0 if optimizer_bytes is None else optimizer_bytes,
        step_bytes_sharded=(copied, copied, copied, copied),
        activation_bytes=width,
        logit_bytes=LOGIT_BYTES[loss](width),
        logit_gradient_bytes=width,
        weight_gradient_fused=True,
        weight_gradient_stubs=True,
        sequence_gather=True,
        pipeline_buffers=True,
        workspace_bytes=constant("workspace_bytes"),
        cache_share=constant("cache_share"),
        mixture_cache_share=constant("mixture_cache_share"),
        context_bytes=constant("context_bytes"),
        communicator_bytes=constant("communicator_bytes"),
    )
