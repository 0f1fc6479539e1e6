"""Why a flag our renderer can write for Megatron-LM was not trained with on a CPU (core 0.19.2)."""

from __future__ import annotations

__all__ = ["OBSTACLES"]

EIGHT_BITS = "Transformer Engine multiplies in 8 and 4 bits on CUDA alone"
FUSED_ADAM = "wants FusedAdam of Transformer Engine (core/optimizer/optimizer_config.py), a CUDA kernel"
HYBRID = (
    "wants the precision-aware optimizer; without its kernel HybridDeviceOptimizer ends with a KeyError, because "
    "parameters on the host are their own copies (core/optimizer/cpu_offloading/hybrid_optimizer.py)"
)
OFFLOADED = "Transformer Engine offloads; the local layers say 'CPU Offloading is enabled when TE is not present'"
DELAYED = "'Delaying wgrad compute is only supported with transformer_engine implementation' (transformer_config.py)"
LIBRARIES = "DeepEP and HybridEP send tokens between GPUs"

TOKENIZERS = "wants Hugging Face's tokenizers, which are not among the frameworks of the tests"

OBSTACLES: dict[str, str] = {
    "--apply-layernorm-1p": "torch's norms, which the local layers use, refuse it (core/transformer/torch_norm.py)",
    "--cp-comm-type": "'Context parallelism is only supported by TEDotProductAttention' (dot_product_attention.py)",
    "--cpu-offloading-num-layers": OFFLOADED,
    "--delay-wgrad-compute": DELAYED,
    "--exp-avg-dtype": FUSED_ADAM,
    "--exp-avg-sq-dtype": FUSED_ADAM,
    "--fine-grained-activation-offloading": OFFLOADED,
    "--fp4-format": EIGHT_BITS,
    "--fp4-recipe": EIGHT_BITS,
    "--fp8-amax-compute-algo": EIGHT_BITS,
    "--fp8-amax-history-len": EIGHT_BITS,
    "--fp8-format": EIGHT_BITS,
    "--fp8-param-gather": EIGHT_BITS,
    "--fp8-recipe": EIGHT_BITS,
    "--main-grads-dtype": FUSED_ADAM,
    "--main-params-dtype": FUSED_ADAM,
    "--moe-flex-dispatcher-backend": LIBRARIES,
    "--moe-router-dtype": "written from 32 experts on: more than are trained here",
    "--offload-modules": OFFLOADED,
    "--optimizer-cpu-offload": HYBRID,
    "--optimizer-offload-fraction": HYBRID,
    "--overlap-cpu-optimizer-d2h-h2d": HYBRID,
    "--overlap-moe-expert-parallel-comm": DELAYED,
    "--reuse-grad-buf-for-mxfp8-param-ag": EIGHT_BITS,
    "--padded-vocab-size": TOKENIZERS,
    "--tensorboard-dir": "wants TensorBoard, which is not among the frameworks of the tests",
    "--tokenizer-model": TOKENIZERS,
    "--tp-comm-overlap": "user buffers of Transformer Engine, memory of GPUs that see each other",
    "--use-precision-aware-optimizer": FUSED_ADAM,
}
